"""The storage and IO layer of language-model pretraining.

>>> import feedline
>>> samples = feedline.open("corpus_text_document", sequence_length=2048, num_samples=100_000)
>>> loader = feedline.Loader(samples, micro_batch_size=8)
>>> for batch in loader:
...     batch["tokens"], batch["labels"]    # int64 arrays of the shape [8, 2048]

`open` returns the samples of Megatron's order by number, `Loader` reads them ahead of a training
loop, `Tokenizer` encodes texts on all cores, and `preprocess`, `check` and `inspect` are the
programs of these names. The submodules `feedline.torch`, `feedline.transformers`,
`feedline.megatron`, `feedline.torchtitan` and `feedline.grain` connect them to the training loops
of these frameworks; importing `feedline` itself imports none of them.
"""

from feedline._feedline import __version__
from feedline.data import Dataset, Loader, open
from feedline.errors import (
    AbortedError,
    ClosedError,
    CorruptError,
    FeedlineError,
    FolderHeldError,
    InterruptedRunError,
    OtherDataError,
    StalledError,
    StepExistsError,
)
from feedline.tokens import TokenBatch, Tokenizer
from feedline.verbs import Progress, check, inspect, preprocess

__all__ = [
    "AbortedError",
    "ClosedError",
    "CorruptError",
    "Dataset",
    "FeedlineError",
    "FolderHeldError",
    "InterruptedRunError",
    "Loader",
    "OtherDataError",
    "Progress",
    "StalledError",
    "StepExistsError",
    "TokenBatch",
    "Tokenizer",
    "__version__",
    "check",
    "inspect",
    "open",
    "preprocess",
]
