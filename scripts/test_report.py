#!/usr/bin/env python3
"""Prints skipped tests, tests that needed a retry, and the slowest tests.

    scripts/test_report.py target/nextest/all/junit.xml

A test that cannot run on a machine prints a line that starts with SKIPPED. Exit code 0.
"""

import sys
import xml.etree.ElementTree as ET


def main(path):
    cases = ET.parse(path).getroot().findall("testsuite/testcase")
    name = lambda case: f"{case.get('classname')} {case.get('name')}"
    flaky = [case for case in cases if case.find("flakyFailure") is not None]
    slowest = sorted(cases, key=lambda case: -float(case.get("time", 0)))[:10]
    seconds = sum(float(case.get("time", 0)) for case in cases)

    print(f"{len(cases)} tests, {seconds:.0f} s of one core or more; the slowest:")
    for case in slowest:
        print(f"  {float(case.get('time')):6.1f} s  {name(case)}")
    print("passed at the second try:" if flaky else "no test needed a second try")
    for case in flaky:
        print(f"  {name(case)}: {failure(case)}")
    skipped = [f"{name(case)}: {reason}" for case in cases for reason in reasons(case)]
    print(f"skipped on this machine: {len(skipped)}")
    for line in skipped:
        print(f"  {line}")
    if skipped:
        print("`make check-all` runs those that need Slurm, Ceph, XFS or NFS")


def failure(case):
    """The panic of the first try, or how nextest ended it."""
    first = case.find("flakyFailure")
    lines = (first.findtext("system-err") or "").splitlines()
    starts = [at for at, line in enumerate(lines) if " panicked at " in line]
    message = [first.get("message") or first.get("type")]
    excerpt = lines[starts[0] : starts[0] + 6] if starts else message
    return " | ".join(line.strip() for line in excerpt)


def reasons(case):
    output = [case.findtext(stream) or "" for stream in ("system-out", "system-err")]
    lines = [line for text in output for line in text.splitlines()]
    return [line.split("SKIPPED", 1)[1].strip(": ") for line in lines if line.startswith("SKIPPED")]


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
