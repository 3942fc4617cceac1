"""The compiled half of the package. What users call is in `feedline`."""

from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np
import numpy.typing as npt

__all__ = ["Dataset", "Loader", "Tokenizer", "__version__", "check", "inspect", "preprocess"]

__version__: str

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
