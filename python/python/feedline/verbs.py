"""The programs `preprocess` and `feedline` as functions."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from feedline import _feedline
from feedline.tokens import Tokenizer, Url, arguments_of, integer_of, text_of


class Progress(NamedTuple):
    """The progress of a call."""

    bytes: int
    """Bytes read of the inputs, as they are stored."""
    bytes_total: int | None = None
    """The bytes of all inputs, if they are known."""
    documents: int | None = None
    """Documents written."""
    tokens: int | None = None
    """Tokens written."""


SequenceKind: TypeAlias = Literal["documents", "sentences", "cpm2"]
OnBadLine: TypeAlias = Literal["fail", "skip"]
OnProgress: TypeAlias = bool | Callable[[Progress], object] | None


def preprocess(
    inputs: Url | Sequence[Url],
    out_prefix: Url,
    *,
    tokenizer: Tokenizer | Url = "gpt2",
    json_keys: Sequence[str] = ("text",),
    append_eod: bool = False,
    objective: SequenceKind = "documents",
    workers: int | None = None,
    shard: tuple[int, int] | None = None,
    on_bad_line: OnBadLine = "fail",
    resume: bool | Literal["restart"] = False,
    progress: OnProgress = None,
) -> dict[str, Any]:
    """Tokenizes JSON lines to Megatron's ``.bin`` and ``.idx``, byte for byte, on all cores.

    Writes ``{out_prefix}_{key}_document.bin`` and ``.idx`` for each key, with checksums and a
    manifest. Ctrl-C ends it; the output so far is committed, and ``resume=True`` continues from it.

    Args:
        inputs: Files, folders and patterns of JSON lines, also compressed and on S3.
        out_prefix: Folder and name of the outputs.
        tokenizer: A `Tokenizer`, or its argument.
        json_keys: The keys of texts; each becomes a dataset.
        append_eod: Whether each document ends with the EOD token.
        objective: Whether a document becomes a sequence, a sequence for each of its sentences (for
            BERT and T5), or CPM-2's contexts and targets.
        workers: Threads. Default: one per core. The outputs do not depend on it.
        shard: ``(index, count)``: only this part of the inputs.
        on_bad_line: Whether a bad line ends the call or is counted and skipped.
        resume: ``True`` continues an interrupted call with the same arguments. ``"restart"``
            discards its outputs and starts again, also with other arguments. Complete outputs are
            never discarded. If no call was interrupted, both start from the first input.
        progress: ``None``: a line on a terminal or in a notebook. ``False``: nothing. A function:
            it is called with `Progress` about twenty times a second.

    Returns:
        The report of the run: documents, tokens, bytes, rates and outputs, units in the names.

    Raises:
        FileNotFoundError: There is no such input.
        FileExistsError: The outputs exist; `InterruptedRunError` if they are incomplete.
        ValueError: A line, a vocabulary or a setting is bad; the text names the file and the byte.
    """
    paths = [inputs] if isinstance(inputs, str | os.PathLike) else list(inputs)
    _check_one_of("objective", objective, get_args(SequenceKind))
    _check_one_of("on_bad_line", on_bad_line, get_args(OnBadLine))
    _check_one_of("append_eod", append_eod, (True, False))
    _check_one_of("resume", resume, (True, False, "restart"))
    if isinstance(json_keys, str):
        raise ValueError(
            f"cannot preprocess files: expected json_keys as a list of keys, found {json_keys!r}"
        )
    if workers is not None:
        workers = integer_of(workers, "workers", "preprocess files", minimum=1)
    if not isinstance(tokenizer, Tokenizer):
        tokenizer = Tokenizer(tokenizer)
    settings = {
        **arguments_of(tokenizer.spec),
        **tokenizer._options,
        "json_keys": list(json_keys),
        "append_eod": bool(append_eod),
        "objective": objective,
        "workers": workers,
        "shard": None if shard is None else f"{shard[0]}/{shard[1]}",
        "on_bad_line": on_bad_line,
        "interrupted": resume if resume == "restart" else "resume" if resume else "refuse",
    }
    with _Line("preprocess", progress) as line:
        report = _feedline.preprocess(
            [text_of(path) for path in paths],
            text_of(out_prefix),
            json.dumps(settings),
            line.preprocess,
        )
    found: dict[str, Any] = json.loads(report)
    return found


def _check_one_of(name: str, found: object, choices: tuple[object, ...]) -> None:
    """Refuses a value that is none of the choices.

    Raises:
        ValueError: It names the argument, the choices and the value.
    """
    if found not in choices:
        *others, last = map(repr, choices)
        expected = f"{', '.join(others)} or {last}"
        raise ValueError(
            f"cannot preprocess files: expected {name} as {expected}, found {found!r}"
        )


def check(name: Url, *, progress: OnProgress = None) -> dict[str, Any]:
    """Reads token files or checkpoints and checks every checksum and rule of the format.

    Args:
        name: A prefix of token files, a checkpoint, or a folder of checkpoints.
        progress: As for `preprocess`.

    Returns:
        ``{"ok": bool, "verdict": {...}}``; the verdict is that of ``feedline check --json``. Damage
        is reported in the verdict, not as an exception.

    Raises:
        FileNotFoundError: There is no dataset or checkpoint of that name.
    """
    with _Line("check", progress) as line:
        found: dict[str, Any] = json.loads(_feedline.check(text_of(name), line.bytes))
        return found


def inspect(name: Url) -> dict[str, Any]:
    """Sizes and counts of token files or checkpoints: what ``feedline inspect --json`` prints.

    Raises:
        FileNotFoundError: There is no dataset or checkpoint of that name.
    """
    found: dict[str, Any] = json.loads(_feedline.inspect(text_of(name)))
    return found


class _Line:
    """Reports progress to a function of the caller, or on a line of standard error."""

    def __init__(self, what: str, wanted: OnProgress) -> None:
        self._what = what
        self._call = wanted if callable(wanted) else None
        self._shows = wanted is True or (wanted is None and _is_interactive())
        self._next = 0.0
        self._width = 0

    @property
    def is_wanted(self) -> bool:
        return self._call is not None or self._shows

    def preprocess(
        self, documents: int, tokens: int, stored: int, stored_all: int | None
    ) -> None:
        self._report(Progress(stored, stored_all, documents, tokens))

    def bytes(self, moved: int) -> None:
        self._report(Progress(moved))

    def _report(self, progress: Progress) -> None:
        if self._call is not None:
            self._call(progress)
        elif self._shows and time.monotonic() >= self._next:
            self._next = time.monotonic() + 0.2
            of = f" of {progress.bytes_total / 1e6:,.0f}" if progress.bytes_total else ""
            text = f"{self._what}: {progress.bytes / 1e6:,.0f}{of} MB"
            if progress.tokens is not None:
                text += f", {progress.documents:,} documents, {progress.tokens:,} tokens"
            self._write(text)

    def _write(self, text: str) -> None:
        sys.stderr.write("\r" + text.ljust(self._width))
        sys.stderr.flush()
        self._width = len(text)

    def __enter__(self) -> _Line:
        return self

    def __exit__(self, *_: object) -> None:
        if self._width:
            self._write("")
            sys.stderr.write("\r")


def _is_interactive() -> bool:
    """Whether standard error is shown to a person: on a terminal, or in a notebook."""
    return sys.stderr.isatty() or "ipykernel" in sys.modules
