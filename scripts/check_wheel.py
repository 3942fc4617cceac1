#!/usr/bin/env python3
"""Tests a wheel with each release of CPython that is found here, each in an empty environment.

    scripts/check_wheel.py WHEEL

Installs the wheel and numpy, and nothing else; then imports the package, runs the programs and
tokenizes a text. Pythons are searched in PATH and in ~/.pyenv/versions. Fails if a Python fails, or
if none is found; prints which releases were not found.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

RELEASES = ("3.11", "3.12", "3.13", "3.14")

STEPS = """
import pathlib, subprocess, sys
import feedline
folder = pathlib.Path(sys.argv[1])
(folder / "text.jsonl").write_text('{"text": "Hello world"}\\n')
feedline.preprocess(folder / "text.jsonl", folder / "called", progress=False)
bin = pathlib.Path(sys.executable).parent
out = ["--json-in", folder / "text.jsonl", "--out", folder / "run", "--quiet"]
subprocess.run([bin / "preprocess", *out], check=True)
for name in "called", "run":
    assert (folder / f"{name}_text_document.bin").read_bytes() == bytes.fromhex("883ce303")
for program in [bin / "feedline"], [bin / "preprocess"], [sys.executable, "-m", "feedline"]:
    shown = subprocess.run([*program, "--version"], check=True, capture_output=True, text=True)
    assert shown.stdout.split()[1] == feedline.__version__, shown.stdout
samples = feedline.open(folder / "run_text_document", sequence_length=1, num_samples=1)
batch = next(iter(feedline.Loader(samples, micro_batch_size=1)))
assert batch["tokens"].tolist() == [[15496]], batch
"""


def main():
    if len(sys.argv) != 2 or not sys.argv[1].endswith(".whl"):
        sys.exit(__doc__)
    wheel = Path(sys.argv[1]).resolve()
    found = pythons()
    for name, python in found.items():
        print(f"{name}: {python}: ", end="", flush=True)
        check(wheel, python)
        print("passed")
    missing = [name for name in RELEASES if name not in found]
    if missing:
        print(f"not found: Python {', '.join(missing)}")
    if not found:
        sys.exit("check_wheel: expected a Python of these releases, found none")


def pythons():
    """The newest interpreter of each release: name to path."""
    found = {}
    versions = sorted((Path.home() / ".pyenv" / "versions").glob("*"), key=release_of)
    for name in RELEASES:
        places = [v / "bin" / "python" for v in versions if v.name.startswith(f"{name}.")][::-1]
        # Shims of pyenv exist for releases that are not active.
        on_path = shutil.which(f"python{name}")
        for place in [*places, *([on_path] if on_path else [])]:
            shown = subprocess.run([place, "-V"], capture_output=True, text=True, check=False)
            if shown.returncode == 0 and shown.stdout.startswith(f"Python {name}."):
                found[name] = place
                break
    return found


def release_of(folder):
    return [int(number) for number in re.findall(r"\d+", folder.name)]


def check(wheel, python):
    with tempfile.TemporaryDirectory() as folder:
        venv = Path(folder) / "venv"
        subprocess.run([python, "-m", "venv", "--without-pip", venv], check=True)
        pip = [sys.executable, "-m", "pip", "--python", venv / "bin" / "python"]
        install = ["install", "-q", "--disable-pip-version-check", "--only-binary=:all:", wheel]
        subprocess.run([*pip, *install], check=True)
        listed = subprocess.run([*pip, "list", "--format=freeze"], capture_output=True, text=True)
        packages = {line.partition("==")[0] for line in listed.stdout.split()}
        if packages != {"feedline", "numpy"}:
            sys.exit(f"check_wheel: expected the packages feedline and numpy, found {packages}")
        subprocess.run([venv / "bin" / "python", "-I", "-c", STEPS, folder], check=True)


if __name__ == "__main__":
    main()
