"""How fast an operator runs: low-precision operators as torch functions."""
