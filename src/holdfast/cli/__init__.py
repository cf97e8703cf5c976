"""The commands, one file each. No logic: each parses its arguments, calls the library, and shows the result."""
