"""The cluster of workers: worker slots, started and drained in order."""
