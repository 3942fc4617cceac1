"""Texts to token ids and back, on all cores."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeAlias, overload

from feedline import _feedline

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Url: TypeAlias = str | os.PathLike[str]

INTEGER_MAX = (1 << 63) - 1
# Longer texts are encoded without the GIL. Shorter ones take a few milliseconds at most.
DIRECT_CHARACTERS_MAX = 1 << 16


def text_of(url: Url) -> str:
    """A path or a URL as text.

    Raises:
        ValueError: It is a URL of which `pathlib` has dropped a slash, or it is not UTF-8.
    """
    text = os.fspath(url)
    if text.startswith("s3:/") and not text.startswith("s3://"):
        raise ValueError(
            f"cannot use {url!r}: expected s3://BUCKET/PREFIX (hint: pass a URL as a str)"
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"cannot use {text!r}: expected a name in UTF-8, found {text[error.start]!r} at "
            f"character {error.start} (hint: rename the file)"
        ) from None
    return text


def integer_of(
    value: SupportsIndex,
    name: str,
    action: str,
    *,
    minimum: int = 0,
    maximum: int = INTEGER_MAX,
) -> int:
    """An argument as a Python int; numpy integers are accepted.

    Raises:
        TypeError: It is not an integer.
        ValueError: It is out of its range.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"cannot {action}: expected {name} as an integer, found {value!r}")
    found = operator.index(value)
    if not minimum <= found <= maximum:
        limit = f">= {minimum}" if found < minimum else f"<= {maximum}"
        raise ValueError(f"cannot {action}: expected {name} {limit}, found {found}")
    return found


class TokenBatch(Sequence["npt.NDArray[np.uint32]"]):
    """The ids of many texts, back to back.

    Attributes:
        values: The ids of all texts, uint32.
        offsets: The start of each text in `values` and the end of the last one, int64: one more
            than there are texts.

    Item `i` is the array of the ids of text `i`, a view. ``pyarrow.array(batch)`` returns
    it as ``large_list<uint32>`` without a copy.
    """

    __slots__ = ("offsets", "values")

    def __init__(self, values: npt.NDArray[np.uint32], offsets: npt.NDArray[np.int64]) -> None:
        self.values = values
        self.offsets = offsets

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, index: int) -> npt.NDArray[np.uint32]: ...
    @overload
    def __getitem__(self, index: slice) -> list[npt.NDArray[np.uint32]]: ...
    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        place = index + len(self) if index < 0 else index
        if not 0 <= place < len(self):
            raise IndexError(f"cannot take text {index}: expected a number below {len(self)}")
        return self.values[self.offsets[place] : self.offsets[place + 1]]

    def __iter__(self) -> Iterator[npt.NDArray[np.uint32]]:
        return (self[place] for place in range(len(self)))

    def tolist(self) -> list[list[int]]:
        """The ids as lists of ints, as Hugging Face returns them."""
        return [ids.tolist() for ids in self]

    def to_arrow(self) -> Any:
        """A ``pyarrow.LargeListArray`` over the same memory. Needs pyarrow."""
        import pyarrow

        return pyarrow.LargeListArray.from_arrays(
            pyarrow.array(self.offsets), pyarrow.array(self.values)
        )

    def __arrow_c_array__(self, requested_schema: Any = None) -> tuple[Any, Any]:
        array: tuple[Any, Any] = self.to_arrow().__arrow_c_array__(requested_schema)
        return array

    def __arrow_c_schema__(self) -> Any:
        return self.to_arrow().type.__arrow_c_schema__()

    def __repr__(self) -> str:
        return f"<feedline.TokenBatch of {len(self)} texts, {len(self.values)} tokens>"


class Tokenizer:
    """A vocabulary and its rules. The ids are those of the original program.

    Args:
        name_or_path: ``"gpt2"``; a ``tokenizer.json``, a SentencePiece ``.model``, a
            ``.tiktoken`` or a ``vocab.txt``, by its name; or a kind and its files, as the programs
            take them: ``"hf:FOLDER"``, ``"gpt2:vocab.json,merges.txt"``, ``"encdec:vocab.txt"``,
            ``"jieba:model"``, ``"null:30000"``.
        tokenizer_rule: Of a folder with a ``tokenizer.json``: ``"file"`` for the rule of that file,
            ``"class"`` for the rule of the class that the folder names, as ``AutoTokenizer`` of
            transformers 5 takes it. ``"hf:FOLDER,rule=class"`` is the same. Default: a folder is
            refused where the two differ.
        special_tokens: More special tokens, for kinds that take them.
        add_special_tokens: Whether a ``tokenizer.json`` may put tokens around each text, as its
            post-processor defines. Default: no, as for pretraining.

    Special tokens that are spelled in a text are ordinary text, except with a ``tokenizer.json``,
    where they become the special token, as in Hugging Face.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is no vocabulary, or the kind is unknown.
    """

    def __init__(
        self,
        name_or_path: Url,
        *,
        tokenizer_rule: str | None = None,
        special_tokens: Sequence[str] = (),
        add_special_tokens: bool = False,
    ) -> None:
        kind, files = split_spec(name_or_path)
        if tokenizer_rule is not None:
            files += f",{RULE}{tokenizer_rule}"
        self.spec = f"{kind}:{files}" if files else kind
        """The kind and its files, as in ``data.tokenizer`` of a run."""
        self._options: dict[str, Any] = {
            "special_tokens": list(special_tokens),
            "add_special_tokens": add_special_tokens,
        }
        self._core = _feedline.Tokenizer(**arguments_of(self.spec), **self._options)

    @property
    def vocab_size(self) -> int:
        """The number of ids; all ids are below it."""
        return self._core.vocab_size

    @property
    def eod(self) -> int | None:
        """The id that ends a document, if the vocabulary has one."""
        return self._core.eod

    @property
    def name(self) -> str:
        """Its name in the programs."""
        return self._core.name

    @property
    def fingerprint(self) -> str:
        """A checksum of the whole vocabulary, 16 hexadecimal digits."""
        return self._core.fingerprint

    @property
    def identifiers(self) -> str:
        """The identifiers that Megatron hashes into the names of cached sample indexes, as JSON."""
        return self._core.identifiers

    def encode(self, text: str) -> list[int]:
        """The ids of one text. Other threads run during the call if the text is long."""
        if len(text) <= DIRECT_CHARACTERS_MAX:
            return self._core.encode(text)
        ids: list[int] = self._core.encode_batch([text], 1)[0].tolist()
        return ids

    def encode_batch(self, texts: Sequence[str], *, num_threads: int | None = None) -> TokenBatch:
        """The ids of many texts, encoded on all cores or `num_threads` threads, without the GIL.

        Raises:
            TypeError: An item is no string.
            ValueError: A text cannot be encoded, or `num_threads` is negative.
        """
        texts = texts if isinstance(texts, list) else list(texts)
        threads = integer_of(num_threads or os.cpu_count() or 1, "num_threads", "encode texts")
        return TokenBatch(*self._core.encode_batch(texts, threads))

    def __call__(self, texts: str | Sequence[str]) -> dict[str, list[Any]]:
        """As a tokenizer of transformers: ``input_ids`` and an ``attention_mask`` of ones."""
        if isinstance(texts, str):
            ids: list[Any] = self.encode(texts)
            return {"input_ids": ids, "attention_mask": [1] * len(ids)}
        ids = self.encode_batch(texts).tolist()
        return {"input_ids": ids, "attention_mask": [[1] * len(each) for each in ids]}

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids. Invalid UTF-8, such as half a character, becomes U+FFFD.

        Raises:
            ValueError: An id is negative or not below `vocab_size`.
        """
        try:
            return self._core.decode_bytes(ids).decode(errors="replace")
        except OverflowError:
            last = self.vocab_size - 1
            found = next(token for token in ids if not 0 <= token <= last)
            hint = "remove labels of -100 first" if found < 0 else "use the tokenizer of the ids"
            raise ValueError(
                f"cannot decode tokens: expected ids from 0 to {last}, found {found} (hint: {hint})"
            ) from None

    def decode_batch(self, batch: Sequence[Sequence[int]]) -> list[str]:
        """The text of each of several lists of ids."""
        return [self.decode(ids) for ids in batch]

    def encode_files(
        self,
        inputs: Url | Sequence[Url],
        out: Url,
        *,
        progress: bool | Callable[[Any], object] | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """Tokenizes files to ``OUT_text_document.bin`` and ``.idx``: see `feedline.preprocess`."""
        from feedline.verbs import preprocess

        return preprocess(inputs, out, tokenizer=self, progress=progress, **options)

    def __reduce__(self) -> tuple[Any, ...]:
        return _open, (self.spec, self._options)

    def __repr__(self) -> str:
        return f"feedline.Tokenizer({self.spec!r})"


def _open(spec: str, options: dict[str, Any]) -> Tokenizer:
    return Tokenizer(spec, **options)


# What names a rule among the files of a tokenizer.
RULE = "rule="

# Kinds of files by their suffixes.
KINDS = {".json": "hf", ".model": "sentencepiece", ".tiktoken": "tiktoken", ".txt": "wordpiece"}


def split_spec(name_or_path: Url) -> tuple[str, str]:
    """The kind of a tokenizer, and its files."""
    name = text_of(name_or_path)
    kind, colon, files = name.partition(":")
    is_url = kind in ("s3", "file") and files.startswith("/")
    if colon and "/" not in kind and not is_url:
        return kind, files
    path = _feedline.local_path(name)
    if path is not None and os.path.isdir(path):
        return "hf", name
    suffix = os.path.splitext(_feedline.file_name(name))[1]
    if suffix in KINDS:
        return KINDS[suffix], name
    return ("hf", name) if is_url else (name, "")


def arguments_of(spec: str) -> dict[str, Any]:
    """The arguments of the compiled tokenizer for a kind and its files."""
    kind, _, files = spec.partition(":")
    named = files.split(",")
    rules = [file.removeprefix(RULE) for file in named if file.startswith(RULE)]
    first, _, second = ",".join(file for file in named if not file.startswith(RULE)).partition(",")
    is_null = kind == "null"
    return {
        "kind": kind,
        "model": first or None,
        "vocab_file": first or None,
        "merge_file": second or None,
        "tokenizer_rule": rules[-1] if rules else None,
        "vocab_size": int(first) if is_null and first else None,
    }
