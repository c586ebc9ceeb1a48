"""The cluster of workers: slots that are kept filled, started and drained in order."""
