"""Joining partial results of attention."""
