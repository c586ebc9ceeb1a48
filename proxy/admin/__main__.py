"""The admin worker process."""

from proxy.runtime.process.hardening import WORKER_OOM_SCORE, confine_process, harden_process, raise_oom_score

if __name__ == "__main__":
    raise_oom_score(WORKER_OOM_SCORE)
    harden_process()  # before the imports, which take most of a second
    confine_process()

    from proto.roles import Role
    from proxy.admin.service import AdminService
    from proxy.runtime.process.worker import worker_main

    worker_main(Role.ADMIN, AdminService)
