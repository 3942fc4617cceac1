#!/usr/bin/env python3
"""Makes dict.txt.zst and hmm.json.zst beside it from the Python package jieba 0.42.1.

    pip install jieba==0.42.1 zstandard && python make.py

The dictionary is the package's dict.txt, byte for byte. The tables of its hidden Markov model are
Python sources there; here they are JSON, each number in the shortest digits that give the same
double: {"start": {state: log}, "transition": {state: {state: log}}, "emission": {state: {char: log}}}.
"""

import hashlib
import json
from pathlib import Path

import jieba
import zstandard
from jieba.finalseg import prob_emit, prob_start, prob_trans

assert jieba.__version__ == "0.42.1", jieba.__version__
here = Path(__file__).parent
words = (Path(jieba.__file__).parent / "dict.txt").read_bytes()
emission = {state: dict(sorted(chars.items())) for state, chars in prob_emit.P.items()}
tables = {"start": prob_start.P, "transition": prob_trans.P, "emission": emission}
model = json.dumps(tables, ensure_ascii=False, separators=(",", ":")).encode()
for name, data in [("dict.txt", words), ("hmm.json", model)]:
    packed = zstandard.ZstdCompressor(level=22).compress(data)
    (here / f"{name}.zst").write_bytes(packed)
    print(name, len(data), hashlib.sha256(data).hexdigest(), len(packed))
