"""One client's connection up to its relay: frames, handshake, lookup mode, lifetime, closing."""
