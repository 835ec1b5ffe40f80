"""Policy: the only place that chooses which implementation serves a call."""
