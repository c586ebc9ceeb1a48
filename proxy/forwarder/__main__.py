"""A forwarding worker process."""

from proto.roles import Role
from proxy.forwarder.service import ForwarderService
from proxy.runtime.worker import worker_main

if __name__ == "__main__":
    worker_main(Role.FORWARDER, ForwarderService)
