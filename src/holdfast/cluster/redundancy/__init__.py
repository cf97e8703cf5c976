"""Erasure coding: changes flow to parities, lost rows are recovered and lost parities rebuilt. Pure."""
