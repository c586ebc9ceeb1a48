"""Connections to brokers that carry lookups: pooled, or isolated for suspect requests."""
