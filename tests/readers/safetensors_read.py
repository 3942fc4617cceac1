"""Reads the files of a folder with the package safetensors, and prints them as one JSON object.

    python3 safetensors_read.py FOLDER

For each tensor: its type, its shape and the SHA-256 of its bytes. If there is an index, every
weight must be in the file that the index names. It needs only safetensors.
"""

import hashlib
import json
import pathlib
import sys

import safetensors

folder = pathlib.Path(sys.argv[1])
found = {}
files = {}
for path in sorted(folder.glob("*.safetensors")):
    for name, tensor in safetensors.deserialize(path.read_bytes()):
        if name.startswith("__pad__"):
            assert not any(tensor["data"]), f"{path.name}: bytes in {name}"
            continue
        assert name not in found, f"{name} is in {files[name]} and {path.name}"
        digest = hashlib.sha256(bytes(tensor["data"])).hexdigest()
        found[name] = [tensor["dtype"], list(tensor["shape"]), digest]
        files[name] = path.name
index = folder / "model.safetensors.index.json"
if index.exists():
    for name, file in json.loads(index.read_text())["weight_map"].items():
        assert files[name] == file, f"{name} is in {files[name]}, by the index in {file}"
print(json.dumps(found))
