"""Loss and every gradient of models of Hugging Face transformers in training, in float64.

    python3 dropout.py ../golden

The oracle of what is dropped, and where: writes golden/dropout_<model>.safetensors for the GPT-2,
the T5 v1.1 and the BERT of hf.py. What their modules drop, in the order of their calls, is drawn
here as recipe/src/rng.rs says, of seed 0 and samples 0 to 2: Philox4x32-10 once more, with numpy.
"""

import sys

import numpy as np
import torch
from transformers import (BertConfig, BertForPreTraining, GPT2Config, GPT2LMHeadModel, T5Config,
                          T5ForConditionalGeneration)

from hf import (ANSWER, FFN, HEADS, HIDDEN, LAYERS, ROWS, SEQ, VOCAB, fill, grads, ids, is_text,
                mean_loss, save)

SEED = 0
M32, M64 = 2**32 - 1, 2**64 - 1


def stream_key(name):
    hashed = 0xcbf29ce484222325
    for byte in name.encode():
        hashed = (hashed ^ byte) * 0x00000100000001b3 & M64
    z = hashed ^ SEED * 0x9e3779b97f4a7c15 & M64
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9 & M64
    z = (z ^ z >> 27) * 0x94d049bb133111eb & M64
    z ^= z >> 31
    return z & M32, z >> 32


def philox(block, tensor, key):
    counter = [block & M32, block >> 32, tensor, 0]
    for _ in range(10):
        a, b = 0xd2511f53 * counter[0], 0xcd9e8d57 * counter[2]
        counter = [b >> 32 ^ counter[1] ^ key[0], b & M32, a >> 32 ^ counter[3] ^ key[1], a & M32]
        key = (key[0] + 0x9e3779b9 & M32, key[1] + 0xbb67ae85 & M32)
    return counter


def dropped(name, shape, rate):
    """For each element of a tensor whether it is dropped; its rows are samples."""
    key, count = stream_key(name), int(np.prod(shape[1:]))
    rows = []
    for sample in range(shape[0]):
        bits = []
        for group in range(-(-count // 128)):
            words = np.array([philox(16 * group + lane, sample, key) for lane in range(16)])
            for half in range(8):
                bits.extend(words[:, half // 2] >> 16 * (half % 2) & 0xffff)
        rows.append(np.array(bits[:count]) < rate)
    return torch.tensor(np.stack(rows).reshape(shape))


class Sites:
    """Stands in for torch's dropout while a model computes; names come in the order of calls."""

    def __init__(self, names):
        self.names = iter(names)

    def __call__(self, x, p=0.5, training=True, inplace=False):
        assert training
        rate = round(p * 65536)
        name = next(self.names)
        assert name.endswith(".weights") == (x.dim() == 4), name
        mask = dropped("dropout." + name, tuple(x.shape), rate)
        return x.masked_fill(mask, 0.0) * (65536 / (65536 - rate))

    def __enter__(self):
        self.before, torch.nn.functional.dropout = torch.nn.functional.dropout, self

    def __exit__(self, kind, *_):
        torch.nn.functional.dropout = self.before
        assert kind or next(self.names, None) is None, "a place that drops nothing"


def layers(unit, blocks):
    return [f"{unit}.{block}" for block in blocks]


def gpt2(folder):
    config = GPT2Config(
        vocab_size=VOCAB, n_embd=HIDDEN, n_layer=LAYERS, n_head=HEADS, n_inner=FFN, n_positions=SEQ,
        embd_pdrop=0.3, resid_pdrop=0.3, attn_pdrop=0.2, attn_implementation="eager")
    model = fill(GPT2LMHeadModel(config)).train()
    counts = (torch.arange(ROWS * SEQ) % 5 != 4).double().reshape(ROWS, SEQ)
    names = ["0.embedding"]
    for unit in range(LAYERS):
        names += layers(unit, ["attention.weights", "attention", "mlp"])
    with Sites(names):
        logits = model(ids(ROWS, SEQ, 31, 7)).logits
    loss = mean_loss(logits, ids(ROWS, SEQ, 17, 3), counts)
    save(folder, "dropout_gpt2", loss, {"logits": logits, **grads(model)})


def t5(folder):
    config = T5Config(
        vocab_size=VOCAB, d_model=HIDDEN, d_kv=6, d_ff=FFN, num_layers=LAYERS, num_decoder_layers=3,
        num_heads=HEADS, relative_attention_num_buckets=8, relative_attention_max_distance=10,
        dropout_rate=0.25, layer_norm_epsilon=1e-6, feed_forward_proj="gated-gelu",
        tie_word_embeddings=False, attn_implementation="eager")
    model = T5ForConditionalGeneration(config)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
    model = fill(model).train()
    own, mlp = ["attention.weights", "attention"], ["mlp.inner", "mlp"]
    names = ["0.embedding"]
    for unit in range(LAYERS):
        names += layers(unit, own + mlp)
    names += [f"{LAYERS - 1}.last", f"{LAYERS}.embedding"]
    for unit in range(LAYERS, LAYERS + 3):
        names += layers(unit, own + ["across.weights", "across"] + mlp)
    names.append(f"{LAYERS + 2}.last")
    counts = is_text(ANSWER)
    labels = ids(ROWS, ANSWER, 17, 3)
    with Sites(names):
        out = model(
            input_ids=ids(ROWS, SEQ, 31, 7), attention_mask=is_text(SEQ).long(),
            decoder_input_ids=ids(ROWS, ANSWER, 13, 5), labels=labels.masked_fill(~counts, -100))
    save(folder, "dropout_t5", out.loss, {"logits": out.logits[counts], **grads(model)})


def bert(folder):
    config = BertConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        intermediate_size=FFN, max_position_embeddings=SEQ, hidden_dropout_prob=0.3,
        attention_probs_dropout_prob=0.2, attn_implementation="eager")
    model = fill(BertForPreTraining(config)).train()
    place = torch.arange(ROWS * SEQ).reshape(ROWS, SEQ)
    counts = is_text(SEQ) & (place % 4 == 1)
    names = ["0.embedding"]
    for unit in range(LAYERS):
        names += layers(unit, ["attention.weights", "attention", "mlp"])
    with Sites(names):
        out = model(
            input_ids=ids(ROWS, SEQ, 31, 7), attention_mask=is_text(SEQ).long(),
            token_type_ids=(torch.arange(SEQ)[None] >= 5).long().expand(ROWS, SEQ) * is_text(SEQ),
            labels=ids(ROWS, SEQ, 17, 3).masked_fill(~counts, -100),
            next_sentence_label=torch.arange(ROWS) % 2)
    save(folder, "dropout_bert", out.loss, {
        "logits": out.prediction_logits[counts], "order": out.seq_relationship_logits,
        **grads(model)})


if __name__ == "__main__":
    folder = sys.argv[1]
    gpt2(folder)
    t5(folder)
    bert(folder)
