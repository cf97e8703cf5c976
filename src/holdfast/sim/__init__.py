"""Whole clusters on virtual time, thousands of failure schedules a minute; months of failures in seconds."""
