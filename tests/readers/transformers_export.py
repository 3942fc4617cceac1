"""Prints the loss of an export, and the ids of its tokenizer, to compare with its run.

    python3 transformers_export.py loss FOLDER PREFIX FROM WINDOW
    python3 transformers_export.py batches FOLDER BATCHES
    python3 transformers_export.py ids FOLDER TEXTS

`loss` prints the loss per token of a causal model over the sequences of PREFIX.bin from the number
FROM on, as `trainer eval corpus` measures it: one text, in windows of WINDOW tokens, each of which
predicts the tokens after its first. `batches` prints the loss of a T5 or a BERT on the batches that
`cargo run -p feed --example valid_batches` prints, as `trainer train` evaluates it; for a BERT,
that of the masked tokens. `ids` prints the ids of each line of TEXTS, one JSON string per line,
without special tokens around it. Without torch and transformers, this exits with 77.
"""

import json
import struct
import sys

try:
    import numpy as np
    import torch
    from transformers import (AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM,
                              AutoTokenizer, BertForPreTraining)
except ImportError as error:
    print(error, file=sys.stderr)
    sys.exit(77)


def tokens(prefix, first):
    """The tokens of a .bin, starting with a sequence."""
    with open(prefix + ".idx", "rb") as file:
        index = file.read()
    kind, count = index[17], struct.unpack_from("<Q", index, 18)[0]
    kind = {1: "<u1", 4: "<i4", 8: "<u2"}[kind]
    lengths = np.frombuffer(index, "<i4", count, 34)[first:]
    starts = np.frombuffer(index, "<i8", count, 34 + 4 * count)[first:]
    with open(prefix + ".bin", "rb") as file:
        data = file.read()
    return np.concatenate([np.frombuffer(data, kind, n, at) for n, at in zip(lengths, starts)])


def opened(kind, folder):
    model, found = kind.from_pretrained(folder, output_loading_info=True, dtype=torch.float64)
    assert not any(found[kind] for kind in ("unexpected_keys", "mismatched_keys")), found
    return model.eval()


def cross_entropy(logits, labels):
    return torch.nn.functional.cross_entropy(logits, labels, reduction="none")


def loss(folder, prefix, first, window):
    model = opened(AutoModelForCausalLM, folder)
    ids = torch.tensor(tokens(prefix, first).astype("i8"))
    total = 0.0
    with torch.no_grad():
        for begin in range(0, len(ids) - 1, window):
            text = ids[begin:begin + window + 1]
            total += cross_entropy(model(text[None, :-1]).logits[0], text[1:]).sum().item()
    print(json.dumps({"loss_per_token": total / (len(ids) - 1), "tokens": len(ids) - 1}))


def batches(folder, file):
    is_bert = AutoConfig.from_pretrained(folder).model_type == "bert"
    model = opened(BertForPreTraining if is_bert else AutoModelForSeq2SeqLM, folder)
    total = count = 0.0
    with open(file, encoding="utf-8") as lines, torch.no_grad():
        for batch in map(json.loads, lines):
            row = lambda key: torch.tensor(batch[key]).reshape(batch["rows"], -1)
            inputs = {key: row(key) for key in ("input_ids", "attention_mask") if key in batch}
            if is_bert:
                # Padding has its own type id there.
                types = (row("token_type_ids") == 1).long()
                logits = model(**inputs, token_type_ids=types).prediction_logits
            else:
                logits = model(**inputs, decoder_input_ids=row("decoder_input_ids")).logits
            each = cross_entropy(logits.transpose(1, 2), row("labels").clamp(min=0))
            weights = row("loss_mask").double()
            total, count = total + (each * weights).sum().item(), count + weights.sum().item()
    print(json.dumps({"loss_per_token": total / count, "tokens": count}))


def ids(folder, texts):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with open(texts, encoding="utf-8") as file:
        for line in file:
            print(json.dumps(tokenizer.encode(json.loads(line), add_special_tokens=False)))


command, *rest = sys.argv[1:]
if command == "loss":
    loss(rest[0], rest[1], int(rest[2]), int(rest[3]))
elif command == "batches":
    batches(*rest)
else:
    ids(*rest)
