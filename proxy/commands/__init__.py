"""What the command line's larger commands do."""
