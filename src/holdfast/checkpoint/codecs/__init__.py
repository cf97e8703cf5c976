"""Row codecs: rows in fewer bits."""
