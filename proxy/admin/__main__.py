"""The admin worker process."""

from proxy.runtime.process.hardening import WORKER_OOM_SCORE
from proxy.runtime.process.start import start_worker

if __name__ == "__main__":
    start_worker("admin", "proxy.admin.service:AdminService", WORKER_OOM_SCORE)
