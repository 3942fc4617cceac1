"""Prints what transformers loads from a folder that was exported, as one JSON object.

    python3 transformers_read.py FOLDER

Of each parameter its shape and the SHA-256 of its bytes. Nothing may be missing, unexpected or of
another shape but the head that is the embedding. It needs torch and transformers; without them it ends
with 77.
"""

import hashlib
import json
import sys

try:
    from transformers import AutoModelForCausalLM
except ImportError as error:
    print(error, file=sys.stderr)
    sys.exit(77)

model, told = AutoModelForCausalLM.from_pretrained(sys.argv[1], output_loading_info=True)
left = {kind: sorted(map(str, names)) for kind, names in told.items() if names}
assert set(left.pop("missing_keys", [])) <= {"lm_head.weight"} and not left, left
found = {}
for name, tensor in model.state_dict().items():
    sum_ = hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()
    found[name] = [list(tensor.shape), sum_]
print(json.dumps(found))
