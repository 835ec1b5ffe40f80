"""How an op lives and is called."""
