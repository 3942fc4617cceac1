"""Names of other packages that Feedline implements or replaces, compared with those it knows."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable
from typing import Any


def assert_known(found: Iterable[str], known: Iterable[str], of: str) -> None:
    """Fails if a release has names that Feedline does not know, or lacks some.

    Raises:
        AssertionError: The names differ; the text has those that are new and those that are gone.
    """
    found, known = set(found), set(known)
    new, gone = sorted(found - known), sorted(known - found)
    assert not new and not gone, f"{of}: new {new}, gone {gone}"


def fields_of(config: Any) -> set[str]:
    """Names of the fields of a dataclass."""
    return {field.name for field in dataclasses.fields(config)}


def parameters_of(function: Callable[..., Any]) -> list[str]:
    """Names of the parameters of a function, in order."""
    return list(inspect.signature(function).parameters)
