"""Writes tests/golden: one small GPT-2 with Adam's moments, as other programs keep it.

    python tests/reference/foreign.py     with torch 2.11, transformers and safetensors

torch.save, torch.distributed.checkpoint, transformers and safetensors write their own files. Those
of Megatron-LM (tensor and pipeline parallel, by checkpoint version) and of DeepSpeed (ZeRO 2 and 3)
have the structure that these programs publish, written by torch.save. Below golden/refused is what
looks like one of them and is something else.
"""

import argparse
import enum
import pickle
import shutil
import sys
import types
from collections import OrderedDict
from pathlib import Path

import numpy
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import get_state_dict
from transformers import GPT2Config, GPT2LMHeadModel

OUT = Path(__file__).parent.parent / "golden"
LAYERS, HEADS, HIDDEN, WORDS, POSITIONS = 2, 2, 4, 6, 3

torch.manual_seed(1)
model = GPT2LMHeadModel(
    GPT2Config(n_layer=LAYERS, n_head=HEADS, n_embd=HIDDEN, n_positions=POSITIONS, vocab_size=WORDS)
).eval()
for parameter in model.parameters():
    parameter.data.normal_(0, 0.2)
adam = torch.optim.AdamW(model.parameters())
ids = torch.tensor([[1, 5, 2]])
model(ids, labels=ids).loss.backward()
adam.step()
params = OrderedDict(model.named_parameters())
moments = {
    key: {name: adam.state[p][key] for name, p in params.items()} for key in ["exp_avg", "exp_avg_sq"]
}


def plain():
    tensors = {name: p.detach().clone() for name, p in params.items()}
    for key, values in moments.items():
        tensors |= {f"{key}/{name}": value for name, value in values.items()}
    save_file(tensors, OUT / "gpt2.safetensors")


def torch_files():
    state = model.state_dict()
    torch.save({"model": state, "iteration": 7, "args": argparse.Namespace(a=object)}, OUT / "zip.pt")
    torch.save(state, OUT / "stream.pt", _use_new_zipfile_serialization=False)
    # Views with strides, and parameters.
    views = {name: torch.nn.Parameter(p.detach().t().contiguous().t()) for name, p in params.items()}
    torch.save(views, OUT / "views.pt")
    # Tensors with attributes, which are rebuilt by another function.
    marked = {name: p.detach().clone() for name, p in params.items()}
    for tensor in marked.values():
        tensor.mark = 1
    torch.save(marked, OUT / "marked.pt")


def distributed():
    weights, optimizer = get_state_dict(model, adam)
    dcp.save({"model": weights, "optim": optimizer, "step": 5}, checkpoint_id=str(OUT / "dcp"))


def megatron(name, tp, pp, version, core=False):
    state = {key: value.detach() for key, value in model.transformer.state_dict().items()}
    width = HIDDEN // HEADS
    args = argparse.Namespace(num_layers=LAYERS, num_attention_heads=HEADS)

    def qkv(weight, rank):
        rest = weight.shape[1:]
        share = HEADS // tp
        heads = weight.view(3, HEADS, width, *rest)[:, rank * share : (rank + 1) * share]
        order = {0: heads, 1: heads.movedim(0, 2), 3: heads.movedim(0, 1)}[version]
        return order.reshape(-1, *rest).contiguous()

    first = 0
    for stage in range(pp):
        layers = (LAYERS + pp - 1 - stage) // pp
        for rank in range(tp):

            def cut(weight, axis):
                return weight.chunk(tp, axis)[rank].contiguous()

            block = {}
            for layer in range(layers):
                theirs, ours = f"layers.{layer}.", f"h.{first + layer}."
                attention = "attention" if version < 2 else "self_attention"
                names = {
                    "ln_1": "input_layernorm.",
                    "ln_2": "post_attention_layernorm.",
                    "attn.c_attn": f"{attention}.query_key_value.",
                    "attn.c_proj": f"{attention}.dense.",
                    "mlp.c_fc": "mlp.dense_h_to_4h.",
                    "mlp.c_proj": "mlp.dense_4h_to_h.",
                }
                if core:
                    names = {
                        "ln_1": "self_attention.linear_qkv.layer_norm_",
                        "ln_2": "mlp.linear_fc1.layer_norm_",
                        "attn.c_attn": "self_attention.linear_qkv.",
                        "attn.c_proj": "self_attention.linear_proj.",
                        "mlp.c_fc": "mlp.linear_fc1.",
                        "mlp.c_proj": "mlp.linear_fc2.",
                    }
                    block[theirs + "self_attention.core_attention._extra_state"] = None
                for our, their in names.items():
                    weight, bias = state[f"{ours}{our}.weight"], state[f"{ours}{our}.bias"]
                    if our == "attn.c_attn":
                        weight, bias = qkv(weight.t(), rank), qkv(bias, rank)
                    elif our == "mlp.c_fc":
                        weight, bias = cut(weight.t(), 0), cut(bias, 0)
                    elif our.endswith("c_proj"):
                        weight = cut(weight.t(), 1)
                    block[f"{theirs}{their}weight"] = weight
                    block[f"{theirs}{their}bias"] = bias
            if stage == pp - 1:
                block["final_layernorm.weight"] = state["ln_f.weight"]
                block["final_layernorm.bias"] = state["ln_f.bias"]
            words = cut(state["wte.weight"], 0)
            if core:
                whole = {f"decoder.{key}": value for key, value in block.items()}
                if stage == 0:
                    whole["embedding.word_embeddings.weight"] = words
                    whole["embedding.position_embeddings.weight"] = state["wpe.weight"]
                if stage == pp - 1:
                    whole["output_layer.weight"] = words
            else:
                language = {"transformer" if version < 2 else "encoder": block}
                if stage == 0:
                    language["embedding"] = {
                        "word_embeddings": {"weight": words},
                        "position_embeddings": {"weight": state["wpe.weight"]},
                    }
                whole = {"language_model": language}
                if pp > 1 and stage == pp - 1:
                    whole["word_embeddings_for_head"] = {"weight": words}
            file = {
                "args": args,
                "model": whole,
                "iteration": 100,
                "rng_state": [{"np_rng_state": numpy.random.RandomState(1).get_state()[2:]}],
            }
            if version > 0:
                file["checkpoint_version"] = float(version)
            folder = OUT / name / "iter_0000100" / (
                f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if pp > 1 else "")
            )
            folder.mkdir(parents=True)
            torch.save(file, folder / "model_optim_rng.pt", _use_new_zipfile_serialization=version > 0)
        first += layers
    (OUT / name / "latest_checkpointed_iteration.txt").write_text("100")


class ZeroStageEnum(int, enum.Enum):
    """As deepspeed.runtime.zero.config has it."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3


ZeroStageEnum.__module__ = "deepspeed.runtime.zero.config"
for end in ["deepspeed", "deepspeed.runtime", "deepspeed.runtime.zero", ZeroStageEnum.__module__]:
    sys.modules[end] = types.ModuleType(end)
sys.modules[ZeroStageEnum.__module__].ZeroStageEnum = ZeroStageEnum


def deepspeed(name, stage, ranks):
    folder = OUT / name / "global_step9"
    folder.mkdir(parents=True)
    (OUT / name / "latest").write_text("global_step9")
    groups = [[n for n, p in params.items() if (p.dim() > 1) == matrix] for matrix in [True, False]]

    def part(values, group, rank):
        flat = [values[n].detach().reshape(-1) for n in group]
        if stage < 3:
            whole = torch.cat(flat)
            whole = torch.nn.functional.pad(whole, (0, -len(whole) % (2 * ranks)))
            return whole.chunk(ranks)[rank].clone()
        cuts = []
        for values in flat:
            share = -(-len(values) // ranks)
            values = torch.nn.functional.pad(values, (0, share * ranks - len(values)))
            cuts.append(values[rank * share : (rank + 1) * share])
        return torch.cat(cuts)

    for rank in range(ranks):
        vectors = [part(params, group, rank) for group in groups]
        adams = {
            place: {"step": 1} | {key: part(values, group, rank) for key, values in moments.items()}
            for place, group in enumerate(groups)
        }
        # Older releases wrote an integer.
        kind = ZeroStageEnum(stage) if stage < 3 else stage
        optimizer = {"zero_stage": kind, "partition_count": ranks}
        if stage < 3:
            optimizer["single_partition_of_fp32_groups"] = vectors
            optimizer["base_optimizer_state"] = {"state": adams, "param_groups": []}
        else:
            optimizer["fp32_flat_groups"] = vectors
            optimizer["optimizer_state_dict"] = {"state": adams, "param_groups": []}
        optim = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": optimizer}, folder / optim)
        states = {
            "module": {n: p.detach().half() for n, p in params.items()} if stage < 3 else {},
            "buffer_names": [],
            "param_shapes": [OrderedDict((n, params[n].shape) for n in group) for group in groups],
            "shared_params": {"lm_head.weight": "transformer.wte.weight"},
            "global_steps": 9,
        }
        if stage == 3:
            torch.save(states, folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        elif rank == 0:
            torch.save(states, folder / "mp_rank_00_model_states.pt")


def refused():
    folder = OUT / "refused"

    def one_layer(name, heads, qkv_rows, fc1_rows, args, head=None):
        """A Megatron-Core layer of width 8; with a head of this value, which a tied one has not."""
        shapes = {
            "embedding.word_embeddings.weight": [6, 8],
            "embedding.position_embeddings.weight": [3, 8],
            "decoder.final_layernorm.weight": [8],
            "decoder.final_layernorm.bias": [8],
        }
        layer = {
            "self_attention.linear_qkv.layer_norm_weight": [8],
            "self_attention.linear_qkv.layer_norm_bias": [8],
            "self_attention.linear_qkv.weight": [qkv_rows, 8],
            "self_attention.linear_qkv.bias": [qkv_rows],
            "self_attention.linear_proj.weight": [8, 8],
            "self_attention.linear_proj.bias": [8],
            "mlp.linear_fc1.layer_norm_weight": [8],
            "mlp.linear_fc1.layer_norm_bias": [8],
            "mlp.linear_fc1.weight": [fc1_rows, 8],
            "mlp.linear_fc1.bias": [fc1_rows],
            "mlp.linear_fc2.weight": [8, 16],
            "mlp.linear_fc2.bias": [8],
        }
        shapes |= {f"decoder.layers.0.{key}": shape for key, shape in layer.items()}
        tensors = {key: torch.zeros(shape) for key, shape in shapes.items()}
        if head is not None:
            tensors["output_layer.weight"] = torch.full([6, 8], head)
        file = {
            "args": argparse.Namespace(num_layers=1, num_attention_heads=heads, **args),
            "model": tensors,
            "checkpoint_version": 3.0,
        }
        (folder / name / "mp_rank_00").mkdir(parents=True)
        torch.save(file, folder / name / "mp_rank_00" / "model_optim_rng.pt")

    one_layer("plain", 4, 24, 16, {"num_query_groups": 1, "group_query_attention": False})
    # Four heads share one of keys and values: the rows divide as those of four would.
    one_layer("groups", 4, 12, 16, {})
    one_layer("groups-said", 4, 24, 16, {"num_query_groups": 1, "group_query_attention": True})
    one_layer("gated", 4, 24, 32, {})
    one_layer("gated-said", 4, 24, 16, {"swiglu": True})
    one_layer("ranks", 4, 24, 16, {"tensor_model_parallel_size": 2})
    one_layer("two-rows", 4, 2, 16, {})
    one_layer("tied", 4, 24, 16, {}, head=0.0)
    one_layer("untied", 4, 24, 16, {}, head=1.0)

    # Rows without columns, of which there may be any number.
    rows = {"decoder.layers.0.self_attention.linear_qkv.weight": torch.zeros(3 << 38, 0)}
    args = argparse.Namespace(num_layers=1, num_attention_heads=1)
    (folder / "endless" / "mp_rank_00").mkdir(parents=True)
    torch.save(
        {"args": args, "model": rows, "checkpoint_version": 1.0},
        folder / "endless" / "mp_rank_00" / "model_optim_rng.pt",
    )
    # Groups that are one, of some hundred parameters, which a pickle has once.
    group = OrderedDict((f"layers.{i}", torch.Size([1])) for i in range(400))
    (folder / "shapes").mkdir()
    torch.save(
        {"param_shapes": [group] * 6000},
        folder / "shapes" / "mp_rank_00_model_states.pt",
    )
    torch.save(
        {"optimizer_state_dict": {"zero_stage": 2}},
        folder / "shapes" / "zero_pp_rank_0_mp_rank_00_optim_states.pt",
    )

    torch.save({"w": torch.eye(2).to_sparse()}, folder / "sparse.pt")
    torch.save({"w": torch.zeros([1] * 33)}, folder / "ranked.pt")
    # Two million runs of one element each.
    wide = torch.zeros(1).expand(1 << 11, 1 << 10)
    torch.save({name: wide for name in "abc"}, folder / "runs.pt")
    below = {"w": torch.zeros(2)}
    for _ in range(30):
        below = {"a": below, "b": below}
    torch.save(below, folder / "again.pt")

    # As many elements as are due, all of them in the first half; and boxes of more axes than the
    # tensor has.
    for name, size, times in [("overlap", [12, 4], 2), ("axes", [24], 1)]:
        dcp.save({"w": torch.arange(24.0).view(6, 4)}, checkpoint_id=str(folder / name))
        path = folder / name / ".metadata"
        metadata = pickle.loads(path.read_bytes())
        entry = metadata.state_dict_metadata["w"]
        entry.size, entry.chunks = torch.Size(size), entry.chunks * times
        path.write_bytes(pickle.dumps(metadata))


shutil.rmtree(OUT, ignore_errors=True)
OUT.mkdir()
plain()
torch_files()
distributed()
megatron("megatron-v0", 2, 1, 0)
megatron("megatron-v1", 1, 1, 1)
megatron("megatron-v3", 2, 2, 3)
megatron("megatron-core", 2, 1, 3, core=True)
deepspeed("zero-2", 2, 3)
deepspeed("zero-3", 3, 2)
refused()
