"""Contract suites and fault injectors that users of the library can run on their own parts too."""
