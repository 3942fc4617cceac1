"""Texts to ids and back, and `preprocess`, `check` and `inspect`."""

import contextlib
import json
import os
import pathlib
import pickle
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest
import tokenizers

import feedline
from conftest import write_documents

DEMO = pathlib.Path(__file__).resolve().parents[2] / "demo"
TEXTS = ["The cat.", "", "héllo 世界 🙂", "a\n\n  b\tc", "x" * 5000, "<|endoftext|> spelled out"]


@pytest.fixture(scope="module")
def gpt2():
    return feedline.Tokenizer("gpt2")


def test_batches_match_single_texts(gpt2):
    texts = TEXTS * 300
    for threads in (1, 2, 5, None):
        batch = gpt2.encode_batch(texts, num_threads=threads)
        assert len(batch) == len(texts)
        assert batch.values.dtype == np.uint32 and batch.offsets.dtype == np.int64
        assert batch[:6] == [] or all(
            ids.tolist() == gpt2.encode(text) for ids, text in zip(batch, texts, strict=True)
        )
    assert batch[-1].tolist() == gpt2.encode(texts[-1])
    assert gpt2.decode_batch(batch[:6]) == TEXTS
    with pytest.raises(IndexError):
        batch[len(texts)]
    assert len(gpt2.encode_batch([])) == 0


def test_ids_match_hugging_face():
    path = DEMO / "tokenizer.json"
    ours, theirs = feedline.Tokenizer(path), tokenizers.Tokenizer.from_file(str(path))
    texts = [text for text in TEXTS if "<|" not in text] + [
        " ".join(["lower", "lowest", str(number)] * 40) for number in range(200)
    ]
    expected = [each.ids for each in theirs.encode_batch(texts, add_special_tokens=False)]
    assert ours.encode_batch(texts).tolist() == expected
    assert ours(texts)["input_ids"] == expected
    assert ours("lower")["attention_mask"] == [1] * len(ours.encode("lower"))
    assert ours.vocab_size == theirs.get_vocab_size()


def test_arrow_shares_the_memory(gpt2):
    batch = gpt2.encode_batch(TEXTS)
    array = pa.array(batch)
    assert array.type == pa.large_list(pa.uint32()) and array.to_pylist() == batch.tolist()
    assert batch.to_arrow().values.buffers()[1].address == batch.values.ctypes.data


def test_invalid_texts_raise(gpt2):
    with pytest.raises(TypeError):
        gpt2.encode_batch(["a", 1])
    with pytest.raises(UnicodeEncodeError):
        gpt2.encode_batch(["\ud800"])
    with pytest.raises(ValueError, match="text 1: expected"):
        feedline.Tokenizer("null:100").encode_batch(["1 2", "x"])
    with pytest.raises(ValueError, match="below 50257"):
        gpt2.decode([50257])
    for threads in (-1, 1 << 64):
        with pytest.raises(ValueError, match=f"expected num_threads .*, found {threads}"):
            gpt2.encode_batch(["a"], num_threads=threads)
    with pytest.raises(FileNotFoundError):
        feedline.Tokenizer("/absent/tokenizer.json")
    with pytest.raises(ValueError, match="'absent'"):
        feedline.Tokenizer("absent")
    assert pickle.loads(pickle.dumps(gpt2)).encode("a b") == gpt2.encode("a b")
    assert gpt2.decode(gpt2.encode("世")[:1]) == "\ufffd"


@pytest.mark.parametrize("convert", [list, np.array])
def test_ids_out_of_range_are_refused(gpt2, convert):
    labels = convert([464, 3797, -100])
    expected = r"expected ids from 0 to 50256, found -100 \(hint: remove labels of -100 first\)"
    with pytest.raises(ValueError, match=expected):
        gpt2.decode(labels)
    with pytest.raises(ValueError, match=expected):
        gpt2.decode_batch([[464], labels])
    with pytest.raises(ValueError, match=f"expected ids from 0 to 50256, found {1 << 40}"):
        gpt2.decode(convert([464, 1 << 40]))


class WithoutGil:
    """The compiled tokenizer, without the method that holds the GIL."""

    def __init__(self, core):
        self.encode_batch = core.encode_batch


def test_long_texts_are_encoded_without_the_gil(gpt2):
    text = " ".join(f"Document {number} — 世界." for number in range(4000))
    assert len(text) > 1 << 16
    direct = gpt2._core.encode(text)
    tokenizer = feedline.Tokenizer("gpt2")
    tokenizer._core = WithoutGil(gpt2._core)
    ids = tokenizer.encode(text)
    assert ids == direct and all(type(each) is int for each in ids[:10])
    assert tokenizer(text) == {"input_ids": direct, "attention_mask": [1] * len(direct)}
    with pytest.raises(UnicodeEncodeError):
        tokenizer.encode("x" * (1 << 16) + "\ud800")


def test_files_match_the_program(gpt2, tmp_path):
    lines = write_documents(tmp_path / "lines.jsonl", 200, seed=3)
    seen = []
    report = gpt2.encode_files(lines, tmp_path / "ours", append_eod=True, progress=seen.append)
    program = pathlib.Path(sys.executable).parent / "preprocess"
    command = [program, "--input", lines, "--out", tmp_path / "theirs", "--append-eod"]
    subprocess.run(command, check=True, capture_output=True)
    for suffix in (".bin", ".idx"):
        ours = (tmp_path / f"ours_text_document{suffix}").read_bytes()
        assert ours == (tmp_path / f"theirs_text_document{suffix}").read_bytes()
    assert report["documents"] == 200
    assert all(isinstance(each, feedline.Progress) for each in seen)


def test_check_and_inspect_match_the_program(corpus, tmp_path):
    program = pathlib.Path(sys.executable).parent / "feedline"
    out = subprocess.run([program, "inspect", corpus, "--json"], check=True, capture_output=True)
    assert feedline.inspect(corpus) == json.loads(out.stdout)
    verdict = feedline.check(corpus, progress=False)
    assert verdict["ok"] is True
    broken = tmp_path / "broken"
    for suffix in (".bin", ".idx", ".crc"):
        raw = bytearray(pathlib.Path(corpus + suffix).read_bytes())
        if suffix == ".bin":
            raw[100] ^= 1
        pathlib.Path(f"{broken}{suffix}").write_bytes(raw)
    assert feedline.check(broken)["ok"] is False
    for verb in (feedline.check, feedline.inspect):
        with pytest.raises((FileNotFoundError, ValueError), match="absent"):
            verb(tmp_path / "absent")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("objective", "document"),
        ("objective", "Sentences"),
        ("objective", None),
        ("on_bad_line", "ignore"),
        ("on_bad_line", True),
        ("append_eod", "false"),
        ("append_eod", None),
        ("resume", "Restart"),
        ("resume", None),
        ("json_keys", "text"),
    ],
)
def test_unknown_settings_are_refused_by_name(tmp_path, name, value):
    """Each was once taken for the default: documents, without a word."""
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"text": "One. Two."}\n')
    call = {name: value}
    with pytest.raises(ValueError, match=f"expected {name} as .*found {value!r}$"):
        feedline.preprocess(lines, tmp_path / "out", progress=False, **call)
    assert list(tmp_path.iterdir()) == [lines]


def test_known_settings_are_taken(tmp_path):
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"text": "One. Two."}\n')
    counts = {}
    for objective in ("documents", "sentences"):
        for append_eod in (np.bool_(True), False):
            out = tmp_path / f"{objective}-{append_eod}"
            settings = {"objective": objective, "append_eod": append_eod, "on_bad_line": "fail"}
            report = feedline.preprocess(lines, out, progress=False, resume=False, **settings)
            counts[objective, bool(append_eod)] = report["sequences"], report["tokens"]
    assert counts["documents", False][0] == 1 and counts["sentences", False][0] == 2
    assert counts["documents", True][1] == counts["documents", False][1] + 1


def test_bad_lines_and_existing_outputs(tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "good"}\n{"text": 1}\n')
    with pytest.raises(ValueError, match="line 2"):
        feedline.preprocess(bad, tmp_path / "bad", progress=False)
    report = feedline.preprocess(bad, tmp_path / "ok", on_bad_line="skip", progress=False)
    assert report["skipped"]["bad_lines"] == 1
    with pytest.raises(FileExistsError):
        feedline.preprocess(bad, tmp_path / "ok", on_bad_line="skip", progress=False)

    def stop(_):
        raise RuntimeError("from the caller")

    fine = write_documents(tmp_path / "many.jsonl", 20_000, seed=4)
    with pytest.raises(RuntimeError, match="from the caller"):
        feedline.preprocess(fine, tmp_path / "stopped", workers=1, progress=stop)


def interrupt(out_prefix, folder):
    """Interrupts a call that has written documents of an input without an end."""
    fifo = folder / "endless.jsonl"
    os.mkfifo(fifo)
    holder = os.open(fifo, os.O_RDWR | os.O_NONBLOCK)

    def feed(progress):
        if progress.documents:
            raise RuntimeError("from the caller")
        with contextlib.suppress(BlockingIOError):
            os.write(holder, b'{"text": "one line"}\n' * 1000)

    try:
        with pytest.raises(RuntimeError, match="from the caller"):
            feedline.preprocess(fifo, out_prefix, workers=1, progress=feed)
    finally:
        os.close(holder)


def test_an_interrupted_run_is_restarted(tmp_path):
    out, lines = tmp_path / "out", write_documents(tmp_path / "lines.jsonl", 300, seed=5)
    feedline.preprocess(lines, tmp_path / "whole", append_eod=True, progress=False)
    interrupt(out, tmp_path)
    options = {"append_eod": True, "progress": False}
    for resume in (False, True):  # its input and settings were others
        with pytest.raises(feedline.InterruptedRunError):
            feedline.preprocess(lines, out, resume=resume, **options)
    with pytest.raises(ValueError, match="expected resume as True, False or 'restart', found 'no'"):
        feedline.preprocess(lines, out, resume="no", **options)
    report = feedline.preprocess(lines, out, resume="restart", **options)
    assert report["documents"] == 300 and report["resumed"] is False
    for suffix in (".bin", ".idx"):
        found = (tmp_path / f"out_text_document{suffix}").read_bytes()
        assert found == (tmp_path / f"whole_text_document{suffix}").read_bytes()
    with pytest.raises(FileExistsError) as raised:  # complete outputs are not discarded
        feedline.preprocess(lines, out, resume="restart", **options)
    assert not isinstance(raised.value, feedline.InterruptedRunError)


def test_a_tokenizer_may_be_named_by_a_url(tmp_path):
    model = tmp_path / "tokenizer.json"
    model.write_bytes((DEMO / "tokenizer.json").read_bytes())
    plain = feedline.Tokenizer(model)
    for url in (f"file:{model}", f"file://{model}?direct=off", f"file:{tmp_path}?direct=off"):
        tokenizer = feedline.Tokenizer(url)
        assert tokenizer.vocab_size == plain.vocab_size
        assert tokenizer.encode("The cat.") == plain.encode("The cat.")
    # The kind is by the name of the file, and not by the last option.
    for url in ("s3://b/a.model?endpoint=http://127.0.0.1:1&ca=x.json", "s3://b/folder?depth=16"):
        kind = "sentencepiece" if "a.model" in url else "hf"
        assert feedline.tokens.split_spec(url) == (kind, url)


def test_workers_are_checked(tmp_path):
    lines = write_documents(tmp_path / "lines.jsonl", 10, seed=5)
    for workers in (0, -1, 1 << 64):
        with pytest.raises(ValueError, match=f"expected workers .*, found {workers}"):
            feedline.preprocess(lines, tmp_path / "out", workers=workers, progress=False)
    report = feedline.preprocess(lines, tmp_path / "out", workers=np.int64(2), progress=False)
    assert report["workers"] == 2
