"""Steps before any worker starts: binding sockets, raising limits."""
