"""Samples by number, and batches that are read ahead."""

import json
import multiprocessing
import os
import pathlib
import pickle
import shutil
import tomllib

import numpy as np
import pytest

import feedline
from feedline.data import _toml

SEQUENCE = 32
SAMPLES = 3000


def opened(source, **options):
    arguments = {"sequence_length": SEQUENCE, "num_samples": SAMPLES, "random_seed": 5, **options}
    return feedline.open(source, **arguments)


def rows_of_index(corpus, folder):
    """Every sample, from Megatron's index files and the `.bin`, by numpy alone."""
    load = {
        name: np.load(next(pathlib.Path(folder).glob(f"*-{name}.npy")))
        for name in ("document_index", "sample_index", "shuffle_index")
    }
    tokens = np.fromfile(corpus + ".bin", dtype=np.uint16)
    lengths = [s for s in feedline_lengths(corpus)]
    starts = np.concatenate([[0], np.cumsum(lengths)])
    for number in load["shuffle_index"]:
        (first, offset), (last, end) = load["sample_index"][number : number + 2]
        row = []
        for place in range(first, last + 1):
            document = load["document_index"][place]
            begin = starts[document] + (offset if place == first else 0)
            until = starts[document] + end + 1 if place == last else starts[document + 1]
            row.append(tokens[begin:until])
        yield np.concatenate(row).astype(np.int64)


def feedline_lengths(corpus):
    """The lengths of the sequences, from the `.idx`."""
    raw = pathlib.Path(corpus + ".idx").read_bytes()
    count = int.from_bytes(raw[18:26], "little")
    return np.frombuffer(raw, dtype=np.int32, count=count, offset=34)


def stream(loader):
    return [(batch["tokens"].copy(), batch["labels"].copy()) for batch in loader]


def assert_equal(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_samples_match_megatrons_index(corpus, tmp_path):
    dataset = opened(corpus, path_to_cache=tmp_path)
    expected = list(rows_of_index(corpus, tmp_path))
    assert len(dataset) == SAMPLES <= len(expected)
    for number in (0, 1, 17, SAMPLES - 1, -1):
        sample = dataset[number]
        np.testing.assert_array_equal(sample["tokens"], expected[range(SAMPLES)[number]][:-1])
        np.testing.assert_array_equal(sample["labels"], expected[range(SAMPLES)[number]][1:])
    for batch, first in zip(
        feedline.Loader(dataset, micro_batch_size=7), range(0, SAMPLES, 7), strict=False
    ):
        rows = np.stack(expected[first : first + 7])
        np.testing.assert_array_equal(batch["tokens"], rows[:, :-1])
        np.testing.assert_array_equal(batch["labels"], rows[:, 1:])
        assert batch["loss_mask"].dtype == np.float32 and (batch["loss_mask"] == 1).all()
        np.testing.assert_array_equal(batch["position_ids"], np.tile(np.arange(SEQUENCE), (7, 1)))


@pytest.mark.parametrize("order", ["megatron", "blocks"])
def test_a_caller_in_equal_strides_is_read_ahead(corpus, order):
    dataset = opened(corpus, order=order)
    whole = stream(feedline.Loader(dataset, micro_batch_size=4))
    for rank in range(3):
        calls = range(4 * rank, SAMPLES - 12, 12)
        before = dataset._core.hits
        for first in calls:
            batch = dataset.read(range(first, first + 4))
            np.testing.assert_array_equal(batch["tokens"], whole[first // 4][0])
        assert dataset._core.hits - before >= len(calls) - 3


def test_any_samples_may_be_read_in_any_order(corpus):
    dataset = opened(corpus)
    numbers = [5, 2999, 0, 5, 1234]
    together = dataset.__getitems__(numbers)
    for number, sample in zip(numbers, together, strict=True):
        np.testing.assert_array_equal(sample["tokens"], dataset[number]["tokens"])
    assert dataset._core.hits == 0
    np.testing.assert_array_equal(dataset[np.int64(5)]["tokens"], together[0]["tokens"])
    for beyond in (SAMPLES, -SAMPLES - 1, 10**18):
        with pytest.raises(IndexError, match=f"below {SAMPLES}"):
            dataset[beyond]
    with pytest.raises(TypeError):
        dataset[1.5]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_share_one_stream(corpus, ranks):
    dataset = opened(corpus)
    alone = stream(feedline.Loader(dataset, micro_batch_size=5))
    each = [
        stream(
            feedline.Loader(
                dataset, micro_batch_size=5, data_parallel_rank=rank, data_parallel_size=ranks
            )
        )
        for rank in range(ranks)
    ]
    merged = [batch for step in zip(*each, strict=True) for batch in step]
    assert len(merged) == len(alone) // ranks * ranks
    for one, other in zip(merged, alone, strict=False):
        assert_equal(one, other)


def test_a_state_continues_with_other_ranks(corpus):
    dataset = opened(corpus)
    whole = stream(feedline.Loader(dataset, micro_batch_size=3))
    two = [
        feedline.Loader(dataset, micro_batch_size=3, data_parallel_rank=rank, data_parallel_size=2)
        for rank in range(2)
    ]
    for step in range(9):
        for rank, loader in enumerate(two):
            np.testing.assert_array_equal(next(loader)["tokens"], whole[2 * step + rank][0])
    state = json.loads(json.dumps(two[1].state_dict()))
    assert state["samples_consumed"] == 54
    for rank in range(3):
        loader = feedline.Loader(
            opened(corpus), micro_batch_size=3, data_parallel_rank=rank, data_parallel_size=3
        )
        loader.load_state_dict(state)
        for step in range(5):
            np.testing.assert_array_equal(next(loader)["tokens"], whole[18 + 3 * step + rank][0])


def test_restarts_leave_no_gap(corpus):
    whole = stream(feedline.Loader(opened(corpus), micro_batch_size=8))
    seen, state = [], None
    for restart in range(20):
        loader = feedline.Loader(opened(corpus), micro_batch_size=8)
        if state:
            loader.load_state_dict(state)
        seen += [next(loader)["tokens"].copy() for _ in range(1 + restart % 4)]
        state = loader.state_dict()
        loader.close()
    assert_equal(seen, [tokens for tokens, _ in whole[: len(seen)]])


def test_state_of_other_data_is_refused(corpus, other_corpus):
    state = feedline.Loader(opened(corpus), micro_batch_size=1).state_dict()
    others = {
        "random_seed = 5": opened(corpus, random_seed=6),
        "split": opened(corpus, split="9,1,0"),
        "corpora": opened(other_corpus),
        "sequence_length = 32": opened(corpus, sequence_length=16),
    }
    for name, dataset in others.items():
        with pytest.raises(feedline.OtherDataError, match=name):
            feedline.Loader(dataset, micro_batch_size=1).load_state_dict(state)


def test_a_state_loads_into_moved_data(corpus, tmp_path):
    for suffix in (".bin", ".idx", ".crc", ".manifest.json"):
        shutil.copy(corpus + suffix, tmp_path)
    state = feedline.Loader(opened(corpus), micro_batch_size=1, samples_consumed=9).state_dict()
    moved = opened(tmp_path / pathlib.Path(corpus).name)
    loader = feedline.Loader(moved, micro_batch_size=1)
    loader.load_state_dict(state)
    np.testing.assert_array_equal(next(loader)["tokens"][0], opened(corpus)[9]["tokens"])


def test_blends_and_runs(corpus, other_corpus, tmp_path):
    blend = opened([(0.7, corpus), (0.3, other_corpus)])
    same = opened({corpus: 0.7, other_corpus: 0.3})
    assert blend.fingerprint == same.fingerprint
    assert len(blend) == SAMPLES
    run = tmp_path / "run.toml"
    run.write_text(
        f"""
        run = {{ dir = "r", seed = 5, budget = {{ samples = {SAMPLES} }} }}
        model = {{ layers = 1, hidden = 8, heads = 1, vocab = 50257, seq_len = {SEQUENCE} }}
        batch = {{ global = 4, micro = 2 }}
        optim.lr.peak = 1e-3
        [data]
        train = [{{ path = "{corpus}", weight = 0.7 }}, {{ path = "{other_corpus}", weight = 0.3 }}]
        split = "1,0,0"
        """
    )
    of_run = feedline.open(run)
    assert len(of_run) == SAMPLES and of_run.fingerprint == blend.fingerprint
    np.testing.assert_array_equal(of_run[77]["tokens"], blend[77]["tokens"])
    assert feedline.open(run, random_seed=6).fingerprint != blend.fingerprint


def test_batches_outlive_their_loader(corpus):
    dataset = opened(corpus)
    with feedline.Loader(dataset, micro_batch_size=2) as loader:
        batches = [next(loader)["tokens"] for _ in range(300)]
    del loader, dataset
    expected = feedline.Loader(opened(corpus), micro_batch_size=2)
    for batch in batches:
        np.testing.assert_array_equal(batch, next(expected)["tokens"])
    batches[0][:] = 0  # its own memory


def test_documents_restart(corpus):
    dataset = opened(corpus, tokenizer="gpt2", reset_at_document=True, mask_eod_loss=True)
    batch = dataset.read(range(6))
    eod = 50256
    for row in range(6):
        expected, place = [], 0
        for token in batch["tokens"][row]:
            expected.append(place)
            place = 0 if token == eod else place + 1
        np.testing.assert_array_equal(batch["position_ids"][row], expected)
        np.testing.assert_array_equal(batch["loss_mask"][row], batch["tokens"][row] != eod)
    offsets = batch["cu_seqlens"]
    assert offsets[0] == 0 and offsets[-1] == 6 * SEQUENCE and (np.diff(offsets) > 0).all()
    for row in range(6):
        of_row = dataset.read([row])["cu_seqlens"]
        assert of_row[0] == 0 and of_row[-1] == SEQUENCE
        inside = offsets[(offsets >= row * SEQUENCE) & (offsets <= (row + 1) * SEQUENCE)]
        np.testing.assert_array_equal(of_row, inside - row * SEQUENCE)


def test_an_item_has_the_same_arrays_however_it_is_read(corpus):
    """Offsets of documents differ in length from item to item, so no caller could stack them."""
    dataset = opened(corpus, tokenizer="gpt2", reset_at_document=True)
    batch = dataset.read(range(6))
    names = set(batch) - {"cu_seqlens"}
    assert set(batch) > names
    for row, sample in enumerate(dataset.__getitems__(range(6))):
        assert set(sample) == set(dataset[row]) == names
        for name in names:
            np.testing.assert_array_equal(sample[name], batch[name][row])
            np.testing.assert_array_equal(dataset[row][name], batch[name][row])


def test_a_pickled_dataset_is_reopened(corpus):
    dataset = opened(corpus)
    again = pickle.loads(pickle.dumps(dataset))
    assert repr(again) == repr(dataset) and "0x" not in repr(dataset)
    np.testing.assert_array_equal(again[3]["tokens"], dataset[3]["tokens"])
    with pytest.raises(TypeError, match="num_workers=0"):
        pickle.dumps(feedline.Loader(dataset, micro_batch_size=1))


def read_in_child(dataset, loader, queue):
    """Runs in a forked process."""
    refusals = []
    for use in (lambda: next(loader), loader.close, lambda: loader.samples_consumed):
        try:
            use()
            refusals.append("nothing")
        except feedline.FeedlineError as error:
            refusals.append(str(error))
    queue.put((dataset[8]["tokens"], refusals, os.getpid()))


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_after_fork_a_dataset_works_and_a_loader_is_refused(corpus):
    dataset = opened(corpus)
    loader = feedline.Loader(dataset, micro_batch_size=2)
    next(loader)
    for first in range(0, 8, 2):
        dataset.read(range(first, first + 2))
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=read_in_child, args=(dataset, loader, queue))
    child.start()
    tokens, refusals, process = queue.get(timeout=60)
    child.join(timeout=60)
    assert child.exitcode == 0
    np.testing.assert_array_equal(tokens, dataset[8]["tokens"])
    for refusal in refusals:
        assert f"process {process}" in refusal and "open it again" in refusal
    assert loader.samples_consumed == 2
    next(loader)


def test_invalid_arguments_raise(corpus, tmp_path):
    with pytest.raises(FileNotFoundError, match="expected .*absent.idx") as raised:
        opened(tmp_path / "absent")
    assert raised.value.errno == 2 and raised.value.filename.endswith("absent")
    with pytest.raises(FileNotFoundError):
        feedline.open(tmp_path / "absent.toml")
    with pytest.raises(ValueError, match="mask_prob"):
        opened(corpus, mask_prop=0.1)
    with pytest.raises(ValueError, match="model.seq_len: expected 1 to"):
        opened(corpus, sequence_length=1 << 30)
    with pytest.raises(ValueError, match="sequence_length"):
        feedline.open(corpus)
    with pytest.raises(ValueError, match="objective"):
        opened(corpus, objective="lmm")
    with pytest.raises(ValueError, match="order"):
        opened(corpus, order="random")
    with pytest.raises(ValueError, match="s3://BUCKET"):
        opened(pathlib.Path("s3://bucket/corpus"))
    with pytest.raises(ValueError, match="data_parallel_rank"):
        feedline.Loader(
            opened(corpus), micro_batch_size=1, data_parallel_rank=2, data_parallel_size=2
        )
    with pytest.raises(ValueError, match="at most 3000"):
        feedline.Loader(opened(corpus), micro_batch_size=1, samples_consumed=SAMPLES + 1)
    with feedline.Loader(opened(corpus), micro_batch_size=1) as loader:
        next(loader)
    with pytest.raises(feedline.ClosedError, match="closed"):
        next(loader)


@pytest.mark.parametrize(
    ("name", "minimum"),
    [
        ("sequence_length", 1),
        ("decoder_sequence_length", 1),
        ("vocab_size", 1),
        ("num_samples", 0),
        ("random_seed", 0),
        ("prefetch_bytes", 0),
    ],
)
def test_integers_of_open_out_of_range_raise_value_error(corpus, name, minimum):
    with pytest.raises(
        ValueError, match=f"cannot open samples: expected {name} >= {minimum}, found -1"
    ):
        opened(corpus, **{name: -1})
    with pytest.raises(ValueError, match=f"expected {name} <= .*, found {1 << 64}"):
        opened(corpus, **{name: 1 << 64})
    for value in (True, 8.0, "8"):
        with pytest.raises(TypeError, match=f"expected {name} as an integer, found {value!r}"):
            opened(corpus, **{name: value})


@pytest.mark.parametrize(
    ("name", "minimum"),
    [
        ("micro_batch_size", 1),
        ("data_parallel_rank", 0),
        ("data_parallel_size", 1),
        ("samples_consumed", 0),
        ("prefetch_bytes", 0),
    ],
)
def test_integers_of_a_loader_out_of_range_raise_value_error(corpus, name, minimum):
    dataset = opened(corpus)
    with pytest.raises(
        ValueError, match=f"cannot load batches: expected {name} >= {minimum}, found -1"
    ):
        feedline.Loader(dataset, **{"micro_batch_size": 1, name: -1})
    with pytest.raises(ValueError, match=f"expected {name} <= .*, found {1 << 64}"):
        feedline.Loader(dataset, **{"micro_batch_size": 1, name: 1 << 64})


def test_what_is_no_state_is_refused(corpus):
    loader = feedline.Loader(opened(corpus), micro_batch_size=1)
    state = loader.state_dict()
    expected = "expected a mapping with samples_consumed and fingerprint, found "
    for bad, found in [
        ({"samples_consumed": 4}, "samples_consumed"),
        ({"fingerprint": state["fingerprint"]}, "fingerprint"),
        ({}, "no keys"),
        ([4], "a value of the type list"),
        (None, "a value of the type NoneType"),
    ]:
        with pytest.raises(ValueError, match=f"{expected}{found} "):
            loader.load_state_dict(bad)
    with pytest.raises(ValueError, match="expected samples_consumed >= 0, found -4"):
        loader.load_state_dict({**state, "samples_consumed": -4})
    with pytest.raises(feedline.OtherDataError, match="random_seed = 5"):
        loader.load_state_dict({"samples_consumed": 4, "fingerprint": "0", "data": None})
    assert loader.samples_consumed == 0


def test_numpy_numbers_equal_those_of_python(corpus):
    plain = {"sequence_length": 16, "num_samples": 100, "random_seed": 7, "vocab_size": 50257}
    scalars = {name: np.int64(value) for name, value in plain.items()}
    documents = {"special": {"eod": np.int32(50256)}, "mask_eod_loss": np.True_}
    expected = feedline.open(corpus, **plain, special={"eod": 50256}, mask_eod_loss=True)
    found = feedline.open(corpus, **scalars, **documents)
    assert found.identity == expected.identity and found.config == expected.config
    again = pickle.loads(pickle.dumps(found))
    np.testing.assert_array_equal(again[9]["loss_mask"], expected[9]["loss_mask"])
    values = [np.float32(0.5), np.float64(1e-9), np.uint8(3), np.True_, np.False_, True, 2, 0.25]
    assert tomllib.loads(f"x = {_toml(values)}")["x"] == [0.5, 1e-9, 3, True, False, True, 2, 0.25]
    with pytest.raises(ValueError, match="mask_prob: expected .*, found NaN"):
        opened(corpus, mask_prob=float("nan"))
    with pytest.raises(TypeError, match="found a value of the type object"):
        opened(corpus, mask_prob=object())


@pytest.mark.parametrize("name", ["\U0001f600", "é\u2028", 'a "b" \\\\x7f', "\x7f", "tab\t\x01"])
def test_paths_may_have_any_character(corpus, tmp_path, name):
    assert tomllib.loads(f"x = {_toml(name)}") == {"x": name}
    folder = tmp_path / name
    folder.mkdir()
    for suffix in (".bin", ".idx", ".crc"):
        shutil.copy(corpus + suffix, folder / (name + suffix))
    dataset = opened(folder / name, path_to_cache=folder)
    np.testing.assert_array_equal(dataset[5]["tokens"], opened(corpus)[5]["tokens"])
    assert list(folder.glob("*-document_index.npy"))


def test_paths_that_are_not_utf8_are_refused(corpus, tmp_path):
    name = os.fsdecode(os.fsencode(tmp_path) + b"/a\xff")
    expected = r"expected a name in UTF-8, found '\\udcff' at character"
    for use in (
        lambda: opened(name),
        lambda: opened([name, corpus]),
        lambda: opened(corpus, path_to_cache=name),
        lambda: feedline.open(name + ".toml"),
        lambda: feedline.Tokenizer(name + ".json"),
        lambda: feedline.inspect(pathlib.Path(name)),
    ):
        with pytest.raises(ValueError, match=expected):
            use()


def test_blends_may_be_lists(corpus, other_corpus):
    text = json.dumps([[0.7, corpus], [0.3, other_corpus]])
    blend = opened(json.loads(text))
    assert blend.fingerprint == opened([(0.7, corpus), (0.3, other_corpus)]).fingerprint
    assert blend.identity["weights"] == [0.7, 0.3]
    for bad in ([[0.7, corpus, 1]], [[corpus]], [(corpus, 0.7)]):
        with pytest.raises(ValueError, match="expected pairs of a weight and a prefix, found"):
            opened(bad)
    # Words alone are prefixes: "0.7" may be the name of a corpus.
    with pytest.raises(FileNotFoundError, match=r"expected .*0\.7\.idx"):
        opened(["0.7", corpus])


def test_corrupt_files_are_refused(corpus, tmp_path):
    name = pathlib.Path(corpus).name
    for suffix in (".bin", ".idx", ".crc"):
        shutil.copy(corpus + suffix, tmp_path)
    path = tmp_path / f"{name}.bin"
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 4
    path.write_bytes(raw)
    with pytest.raises(feedline.CorruptError, match="expected CRC-32C .* at byte"):
        opened(tmp_path / name)
    path.write_bytes(raw[:-1000])
    with pytest.raises(feedline.CorruptError, match="bytes"):
        opened(tmp_path / name)


def test_corruption_of_an_open_corpus_is_detected(corpus, tmp_path):
    name = pathlib.Path(corpus).name
    for suffix in (".bin", ".idx", ".crc"):
        shutil.copy(corpus + suffix, tmp_path)
    dataset = opened(tmp_path / name)
    path = tmp_path / f"{name}.bin"
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 4
    path.write_bytes(raw)
    with pytest.raises(feedline.CorruptError, match="expected CRC-32C .* at byte"):
        list(feedline.Loader(dataset, micro_batch_size=4))
    with pytest.raises(feedline.CorruptError, match="expected CRC-32C .* at byte"):
        dataset.read(range(SAMPLES // 2))
