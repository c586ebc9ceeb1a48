"""Use up the memory of a container, for a Python that runs in it: until the kernel's first kill, or without end.

The memory is a file's that has no name, and so belongs to no process: the kernel has to choose one to kill. The program
needs the standard library only, since tests also send its text to pods.
"""

import os
import re
import sys

COUNTERS = ("/sys/fs/cgroup/memory/memory.oom_control", "/sys/fs/cgroup/memory.events")
"""Where a container sees how many of its processes the kernel has killed (`oom_kill`): version 1 and 2 of cgroups."""

MIB_MAX = 4096


def kills(counters: list[str]) -> int:
    """Return how many of the container's processes the kernel has killed."""
    for path in counters:
        try:
            with open(path) as file:
                found = re.search(r"^oom_kill (\d+)", file.read(), re.MULTILINE)
        except OSError:
            continue
        if found:
            return int(found[1])
    sys.exit("no counter of kills")


def main() -> None:
    """Arguments: `once` or `for-ever`, and the file with the counter, if it is in none of COUNTERS."""
    mode, *counters = sys.argv[1:]
    counters = counters or list(COUNTERS)
    before, file, piece, written = kills(counters), os.memfd_create("hog"), bytes(1 << 20), 0
    while written < MIB_MAX and (mode == "for-ever" or kills(counters) == before):
        os.write(file, piece)
        written += 1
    os.ftruncate(file, 0)
    print(written, kills(counters) - before)


if __name__ == "__main__":
    main()
