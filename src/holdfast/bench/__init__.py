"""One module per published result, and the shared harness."""
