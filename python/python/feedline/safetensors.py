"""The functions of the package `safetensors`, for files, steps and S3.

>>> from feedline.safetensors import load_file, safe_open, save_file
>>> save_file({"weight": tensor}, "s3://bucket/model.safetensors")
>>> load_file("model.safetensors")["weight"]
>>> load_file("run/ckpt")["lm_head.weight"]      # the weights of the newest step, verified

Every reader of safetensors can open the files of `save_file`. A file appears when all of it is
durable. Files are read with direct I/O by several threads.

The metadata of a file has a CRC-64 of each tensor, as ``feedline.crc64``, and the length of the
file, as ``feedline.file_bytes``. `load_file` and `get_tensor` compare the checksums of each whole
tensor; `safe_open.metadata` leaves both strings out. Another program may copy them into a file of
its own, with other tensors. They are used only if the file looks as `save_file` writes it:

- The data begin at a multiple of 4,096 bytes.
- The 8 bytes before the data are spaces. The safetensors package pads with at most 7.
- The file has the length in its metadata.

Files that `save_file` has written without the length are recognized by the multiple of 4,096.

A tensor of a type that torch lacks, such as ``F6_E2M3``, is refused by name when it is read. The
other tensors of its file can be read.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import secrets
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from feedline import _feedline
from feedline._names import DTYPES, bytes_of, dtype_name, in_header
from feedline.ckpt import Step, open_step
from feedline.errors import CorruptError
from feedline.tokens import Url, text_of

__all__ = ["load_file", "load_model", "safe_open", "save_file", "save_model"]

_CHECKSUMS = "feedline.crc64"
"""The key of the checksums in the metadata: JSON of hexadecimal digits by the tensors' names."""

_FILE_BYTES = "feedline.file_bytes"
"""The key of the length of the file in the metadata: 16 hexadecimal digits."""

_ALIGN_BYTES = 4096

_TYPES = {"F4" if name == "F4_X2" else name: dtype for name, dtype in DTYPES.items()}
"""The types of torch by their names in a header."""

_PADDING_BYTES = 8
"""The minimum number of spaces that end a header. Other programs align it to 8 bytes: at most 7."""


def save_file(
    tensors: Mapping[str, torch.Tensor], filename: Url, metadata: Mapping[str, str] | None = None
) -> None:
    """Writes tensors to a file, durably. A file of that name is replaced atomically.

    Args:
        tensors: Tensors by their names; those of a device are copied to host memory.
        filename: A path or a URL. An object of S3 that exists is not replaced.
        metadata: Strings that are stored with them.

    Raises:
        ValueError: A tensor cannot be stored, or two share memory; the text names them.
        FileExistsError: The object exists, on S3.
        OSError: The store failed, or is full.
    """
    name = text_of(filename)
    _check_shared(tensors)
    order = sorted(tensors, key=lambda key: (-tensors[key].element_size(), key))
    kinds = {key: _kind_of(tensors[key], key) for key in order}
    hosts = {key: _on_host(tensors[key]) for key in order}
    parts = [bytes_of(hosts[key]) for key in order]
    checksums = dict(zip(order, _feedline.crc64_all(parts), strict=True))
    strings = dict(metadata or {})
    strings[_CHECKSUMS] = json.dumps({key: f"{value:016x}" for key, value in checksums.items()})
    header: dict[str, Any] = {"__metadata__": strings}
    at = 0
    for key, part in zip(order, parts, strict=True):
        dtype, shape = kinds[key]
        header[key] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(part)]}
        at += len(part)
    head = _packed(header, at)
    path = _feedline.local_path(name)
    if path is None:
        _feedline.write_file(name, head, parts)
        return
    folder_name, base = os.path.split(path)
    hidden = os.path.join(folder_name, f".{base}.{secrets.token_hex(4)}")
    _feedline.write_file(hidden, head, parts)
    try:
        os.replace(hidden, path)
    except OSError:
        os.unlink(hidden)
        raise
    folder = os.open(folder_name or ".", os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _kind_of(tensor: torch.Tensor, name: str) -> tuple[str, list[int]]:
    """Type and shape in a header."""
    dtype = dtype_name(tensor.dtype, name)
    try:
        return in_header(dtype, tensor.shape)
    except ValueError as error:
        raise ValueError(f"cannot save tensor '{name}': {error}") from None


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in host memory, contiguous. A conjugate is only marked until it is resolved."""
    return tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()


def _packed(header: dict[str, Any], data_bytes: int) -> bytes:
    """The bytes before the data. The length of the file is added to the metadata."""
    head = b""
    for _ in range(2):  # the first one has the length of the second one
        header["__metadata__"][_FILE_BYTES] = f"{len(head) + data_bytes:016x}"
        text = json.dumps(header, separators=(",", ":")).encode() + b" " * _PADDING_BYTES
        text += b" " * (-(len(text) + 8) % _ALIGN_BYTES)
        head = len(text).to_bytes(8, "little") + text
    return head


def load_file(filename: Url, device: str | int | torch.device = "cpu") -> dict[str, torch.Tensor]:
    """All tensors of a file, or all weights of a step.

    Args:
        filename: A path or a URL: a safetensors file, a step, or a folder of steps.
        device: The device of the returned tensors.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: A tensor is of a type that torch lacks; the text names it.
        CorruptError: The file does not match its format or its checksums.
    """
    with safe_open(filename, "pt", device) as file:
        return file.get_tensors()


def save_model(
    model: torch.nn.Module, filename: Url, metadata: Mapping[str, str] | None = None
) -> None:
    """Writes the state of a model. Tensors that share memory are written once, under the first of
    their names in alphabetical order; the metadata maps the other names to it."""
    kept: dict[tuple[Any, ...], str] = {}
    tensors: dict[str, torch.Tensor] = {}
    strings = dict(metadata or {})
    for name, tensor in sorted(model.state_dict().items()):
        place = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride())
        first = kept.setdefault(place, name) if tensor.numel() else name
        if first == name:
            tensors[name] = tensor
        else:
            strings[name] = first
    save_file(tensors, filename, strings)


def load_model(
    model: torch.nn.Module,
    filename: Url,
    strict: bool = True,
    device: str | int | torch.device = "cpu",
) -> tuple[list[str], list[str]]:
    """Loads the state of a model, as `torch.nn.Module.load_state_dict` does.

    Returns:
        Names that the file lacks, and names that the model lacks. A tensor that shares its memory
        with one that was loaded is not missing.

    Raises:
        RuntimeError: With ``strict``, if there are such names, or a shape differs.
    """
    state = load_file(filename, device)
    found = model.load_state_dict(state, strict=False)
    own = model.state_dict()
    loaded = {own[name].data_ptr() for name in state if name in own}
    missing = [name for name in found.missing_keys if own[name].data_ptr() not in loaded]
    if strict and (missing or found.unexpected_keys):
        raise RuntimeError(
            f"cannot load {text_of(filename)}: expected the tensors of the model, found "
            f"{len(missing)} missing ({', '.join(missing[:5])}) and "
            f"{len(found.unexpected_keys)} others ({', '.join(found.unexpected_keys[:5])})"
        )
    return missing, list(found.unexpected_keys)


class safe_open:  # noqa: N801, the name in the package that it replaces
    """A file from which single tensors and parts of them are read.

    Args:
        filename: A path or a URL: a safetensors file, a step, or a folder of steps for the weights
            of the newest.
        framework: ``"pt"``.
        device: The device of the returned tensors.

    Raises:
        FileNotFoundError: There is no such file.
        CorruptError: The file does not match its format.
    """

    def __init__(
        self, filename: Url, framework: str = "pt", device: str | int | torch.device = "cpu"
    ) -> None:
        if framework not in ("pt", "torch", "pytorch"):
            raise ValueError(f"cannot use framework '{framework}': expected 'pt'")
        self._device = device
        name = text_of(filename)
        self._source: _FileTensors | _StepTensors
        path = _feedline.local_path(name)
        is_file = path is not None and os.path.isfile(path)
        if is_file or _feedline.file_name(name).endswith(".safetensors"):
            self._source = _FileTensors(name)
        else:
            self._source = _StepTensors(open_step(name))

    def __enter__(self) -> safe_open:
        return self

    def __exit__(self, *_: object) -> None:
        """Does nothing: files are only open during calls."""

    def keys(self) -> list[str]:
        """The names of all tensors, sorted."""
        return sorted(self._source.entries)

    def offset_keys(self) -> list[str]:
        """The names of all tensors, in the order of the file."""
        return list(self._source.entries)

    def metadata(self) -> dict[str, str]:
        """The strings that were stored with the tensors."""
        return self._source.metadata()

    def get_tensor(self, name: str) -> torch.Tensor:
        """A whole tensor.

        Raises:
            KeyError: There is no such tensor.
            ValueError: It is of a type that torch lacks.
            CorruptError: The tensor differs from its checksum.
        """
        return self._whole([name])[name]

    def get_tensors(self) -> dict[str, torch.Tensor]:
        """All tensors, read together."""
        return self._whole(self.keys())

    def get_slice(self, name: str) -> TensorSlice:
        """A tensor of which only a part is read: ``file.get_slice(name)[10:20, :4]``."""
        self._source.entry(name)
        return TensorSlice(self._source, name, self._device)

    def _whole(self, names: list[str]) -> dict[str, torch.Tensor]:
        tensors = {}
        for name in names:
            dtype, shape = _torch_kind(self._source, name)
            tensors[name] = torch.empty(shape, dtype=dtype)
        self._source.read_whole(tensors)
        return {name: tensor.to(self._device) for name, tensor in tensors.items()}


class TensorSlice:
    """A tensor of a file or a step. Indexing it reads the rows, and of a step the box, that the
    index needs."""

    def __init__(
        self,
        source: _FileTensors | _StepTensors,
        name: str,
        device: str | int | torch.device,
    ) -> None:
        self._source, self._name, self._device = source, name, device

    def get_shape(self) -> list[int]:
        """Elements along each axis. Those of ``F4`` are half a byte; torch counts pairs of them."""
        return list(self._source.entry(self._name)[1])

    def get_dtype(self) -> str:
        """Its type, by its name in safetensors."""
        return self._source.entry(self._name)[0]

    def __getitem__(self, index: Any) -> torch.Tensor:
        """The elements of any index of torch. Integers, slices and an ellipsis read a part; any
        other index, such as a list, reads the whole tensor.

        Raises:
            IndexError: It has more axes than the tensor, is outside of one, or cuts a byte of F4.
            TypeError: It is no index.
            ValueError: The step of a slice is not positive, or torch lacks the type.
        """
        dtype, shape = _torch_kind(self._source, self._name)
        is_packed = self.get_dtype() == "F4"
        found = _box(index, self.get_shape(), f"tensor '{self._name}'")
        if found is None and is_packed:
            raise TypeError(
                f"cannot slice tensor '{self._name}' of type F4: expected integers, slices and one "
                f"ellipsis, found {index!r}"
            )
        if found is None:
            tensor = torch.empty(shape, dtype=dtype)
            self._source.read_whole({self._name: tensor})
            return tensor[index].contiguous().to(self._device)
        spans, rest = found
        if is_packed:
            _halve(spans, rest, self._name)
        box = self._source.read_box(self._name, spans)
        return box[tuple(rest)].contiguous().to(self._device)


class _FileTensors:
    """The tensors of a safetensors file."""

    def __init__(self, name: str) -> None:
        self._file = _feedline.TensorFile(name)
        self.entries: dict[str, tuple[str, list[int], int, int]] = {
            key: (dtype, shape, begin, end)
            for key, dtype, shape, begin, end in sorted(
                self._file.tensors(), key=lambda entry: entry[3]
            )
        }

    def metadata(self) -> dict[str, str]:
        strings = dict(self._file.metadata())
        return {key: strings[key] for key in strings if key not in (_CHECKSUMS, _FILE_BYTES)}

    @property
    def place(self) -> str:
        return self._file.file

    def entry(self, name: str) -> tuple[str, list[int]]:
        if name not in self.entries:
            raise KeyError(
                f"cannot read tensor '{name}' of {self._file.file}: expected one of "
                f"{len(self.entries)} names, found no such tensor"
            )
        return self.entries[name][:2]

    def read_whole(self, tensors: dict[str, torch.Tensor]) -> None:
        arrays = {name: bytes_of(tensor) for name, tensor in tensors.items()}
        order = sorted(arrays, key=lambda name: self.entries[name][2])
        self._file.read([(self.entries[name][2], arrays[name]) for name in order])
        checksums = self._checksums
        known = [name for name in order if name in checksums]
        found = _feedline.crc64_all([arrays[name] for name in known])
        for name, value in zip(known, found, strict=True):
            if f"{value:016x}" != checksums[name]:
                raise CorruptError(
                    f"cannot read tensor '{name}' of {self._file.file}: expected CRC-64 "
                    f"{checksums[name]} as in its metadata, found {value:016x}"
                )

    @functools.cached_property
    def _checksums(self) -> dict[str, str]:
        """The checksums, by the tensors' names. Empty if another program has written the file."""
        strings = dict(self._file.metadata())
        if _CHECKSUMS not in strings or not self.entries:
            return {}
        start = min(begin for *_, begin, _ in self.entries.values())
        file_bytes = max(end for *_, end in self.entries.values())
        if start % _ALIGN_BYTES:
            return {}
        if _FILE_BYTES in strings:
            padding = np.empty(_PADDING_BYTES, np.uint8)
            self._file.read([(start - _PADDING_BYTES, padding)])
            is_padded = padding.tobytes() == b" " * _PADDING_BYTES
            if not is_padded or strings[_FILE_BYTES] != f"{file_bytes:016x}":
                return {}
        try:
            checksums: dict[str, str] = json.loads(strings[_CHECKSUMS])
        except ValueError as error:
            raise CorruptError(
                f"cannot read the checksums of {self._file.file}: expected JSON, found {error}"
            ) from error
        return checksums

    def read_box(self, name: str, spans: list[list[int]]) -> torch.Tensor:
        """Reads whole rows of the first axis, and slices them in memory."""
        dtype, shape = _torch_kind(self, name)
        begin = self.entries[name][2]
        if not shape:
            tensor = torch.empty(shape, dtype=dtype)
            self.read_whole({name: tensor})
            return tensor
        first, rows = spans[0]
        tensor = torch.empty([rows, *shape[1:]], dtype=dtype)
        row_bytes = torch.Size(shape[1:]).numel() * tensor.element_size()
        if tensor.numel():
            self._file.read([(begin + first * row_bytes, bytes_of(tensor))])
        return tensor[(slice(None), *(slice(start, start + n) for start, n in spans[1:]))]


class _StepTensors:
    """The weights of a step."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self.entries = {name: step.entry(name) for group, name in step.keys() if group == "model"}

    def metadata(self) -> dict[str, str]:
        return {"format": "pt", "step": str(self._step.step)}

    @property
    def place(self) -> str:
        return self._step.folder

    def entry(self, name: str) -> tuple[str, list[int]]:
        return in_header(*self._step.entry(name))

    def read_whole(self, tensors: dict[str, torch.Tensor]) -> None:
        self._step.read_into(
            [(name, "model", None, bytes_of(tensor)) for name, tensor in tensors.items()]
        )

    def read_box(self, name: str, spans: list[list[int]]) -> torch.Tensor:
        dtype, _ = _torch_kind(self, name)
        tensor = torch.empty([length for _, length in spans], dtype=dtype)
        self._step.read_into([(name, "model", spans, bytes_of(tensor))])
        return tensor


def _torch_kind(
    source: _FileTensors | _StepTensors, name: str
) -> tuple[torch.dtype, list[int]]:
    """Type and shape of a tensor in torch.

    Raises:
        KeyError: There is no such tensor.
        ValueError: torch has no such type, or no pairs of F4 fill a row.
    """
    kind, shape = source.entry(name)
    dtype = _TYPES.get(kind)
    if kind == "F4" and shape and shape[-1] % 2 == 0:
        shape = [*shape[:-1], shape[-1] // 2]
    elif kind == "F4":
        dtype = None
    if dtype is None:
        raise ValueError(
            f"cannot read tensor '{name}' of {source.place}: expected a type of torch "
            f"{torch.__version__}, found {kind} of shape {shape} (hint: safe_open reads the others)"
        )
    return dtype, shape


def _box(
    index: Any, shape: list[int], what: str
) -> tuple[list[list[int]], list[int | slice]] | None:
    """The smallest box that contains the elements of an index, and the index within that box.
    ``None`` if it has anything but integers, slices and one ellipsis, or the tensor is a scalar.

    Raises:
        IndexError: The index has more axes than the tensor, or is outside of one.
        ValueError: The step of a slice is not positive.
    """
    parts = list(index) if isinstance(index, tuple) else [index]
    dots = [place for place, part in enumerate(parts) if part is Ellipsis]
    if not shape or len(dots) > 1 or not all(_is_plain(part) for part in parts):
        return None
    for at in dots:
        parts[at : at + 1] = [slice(None)] * (len(shape) - len(parts) + 1)
    if len(parts) > len(shape):
        raise IndexError(
            f"cannot slice {what}: expected at most {len(shape)} indices, found {len(parts)}"
        )
    parts += [slice(None)] * (len(shape) - len(parts))
    spans: list[list[int]] = []
    rest: list[int | slice] = []
    for part, length in zip(parts, shape, strict=True):
        if isinstance(part, slice):
            start, stop, step = part.indices(length)
            if step < 1:
                raise ValueError(f"cannot slice {what}: expected a positive step, found {step}")
            spans.append([start, max(0, stop - start)])
            rest.append(slice(None, None, step))
            continue
        place = int(part) + length if part < 0 else int(part)
        if not 0 <= place < length:
            raise IndexError(
                f"cannot slice {what}: expected an index within {length} elements, found {part}"
            )
        spans.append([place, 1])
        rest.append(0)
    return spans, rest


def _is_plain(part: Any) -> bool:
    is_int = isinstance(part, int | np.integer) and not isinstance(part, bool)
    return is_int or isinstance(part, slice) or part is Ellipsis


def _halve(spans: list[list[int]], rest: list[int | slice], name: str) -> None:
    """Counts pairs along the last axis, in place of elements of half a byte.

    Raises:
        IndexError: The box has half a pair.
    """
    start, length = spans[-1] if spans[-1][1] else (0, 0)
    part = rest[-1]
    if start % 2 or length % 2 or not isinstance(part, slice) or part.step != 1:
        raise IndexError(
            f"cannot slice tensor '{name}' of type F4: expected whole bytes, which have two "
            f"elements of the last axis each, found {length} from {start}"
        )
    spans[-1] = [start // 2, length // 2]


def _check_shared(tensors: Mapping[str, torch.Tensor]) -> None:
    places: dict[torch.device, list[tuple[int, int, str]]] = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            found = type(tensor).__name__
            raise ValueError(f"cannot save '{name}': expected a tensor, found {found}")
        if tensor.numel() and not tensor.is_meta:
            steps = zip(tensor.shape, tensor.stride(), strict=True)
            last = sum((length - 1) * step for length, step in steps)
            begin = tensor.data_ptr()
            end = begin + (last + 1) * tensor.element_size()
            places.setdefault(tensor.device, []).append((begin, end, name))
    for each in places.values():
        each.sort()
        for (_, end, other), (begin, _, name) in itertools.pairwise(each):
            if begin < end:
                raise ValueError(
                    f"cannot save '{name}': expected memory of its own, found that of '{other}' "
                    "(hint: save_model writes shared tensors once)"
                )
