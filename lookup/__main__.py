"""A lookup worker process."""

from lookup.service import LookupService
from proto.roles import Role
from proxy.runtime.worker import worker_main

if __name__ == "__main__":
    worker_main(Role.LOOKUP, LookupService)
