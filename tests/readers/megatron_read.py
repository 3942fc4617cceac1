"""Prints what Megatron's own reader finds in a dataset, as one JSON object.

    python3 megatron_read.py PREFIX

    {"sequences": S, "documents": D, "tokens": T,
     "sha256": of all tokens as little-endian int64, "first_tokens": [up to 16 of them]}

It needs megatron-core and numpy, but no PyTorch: the reader reads tokens with numpy, and only needs
names of `torch`, which are defined below.
"""

import hashlib
import importlib.util
import json
import pathlib
import sys
import types


def module(name: str, **names: object) -> types.ModuleType:
    """Creates a module that imports will find."""
    made = types.ModuleType(name)
    made.__dict__.update(names)
    sys.modules[name] = made
    return made


def megatron_dataset_class() -> type:
    """Megatron's IndexedDataset, without running what `megatron.core` imports for training."""
    data = module("torch.utils.data", Dataset=object)
    utils = module("torch.utils", data=data)
    distributed = module("torch.distributed", is_initialized=lambda: False)
    module("torch", utils=utils, distributed=distributed, Tensor=object)

    found = importlib.util.find_spec("megatron")
    if found is None:
        sys.exit("megatron-core is not installed")
    root = pathlib.Path(next(iter(found.submodule_search_locations))) / "core"
    for name in ("megatron.core", "megatron.core.datasets"):
        module(name, __path__=[str(root / name.removeprefix("megatron.core").lstrip("."))])
    module("megatron.core.utils", log_single_rank=lambda *_args, **_named: None)

    from megatron.core.datasets.indexed_dataset import IndexedDataset

    return IndexedDataset


def main() -> None:
    dataset = megatron_dataset_class()(sys.argv[1])
    digest, tokens, first = hashlib.sha256(), 0, []
    for sequence in range(len(dataset)):
        ids = dataset[sequence].astype("<i8")
        digest.update(ids.tobytes())
        tokens += len(ids)
        first += ids[: 16 - len(first)].tolist()
    found = {
        "sequences": len(dataset),
        "documents": len(dataset.document_indices) - 1,
        "tokens": tokens,
        "sha256": digest.hexdigest(),
        "first_tokens": first,
    }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
