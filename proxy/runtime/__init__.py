"""What every worker process shares: its life under the supervisor, the RPC, logs, metrics, links to brokers."""
