"""Names and types of tensors: those of a state of torch, and those of a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
"""The types that a step stores, by their names in safetensors. Elements of ``F4_X2`` are pairs of
``F4``, as in torch: see `in_header`."""

# Types of torch 2.7 and 2.8.
for _name, _attribute in (("F8_E8M0", "float8_e8m0fnu"), ("F4_X2", "float4_e2m1fn_x2")):
    if hasattr(torch, _attribute):
        DTYPES[_name] = getattr(torch, _attribute)

_NAMES = {dtype: name for name, dtype in DTYPES.items()}

_OPTIMIZERS = ("optim", "optimizer")
_MOMENTS = ("exp_avg", "exp_avg_sq")
_MASTERS = ("fp32_param", "master")


def dtype_name(dtype: torch.dtype, tensor: str) -> str:
    """The name of a type.

    Raises:
        ValueError: A step cannot store it.
    """
    try:
        return _NAMES[dtype]
    except KeyError:
        raise ValueError(
            f"cannot save tensor '{tensor}': expected one of {', '.join(DTYPES)}, found {dtype}"
        ) from None


def in_header(dtype: str, shape: Sequence[int]) -> tuple[str, list[int]]:
    """Type and shape of a tensor in a safetensors header, where each element of a pair counts.

    Args:
        dtype: A key of `DTYPES`.
        shape: As in torch: elements along each axis, pairs for ``F4_X2``.

    Raises:
        ValueError: It has no axis on which pairs can be counted.
    """
    if dtype != "F4_X2":
        return dtype, list(shape)
    if not shape:
        raise ValueError("expected at least one axis of pairs of F4, found a scalar")
    return "F4", [*shape[:-1], 2 * shape[-1]]


def bytes_of(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The memory of a contiguous tensor in host memory, as bytes."""
    if tensor.numel() == 0:
        return np.empty(0, np.uint8)
    view = tensor.detach().reshape(-1).view(torch.uint8)
    return view.numpy()


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether a subclass computes the elements of a tensor, which has no memory of its own."""
    return type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def check_contents(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Checks that the elements of a tensor are stored as its type and its size state.

    A wrapper may contain one tensor of its own type and size, with others that are derived from
    it, such as scales. The elements of a quantized tensor would be stored as other numbers.

    Returns:
        The tensor that has the memory of the elements.

    Raises:
        ValueError: It is not dense, or its elements are stored in another form.
    """
    inside = [tensor]
    if is_wrapper(tensor):
        flatten = getattr(tensor, "__tensor_flatten__", None)
        parts = [getattr(tensor, part) for part in flatten()[0]] if flatten else []
        form = (tensor.dtype, tensor.shape)
        inside = [part for part in parts if (part.dtype, part.shape) == form]
    if len(inside) != 1 or tensor.layout is not torch.strided or tensor.is_quantized:
        kind = type(tensor)
        raise ValueError(
            f"cannot save tensor '{name}': expected a dense tensor, or a subclass over one of the "
            f"same type and size, found {kind.__module__}.{kind.__qualname__} of {tensor.dtype} "
            f"and {tensor.layout} (hint: convert it to a torch.Tensor)"
        )
    return tensor if inside[0] is tensor else check_contents(inside[0], name)


class Names:
    """The group and the name in a step of every tensor of a state, and the path to every leaf."""

    def __init__(
        self, places: dict[str, tuple[str, str]], paths: Mapping[str, Sequence[Any]]
    ) -> None:
        self.places = places
        self.paths = paths

    @classmethod
    def of_state(cls, tensors: Iterable[str], paths: Mapping[str, Sequence[Any]]) -> Names:
        """Assigns groups and names to the tensors of a state.

        Args:
            tensors: Their names in the state, which DCP joins from the keys.
            paths: The keys of each tensor and value, where they are known.
        """
        names = list(dict.fromkeys(tensors))
        has_model = any(len(path) > 1 and path[0] == "model" for path in paths.values()) or (
            not paths and any(name.startswith("model.") for name in names)
        )
        places: dict[str, tuple[str, str]] = {}
        taken: set[tuple[str, str]] = set()
        for name in names:
            place = _place(name, paths.get(name), has_model and bool(paths))
            # Two names map to one place: the second keeps its name in the state.
            place = ("other", name) if place in taken else place
            taken.add(place)
            places[name] = place
        return cls(places, paths)

    @classmethod
    def of_step(cls, keys: Iterable[tuple[str, str]]) -> Names:
        """The names in a state of tensors of other programs, from ``(group, name)`` of each."""
        places: dict[str, tuple[str, str]] = {}
        paths: dict[str, Sequence[Any]] = {}
        for group, name in keys:
            if group == "model":
                path: tuple[str, ...] = ("model", name)
            elif group == "other":
                path = (name,)
            else:
                path = ("optim", "state", name, group)
            places[".".join(path)] = (group, name)
            paths[".".join(path)] = path
        return cls(places, paths)

    @classmethod
    def of_json(cls, found: Mapping[str, Any]) -> Names:
        places = {name: (place[0], place[1]) for name, place in found["tensors"].items()}
        return cls(places, found["paths"])


def _place(name: str, path: Sequence[Any] | None, is_below_model: bool) -> tuple[str, str]:
    """The group and the name of a tensor, by its path if that is known, since a Llama has tensors
    that are called ``model.layers``."""
    keys = tuple(path) if path else (name,)
    if not all(isinstance(key, str) for key in keys):
        return ("other", name)
    if len(keys) > 1 and keys[0] == "model":
        return ("model", ".".join(keys[1:]))
    is_optimizer = keys[0] in _OPTIMIZERS and len(keys) > 1
    if not is_optimizer and len(keys) == 1:
        first, _, rest = name.partition(".")
        keys, is_optimizer = ((first, rest), True) if first in _OPTIMIZERS else (keys, False)
    if is_optimizer:
        return _moment(".".join(keys[1:])) or ("other", name)
    if is_below_model or len(keys) > 1:
        return ("other", name)
    return ("model", name)


def _moment(text: str) -> tuple[str, str] | None:
    """Parses ``state.NAME.exp_avg`` of DCP and ``state.exp_avg.NAME`` of Megatron."""
    first, _, rest = text.partition(".")
    if first != "state" or not rest:
        return None
    for word in _MOMENTS + _MASTERS:
        group = "master" if word in _MASTERS else word
        if rest.endswith(f".{word}"):
            return (group, rest[: -len(word) - 1])
        if rest.startswith(f"{word}."):
            return (group, rest[len(word) + 1 :])
    return None
