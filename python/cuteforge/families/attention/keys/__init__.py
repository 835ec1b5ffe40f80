"""Where keys and values come from, and their way to shared memory."""
