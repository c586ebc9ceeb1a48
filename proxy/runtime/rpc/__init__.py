"""The RPC between the cluster's processes over Unix sockets."""
