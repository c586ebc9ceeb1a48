"""Names to addresses, in the background and within bounds."""
