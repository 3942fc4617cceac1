"""Megatron-LM's ``pretrain`` on a CPU: ``python megatron_lm.py FOLDER CORPUS [ARGUMENT...]``.

It trains a small GPT for 6 iterations with the data and the checkpoints of Feedline, or with
``--plain`` with those of Megatron. ``--kill-at N`` kills it in iteration N, which counts from 0. Further arguments are
those of Megatron-LM. Only calls of CUDA are replaced.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from argparse import ArgumentParser
from functools import partial
from typing import Any

os.environ["TORCHDYNAMO_DISABLE"] = "1"

import megatron.core.datasets.utils
import megatron.core.tensor_parallel.random as random_states
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.training import get_args, get_tokenizer, pretrain
from megatron.training.argument_utils import (
    core_transformer_config_from_args,
    pretrain_cfg_container_from_args,
)
from megatron.training.arguments import parse_and_validate_args
from torch.overrides import TorchFunctionMode

import feedline.megatron

MODEL = """
    --num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 32
    --max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 4 --train-iters 6
    --lr 1e-2 --lr-decay-style constant --clip-grad 0 --attention-dropout 0.1 --hidden-dropout 0.1
    --tokenizer-type NullTokenizer --vocab-size 50256 --split 90,5,5 --num-workers 0
    --save-interval 2 --eval-iters 1 --eval-interval 4 --log-interval 1 --ckpt-format torch_dist
    --no-create-attention-mask-in-dataloader --transformer-impl local --use-cpu-initialization
    --distributed-backend gloo --attention-backend unfused --no-gradient-accumulation-fusion
    --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion
    --no-persist-layer-norm
"""


class OnCpu(TorchFunctionMode):
    """Runs on the CPU what the program requests of a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        if func is torch.Tensor.to and len(args) > 1 and _is_gpu(args[1]):
            args = (args[0], "cpu", *args[2:])
        if _is_gpu(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def _is_gpu(device: Any) -> bool:
    if isinstance(device, bool) or not isinstance(device, int | str | torch.device):
        return False
    return isinstance(device, int) or str(device).startswith("cuda")


class Nothing:
    """A stream or an event, without a GPU."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return nothing


def nothing(*_: Any, **__: Any) -> None: ...


def replace_cuda() -> None:
    """Replaces the calls of CUDA in a run without a GPU."""
    cuda: Any = torch.cuda
    for name in ("synchronize", "empty_cache", "set_device", "manual_seed_all"):
        setattr(cuda, name, nothing)
    cuda.is_available = lambda: True
    cuda.device_count = lambda: 1
    cuda.current_device = lambda: 0
    cuda.get_device_capability = lambda *_: (8, 0)
    cuda.get_device_properties = lambda *_: Nothing()
    cuda.manual_seed = torch.default_generator.manual_seed
    cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    for name in ("allocated", "reserved"):
        setattr(cuda, f"memory_{name}", lambda *_: 0)
        setattr(cuda, f"max_memory_{name}", lambda *_: 0)
    cuda.Stream = cuda.Event = cuda.stream = Nothing
    cuda.current_stream = Nothing
    random_states._get_cuda_rng_state = cuda.get_rng_state
    random_states._set_cuda_rng_state = cuda.set_rng_state
    for name in ("_accelerator_graph_capture_health_check", "_cuda_graph_capture_health_check"):
        setattr(torch.optim.Optimizer, name, nothing)
    start = torch.distributed.init_process_group
    torch.distributed.init_process_group = lambda device_id=None, **options: start(**options)
    # The package has a compiled module, but no sources.
    megatron.core.datasets.utils.compile_helpers = nothing


def model_provider(
    pre_process: bool, post_process: bool, vp_stage: Any = None, config: Any = None, **options: Any
) -> GPTModel:
    args = get_args()
    config = config or core_transformer_config_from_args(args)
    sizes = (args.padded_vocab_size, args.seq_length)
    return GPTModel(
        config, get_gpt_layer_local_spec(), *sizes, pre_process, post_process, **options
    )


def datasets_provider(num_samples: Any, vp_stage: Any = None) -> Any:
    args = get_args()
    if args.dataloader_type == "external":
        return feedline.megatron.external_loaders(args, num_samples)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        split=args.split,
        blend=(args.data_path, None),
        path_to_cache=args.data_cache_path,
        tokenizer=get_tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    cls = GPTDataset if args.plain else feedline.megatron.GPTDataset
    return BlendedMegatronDatasetBuilder(cls, num_samples, lambda: True, config).build()


def loss_func(loss_mask: torch.Tensor, is_training: bool, output: torch.Tensor) -> Any:
    loss = (output.view(-1).float() * loss_mask.view(-1)).sum()
    if is_training:  # Megatron's log of the first iterations after a resume has their mean
        print(f"loss of iteration {get_args().curr_iteration}: {loss.item()!r}", flush=True)
    count = loss_mask.sum().to(torch.int)
    return loss, count, {"lm loss": torch.stack([loss.detach(), count.float()])}


def forward_step(data_iterator: Any, model: Any) -> Any:
    args = get_args()
    batch = next(data_iterator)
    if args.curr_iteration == args.kill_at and model.training:
        os.kill(os.getpid(), signal.SIGKILL)
    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return output, partial(loss_func, batch["loss_mask"], model.training)


def add_arguments(parser: ArgumentParser) -> ArgumentParser:
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--kill-at", type=int)
    return parser


def main() -> None:
    folder, corpus, *others = sys.argv[1:]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    paths = ["--data-path", corpus, "--data-cache-path", f"{folder}/cache"]
    paths += ["--save", f"{folder}/ckpt", "--load", f"{folder}/ckpt"]
    sys.argv[1:] = [*MODEL.split(), *paths, *others]
    torch.set_num_threads(1)
    replace_cuda()
    args = parse_and_validate_args(extra_args_provider=add_arguments)
    if not args.plain:
        feedline.megatron.install()
    datasets_provider.is_distributed = True  # type: ignore[attr-defined]
    with OnCpu():
        pretrain(
            pretrain_cfg_container_from_args(args),
            datasets_provider,
            ModelType.encoder_or_decoder,
            forward_step,
            model_provider=model_provider,
        )


if __name__ == "__main__":
    main()
