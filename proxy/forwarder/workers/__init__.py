"""Clients of the auth and lookup workers, as the forwarder calls them."""
