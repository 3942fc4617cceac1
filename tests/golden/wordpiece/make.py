"""Cases of FullTokenizer, the program of BERT's authors:

    python make.py FOLDER_WITH_TOKENIZATION_PY > full_tokenizer.json

The folder is `bert/` of `bert-tensorflow` 1.0.4; its imports of TensorFlow and absl can be taken out.
"""

import json
import random
import sys
from pathlib import Path

HERE = Path(__file__).parent
POOLS = [
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ",
    " \t\n\r\u00a0\u2003\u2028\u2029\u3000\x0b\x0c\x1c\x85",
    ".,'!?-_()[]{}#@$^`~|",
    "\u0391\u03a3\u039f\u0394\u03c3\u03c2\u03ac'\u2019.",
    "\u00e9\u00e8\u00fc\u00df\u0130\u0131\u01c5\u212b\ufb01",
    "\u4e2d\u56fd\u4eba\U00020000\U0002b820\U0002b9a6\uf900\u8c48",
    "\u0301\u0327\u200b\u200d\u00ad\ufeff\x00\x01\ufffd",
    "\ue000\uf8ff\U000f0000\u0378\U0001fae8\u1c89\u1c90\u1734",
    "\uac00\uac01\ud55c\uae00\u3072\u3089\u304c\u306a",
    "0123456789",
]


def text(rng):
    target, made = rng.choice([3, 8, 20, 40, 90]), ""
    while len(made) < target:
        kind = rng.random()
        if kind < 0.35:
            made += "".join(rng.choice(POOLS[0]) for _ in range(rng.randint(1, 8)))
        elif kind < 0.95:
            pool = rng.choice(POOLS)
            made += "".join(rng.choice(pool) for _ in range(rng.randint(1, 4)))
        else:
            code = rng.randrange(0x110000)
            made += chr(code) if not 0xD800 <= code < 0xE000 else ""
        made += " " if rng.random() < 0.3 else ""
    return made


def main(folder):
    sys.path.insert(0, folder)
    from tokenization import FullTokenizer

    rng = random.Random(1)
    cases = {}
    for case in ("lower", "kept"):
        tokenizer = FullTokenizer(str(HERE / f"{case}.txt"), do_lower_case=case == "lower")
        texts = [item["text"] for item in json.loads((HERE / f"{case}.json").read_text())[:60]]
        texts += ["a" * length for length in (99, 100, 101, 199, 200, 201)]
        sigma = "\u03a3"
        texts += [f"\u039f\u0394\u039f{sigma} \u0391{sigma}'\u0391 \u0391{sigma}. {sigma}\u0391 {sigma}"]
        texts += ["[MASK] [CLS] unaffable"]
        texts += [text(rng) for _ in range(150)]
        cases[case] = [
            {"text": text, "ids": tokenizer.convert_tokens_to_ids(tokenizer.tokenize(text))}
            for text in texts
        ]
    print(json.dumps(cases, indent=0))


if __name__ == "__main__":
    main(sys.argv[1])
