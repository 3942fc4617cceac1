"""A save of torch_checkpointing that stops in the middle of a file, to be killed.

``python slow_checkpoint.py CHECKPOINT``
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from torch_checkpointing import CheckpointManager, SyncCheckpointSaverConfig

from feedline.torch_checkpointing import StorageConfig


class Slow:
    """Pickling it never ends."""

    def __reduce__(self) -> Any:
        print("paused", flush=True)
        time.sleep(600)


if __name__ == "__main__":
    manager = CheckpointManager.Config(
        save=SyncCheckpointSaverConfig(), storage_config=StorageConfig()
    ).build()
    weights = torch.arange(500_000.0)
    manager.save(sys.argv[1], {"model": {"w": weights}, "other": {"w": weights, "slow": Slow()}})
