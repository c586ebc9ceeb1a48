"""Memory and sockets that processes of the cluster share by descriptor."""
