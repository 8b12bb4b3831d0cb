"""Commands of the console script, one module each."""
