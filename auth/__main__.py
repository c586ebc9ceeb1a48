"""An auth worker process."""

from auth.service import AuthService
from proto.roles import Role
from proxy.runtime.worker import worker_main

if __name__ == "__main__":
    worker_main(Role.AUTH, AuthService)
