"""A process of the cluster: its start under the supervisor, inherited descriptors, hardening."""
