"""What the proxy and the analytics both use: errors, logs, reloaded files. It imports neither of them."""
