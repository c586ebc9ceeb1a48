"""What the C library does with memory that was freed: by default it goes back to the kernel.

Each request needs a few hundred kilobytes for a moment. glibc returns what is free at the heap's end, so the next
request faults every page in again, cleared by the kernel: about 200 faults and a quarter of a millisecond for each.
https://man7.org/linux/man-pages/man3/mallopt.3.html
"""

import ctypes

KEPT_BYTES_MAX = 64 * 1024 * 1024
"""How much of it the process keeps."""

_MMAP_BYTES = 32 * 1024 * 1024  # the largest that mallopt takes; blocks from this size on are returned as before
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3


def keep_freed_memory() -> None:
    """Keep up to KEPT_BYTES_MAX for the next request; nothing happens where the C library is not glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, KEPT_BYTES_MAX)
        mallopt(_MMAP_THRESHOLD, _MMAP_BYTES)
