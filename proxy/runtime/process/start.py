"""Start of a worker process: it gives up its privileges before the imports, which take most of a second."""

import signal
from importlib import import_module

from proxy.runtime.process import hardening


def start_worker(role: str, service: str, oom_score: int) -> None:
    """Harden this process, then run it as a worker until the supervisor ends it.

    ``service``: ``module:name`` of the factory of its proxy.runtime.process.worker.Service. ``oom_score``: thousandths
    of the memory, see ``hardening.raise_oom_score``.
    """
    hardening.restrict_process(oom_score)
    # A thread of the supervisor that starts processes may have signals blocked (proxy.supervisor.config_watch).
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    from proto.roles import Role
    from proxy.runtime.process.worker import worker_main

    module, _, name = service.partition(":")
    worker_main(Role(role), getattr(import_module(module), name))
