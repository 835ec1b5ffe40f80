"""The state of a server: a paged KV cache and graphs of decode steps. Chooses nothing."""
