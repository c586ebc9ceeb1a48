"""The auth worker: the only one that reads keys and tokens. Judges clients, and speaks for the proxy at brokers."""
