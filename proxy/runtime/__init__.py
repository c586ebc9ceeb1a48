"""What all processes of the cluster share: event loop, RPC, worker start-up, broker connections, logs, metrics."""
