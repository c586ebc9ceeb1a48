"""An auth worker process."""

from proxy.runtime.process.hardening import WORKER_OOM_SCORE
from proxy.runtime.process.start import start_worker

if __name__ == "__main__":
    start_worker("auth", "auth.service:AuthService", WORKER_OOM_SCORE)
