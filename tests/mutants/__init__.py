"""Mutation testing: small faults are put into the code, one at a time, and the tests must notice.

`make mutants` draws mutants at random from the rooms named in `rooms.py`, runs the tests that are meant for
each, and lists those that survive. A survivor shows a line whose effect no test checks.
"""
