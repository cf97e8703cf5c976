"""Rows in fewer bits: row codecs, and which part of a record is stored by which."""
