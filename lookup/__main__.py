"""A lookup worker process."""

from proxy.runtime.process.hardening import DATA_WORKER_OOM_SCORE
from proxy.runtime.process.start import start_worker

if __name__ == "__main__":
    start_worker("lookup", "lookup.service:LookupService", DATA_WORKER_OOM_SCORE)
