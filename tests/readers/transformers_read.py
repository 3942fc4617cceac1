"""Loads an exported folder with transformers, and prints its parameters as one JSON object.

    python3 transformers_read.py FOLDER

For each parameter: its shape and the SHA-256 of its bytes. No parameter may be missing, unexpected
or of another shape, except the head, which is the embedding. Without torch and transformers, it
exits with 77.
"""

import hashlib
import json
import sys

try:
    from transformers import AutoModelForCausalLM
except ImportError as error:
    print(error, file=sys.stderr)
    sys.exit(77)

model, report = AutoModelForCausalLM.from_pretrained(sys.argv[1], output_loading_info=True)
problems = {kind: sorted(map(str, names)) for kind, names in report.items() if names}
assert set(problems.pop("missing_keys", [])) <= {"lm_head.weight"} and not problems, problems
found = {}
for name, tensor in model.state_dict().items():
    digest = hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()
    found[name] = [list(tensor.shape), digest]
print(json.dumps(found))
