"""Samples of a run's order: by number (`Dataset`), and read ahead of a training loop (`Loader`)."""

from __future__ import annotations

import atexit
import json
import logging
import numbers
import operator
import os
import weakref
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self, SupportsIndex, TypeAlias

from feedline import _feedline, _ranks
from feedline.errors import OtherDataError
from feedline.tokens import INTEGER_MAX, Tokenizer, Url, integer_of, split_spec, text_of

if TYPE_CHECKING:
    import numpy.typing as npt

Arrays: TypeAlias = "dict[str, npt.NDArray[Any]]"
Blend: TypeAlias = Sequence[tuple[float, Url] | list[Any]] | Sequence[Url] | Mapping[str, float]
Part: TypeAlias = Literal["train", "valid", "test"]
Objective: TypeAlias = Literal["lm", "span-corruption", "encdec", "mlm"]

FAMILIES = {"lm": "gpt", "span-corruption": "t5", "encdec": "t5", "mlm": "bert"}
# The bound for ids of a corpus without a named tokenizer.
VOCAB_SIZE_MAX = 1 << 24
PREFETCH_BYTES = 512 << 20
# Samples of a global batch are a product of two such counts, so they fit in 64 bits.
COUNT_MAX = (1 << 32) - 1
# Flat arrays of a batch: the first offset of each document, over all rows.
OFFSETS = ("cu_seqlens", "enc_cu_seqlens", "dec_cu_seqlens")

_log = logging.getLogger("feedline.loader")


def open(
    source: Url | Blend,
    *,
    sequence_length: int | None = None,
    num_samples: int | None = None,
    random_seed: int | None = None,
    split: str | None = None,
    index_split: Part = "train",
    objective: Objective | None = None,
    decoder_sequence_length: int | None = None,
    tokenizer: Tokenizer | Url | Mapping[str, Any] | None = None,
    vocab_size: int | None = None,
    order: Literal["megatron", "blocks", "file"] = "megatron",
    path_to_cache: Url | None = None,
    cache: bool = True,
    prefetch_bytes: int = PREFETCH_BYTES,
    **data: Any,
) -> Dataset:
    """Opens token files as samples in a training order.

    Args:
        source: The prefix of a ``.bin`` and ``.idx``; a blend, as ``[(0.7, "a"), (0.3, "b")]``
            with tuples or lists, ``{"a": 0.7, "b": 0.3}`` or, of equal weights, ``["a", "b"]``; or
            the TOML of a run of ``trainer``, whose settings apply unless they are given here. A
            prefix may be on S3 (``s3://bucket/prefix``).
        sequence_length: Tokens of a sample; of an encoder with T5. Required with a prefix.
        num_samples: Samples that the order is built for, as in Megatron: a longer run has another
            order. Default: one epoch; with a TOML, those of the run.
        random_seed: Seed of the order and of masking. Default: 1234.
        split: Shares of the documents for training, validation and test. Default: ``"1,0,0"``, all
            documents for training.
        index_split: Which of these shares.
        objective: ``"lm"`` (GPT), ``"span-corruption"`` (T5), ``"encdec"`` (CPM-2) or ``"mlm"``
            (BERT). Default: ``"lm"``.
        decoder_sequence_length: Tokens of a decoder, with T5 and CPM-2.
        tokenizer: The tokenizer of the corpus, as `Tokenizer` takes it. Its special tokens are
            needed by all objectives but ``"lm"``, and by ``"lm"`` for ``reset_at_document`` and
            ``mask_eod_loss``. Or the ``unique_identifiers`` of Megatron's
            tokenizer, so that cached indexes of Megatron are found.
        vocab_size: Ids of the model. Default: those of the tokenizer.
        order: ``"megatron"``: the order of Megatron's dataset of the objective, byte for byte.
            ``"blocks"``: shuffled blocks of neighbours, which needs no index and reads in large
            requests. ``"file"``: sequences in the order of the file.
        path_to_cache: Folder of the sample indexes. Default: beside the corpus, as in Megatron.
        cache: Whether the indexes are stored; otherwise they are built in memory.
        prefetch_bytes: Memory for the samples that `Dataset` reads ahead.
        data: Other keys of ``[data]`` of a run: ``reset_at_document``, ``mask_eod_loss``,
            ``mask_prob``, ``special={"eod": 0}``, ``verify=False`` and so on.

    Raises:
        FileNotFoundError: There are no such files.
        CorruptError: The files do not match their formats.
        ValueError: A setting is out of its range, or the corpus is not of this objective.
    """
    sequence_length = _integer("sequence_length", sequence_length, 1)
    decoder_sequence_length = _integer("decoder_sequence_length", decoder_sequence_length, 1)
    vocab_size = _integer("vocab_size", vocab_size, 1)
    random_seed = _integer("random_seed", random_seed, 0)
    names = {
        "index_split": index_split,
        "num_samples": _integer("num_samples", num_samples, 0),
        "order": order,
        "cached": cache,
        "prefetch_bytes": _integer("prefetch_bytes", prefetch_bytes, 0),
    }
    data = {"split": split, "objective": objective, "cache_dir": _path(path_to_cache), **data}
    if (run := _run_file(source)) is not None:
        given = {
            "run.seed": random_seed,
            "model.seq_len": sequence_length,
            "model.dec_len": decoder_sequence_length,
            "model.vocab": vocab_size,
            **{f"data.{key}": value for key, value in data.items()},
        }
        if isinstance(tokenizer, Mapping):
            raise ValueError(
                "cannot open a run: expected tokenizer as a name or a file, found identifiers"
            )
        if tokenizer is not None:
            given["data.tokenizer"] = _spec_of(tokenizer)
        sets = [f"{key}={_toml(value)}" for key, value in given.items() if value is not None]
        return Dataset(_label=run, text=None, file=run, sets=sets, identifiers=None, **names)
    if sequence_length is None:
        raise ValueError("cannot open samples: expected sequence_length, found none")
    objective = data.setdefault("objective", None) or "lm"
    if objective not in FAMILIES:
        expected = ", ".join(FAMILIES)
        raise ValueError(f"cannot use objective: expected one of {expected}, found {objective!r}")
    corpora, label = _corpora(source)
    identifiers = None
    if tokenizer is None or isinstance(tokenizer, Mapping):
        spec, vocab = f"null:{vocab_size or VOCAB_SIZE_MAX}", vocab_size or VOCAB_SIZE_MAX
        identifiers = json.dumps(tokenizer)
    else:
        tokenizer = tokenizer if isinstance(tokenizer, Tokenizer) else Tokenizer(tokenizer)
        spec, vocab = tokenizer.spec, vocab_size or tokenizer.vocab_size
        if objective == "lm" and tokenizer.eod is not None:
            identifiers = tokenizer.identifiers
            data.setdefault("special", {"eod": tokenizer.eod})
    config = {
        # Settings that do not affect data are as small as possible.
        "run": {"dir": ".", "budget": {"samples": 1}, "seed": random_seed},
        "model": {
            "family": FAMILIES[objective],
            "layers": 1,
            "hidden": 2,
            "heads": 1,
            "vocab": vocab,
            "seq_len": sequence_length,
            "dec_len": decoder_sequence_length,
        },
        "batch": {"global": 1, "micro": 1},
        "optim": {"lr": {"peak": 0.0}},
        "data": {**data, "split": split or "1,0,0", "train": corpora, "tokenizer": spec},
    }
    text = "".join(f"{key} = {_toml(value)}\n" for key, value in config.items())
    return Dataset(_label=label, text=text, file=None, sets=[], identifiers=identifiers, **names)


class Dataset:
    """Samples in a training order, by number: a map-style dataset, created by `open`.

    Index `i` is the `i`-th sample of the run, not of the corpus: the order is shuffled already, so
    read it in sequence. For a caller that reads in equal strides, as samplers of ranks do, samples
    are read ahead from the third call on, without workers of a ``DataLoader``.

    A sample is a dict of arrays with the names of Megatron's datasets. ``"lm"``: ``tokens``,
    ``labels``, ``position_ids`` (int64) and ``loss_mask`` (float32) of the shape
    ``[sequence_length]``. T5 and CPM-2: ``text_enc``, ``text_dec``, ``labels``, ``loss_mask`` and
    masks. BERT: ``text``, ``types``, ``labels``, ``loss_mask``, ``padding_mask``, ``is_random``.
    Arrays of one name have the same shape in all samples, so that any caller can stack them. Where
    documents restart, `read` and `Loader` have their offsets, too: ``cu_seqlens``.

    It may be pickled and used after ``fork``: it is reopened there.
    """

    def __init__(self, *, _label: str, **arguments: Any) -> None:
        self._label = _label
        self._arguments = arguments
        self._open()

    def _open(self) -> None:
        self._core = _feedline.Dataset(**self._arguments)
        self._process = os.getpid()
        _live.add(self)

    @property
    def _core_of_process(self) -> _feedline.Dataset:
        if self._process != os.getpid():
            self._open()
        return self._core

    def __len__(self) -> int:
        return len(self._core)

    def __getitem__(self, index: int) -> Arrays:
        """One sample. Negative indices count from the end.

        Raises:
            IndexError: There is no such sample.
        """
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Arrays]:
        """Several samples in one read. torch's ``DataLoader`` calls it for a batch."""
        batch = self.read(indices)
        names = [name for name in batch if name not in OFFSETS]
        return [{name: batch[name][row] for name in names} for row in range(len(indices))]

    _getitems = __getitems__  # Grain's name for it

    def read(self, indices: Sequence[int]) -> Arrays:
        """Several samples as one batch: arrays of the shape ``[len(indices), ...]``."""
        return self._core_of_process.read([self._place(index) for index in indices])

    def __iter__(self) -> Iterator[Arrays]:
        return (self[index] for index in range(len(self)))

    def _place(self, index: int) -> int:
        place, count = operator.index(index), len(self)
        if place < 0:
            place += count
        if not 0 <= place < count:
            raise IndexError(f"cannot read sample {index}: expected a number below {count}")
        return place

    @property
    def sequence_length(self) -> int:
        """Tokens of a sample."""
        return self._core.sequence_length

    @property
    def identity(self) -> dict[str, Any]:
        """Identifies these samples in any folder: counts and checksums of the corpora, and all
        settings of the order."""
        found: dict[str, Any] = json.loads(self._core.identity)
        return found

    @property
    def fingerprint(self) -> str:
        """A checksum of `identity`, eight hexadecimal digits."""
        return f"{zlib.crc32(self._core.identity.encode()):08x}"

    @property
    def config(self) -> str:
        """The settings as the TOML of a run; of its model only the sequence lengths count."""
        return self._core.config

    def close(self) -> None:
        """Ends the threads that read ahead. A later read restarts them."""
        self._core_of_process.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (self._label, self._arguments)

    def __repr__(self) -> str:
        identity = self.identity
        names = ("sequence_length", "num_samples", "random_seed", "split", "index_split")
        settings = ", ".join(f"{name}={identity[name]!r}" for name in names)
        return f"feedline.open({self._label!r}, {settings})"


class Loader:
    """Batches of one data-parallel rank, read ahead by its own threads.

    An iterator of dicts of arrays of the shape ``[micro_batch_size, ...]``, named as in `Dataset`.
    The arrays are views of memory that the loader reuses after the last of them is freed, so any
    number of batches may be kept. ``position_ids`` are one array for all batches, unless documents
    restart them. The end of the run is dropped if it is too short for a batch of every rank.

    A loop continues where the last one stopped. After the last batch, a new loop starts again at
    the first sample.

    Its whole state is the number of samples that all ranks together have consumed: a run continues
    with another number of ranks, another batch size or another store. No worker processes are
    needed, and resuming reads nothing.

    Args:
        dataset: What `open` returned.
        micro_batch_size: Samples of a batch.
        data_parallel_rank: This rank, among those that read different samples.
        data_parallel_size: How many these are. Each chunk of ``micro_batch_size *
            data_parallel_size`` samples is divided among them as Megatron's sampler does. Default
            of both: those of torch's process group at the first batch, if all its ranks read
            different samples; in one process 0 and 1.
        samples_consumed: Where to start.
        prefetch_seconds: How long the training loop could continue without further reads.
        prefetch_bytes: The most memory for that.
        timeout: Seconds after which a wait for a batch raises `StalledError`.

    Raises:
        ValueError: An argument is out of its range, or only one of the rank and the size is given.
            At the first use: neither is given, and processes of the run may share samples.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        micro_batch_size: int,
        data_parallel_rank: int | None = None,
        data_parallel_size: int | None = None,
        samples_consumed: int = 0,
        prefetch_seconds: float = 60.0,
        prefetch_bytes: int = PREFETCH_BYTES,
        timeout: float = 300.0,
    ) -> None:
        def integer(name: str, value: int, minimum: int, maximum: int = COUNT_MAX) -> int:
            return integer_of(value, name, "load batches", minimum=minimum, maximum=maximum)

        self.dataset = dataset
        self._options = (
            prefetch_seconds,
            integer("prefetch_bytes", prefetch_bytes, 0, INTEGER_MAX),
            timeout,
        )
        self._micro_batch_size = integer("micro_batch_size", micro_batch_size, 1)
        # Ranks that are not given are known when the processes of the run have met.
        rank, size = 0, 1
        if data_parallel_rank is not None:
            rank = integer("data_parallel_rank", data_parallel_rank, 0)
        if data_parallel_size is not None:
            size = integer("data_parallel_size", data_parallel_size, 1)
        self._has_ranks = data_parallel_rank is not None
        if self._has_ranks != (data_parallel_size is not None):
            raise ValueError(
                "cannot load batches: expected both or neither of data_parallel_rank and "
                f"data_parallel_size, found {data_parallel_rank} and {data_parallel_size}"
            )
        # Whether no batch was returned since the start, or since a state was loaded.
        self._is_fresh = True
        self._open(rank, size, integer("samples_consumed", samples_consumed, 0, INTEGER_MAX))
        _live.add(self)

    def _open(self, rank: int, size: int, consumed: int) -> None:
        self._ranks = rank, size
        core, micro = self.dataset._core_of_process, self._micro_batch_size
        self._core = _feedline.Loader(core, micro, rank, size, consumed, *self._options)
        self._process = os.getpid()

    def _divide(self) -> None:
        """Takes the ranks that were not given from this process."""
        if not self._has_ranks and (found := _ranks.of_process()) != self._ranks:
            self._open(*found, self._core.samples_consumed)

    def __len__(self) -> int:
        """Batches of the whole run, not only the remaining ones."""
        self._divide()
        return len(self._core)

    def __iter__(self) -> Self:
        """Returns itself. After the last batch it starts again at the first sample.

        If no batch was read since that place was given or loaded, it logs a warning: the run of the
        state may have been complete.

        Raises:
            ValueError: There are too few samples for a batch of every rank.
        """
        self._divide()
        count, of_all = len(self.dataset), self._micro_batch_size * self._ranks[1]
        consumed = self._core.samples_consumed
        if count < of_all:
            raise ValueError(
                f"cannot load batches: expected at least {of_all} samples, a batch of every rank, "
                f"found {count}"
            )
        if consumed + of_all > count:
            if self._is_fresh:
                _log.warning(
                    "loader: the given place is the end, after %d of %d samples; this loop starts "
                    "again at the first sample",
                    consumed,
                    count,
                )
            self._core.samples_consumed = 0
            self._is_fresh = True
        return self

    def __next__(self) -> Arrays:
        """The next batch. After an error, the next call tries the same batch again.

        Raises:
            StopIteration: The run has no further batch.
            StalledError: There was no data within the timeout.
            CorruptError: The bytes differ from their checksum.
            ClosedError: The loader was closed.
        """
        if self._is_fresh or (self._ranks[1] == 1 and _ranks.of_group()[1] > 1):
            self._divide()
            self._is_fresh = False
        batch = self._core.next_batch()
        if batch is None:
            raise StopIteration
        return batch

    @property
    def samples_consumed(self) -> int:
        """Samples that all ranks together have consumed, including all batches returned so far."""
        return self._core.samples_consumed

    def state_dict(self) -> dict[str, Any]:
        """The number of consumed samples, and a description of the data."""
        return {
            "samples_consumed": self.samples_consumed,
            "fingerprint": self.dataset.fingerprint,
            "data": self.dataset.identity,
        }

    save_state = state_dict  # Megatron's name for it

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a state, of any number of ranks.

        Raises:
            OtherDataError: It is of other data; the text names what differs.
            ValueError: It is not the state of a loader.
        """
        _check_state(state)
        if state["fingerprint"] != self.dataset.fingerprint:
            raise OtherDataError(_difference(state.get("data"), self.dataset.identity))
        consumed = state["samples_consumed"]
        self._core.samples_consumed = integer_of(
            consumed, "samples_consumed", "load the state of a loader"
        )
        self._is_fresh = True

    def metrics(self) -> dict[str, Any]:
        """Counters since the first batch: bytes, requests, waits, prefetched samples."""
        found: dict[str, Any] = json.loads(self._core.metrics())
        return found

    def close(self) -> None:
        """Ends the threads and frees the memory. Existing arrays stay valid."""
        self._has_ranks = True  # it must not be opened again for others
        self._core.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError(
            "cannot pickle a feedline.Loader: it holds threads (hint: pickle its dataset and its "
            "state_dict(), or set num_workers=0: it needs no workers)"
        )

    def __repr__(self) -> str:
        return f"<feedline.Loader of {self.dataset!r}>"


# Threads must end before the interpreter exits.
_live: weakref.WeakSet[Dataset | Loader] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for each in list(_live):
        if each._process == os.getpid():
            each.close()


def _again(label: str, arguments: dict[str, Any]) -> Dataset:
    return Dataset(_label=label, **arguments)


def _check_state(state: Any) -> None:
    if not isinstance(state, Mapping):
        found = f"a value of the type {type(state).__name__}"
    elif "samples_consumed" in state and "fingerprint" in state:
        return
    else:
        found = ", ".join(str(key) for key in state) or "no keys"
    raise ValueError(
        "cannot load the state of a loader: expected a mapping with samples_consumed and "
        f"fingerprint, found {found} (hint: pass what state_dict() returned)"
    )


def _difference(theirs: Any, ours: Mapping[str, Any]) -> str:
    theirs = theirs if isinstance(theirs, Mapping) else {}
    names = [name for name in {**ours, **theirs} if theirs.get(name) != ours.get(name)]
    found = ", ".join(f"{name} = {json.dumps(theirs.get(name))}" for name in names)
    expected = ", ".join(f"{name} = {json.dumps(ours.get(name))}" for name in names)
    return (
        f"cannot load the state of a loader: expected {expected or 'the same data'}, found "
        f"{found or 'another fingerprint'} (hint: open the data that the state was saved with)"
    )


def _integer(name: str, value: SupportsIndex | None, minimum: int) -> int | None:
    """An argument of `open` as an int of Python, if it is given."""
    return None if value is None else integer_of(value, name, "open samples", minimum=minimum)


def _path(url: Url | None) -> str | None:
    return None if url is None else text_of(url)


def _run_file(source: Url | Blend) -> str | None:
    if isinstance(source, str | os.PathLike) and text_of(source).endswith(".toml"):
        return text_of(source)
    return None


def _spec_of(tokenizer: Tokenizer | Url) -> str:
    return tokenizer.spec if isinstance(tokenizer, Tokenizer) else ":".join(split_spec(tokenizer))


def _corpora(source: Url | Blend) -> tuple[list[dict[str, Any]], str]:
    if isinstance(source, str | os.PathLike):
        parts = [(1.0, source)]
    elif isinstance(source, Mapping):
        parts = [(weight, path) for path, weight in source.items()]
    else:
        parts = [_weighted(part) for part in source]
    paths = [text_of(path) for _, path in parts]
    weights = [float(weight) for weight, _ in parts]
    corpora = [
        {"path": path, "weight": weight} for path, weight in zip(paths, weights, strict=True)
    ]
    return corpora, ", ".join(paths)


def _weighted(part: Any) -> tuple[float, Url]:
    if not isinstance(part, tuple | list):
        return 1.0, part
    try:
        weight, prefix = part
        return float(weight), prefix
    except (TypeError, ValueError):
        raise ValueError(
            f"cannot open a blend: expected pairs of a weight and a prefix, found {part!r}"
        ) from None


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        items = [f"{key} = {_toml(item)}" for key, item in value.items() if item is not None]
        return "{ " + ", ".join(items) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    if isinstance(value, str | os.PathLike):
        # JSON escapes are valid TOML, except surrogate pairs; TOML escapes U+007F, too.
        return json.dumps(text_of(value), ensure_ascii=False).replace("\x7f", "\\u007f")
    if hasattr(value, "item"):  # a numpy scalar; np.bool_ is not a bool
        value = value.item()
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, numbers.Integral):
        return str(int(value))
    if isinstance(value, numbers.Real):
        return repr(float(value))
    raise TypeError(
        "cannot open samples: expected settings of strings, numbers, bools, lists and "
        f"dictionaries, found a value of the type {type(value).__name__}"
    )
