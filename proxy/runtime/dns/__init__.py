"""Name resolution in the background: cached, shared fairly, within bounds."""
