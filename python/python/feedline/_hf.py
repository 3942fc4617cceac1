"""Models of transformers: the names of their tensors, and the files that ``from_pretrained`` reads.

A wrapper of `torch.compile`, `DistributedDataParallel` or FSDP2 changes neither names nor files.
"""

from __future__ import annotations

import copy
import json
import os
import secrets
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from feedline._names import DTYPES, bytes_of
from feedline.ckpt import Step

_INDEX = "model.safetensors.index.json"

_FILE_BYTES_MAX = 4 << 30
"""The most bytes of tensors in a file of joined weights, except for a larger tensor."""


def bare_model(model: Any) -> Any:
    """The model without the modules that compile it or that average its gradients."""
    while True:
        # Not by `getattr`, with which a model of PEFT finds what is inside it.
        inside = getattr(model, "_modules", {})
        if isinstance(model, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel):
            model = model.module
        elif "_orig_mod" in inside:
            model = inside["_orig_mod"]
        else:
            return model


def stored_name(name: str) -> str:
    """The name of a tensor without the names of compiled modules."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def parameter_names(model: Any) -> dict[int, str]:
    """A name for each parameter. Of several names, it is the one that transformers stores."""
    model = bare_model(model)
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    names: dict[int, str] = {}
    for raw, parameter in model.named_parameters(remove_duplicate=False):
        name = stored_name(raw)
        if id(parameter) not in names or names[id(parameter)] in tied:
            names[id(parameter)] = name
    return names


def weights_of(model: Any, adapters: frozenset[str] | None = None) -> dict[str, Any]:
    """The tensors of a model, each once. With adapters, only these and what is trained."""
    bare = bare_model(model)
    parameters = list(bare.named_parameters(remove_duplicate=False))
    unique = set(parameter_names(bare).values())
    repeated = {stored_name(name) for name, _ in parameters} - unique
    found = {stored_name(name): value for name, value in bare.state_dict().items()}
    found = {name: value for name, value in found.items() if name not in repeated}
    if adapters is None:
        return found
    trained = {stored_name(name) for name, each in parameters if each.requires_grad}
    return {name: value for name, value in found.items() if name in adapters | trained}


def load_weights(model: Any, weights: Mapping[str, Any]) -> None:
    """Copies tensors into a model, by the names of `weights_of`."""
    bare = bare_model(model)
    named = {name: stored_name(name) for name in bare.state_dict()}
    found = {name: weights[stored] for name, stored in named.items() if stored in weights}
    bare.load_state_dict(found, strict=False)


def has_config(model: Any) -> bool:
    """Whether ``from_pretrained`` can open steps of a model."""
    return isinstance(bare_model(model), transformers.PreTrainedModel) or has_adapters(model)


def has_adapters(model: Any) -> bool:
    """Whether it is a model of PEFT, or a model of transformers that has adapters."""
    bare = bare_model(model)
    peft = sys.modules.get("peft")  # a model of it needs it imported
    is_of_peft = peft is not None and isinstance(bare, peft.PeftModel)
    return is_of_peft or bool(getattr(bare, "_hf_peft_config_loaded", False))


def adapter_names(model: Any) -> frozenset[str] | None:
    """The names of the tensors that PEFT saves, of all adapters, or None without adapters.

    Raises:
        ValueError: A module inside is compiled, so that PEFT would store names that it cannot load.
    """
    if not has_adapters(model):
        return None
    from peft import get_peft_model_state_dict

    bare = bare_model(model)
    state = bare.state_dict()
    if any(stored_name(name) != name for name in state):
        raise ValueError(
            "cannot save steps of a model with adapters: expected no compiled module inside it, "
            "found some (hint: compile the model that has the adapters, with torch.compile)"
        )
    found = set()
    for adapter in bare.peft_config:
        saved = get_peft_model_state_dict(bare, state_dict=dict(state), adapter_name=adapter)
        ids = {id(value) for value in saved.values()}
        for name, value in state.items():
            if id(value) in ids or f".{adapter}." in name or name.endswith(f".{adapter}"):
                found.add(name)
    return frozenset(found)


def gathered(weights: Mapping[str, Any], owner: int | None) -> dict[str, Any]:
    """The weights with each sharded tensor complete on one rank, in host memory.

    transformers reads complete tensors only. All ranks call this with the same names. A rank holds
    one complete tensor more than its share.

    Args:
        weights: The tensors of this rank.
        owner: The rank for all sharded tensors. None: the bytes are divided evenly.
    """
    if not any(is_sharded(value) for value in weights.values()):
        return dict(weights)
    ranks = torch.distributed.get_world_size()
    assigned_bytes = [0] * ranks
    found = {}
    for name, value in weights.items():
        if not is_sharded(value):
            found[name] = value
            continue
        rank = assigned_bytes.index(min(assigned_bytes)) if owner is None else owner
        assigned_bytes[rank] += value.numel() * value.element_size()
        # Shards that FSDP2 keeps in host memory are gathered by the group of their device.
        complete = value.detach().to(value.device_mesh.device_type).full_tensor()
        if rank == torch.distributed.get_rank():
            found[name] = complete.cpu()
    return found


def is_sharded(value: Any) -> bool:
    """Whether a value is a DTensor."""
    return type(value).__name__ == "DTensor" and hasattr(value, "full_tensor")


def largest_bytes(weights: Mapping[str, Any]) -> int:
    """The bytes of the largest tensor, complete."""
    tensors = [value for value in weights.values() if isinstance(value, torch.Tensor)]
    return max((value.numel() * value.element_size() for value in tensors), default=0)


def model_files(model: Any, weights: Mapping[str, Any]) -> dict[str, bytes]:
    """The files that ``save_pretrained`` writes in addition to the weights of a step.

    Args:
        model: The model. One without ``save_pretrained`` has no such files.
        weights: The tensors of its adapters, complete. They are stored as PEFT names them.
    """
    bare = bare_model(model)
    if has_adapters(bare):
        return saved_files(bare, state_dict=dict(weights), is_main_process=True)
    if not isinstance(bare, transformers.PreTrainedModel):
        return {}
    config = copy.deepcopy(bare.config)
    config.architectures = [_own_class(bare).__name__]
    config.dtype = str(bare.dtype).removeprefix("torch.")
    files = _code_files(bare, config)
    files["config.json"] = config.to_json_string().encode()
    if bare.can_generate():
        files["generation_config.json"] = bare.generation_config.to_json_string().encode()
    return files


def saved_files(saved: Any, **options: Any) -> dict[str, bytes]:
    """The files that the ``save_pretrained`` of an object writes, by their paths."""
    with tempfile.TemporaryDirectory() as folder:
        saved.save_pretrained(folder, **options)
        return _files_in(Path(folder))


def complete(folder: Path, files: Mapping[str, bytes]) -> None:
    """Writes missing files, each atomically."""
    for name, data in files.items():
        path = folder / name
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            _write(path, [data])


def read_weights(step: Step, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """The weights of a step that have these names."""
    found = {}
    for name in sorted(set(names) & {name for group, name in step.keys() if group == "model"}):
        dtype, shape = step.entry(name)
        found[name] = torch.empty(shape, dtype=DTYPES[dtype])
    step.read_into([(name, "model", None, bytes_of(value)) for name, value in found.items()])
    return found


def join_weights(step: Step) -> None:
    """Writes complete weights beside those of a step that are cut or packed, and their index.

    Memory: one tensor.
    """
    folder = Path(step.folder)
    names = [name for group, name in step.keys() if group == "model"]
    if not names or (folder / _INDEX).exists():
        return
    files: list[list[str]] = [[]]
    file_bytes = 0
    for name in names:
        size = _tensor_bytes(step, name)
        if files[-1] and file_bytes + size > _FILE_BYTES_MAX:
            files.append([])
            file_bytes = 0
        files[-1].append(name)
        file_bytes += size
    places = {}
    for number, inside in enumerate(files, 1):
        file = f"joined-{number:05}-of-{len(files):05}.safetensors"
        _write(folder / file, _safetensors(step, inside))
        places.update(dict.fromkeys(inside, file))
    total = sum(_tensor_bytes(step, name) for name in names)
    index = {"metadata": {"total_size": total}, "weight_map": places}
    complete(folder, {_INDEX: json.dumps(index, indent=2).encode()})


def _tensor_bytes(step: Step, name: str) -> int:
    dtype, shape = step.entry(name)
    return torch.Size(shape).numel() * DTYPES[dtype].itemsize


def _safetensors(step: Step, names: list[str]) -> Iterator[bytes | memoryview]:
    """The parts of a safetensors file with these weights."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        dtype, shape = step.entry(name)
        start, end = end, end + _tensor_bytes(step, name)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in names:
        data = np.empty(_tensor_bytes(step, name), np.uint8)
        step.read_into([(name, "model", None, data)])
        yield data.data


def _write(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    temporary = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    # The kernel applies the umask, as for the files of the step.
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with open(descriptor, "wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _files_in(folder: Path) -> dict[str, bytes]:
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def _code_files(model: Any, config: Any) -> dict[str, bytes]:
    """The modules of a model whose code is not in transformers. Changes its config."""
    if not model.is_remote_code():
        return {}
    from transformers.dynamic_module_utils import custom_object_save

    with tempfile.TemporaryDirectory() as folder:
        custom_object_save(model, folder, config=config)
        return _files_in(Path(folder))


def _own_class(model: Any) -> type:
    """The class of a model, without those that FSDP2 derives from it."""
    for kind in type(model).__mro__:
        if not any(base.__module__.startswith("torch.distributed") for base in kind.__mro__):
            return kind
    return type(model)
