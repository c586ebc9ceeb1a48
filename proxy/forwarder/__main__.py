"""A forwarding worker process."""

from proxy.runtime.process.hardening import DATA_WORKER_OOM_SCORE
from proxy.runtime.process.start import start_worker

if __name__ == "__main__":
    start_worker("forwarder", "proxy.forwarder.service:ForwarderService", DATA_WORKER_OOM_SCORE)
