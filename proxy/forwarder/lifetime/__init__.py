"""Relays of sessions that can expire: frames are followed, and clients asked for fresh credentials (KIP-368)."""
