"""The compiled half of the package. What users call is in `feedline`."""

from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np
import numpy.typing as npt

__all__ = [
    "Checkpoint",
    "Checkpoints",
    "Dataset",
    "Loader",
    "Tokenizer",
    "__version__",
    "check",
    "ckpt_diff",
    "ckpt_ls",
    "ckpt_verify",
    "copy_all",
    "inspect",
    "preprocess",
    "process_identity",
    "split_step",
]

__version__: str

@final
class Checkpoints:
    def __new__(cls, folder: str, options: str) -> Checkpoints: ...
    def save(
        self,
        recipe: bytes,
        part: str,
        held: Sequence[npt.NDArray[np.uint8]],
        blobs: Sequence[tuple[str, bytes]],
        meta: str,
        progress: Callable[[int], object] | None,
    ) -> str: ...
    def decline(self, recipe: bytes, part: str, reason: str) -> None: ...
    def steps(self) -> list[int]: ...
    def open(self, step: int | None) -> Checkpoint | None: ...
    def retain(self, keep_last: int, keep_every: int | None) -> list[int]: ...

@final
class Checkpoint:
    @property
    def step(self) -> int: ...
    @property
    def folder(self) -> str: ...
    def meta(self) -> str: ...
    def tensors(self) -> list[tuple[str, str, str, list[int]]]: ...
    def tensor(self, name: str, group: str) -> None: ...
    def blobs(self) -> list[str]: ...
    def blob(self, name: str) -> bytes: ...
    def read(
        self,
        wants: Sequence[tuple[str, str, list[list[int]] | None, npt.NDArray[np.uint8]]],
        progress: Callable[[int], object] | None,
    ) -> int: ...

@final
class Dataset:
    def __new__(
        cls,
        text: str | None,
        file: str | None,
        sets: list[str],
        index_split: str,
        num_samples: int | None,
        order: str,
        cached: bool,
        identifiers: str | None,
        prefetch_bytes: int,
    ) -> Dataset: ...
    def __len__(self) -> int: ...
    @property
    def config(self) -> str: ...
    @property
    def identity(self) -> str: ...
    @property
    def sequence_length(self) -> int: ...
    @property
    def hits(self) -> int: ...
    def read(self, samples: Sequence[int]) -> dict[str, npt.NDArray[Any]]: ...
    def close(self) -> None: ...

@final
class Loader:
    def __new__(
        cls,
        dataset: Dataset,
        micro_batch_size: int,
        rank: int,
        ranks: int,
        samples_consumed: int,
        prefetch_seconds: float,
        prefetch_bytes: int,
        timeout: float,
    ) -> Loader: ...
    samples_consumed: int
    def __len__(self) -> int: ...
    def next_batch(self) -> dict[str, npt.NDArray[Any]] | None: ...
    def metrics(self) -> str: ...
    def close(self) -> None: ...

@final
class Tokenizer:
    def __new__(
        cls,
        kind: str,
        model: str | None,
        vocab_file: str | None,
        merge_file: str | None,
        vocab_size: int | None,
        special_tokens: list[str],
        add_special_tokens: bool,
    ) -> Tokenizer: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def eod(self) -> int | None: ...
    @property
    def name(self) -> str: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def identifiers(self) -> str: ...
    def encode(self, text: str) -> list[int]: ...
    def encode_batch(
        self, texts: list[str], threads: int
    ) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]: ...
    def decode_bytes(self, ids: Sequence[int]) -> bytes: ...

def preprocess(
    inputs: list[str],
    out_prefix: str,
    settings: str,
    progress: Callable[..., object] | None,
) -> str: ...
def check(name: str, progress: Callable[[int], object] | None) -> str: ...
def inspect(name: str) -> str: ...
def ckpt_ls(folder: str) -> str: ...
def ckpt_verify(name: str, progress: Callable[[int], object] | None) -> str: ...
def ckpt_diff(a: str, b: str, read: bool, progress: Callable[[int], object] | None) -> str: ...
def process_identity() -> str: ...
def split_step(name: str) -> tuple[str, int] | None: ...
def copy_all(
    arena: npt.NDArray[np.uint8],
    parts: Sequence[tuple[int, npt.NDArray[np.uint8]]],
    threads: int,
) -> None: ...
