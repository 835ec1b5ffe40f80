"""The kernel families: attention, compressed sparse attention, rotary embedding."""
