"""Accept clients: admission within the limits, listener transports, connections before authentication."""
