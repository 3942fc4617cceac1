"""Logits, loss and every gradient of small models of Hugging Face transformers, in float64.

    python3 hf.py ../golden

Checks golden/gpt2.safetensors, which gpt2.py made with numpy alone, against GPT-2 as well.

The oracle of tests/it/model/families.rs: writes golden/<model>.safetensors for a Llama, a T5 v1.1, a
T5 v1.0 and a BERT. Weights are a formula of their name and place, as in gpt2.py, so that the test
makes the same ones and only the results are stored, under our names. Made with torch 2.11.0 and
transformers 5.
"""

import sys

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from transformers import (BertConfig, BertForPreTraining, GPT2Config, GPT2LMHeadModel, LlamaConfig,
                          LlamaForCausalLM, T5Config, T5ForConditionalGeneration)

LAYERS, HIDDEN, HEADS, FFN, VOCAB, ROWS = 2, 16, 2, 24, 53, 3
SEQ, ANSWER = 12, 8


def value(name, shape):
    """Spread over [-0.5, 0.5), exact in float32; gains of norms around 1."""
    seed = sum(ord(c) * (i + 1) for i, c in enumerate(name))
    place = np.arange(np.prod(shape), dtype=np.uint64) * 2654435761 + seed * 40503
    unit = (place % 2**32 >> 16).astype(np.float64) / 65536 - 0.5
    is_gain = len(shape) == 1 and name.endswith("weight")
    return torch.tensor((unit * 0.25 + 1 if is_gain else unit).reshape(shape))


def ids(rows, length, factor, first):
    place = torch.arange(rows * length)
    return ((place * factor + first) % VOCAB).reshape(rows, length)


def is_text(length):
    """Rows of which the last tokens are padding, more of them in later rows."""
    return torch.arange(length)[None] < length - 2 * torch.arange(ROWS)[:, None]


def mean_loss(logits, labels, counts):
    each = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    return (each * counts).sum() / counts.sum()


def fill(model):
    for name, p in model.named_parameters():
        p.data = value(name, p.shape)
    return model.double().eval()


def save(folder, name, loss, tensors):
    loss.backward()
    tensors = {key: make() if callable(make) else make for key, make in tensors.items()}
    arrays = {"loss": loss[None], **tensors}
    arrays = {k: np.ascontiguousarray(v.detach().numpy(), "<f4") for k, v in arrays.items()}
    save_file(arrays, f"{folder}/{name}.safetensors")
    print(f"{name}: loss {loss.item():.6f}, {len(arrays)} tensors")


def grads(model):
    return {name: (lambda p=p: p.grad) for name, p in model.named_parameters()}


def gpt2(folder):
    """The model of gpt2.py, against the file that it made."""
    config = GPT2Config(
        vocab_size=VOCAB, n_embd=HIDDEN, n_layer=LAYERS, n_head=HEADS, n_inner=48, n_positions=SEQ,
        embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0, attn_implementation="sdpa")
    model = fill(GPT2LMHeadModel(config))
    counts = (torch.arange(ROWS * SEQ) % 5 != 4).double().reshape(ROWS, SEQ)
    logits = model(ids(ROWS, SEQ, 31, 7)).logits
    loss = mean_loss(logits, ids(ROWS, SEQ, 17, 3), counts)
    loss.backward()
    expected = load_file(f"{folder}/gpt2.safetensors")
    found = {"loss": loss[None], "logits": logits, **{k: v() for k, v in grads(model).items()}}
    assert found.keys() == expected.keys()
    worst = max(np.abs(found[k].detach().numpy() - expected[k]).max() for k in expected)
    assert worst < 1e-6, worst
    print(f"gpt2: loss {loss.item():.6f}, {len(expected)} tensors match gpt2.py to {worst:.1e}")


def llama(folder):
    """Its matrices under the names and in the orientation that our decoders have."""
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=FFN, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, max_position_embeddings=SEQ, rms_norm_eps=1e-5,
        tie_word_embeddings=False, attn_implementation="sdpa")
    model = LlamaForCausalLM(config).double().eval()
    m, grad = model.model, {}

    def own(name, p):
        p.data = value(name, p.shape)
        grad[name] = lambda: p.grad

    def fused(name, linears):
        whole = value(name, (HIDDEN, sum(l.weight.shape[0] for l in linears)))
        parts = whole.split([l.weight.shape[0] for l in linears], 1)
        for linear, part in zip(linears, parts):
            linear.weight.data = part.T.contiguous()
        grad[name] = lambda: torch.cat([l.weight.grad.T for l in linears], 1)

    def conv(name, linear):
        linear.weight.data = value(name, tuple(reversed(linear.weight.shape))).T.contiguous()
        grad[name] = lambda: linear.weight.grad.T

    own("transformer.wte.weight", m.embed_tokens.weight)
    own("lm_head.weight", model.lm_head.weight)
    own("transformer.ln_f.weight", m.norm.weight)
    for i, layer in enumerate(m.layers):
        h, a = f"transformer.h.{i}.", layer.self_attn
        own(h + "ln_1.weight", layer.input_layernorm.weight)
        own(h + "ln_2.weight", layer.post_attention_layernorm.weight)
        fused(h + "attn.c_attn.weight", [a.q_proj, a.k_proj, a.v_proj])
        conv(h + "attn.c_proj.weight", a.o_proj)
        fused(h + "mlp.c_fc.weight", [layer.mlp.gate_proj, layer.mlp.up_proj])
        conv(h + "mlp.c_proj.weight", layer.mlp.down_proj)
    counts = (torch.arange(ROWS * SEQ) % 5 != 4).double().reshape(ROWS, SEQ)
    logits = model(ids(ROWS, SEQ, 31, 7)).logits
    loss = mean_loss(logits, ids(ROWS, SEQ, 17, 3), counts)
    save(folder, "llama", loss, {"logits": logits, **grad})


def t5(folder, name, **kind):
    config = T5Config(
        vocab_size=VOCAB, d_model=HIDDEN, d_kv=6, d_ff=FFN, num_layers=LAYERS, num_decoder_layers=3,
        num_heads=HEADS, relative_attention_num_buckets=8, relative_attention_max_distance=10,
        dropout_rate=0.0, layer_norm_epsilon=1e-6, **kind)
    model = T5ForConditionalGeneration(config)
    if not config.scale_decoder_outputs:
        # transformers 5 ties the head of a new model whatever the config says.
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
    fill(model)
    counts = is_text(ANSWER)
    labels = ids(ROWS, ANSWER, 17, 3)
    out = model(
        input_ids=ids(ROWS, SEQ, 31, 7), attention_mask=is_text(SEQ).long(),
        decoder_input_ids=ids(ROWS, ANSWER, 13, 5), labels=labels.masked_fill(~counts, -100))
    save(folder, name, out.loss, {"logits": out.logits[counts], **grads(model)})


def bert(folder):
    config = BertConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        intermediate_size=FFN, max_position_embeddings=SEQ, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, attn_implementation="eager")
    model = fill(BertForPreTraining(config))
    place = torch.arange(ROWS * SEQ).reshape(ROWS, SEQ)
    counts = is_text(SEQ) & (place % 4 == 1)
    out = model(
        input_ids=ids(ROWS, SEQ, 31, 7), attention_mask=is_text(SEQ).long(),
        token_type_ids=(torch.arange(SEQ)[None] >= 5).long().expand(ROWS, SEQ) * is_text(SEQ),
        labels=ids(ROWS, SEQ, 17, 3).masked_fill(~counts, -100),
        next_sentence_label=torch.arange(ROWS) % 2)
    save(folder, "bert", out.loss, {
        "logits": out.prediction_logits[counts], "order": out.seq_relationship_logits,
        **grads(model)})


def buckets():
    """Where each bucket of T5's distances begins, for the test of `model::t5`."""
    attention = T5ForConditionalGeneration(T5Config(
        vocab_size=8, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)).decoder.block[0]
    of = attention.layer[0].SelfAttention._relative_position_bucket
    for both in [True, False]:
        row = of(-torch.arange(400), bidirectional=both, num_buckets=32, max_distance=128).tolist()
        print([row.index(bucket) for bucket in sorted(set(row))])


if __name__ == "__main__":
    folder = sys.argv[1]
    gpt2(folder)
    llama(folder)
    t5(folder, "t5_v1_1", feed_forward_proj="gated-gelu", tie_word_embeddings=False)
    t5(folder, "t5_v1_0", feed_forward_proj="relu", tie_word_embeddings=True)
    bert(folder)
    buckets()
