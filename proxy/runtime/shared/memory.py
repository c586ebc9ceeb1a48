"""Memory that several of the cluster's processes share by its descriptor."""

import fcntl
import os

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""No process that has it may change its size: to touch what is no longer there would kill all others."""


def create_shared_memory(name: str, size_bytes: int) -> int:
    """Create memory of a fixed size, all zero; return its descriptor, for the supervisor to pass on."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size_bytes)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    return descriptor
