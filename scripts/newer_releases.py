#!/usr/bin/env python3
"""Compares the packages of this Python with scripts/sockets.txt.

    PYTHON scripts/newer_releases.py            prints each release that is newer than the tested one
    PYTHON scripts/newer_releases.py --not-run  prints which tested release this Python cannot have

Exit code 0.
"""

import importlib.metadata
import re
import sys
from pathlib import Path

PINNED = re.compile(r'([\w.-]+)==(\S+)(?: ; python_version (>=|<) "3\.12")?')


def main(arguments):
    if arguments == ["--not-run"]:
        not_run()
    elif arguments:
        sys.exit(__doc__)
    else:
        newer()


def newer():
    changed = False
    for name, version in pins(">=").items():
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found = "none"
        if found != version:
            changed = True
            print(f"newer_releases: {name} {found} (tested: {version})")
    if not changed:
        print("newer_releases: none; all are those of scripts/sockets.txt")


def not_run():
    if sys.version_info >= (3, 12):
        return
    version, older = sys.version.split()[0], pins("<")
    newest = [f"{name} {pin}" for name, pin in pins(">=").items() if older[name] != pin]
    print(f"not run, because they need Python 3.12 and this is {version}: {', '.join(newest)}")


def pins(marker):
    """The versions for Python 3.12 and later (`>=`), or for earlier ones (`<`)."""
    lines = (Path(__file__).parent / "sockets.txt").read_text().splitlines()
    found = (PINNED.fullmatch(line) for line in lines)
    return {match[1]: match[2] for match in found if match and match[3] in (None, marker)}


if __name__ == "__main__":
    main(sys.argv[1:])
