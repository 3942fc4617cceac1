"""What a test knows of a library's protocol, compared with what the installed release has."""

from __future__ import annotations

from collections.abc import Iterable


def assert_known(found: Iterable[str], known: Iterable[str], of: str) -> None:
    """Checks that a release has exactly the known names.

    Args:
        found: The names of the installed release.
        known: The names that the adapter was written for.
        of: What they are the names of, for the message.

    Raises:
        AssertionError: It names what is new and what is gone.
    """
    found, known = set(found), set(known)
    new, gone = sorted(found - known), sorted(known - found)
    assert not new and not gone, f"{of}: new: {new}, gone: {gone}"
