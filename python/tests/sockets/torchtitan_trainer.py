"""A run of torchtitan's own trainer on a CPU, with a tiny Llama.

``python torchtitan_trainer.py FOLDER [KILL]`` prints the loss of each step and of each validation.
A run in the same folder continues. It kills itself after the step ``KILL``.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torchtitan.tools import utils

# torchtitan takes a machine without an accelerator for one with CUDA. What it asks of the device:
utils.device_type = "cpu"
utils.device_module = SimpleNamespace(
    set_device=lambda _: None,
    device_count=lambda: 1,
    current_device=lambda: 0,
    get_device_name=lambda _: "cpu",
    get_device_properties=lambda _: SimpleNamespace(total_memory=1 << 30),
    reset_peak_memory_stats=lambda: None,
    empty_cache=lambda: None,
    memory_stats=lambda _: {},
    synchronize=lambda: None,
    current_stream=torch.cpu.current_stream,
)
from tokenizers import Tokenizer, models  # noqa: E402
from torch.nn.attention.flex_attention import (  # noqa: E402
    BlockMask,
    create_block_mask,
    create_mask,
)
from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.components.metrics import MetricsProcessor  # noqa: E402
from torchtitan.components.optimizer import (  # noqa: E402
    LRSchedulersContainer,
    OptimizersContainer,
    ParamGroupConfig,
)
from torchtitan.components.validate import Validator  # noqa: E402
from torchtitan.config import TrainingConfig  # noqa: E402
from torchtitan.config.configs import CommConfig, DebugConfig  # noqa: E402
from torchtitan.models import llama3  # noqa: E402
from torchtitan.models.common import attention  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

from feedline.torchtitan import CheckpointManager, DataLoader  # noqa: E402

VOCABULARY = 256
EOD = 255
STEPS = 8
KILL = int(sys.argv[2]) if len(sys.argv) > 2 else None


class Losses(MetricsProcessor):
    """Prints losses with all their digits."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        pass

    def log(self, step: int, global_avg_loss: float, *more: Any, **named: Any) -> None:
        print(f"step {step}: {global_avg_loss!r}", flush=True)
        if step == KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        super().log(step, global_avg_loss, *more, **named)

    def log_validation(self, loss: float, step: int) -> None:
        print(f"validation {step}: {loss!r}", flush=True)
        super().log_validation(loss, step)


def write_tokenizer(folder: Path) -> None:
    """Files of a tokenizer, of which the loader needs the id of the token that ends documents."""
    vocabulary = {"a": 0, "<|endoftext|>": EOD}
    folder.mkdir(parents=True, exist_ok=True)
    Tokenizer(models.WordLevel(vocabulary, unk_token="a")).save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_corpus(prefix: str) -> None:
    """40 documents of 20 to 80 tokens, in Megatron's format."""
    random = np.random.default_rng(1)
    lengths = random.integers(20, 80, 40, dtype=np.int32)
    tokens = random.integers(0, EOD, lengths.sum()).astype(np.uint16)
    tokens[np.cumsum(lengths) - 1] = EOD
    tokens.tofile(f"{prefix}.bin")
    starts = 2 * (np.cumsum(lengths, dtype=np.int64) - lengths)
    header = struct.pack("<9sQBQQ", b"MMIDIDX", 1, 8, 40, 41)
    with open(f"{prefix}.idx", "wb") as file:
        file.write(header + lengths.tobytes() + starts.tobytes() + np.arange(41).tobytes())


def masked_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    block_mask: BlockMask,
    scale: float | None,
    enable_gqa: bool,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """FlexAttention with the same mask, because PyTorch's has no gradient on a CPU."""
    sizes = query.shape[0], None, query.shape[2], key.shape[2]
    mask = create_mask(block_mask.mask_mod, *sizes, device="cpu")
    result = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scale, enable_gqa=enable_gqa
    )
    return result, None


def model_spec() -> Any:
    """torchtitan's debug model with two layers, and attention masks from positions."""
    spec = llama3.model_registry("debugmodel", attn_backend="flex")
    del spec.model.layers[2:]
    spec.model.vocab_size = VOCABULARY
    spec.model.tok_embeddings.num_embeddings = VOCABULARY
    spec.model.lm_head.out_features = VOCABULARY
    return spec


def config_of(corpus: str, folder: Path) -> Trainer.Config:
    adamw = ParamGroupConfig(
        pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-3}
    )
    return Trainer.Config(
        model_spec=model_spec(),
        hf_assets_path=str(folder / "tokenizer"),
        dump_folder=str(folder),
        loss=CrossEntropyLoss.Config(),
        optimizer=OptimizersContainer.Config(param_groups=[adamw], implementation="for-loop"),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        training=TrainingConfig(
            local_batch_size=2,
            global_batch_size=4,
            seq_len=64,
            steps=STEPS,
            disable_cuda_graphs=True,
            mixed_precision_param="float32",
        ),
        # The second pass begins within the batch of step 3.
        dataloader=DataLoader.Config(dataset_path=corpus, num_samples=11, infinite=True),
        validator=Validator.Config(
            enable=True,
            freq=3,
            steps=4,
            dataloader=DataLoader.Config(dataset_path=corpus, num_samples=5, seed=1),
        ),
        metrics=Losses.Config(log_freq=1),
        checkpoint=CheckpointManager.Config(
            enable=True, interval=2, last_save_model_only=False
        ),
        comm=CommConfig(trace_buf_size=0),
        debug=DebugConfig(seed=7),
    )


def main() -> None:
    folder = Path(sys.argv[1])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    attention.FlexAttention._compiled_flex_attn = staticmethod(masked_attention)
    # Compiling it takes longer than the run.
    attention._compiled_create_block_mask = create_block_mask
    write_tokenizer(folder / "tokenizer")
    corpus = str(folder / "corpus")
    write_corpus(corpus)
    trainer = Trainer(config_of(corpus, folder))
    trainer.train()
    trainer.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
