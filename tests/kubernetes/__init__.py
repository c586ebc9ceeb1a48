"""What only a real Kubernetes node shows: `make e2e-kubernetes` (docs/kubernetes-tests.md)."""
