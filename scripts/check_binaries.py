#!/usr/bin/env python3
"""Checks which glibc the binaries of a wheel, or programs, need.

    scripts/check_binaries.py WHEEL...               as much as the tag of the wheel promises
    scripts/check_binaries.py --glibc 2.28 FILE...   at most this

Prints the newest glibc symbol of each ELF file, and its libraries. Fails if a symbol is newer than the
promise, or if a library is not one that every Linux with glibc has.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

# Libraries that belong to glibc, and the runtime of gcc, which every distribution installs.
LIBRARIES = re.compile(r"(libc|libm|libdl|librt|libpthread|libgcc_s|ld-linux-\w+(-\w+)?)\.so\.\d")
# Versions of symbols of libgcc_s: gcc 3.0 to 4.3, older than every glibc of a tag.
OF_LIBGCC = re.compile(r"GCC_(3\.\d(\.\d)?|4\.[0-3](\.0)?)")


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--glibc", type=release, help="such as 2.28; not for wheels")
    parser.add_argument("files", type=Path, nargs="+")
    arguments = parser.parse_args()
    problems = []
    for file in arguments.files:
        if file.suffix == ".whl":
            problems += check_wheel(file)
        else:
            problems += check(file, file.name, arguments.glibc)
    for problem in problems:
        print(f"check_binaries: {problem}", file=sys.stderr)
    return 1 if problems else 0


def release(text):
    """The numbers of a release: 2.28 is older than 2.4 as text, and newer as a release."""
    return tuple(int(number) for number in text.split("."))


def check_wheel(wheel):
    tags = re.findall(r"manylinux_(\d+)_(\d+)_", wheel.name)
    # Without such a tag the wheel promises nothing: it is for the machine that built it.
    glibc = max((tuple(map(int, tag)) for tag in tags), default=None)
    found = []
    with zipfile.ZipFile(wheel) as files, tempfile.TemporaryDirectory() as folder:
        for name in files.namelist():
            if files.read(name)[:4] == b"\x7fELF":
                found.append((name, Path(files.extract(name, folder))))
        if not found:
            return [f"{wheel.name}: expected ELF files, found none"]
        return [problem for name, file in found for problem in check(file, name, glibc)]


def check(file, name, glibc):
    """The problems of one ELF file."""
    needs, libraries = needs_of(file)
    releases = [release(need[6:]) for need in needs if re.fullmatch(r"GLIBC_[\d.]+", need)]
    newest = max(releases, default=())
    text = ".".join(map(str, newest)) or "none"
    megabytes = file.stat().st_size / 1e6
    print(f"{name}: glibc {text}, {megabytes:.1f} MB, libraries {' '.join(sorted(libraries))}")
    problems = []
    if glibc and newest > glibc:
        limit = ".".join(map(str, glibc))
        newer = sorted(n for n in needs if n.startswith("GLIBC_") and release(n[6:]) > glibc)
        problems.append(f"cannot accept {name}: expected symbols up to glibc {limit}, found "
                        f"{', '.join(newer)}")
    others = [n for n in needs if not re.fullmatch(r"GLIBC_[\d.]+", n) and not OF_LIBGCC.fullmatch(n)]
    others += [library for library in libraries if not LIBRARIES.fullmatch(library)]
    if others:
        problems.append(f"cannot accept {name}: expected glibc and libgcc_s only, found "
                        f"{', '.join(sorted(others))}")
    return problems


def needs_of(file):
    """Versions of symbols that a file needs from its libraries, and their names."""
    def readelf(option):
        command = ["readelf", "--wide", option, file]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        if done.stderr:
            sys.exit(f"check_binaries: cannot read {file}: {done.stderr.strip()}")
        return done.stdout

    # Versions that the file itself defines are in another section.
    _, _, needed = readelf("--version-info").partition("Version needs section")
    libraries = set(re.findall(r"\(NEEDED\).*\[(.*)\]", readelf("--dynamic")))
    return set(re.findall(r"Name: (\S+) ", needed)), libraries


if __name__ == "__main__":
    sys.exit(main())
