"""The plans of DCP: a check of what they contain, and the caches that DCP has of them.

A newer release of torch may plan what this package does not know. A plan with such a part is
refused by name: read as if the part were absent, it could store other data.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any

from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    SavePlan,
    SavePlanner,
    WriteItemType,
)

_TYPES = (
    WriteItemType.TENSOR,
    WriteItemType.SHARD,
    WriteItemType.BYTE_IO,
    LoadItemType.TENSOR,
    LoadItemType.BYTE_IO,
)

# Without `TensorProperties`: the tensor itself has all that they contain.
_FIELDS: dict[str, frozenset[str]] = {
    "SavePlan": frozenset(("items", "storage_data", "planner_data", "usable")),
    "LoadPlan": frozenset(("items", "storage_data", "planner_data")),
    "WriteItem": frozenset(("index", "type", "bytes_io_data", "tensor_data")),
    "TensorWriteData": frozenset(("chunk", "properties", "size")),
    "ChunkStorageMetadata": frozenset(("offsets", "sizes")),
    "MetadataIndex": frozenset(("fqn", "offset", "index")),
    "ReadItem": frozenset(
        ("type", "dest_index", "dest_offsets", "storage_index", "storage_offsets", "lengths")
    ),
}
"""The fields of the classes of plans, in torch 2.11 to 2.15."""

_CACHES = (
    "_cached_save_plan",
    "_cached_all_plans",
    "_cached_global_plan",
    "_cached_metadata",
    "_cached_final_save_plan",
)
"""The dictionaries in which `SavePlanner` caches plans, by the name of the planner's class."""


def check_plan(plan: SavePlan | LoadPlan) -> None:
    """Checks that each part of a plan is known.

    Raises:
        ValueError: An item has a type, or a class a field with a value, that is not known.
    """
    _check_fields(plan, "a plan")
    for item in plan.items:
        index = getattr(item, "index", None) or getattr(item, "storage_index", None)
        name = f"'{getattr(index, 'fqn', index)}'"
        if item.type not in _TYPES:
            known = ", ".join(dict.fromkeys(kind.name for kind in _TYPES))
            raise ValueError(
                f"cannot save or load {name}: expected an item of DCP of the type {known}, found "
                f"{item.type} (hint: this torch is newer than this feedline)"
            )
        _check_fields(item, name)
        for part in (index, getattr(item, "dest_index", None), getattr(item, "tensor_data", None)):
            _check_fields(part, name)
        _check_fields(getattr(getattr(item, "tensor_data", None), "chunk", None), name)


def check_keywords(found: Mapping[str, Any], known: Iterable[str], call: str) -> None:
    """Checks the keywords with which DCP calls a storage.

    Raises:
        ValueError: One of them is not known.
    """
    for name in sorted(set(found) - set(known)):
        raise ValueError(
            f"cannot use {call}: expected the keywords {', '.join(known)}, found {name}="
            f"{found[name]!r} (hint: this torch is newer than this feedline)"
        )


def _check_fields(part: Any, name: str) -> None:
    kind: Any = type(part)
    for field, default in _unknown_fields(kind):
        if getattr(part, field) != default:
            raise ValueError(
                f"cannot save or load {name}: expected a {kind.__name__} of DCP without "
                f"{field}, found {getattr(part, field)!r} (hint: this torch is newer than this "
                "feedline)"
            )


@functools.cache
def _unknown_fields(kind: Any) -> tuple[tuple[str, Any], ...]:
    """The fields of a class that are not known, with their defaults."""
    named = [_FIELDS[base.__name__] for base in kind.__mro__ if base.__name__ in _FIELDS]
    if not named or not dataclasses.is_dataclass(kind):
        return ()
    known = named[0]
    unknown = [field for field in dataclasses.fields(kind) if field.name not in known]
    return tuple(
        (each.name, each.default_factory() if callable(each.default_factory) else each.default)
        for each in unknown
    )


class PlanCaches:
    """DCP's caches of plans in this process, for planners with ``enable_plan_caching``.

    A rank whose plan equals the cached one sends none, and writes by the last plan that it was
    given. This is right only if the caches of all ranks are those of one save that all of them
    have started to write. Otherwise all ranks empty them, and the next save is planned completely:
    after a save that failed in planning, and after one by another storage. Releases of torch
    differ in what they have cached by then.
    """

    def __init__(self) -> None:
        self._is_planning = False
        self._left: dict[tuple[str, str], Any] = {}
        self._ranks = 0

    def start(self) -> None:
        """Prepares for the planning of a save. Each rank calls it before its planner plans."""
        if self._is_planning or not _are_same(_cached(), self._left):
            for cache in _CACHES:
                getattr(SavePlanner, cache, {}).clear()
            self._left = {}
        self._is_planning = True

    def completed(self, plans: list[SavePlan]) -> list[SavePlan]:
        """The plans of all ranks, of which the planner has replaced unchanged ones by empty ones.

        Returns:
            The empty plans: no plan has changed, and each rank has its last one.

        Raises:
            ValueError: The unchanged plans are not known.
        """
        if not any(plan.usable for plan in plans):
            if self._ranks != len(plans):
                raise plans_refusal()
            return plans
        if not all(plan.usable for plan in plans):
            plans = self._unchanged(plans)
        return plans

    def _unchanged(self, plans: list[SavePlan]) -> list[SavePlan]:
        # The planner has just cached the complete list, with the very objects of `plans`.
        found = [
            cached
            for cached in getattr(SavePlanner, "_cached_global_plan", {}).values()
            if len(cached) == len(plans)
            and all(new is old for new, old in zip(plans, cached, strict=True) if new.usable)
        ]
        is_known = len(found) == 1 and all(
            plan.usable and isinstance(plan.storage_data, str) for plan in found[0]
        )
        if not is_known:
            raise plans_refusal()
        return list(found[0])

    def keep(self, plans: list[SavePlan]) -> None:
        """Records that the coordinator has planned a save of these ranks."""
        self._ranks = len(plans)

    def end(self) -> None:
        """Records that this rank has its plan and starts to write."""
        self._is_planning, self._left = False, _cached()


def plans_refusal() -> ValueError:
    """The error of a save whose cached plans are not known."""
    return ValueError(
        "cannot save by a planner that keeps its plans: expected the plans of all ranks, found "
        "that some are not known, after a save of other ranks or by another storage (hint: save "
        "again, or leave out enable_plan_caching)"
    )


def _cached() -> dict[tuple[str, str], Any]:
    return {
        (cache, key): value
        for cache in _CACHES
        for key, value in getattr(SavePlanner, cache, {}).items()
    }


def _are_same(a: dict[tuple[str, str], Any], b: dict[tuple[str, str], Any]) -> bool:
    return a.keys() == b.keys() and all(a[key] is b[key] for key in a)
