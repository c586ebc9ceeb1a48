"""Settings of glibc's allocator, which by default returns freed memory to the kernel.

Each request needs a few hundred kilobytes for a moment. glibc trims the free end of the heap, so the next request
faults every page in again, cleared by the kernel: about 200 faults and a quarter of a millisecond for each request.
https://man7.org/linux/man-pages/man3/mallopt.3.html
"""

import ctypes

FREE_BYTES_RETAINED_MAX = 64 * 1024 * 1024
"""Free bytes that the heap retains."""

_MMAP_BYTES = 32 * 1024 * 1024  # the largest that mallopt takes; blocks from this size on are returned as before
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3


def retain_freed_memory() -> None:
    """Retain up to FREE_BYTES_RETAINED_MAX of freed memory for the next request. Does nothing without glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, FREE_BYTES_RETAINED_MAX)
        mallopt(_MMAP_THRESHOLD, _MMAP_BYTES)
