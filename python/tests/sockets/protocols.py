"""Names of other packages that Feedline implements or replaces, compared with those it knows."""

from __future__ import annotations

from collections.abc import Iterable


def assert_known(found: Iterable[str], known: Iterable[str], of: str) -> None:
    """Fails if a release has names that Feedline does not know, or lacks some.

    Raises:
        AssertionError: The names differ; the text has those that are new and those that are gone.
    """
    found, known = set(found), set(known)
    new, gone = sorted(found - known), sorted(known - found)
    assert not new and not gone, f"{of}: new are {new}, gone are {gone}"
