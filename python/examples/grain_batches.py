"""Batches of Grain for JAX. The lines that read with Feedline end with ``# feedline``.

    python grain_batches.py [CORPUS]
"""

import json

from demo_corpus import corpus_prefix

import feedline.grain  # feedline

samples = feedline.open(corpus_prefix(), sequence_length=64, num_samples=80)  # feedline
batches = feedline.grain.Batches(samples, micro_batch_size=4)  # feedline

iterator = iter(batches)
for step in range(10):
    batch = next(iterator)
print(f"step {step}: tokens {batch['tokens'].shape}, first {batch['tokens'][0, :4].tolist()}")

checkpoint = json.dumps(iterator.get_state())
expected = next(iterator)["tokens"]
resumed = iter(batches)
resumed.set_state(json.loads(checkpoint))
assert (next(resumed)["tokens"] == expected).all()
print(f"resumed after {json.loads(checkpoint)['samples_consumed']} samples")
