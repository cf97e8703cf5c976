"""The commands, one file each, without logic: they parse arguments, call the library, and show the result."""
