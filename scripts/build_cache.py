#!/usr/bin/env python3
"""Caches compiled third-party crates outside of the checkout for the next clone.

    scripts/build_cache.py restore    copy them into a new target folder
    scripts/build_cache.py save       copy them from the target folder into the cache

They are in ${XDG_CACHE_HOME:-~/.cache}/feedline/crates/KEY, 1.3 GB for the tests and about as much
for a release build, 4 GB at most, and may be deleted at any time. KEY is a hash of the inputs of their
compilation: rustc, their versions in Cargo.lock, Cargo.toml and .cargo/config.toml without comments.
The two most recently used keys are cached. Crates of the workspace are never cached: cargo would take
those of another clone for this one's.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

KEYS_MAX = 2
BYTES_MAX = 4 << 30
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "feedline" / "crates"
TARGET = Path(os.environ.get("CARGO_TARGET_DIR", "target"))
PROFILES = ("debug", "release")
# Folders of a profile: the first has a file per crate, the others a folder per crate.
PARTS = ("deps", "build", ".fingerprint")


def main(command):
    os.chdir(Path(__file__).resolve().parent.parent)
    cached = CACHE / key()
    CACHE.mkdir(parents=True, exist_ok=True)
    # Two clones may do this at once.
    with open(CACHE / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if command == "restore":
            restore(cached)
        else:
            save(cached)


def key():
    digest = hashlib.sha256(subprocess.check_output(["rustc", "-vV"]))
    # The crates of the workspace are not cached, so their entries do not matter.
    packages = Path("Cargo.lock").read_text().split("[[package]]")
    digest.update("".join(text for text in packages if "\nsource = " in text).encode())
    for path in ("Cargo.toml", ".cargo/config.toml"):
        without_comments = re.sub(r"[ \t]*#.*", "", Path(path).read_text())
        digest.update(without_comments.encode())
    return digest.hexdigest()[:16]


def restore(cached):
    for profile in PROFILES:
        if (cached / profile).is_dir() and not (TARGET / profile / "deps").exists():
            for part in PARTS:
                shutil.copytree(cached / profile / part, TARGET / profile / part, symlinks=True)
            os.utime(cached)


def save(cached):
    for profile in PROFILES:
        for part in PARTS:
            save_part(TARGET / profile / part, cached / profile / part)
    os.utime(cached)
    files = (Path(folder) / name for folder, _, names in os.walk(cached) for name in names)
    if sum(file.lstat().st_size for file in files) > BYTES_MAX:
        # The cache has old files of many builds; the next `save` fills it with current ones.
        shutil.rmtree(cached)
    keys = sorted((path for path in CACHE.iterdir() if path.is_dir()), key=os.path.getmtime)
    for old in keys[:-KEYS_MAX]:
        shutil.rmtree(old)


def save_part(source, cached):
    if not source.is_dir():
        return
    cached.mkdir(parents=True, exist_ok=True)
    for entry in os.scandir(source):
        if is_third_party(entry) and not (cached / entry.name).exists():
            copy(entry, cached / entry.name)


def copy(entry, target):
    """Copies atomically and with modification times, by which cargo detects that it is fresh."""
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
        copied = Path(scratch) / entry.name
        if entry.is_dir():
            shutil.copytree(entry.path, copied, symlinks=True)
        else:
            shutil.copy2(entry.path, copied)
        copied.rename(target)


def is_third_party(entry):
    """Decides by the name, [lib]NAME-HASH...; all programs are of the workspace."""
    stem = re.sub(r"-[0-9a-f]{16}.*$", "", entry.name).replace("-", "_")
    is_program = entry.is_file() and not entry.name.startswith("lib") and "." not in entry.name
    return not is_program and stem not in OURS and stem.removeprefix("lib") not in OURS


def targets():
    command = ["cargo", "metadata", "--no-deps", "--format-version=1", "--locked"]
    packages = json.loads(subprocess.check_output(command))["packages"]
    names = {package["name"] for package in packages}
    names |= {target["name"] for package in packages for target in package["targets"]}
    return {name.replace("-", "_") for name in names}


if __name__ == "__main__":
    if sys.argv[1:] not in (["restore"], ["save"]):
        sys.exit(__doc__)
    OURS = targets()
    main(sys.argv[1])
