"""`make bench`: everything the measurements need (which is what the tests need), then the measurements."""

from __future__ import annotations

import sys

from local.test import ERRORS, become, prepare


def main() -> int:
    """Prepare, then become the measurements."""
    try:
        environment = prepare()
    except ERRORS as error:
        print(f"\nmake bench: {error}", file=sys.stderr)
        return 1
    return become(environment, "tests.bench", *sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
