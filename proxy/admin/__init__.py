"""The admin worker: the HTTP port for operators, Prometheus and Kubernetes, in a process without any key."""
