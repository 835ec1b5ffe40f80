"""Adapters to libraries that bring models. Each is imported by name and needs an optional package."""
