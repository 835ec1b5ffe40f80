"""What the tests share; imported as ``helpers`` from ``test/python``."""
