"""The HTTP worker: a reverse proxy for the brokers' web port, `/admin`, `/lookup`, functions and further paths."""
