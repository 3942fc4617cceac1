#!/usr/bin/env python3
"""Exports tiny runs of many kinds and compares their loss in transformers with that of the trainer.

    scripts/check_exports.py BINARIES PYTHON VALID_BATCHES [FAMILY]

BINARIES is a folder with preprocess, trainer and feedline, PYTHON one with torch and transformers,
VALID_BATCHES the program that `cargo build -p feed --example valid_batches` builds. FAMILY (gpt, t5 or
bert) selects runs. Prints a line per run: both losses and their difference, or the refusal. Exits with
1 if a difference exceeds 1e-5, or if a run is refused unexpectedly or not refused as expected.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

LOSS_DIFFERENCE_MAX = 1e-5
READER = Path(__file__).resolve().parent.parent / "tests" / "readers" / "transformers_export.py"
TOKENIZER = READER.parent.parent.parent / "demo" / "tokenizer.json"
WORDS = "the cat sat on a mat and the dog ran to the big red house while it was raining".split()
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[BOS]", "[EOS]"]
VOCAB = SPECIAL + [f"<extra_id_{i}>" for i in range(20)] + sorted(set(WORDS)) + ["."]

LLAMA = {"norm": '"rmsnorm"', "positions": '"rope"', "bias": "false", "activation": '"swiglu"'}
# Name, family, keys of [model], and the key that the refusal must name.
CASES = [
    ("default", "gpt", {}, None),
    ("relu, eps 1e-2", "gpt", {"activation": '"relu"', "norm_eps": "1e-2"}, None),
    ("gelu", "gpt", {"activation": '"gelu"'}, None),
    ("gelu-tanh, eps 1e-3", "gpt", {"activation": '"gelu-tanh"', "norm_eps": "1e-3"}, None),
    ("4 heads, ffn 48", "gpt", {"heads": "4", "ffn": "48"}, None),
    ("untied, dropout", "gpt", {"tie_embeddings": "false", "dropout": "0.1"}, None),
    ("vocab 4090", "gpt", {"vocab": "4090"}, None),
    ("head_dim 8", "gpt", {"head_dim": "8"}, "model.head_dim"),
    ("swiglu", "gpt", {"activation": '"swiglu"'}, "model.activation"),
    ("rmsnorm", "gpt", {"norm": '"rmsnorm"'}, "model.norm"),
    ("rope", "gpt", {"positions": '"rope"'}, "model.positions"),
    ("no bias", "gpt", {"bias": "false"}, "model.bias"),
    ("as Llama", "gpt", LLAMA, "model.norm"),
    ("default", "t5", {}, None),
    ("relu, eps 1e-3", "t5", {"activation": '"relu"', "norm_eps": "1e-3"}, None),
    ("gelu", "t5", {"activation": '"gelu"'}, None),
    ("gelu-tanh", "t5", {"activation": '"gelu-tanh"'}, None),
    ("swiglu, head_dim 8", "t5", {"activation": '"swiglu"', "head_dim": "8"}, None),
    ("max 20, 8 buckets", "t5", {"relative_max": "20", "relative_buckets": "8"}, None),
    ("tied, 1 decoder layer", "t5", {"tie_embeddings": "true", "decoder_layers": "1"}, None),
    ("two dropouts", "t5", {"dropout": "0.1", "attention_dropout": "0.0"},
     "model.attention_dropout"),
    ("learned positions", "t5", {"positions": '"learned"'}, "model.positions"),
    ("default", "bert", {}, None),
    ("relu, eps 1e-2", "bert", {"activation": '"relu"', "norm_eps": "1e-2"}, None),
    ("gelu-tanh", "bert", {"activation": '"gelu-tanh"'}, None),
    ("untied", "bert", {"tie_embeddings": "false"}, "model.tie_embeddings"),
    ("head_dim 8", "bert", {"head_dim": "8"}, "model.head_dim"),
]


def call(*args, check=True):
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([str(arg) for arg in args], capture_output=True, text=True, env=env)
    if check and done.returncode:
        sys.exit(f"{args}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done


def make_corpora(binaries):
    make = random.Random(3)
    sentence = lambda: " ".join(make.choice(WORDS) for _ in range(make.randint(3, 9))) + " ."
    with open("texts.jsonl", "w") as file:
        for _ in range(300):
            text = " ".join(sentence() for _ in range(make.randint(2, 6)))
            file.write(json.dumps({"text": text}) + "\n")
    Path("vocab.txt").write_text("\n".join(VOCAB) + "\n")
    common = [binaries / "preprocess", "--json-in", "texts.jsonl"]
    call(*common, "--out", "gpt", "--tokenizer", "hf", "--tokenizer-model", TOKENIZER,
         "--append-eod")
    call(*common, "--out", "words", "--tokenizer", "wordpiece", "--vocab-file", "vocab.txt",
         "--split-sentences")


def config(family, name, keys):
    is_gpt = family == "gpt"
    model = {"family": f'"{family}"', "layers": "2", "hidden": "32", "heads": "2",
             "vocab": "4096" if is_gpt else str(len(VOCAB)), "seq_len": "48"}
    model |= {"dec_len": "24"} if family == "t5" else {}
    corpus = "gpt_text_document" if is_gpt else "words_text_sentence"
    tokenizer = f"hf:{TOKENIZER}" if is_gpt else "wordpiece:vocab.txt"
    lines = "\n".join(f"{key} = {value}" for key, value in (model | keys).items())
    path = Path(f"{name}.toml")
    path.write_text(f"""
[run]
dir = "{name}"
seed = 5
threads = 1
budget = {{ steps = 30 }}
[model]
{lines}
[data]
train = "{corpus}"
split = "90,10,0"
tokenizer = "{tokenizer}"
[batch]
global = 8
micro = 2
[optim.lr]
peak = 1e-2
warmup = {{ steps = 4 }}
[checkpoint]
every = {{ steps = 30 }}
[eval]
every = 30
""")
    return path


def trainer_loss(binaries, family, name):
    """The loss on the validation split: of a text in windows, or of the batches at the last step."""
    if family == "gpt":
        found = call(binaries / "trainer", "eval", "corpus", "--ckpt", name, "--json").stdout
        return json.loads(found)["loss_per_token"]
    lines = [json.loads(line) for line in Path(name, "log.jsonl").read_text().splitlines()]
    return [line["eval_loss"] for line in lines if "eval_loss" in line][-1]


def transformers_loss(python, valid_batches, family, name, path):
    if family == "gpt":
        rest = ["loss", f"{name}-hf", "gpt_text_document", 270, 48]
    else:
        Path(f"{name}.jsonl").write_text(call(valid_batches, path).stdout)
        rest = ["batches", f"{name}-hf", f"{name}.jsonl"]
    return json.loads(call(python, READER, *rest).stdout)["loss_per_token"]


def check(binaries, python, valid_batches, number, case):
    title, family, keys, refusal = case
    name = f"{family}-{number}"
    path = config(family, name, keys)
    call(binaries / "trainer", "train", path)
    done = call(binaries / "feedline", "ckpt", "export", f"{name}/ckpt", f"{name}-hf", check=False)
    if refusal or done.returncode:
        is_right = done.returncode == 2 and bool(refusal) and refusal in done.stderr
        print(f"{family} {title}: refused: {done.stderr.strip()}", flush=True)
        return is_right
    ours = trainer_loss(binaries, family, name)
    theirs = transformers_loss(python, valid_batches, family, name, path)
    print(f"{family} {title}: trainer {ours:.7f}, transformers {theirs:.7f}, "
          f"difference {abs(ours - theirs):.1e}", flush=True)
    return abs(ours - theirs) <= LOSS_DIFFERENCE_MAX


def main():
    binaries, python, valid_batches = (Path(arg).absolute() for arg in sys.argv[1:4])
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        make_corpora(binaries)
        cases = [case for case in CASES if case[1] in (sys.argv[4:] or ("gpt", "t5", "bert"))]
        results = [check(binaries, python, valid_batches, *item) for item in enumerate(cases)]
        os.chdir("/")
    sys.exit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
