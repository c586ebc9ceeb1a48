"""What the end-to-end tests are built from: the cluster, brokers, client programs, and raw connections."""
