"""A process of the cluster: its start by the supervisor, inherited descriptors, hardening."""
