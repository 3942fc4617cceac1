"""Compares what a framework has with what was known when its adapter was written."""

from __future__ import annotations

from collections.abc import Iterable


def assert_known(found: Iterable[str], known: Iterable[str], of: str) -> None:
    """Raises an `AssertionError` that names what is new and what is gone, if anything is."""
    new, gone = sorted(set(found) - set(known)), sorted(set(known) - set(found))
    assert not new and not gone, f"{of}: new {new}, gone {gone}"
