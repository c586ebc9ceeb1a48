"""What the supervisor does before any worker starts: binds sockets, raises limits."""
