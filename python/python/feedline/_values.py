"""Values that are no tensors, as JSON and back. Reading them runs no code.

None, booleans, numbers, strings, lists and dictionaries with string keys are themselves in
JSON. Other values are an object with one key that starts with ``$`` and names their type. Only the
types named here are stored, and not their subclasses, so that a value is read as it was saved.
"""

from __future__ import annotations

import base64
import io
import math
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import numpy as np

_TENSOR_BYTES_MAX = 1 << 20
"""The most bytes of a tensor among values: a learning rate or a table, but no weights."""


def encoded(value: Any, name: str, allow_pickle: bool) -> Any:
    """A value as JSON. ``name`` is its path in the state, for the error message.

    Raises:
        ValueError: JSON cannot store it, and pickles are not allowed.
    """
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if kind in (list, tuple, set, frozenset):
        items = [encoded(v, f"{name}[{n}]", allow_pickle) for n, v in enumerate(value)]
        return items if kind is list else {f"${kind.__name__}": items}
    if kind is dict and all(type(k) is str and not k.startswith("$") for k in value):
        return {k: encoded(v, f"{name}.{k}", allow_pickle) for k, v in value.items()}
    if kind in _MAPPINGS:
        pairs = [
            [encoded(k, f"{name} (a key)", allow_pickle), encoded(v, f"{name}.{k}", allow_pickle)]
            for k, v in value.items()
        ]
        return {_MAPPINGS[kind]: pairs}
    if kind is defaultdict and any(value.default_factory is made for made in _FACTORIES):
        pairs = encoded(OrderedDict(value), name, allow_pickle)["$ordered"]
        return {"$defaultdict": [_FACTORIES[value.default_factory], pairs]}
    if kind is deque:
        return {"$deque": [encoded(list(value), name, allow_pickle), value.maxlen]}
    if kind is complex:
        return {"$complex": [repr(value.real), repr(value.imag)]}
    if kind in (bytes, bytearray):
        return {f"${kind.__name__}": _text(value)}
    if kind is io.BytesIO:
        return {"$bytesio": _text(value.getvalue())}
    if isinstance(value, np.generic) and _is_plain(value.dtype):
        return {"$scalar": [value.dtype.str, _text(value.tobytes())]}
    if kind is np.ndarray and _is_plain(value.dtype):
        return {"$array": [value.dtype.str, list(value.shape), _text(value.tobytes())]}
    return _torch_value(value, name, allow_pickle)


def _is_plain(dtype: np.dtype[Any]) -> bool:
    """Whether the string of a dtype describes it completely, and no element is an object."""
    return not dtype.hasobject and dtype.itemsize > 0 and np.dtype(dtype.str) == dtype


def _torch_value(value: Any, name: str, allow_pickle: bool) -> Any:
    import torch

    if type(value) is torch.Size:
        return {"$size": list(value)}
    if type(value) is torch.dtype:
        return {"$dtype": str(value).removeprefix("torch.")}
    if type(value) is torch.device:
        return {"$device": str(value)}
    if type(value) is torch.torch_version.TorchVersion:
        return {"$torch_version": str(value)}
    if type(value) is torch.Tensor and _is_small(value):
        array = value.contiguous().reshape(-1).view(torch.uint8).numpy()
        dtype = str(value.dtype).removeprefix("torch.")
        return {"$tensor": [dtype, list(value.shape), _text(array.tobytes())]}
    if not allow_pickle:
        raise ValueError(
            f"cannot save '{name}': expected a tensor, or numbers, strings, bytes, lists, "
            f"dictionaries and numpy arrays, found {type(value).__module__}."
            f"{type(value).__qualname__} (hint: convert it, or pass allow_pickle=True, which "
            "stores a pickle)"
        )
    pickled = io.BytesIO()
    torch.save(value, pickled)
    return {"$pickle": _text(pickled.getvalue())}


def _is_small(tensor: Any) -> bool:
    """Whether it is a small tensor in host memory that its type, shape and bytes describe."""
    return (
        tensor.device.type == "cpu"
        and str(tensor.layout) == "torch.strided"
        and not tensor.requires_grad
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor.is_quantized
        and tensor.nbytes <= _TENSOR_BYTES_MAX
    )


def decoded(value: Any, name: str, allow_pickle: bool) -> Any:
    """The value of `encoded`.

    Raises:
        ValueError: It is pickled and pickles are not allowed, or its kind is unknown.
    """
    if isinstance(value, list):
        return [decoded(item, name, allow_pickle) for item in value]
    if not isinstance(value, dict):
        return value
    if not any(key.startswith("$") for key in value):
        return {k: decoded(v, f"{name}.{k}", allow_pickle) for k, v in value.items()}
    ((kind, inner),) = value.items()
    if kind in _COLLECTIONS:
        return _COLLECTIONS[kind](decoded(inner, name, allow_pickle))
    if kind in _MAPPINGS.values():
        made: Any = {mark: kind for kind, mark in _MAPPINGS.items()}[kind]()
        return _filled(made, inner, name, allow_pickle)
    if kind == "$defaultdict":
        factories: Any = {mark: factory for factory, mark in _FACTORIES.items()}
        return _filled(defaultdict(factories[inner[0]]), inner[1], name, allow_pickle)
    if kind == "$deque":
        return deque(decoded(inner[0], name, allow_pickle), inner[1])
    if kind == "$scalar":
        return np.frombuffer(_bytes(inner[1]), np.dtype(inner[0]))[0]
    if kind == "$array":
        flat = np.frombuffer(_bytes(inner[2]), np.dtype(inner[0]))
        return flat.reshape(inner[1]).copy()
    if kind in _OF_TORCH:
        return _torch_decoded(kind, inner, name, allow_pickle)
    if kind in _OTHERS:
        return _OTHERS[kind](inner)
    raise ValueError(f"cannot read '{name}': expected a kind of value that is known, found {kind}")


def _filled(made: Any, pairs: Any, name: str, allow_pickle: bool) -> Any:
    """A dictionary with these keys and values."""
    # By keys: the constructor of a Counter would count the pairs.
    for key, value in pairs:
        made[decoded(key, name, allow_pickle)] = decoded(value, name, allow_pickle)
    return made


def _torch_decoded(kind: str, inner: Any, name: str, allow_pickle: bool) -> Any:
    import torch

    if kind == "$size":
        return torch.Size(inner)
    if kind == "$dtype":
        return _dtype(inner, name)
    if kind == "$device":
        return torch.device(inner)
    if kind == "$torch_version":
        return torch.torch_version.TorchVersion(inner)
    if kind == "$tensor":
        tensor = torch.empty(inner[1], dtype=_dtype(inner[0], name))
        flat = np.frombuffer(_bytes(inner[2]), np.uint8).copy()
        if tensor.numel():  # torch does not view bytes that are none as another type
            tensor.copy_(torch.from_numpy(flat).view(tensor.dtype).reshape(tensor.shape))
        return tensor
    if not allow_pickle:
        raise ValueError(
            f"cannot read '{name}': expected a value without a pickle, found one (hint: "
            "allow_pickle=True loads it, and runs whatever is in it)"
        )
    return torch.load(io.BytesIO(_bytes(inner)), weights_only=False)


def _dtype(text: str, name: str) -> Any:
    import torch

    found = getattr(torch, text, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"cannot read '{name}': expected a type of torch, found {text!r}")
    return found


_OF_TORCH = ("$size", "$dtype", "$device", "$torch_version", "$tensor", "$pickle")

_MAPPINGS: dict[type, str] = {dict: "$dict", OrderedDict: "$ordered", Counter: "$counter"}

_FACTORIES: dict[Any, str | None] = {
    None: None,
    **{kind: kind.__name__ for kind in (bool, int, float, str, bytes, list, tuple, set, dict)},
}
"""What makes a missing value of a `defaultdict`. Other functions cannot be named safely."""

_COLLECTIONS: dict[str, Any] = {"$tuple": tuple, "$set": set, "$frozenset": frozenset}

_OTHERS: dict[str, Any] = {
    "$float": float,
    "$complex": lambda pair: complex(float(pair[0]), float(pair[1])),
    "$bytes": lambda text: _bytes(text),
    "$bytearray": lambda text: bytearray(_bytes(text)),
    "$bytesio": lambda text: io.BytesIO(_bytes(text)),
}


def _text(value: bytes | bytearray) -> str:
    return base64.b64encode(value).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)
