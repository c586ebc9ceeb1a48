"""The fork server: the process from which the supervisor's workers are forked."""
