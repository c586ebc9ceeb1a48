"""Worker processes as the supervisor sees them: start, configure, wait for, end."""
