"""The forwarding worker: takes clients in, leads them through the handshake, then relays their bytes."""
