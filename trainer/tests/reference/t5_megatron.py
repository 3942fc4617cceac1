"""Logits, loss and every gradient of a small T5 of Megatron, in float64.

    python3 t5_megatron.py ../golden

The oracle of tests/it/model/families.rs: writes golden/t5_megatron.safetensors. Weights, tokens and
masks are those of hf.py; matrices that Megatron has in one are several under our names. Made with
torch 2.11.0 and megatron-core 0.16.1, on a CPU, of which it knows nothing: two things that it asks
a GPU for are given to it.
"""

import contextlib
import functools
import os
import sys

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.T5 import t5_spec
from megatron.core.models.T5.t5_model import T5Model
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import GlobalMemoryBuffer

from hf import ANSWER, FFN, HEADS, HIDDEN, LAYERS, ROWS, SEQ, VOCAB, ids, is_text, mean_loss, save, value

DECODER_LAYERS, HEAD_DIM = 3, 6


class NoGenerator:
    """Nothing is dropped, so there is nothing to draw."""

    fork = staticmethod(contextlib.nullcontext)


def on_a_cpu():
    GlobalMemoryBuffer.get_tensor = lambda self, shape, dtype, name, *more: torch.empty(
        shape, dtype=dtype)
    tensor_parallel.get_cuda_rng_tracker = NoGenerator
    for key, address in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}.items():
        os.environ.setdefault(key, address)
    torch.distributed.init_process_group("gloo", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()


def model():
    config = {
        layers: TransformerConfig(
            num_layers=layers, hidden_size=HIDDEN, num_attention_heads=HEADS, ffn_hidden_size=FFN,
            kv_channels=HEAD_DIM, hidden_dropout=0.0, attention_dropout=0.0,
            activation_func=functools.partial(torch.nn.functional.gelu, approximate="tanh"),
            layernorm_epsilon=1e-6, use_cpu_initialization=True, params_dtype=torch.float64,
            bias_activation_fusion=False, bias_dropout_fusion=False, masked_softmax_fusion=False)
        for layers in (LAYERS, DECODER_LAYERS)}
    specs = [
        t5_spec.get_t5_encoder_with_local_block_spec(LAYERS),
        t5_spec.get_t5_decoder_with_local_block_spec(DECODER_LAYERS)]
    for spec in specs:
        # As those for Transformer Engine have it, which are Megatron's default.
        spec.layer_norm = t5_spec.LNImpl
    return T5Model(
        config[DECODER_LAYERS], config[LAYERS], *specs,
        vocab_size=VOCAB, max_sequence_length=SEQ, share_embeddings_and_output_weights=True,
        position_embedding_type="learned_absolute", parallel_output=False).double().eval()


def fill(t5):
    """Gives every parameter its values; the gradients of ours, by their names."""
    grads = {}

    def own(name, p):
        p.data = value(name, p.shape).double()
        grads[name] = lambda: p.grad

    def both(name, module):
        own(f"{name}.weight", module.weight)
        own(f"{name}.bias", module.bias)

    def heads(names, linear):
        """Of one head after the other its part of each."""
        split = lambda x: x.unflatten(0, (HEADS, len(names), HEAD_DIM)).unbind(1)
        width = HEADS * HEAD_DIM
        for part, p in {"weight": linear.weight, "bias": linear.bias}.items():
            shape = (width, HIDDEN) if part == "weight" else (width,)
            of = [value(f"{name}.{part}", shape).unflatten(0, (HEADS, HEAD_DIM)) for name in names]
            p.data = torch.stack(of, 1).flatten(0, 2).double()
            for place, name in enumerate(names):
                grads[f"{name}.{part}"] = lambda p=p, at=place: split(p.grad)[at].flatten(0, 1)

    own("shared.weight", t5.embedding.word_embeddings.weight)
    own("position_embeddings.weight", t5.embedding.position_embeddings.weight)
    own("lm_head.bias", t5.lm_head.output_layer.bias)
    for name, stack in {"encoder": t5.encoder, "decoder": t5.decoder}.items():
        both(f"{name}.final_layer_norm", stack.final_layernorm)
        for at, layer in enumerate(stack.layers):
            block = f"{name}.block.{at}.layer"
            both(f"{block}.0.layer_norm", layer.input_layernorm)
            attention = f"{block}.0.SelfAttention"
            heads([f"{attention}.{of}" for of in "qkv"], layer.self_attention.linear_qkv)
            both(f"{attention}.o", layer.self_attention.linear_proj)
            if name == "decoder":
                both(f"{block}.1.layer_norm", layer.pre_cross_attn_layernorm)
                attention = f"{block}.1.EncDecAttention"
                heads([f"{attention}.q"], layer.cross_attention.linear_q)
                heads([f"{attention}.{of}" for of in "kv"], layer.cross_attention.linear_kv)
                both(f"{attention}.o", layer.cross_attention.linear_proj)
            last = f"{block}.{2 if name == 'decoder' else 1}"
            both(f"{last}.layer_norm", layer.pre_mlp_layernorm)
            both(f"{last}.DenseReluDense.wi", layer.mlp.linear_fc1)
            both(f"{last}.DenseReluDense.wo", layer.mlp.linear_fc2)
    assert sum(p.numel() for p in t5.parameters()) > 0
    return grads


if __name__ == "__main__":
    on_a_cpu()
    t5 = model()
    grads = fill(t5)
    text, counts = is_text(SEQ), is_text(ANSWER)
    later = torch.ones(ANSWER, ANSWER).triu(1).bool()
    # True where a query does not see a key.
    hides = lambda rows, keys: ~keys[:, None, None, :].expand(ROWS, 1, rows, keys.shape[1])
    logits = t5(
        ids(ROWS, SEQ, 31, 7), ids(ROWS, ANSWER, 13, 5), hides(SEQ, text),
        later.expand(ROWS, 1, ANSWER, ANSWER), hides(ANSWER, text))
    if logits.shape[0] != ROWS:
        logits = logits.transpose(0, 1)
    loss = mean_loss(logits, ids(ROWS, ANSWER, 17, 3), counts.double())
    save(sys.argv[1], "t5_megatron", loss, {"logits": logits[counts], **grads})
