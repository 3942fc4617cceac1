#!/usr/bin/env bash
# safetensors.torch.save_file stores a complex tensor that torch conjugates lazily without the conjugation.
#
# x.conj() is contiguous and equals the conjugate in every operation of torch, but it shares the bytes of x
# and only has a flag. save_file writes the bytes. The file then has x, and nothing is reported.
# Exits 0 while this is so, 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.11.0 numpy==2.4.6 safetensors==0.8.0
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import sys

import safetensors
import torch
from safetensors.torch import load_file, save_file

print(f"torch {torch.__version__}, safetensors {safetensors.__version__}")
x = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
lazy = x.conj()
print(f"tensor to save: {lazy.tolist()}, contiguous: {lazy.is_contiguous()}")
save_file({"lazy": lazy, "resolved": lazy.resolve_conj()}, "a.safetensors")
loaded = load_file("a.safetensors")
print(f"loaded, saved as it is: {loaded['lazy'].tolist()}")
print(f"loaded, saved after resolve_conj(): {loaded['resolved'].tolist()}")
is_resolved_right = torch.equal(loaded["resolved"], lazy)
is_lazy_wrong = torch.equal(loaded["lazy"], x) and not torch.equal(loaded["lazy"], lazy)
if is_lazy_wrong and is_resolved_right:
    print("save_file lost the conjugation without an error")
    sys.exit(0)
print("the behaviour has changed")
sys.exit(1)
PYTHON
