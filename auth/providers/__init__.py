"""Authentication providers, one file each."""
