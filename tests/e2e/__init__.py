"""Real clients through the real cluster to a real broker."""
