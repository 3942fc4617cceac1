"""feedline.safetensors compared with the package safetensors."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch as theirs
import torch
import torch.distributed.checkpoint as dcp

import feedline
from feedline import _feedline, ckpt
from feedline import safetensors as ours
from feedline.dcp import StorageReader, StorageWriter, step_url


def some_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {
        "b.weight": torch.randn(30, 20),
        "a.half": torch.randn(7).to(torch.bfloat16),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(3, dtype=torch.int64),
        "flags": torch.tensor([True, False]),
        "view": torch.randn(5, 6).t(),
        "eight": torch.randn(9).to(torch.float8_e4m3fn),
    }


def newer_tensors() -> dict[str, torch.Tensor]:
    """Every bit pattern of the types that safetensors 0.8 has and its first versions lack."""

    def patterns(dtype: torch.dtype) -> torch.Tensor:
        return torch.arange(256, dtype=torch.uint8).view(dtype)

    return {
        "scales": patterns(torch.float8_e8m0fnu),
        "fnuz43": patterns(torch.float8_e4m3fnuz).reshape(16, 16),
        "fnuz52": patterns(torch.float8_e5m2fnuz).reshape(2, 128),
        "pairs": patterns(torch.float4_e2m1fn_x2).reshape(4, 8, 8),
        "no pairs": patterns(torch.float4_e2m1fn_x2)[:0].reshape(3, 0),
        "complex": torch.complex(torch.arange(12.0), -torch.arange(12.0)).reshape(3, 4),
    }


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        other = found[name]
        assert other.dtype == tensor.dtype and other.shape == tensor.shape, name
        assert torch.equal(
            other.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)
        )


@pytest.mark.parametrize(("save", "load"), [(ours, theirs), (theirs, ours), (ours, ours)])
def test_each_reads_what_the_other_writes(tmp_path: Path, save: object, load: object) -> None:
    tensors = {name: tensor.contiguous() for name, tensor in some_tensors().items()}
    tensors |= newer_tensors()
    file = tmp_path / "model.safetensors"
    save.save_file(tensors, file, {"format": "pt"})  # type: ignore[attr-defined]
    assert_same(load.load_file(file), tensors)  # type: ignore[attr-defined]
    assert os.listdir(tmp_path) == [file.name]


def test_a_file_is_replaced_atomically(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    for value in (1.0, 2.0):
        ours.save_file({"w": torch.full((3,), value)}, file)
    assert ours.load_file(file)["w"].tolist() == [2.0, 2.0, 2.0]
    with pytest.raises(ValueError, match="'w'.*complex128"):
        ours.save_file({"w": torch.zeros(2, dtype=torch.complex128)}, file)
    with pytest.raises(ValueError, match="'s'.*scalar"):
        ours.save_file({"s": torch.zeros((), dtype=torch.float4_e2m1fn_x2)}, file)
    assert ours.load_file(file)["w"].tolist() == [2.0, 2.0, 2.0]
    assert os.listdir(tmp_path) == [file.name]


def test_slices_match_the_package(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    tensors = some_tensors()
    ours.save_file(tensors, file, {"a": "b"})
    dcp.save(tensors, storage_writer=StorageWriter(tmp_path / "ckpt", 1), no_dist=True)
    indices = [
        (slice(3, 20, 4), slice(None, 5)),
        (2,),
        (slice(None), -1),
        (..., slice(1, 3)),
        (slice(40, 50),),
        (slice(5, 2),),
        (-1, -2),
    ]
    with safetensors.safe_open(file, "pt") as expected:
        for source in (file, tmp_path / "ckpt"):
            with ours.safe_open(source, framework="pt") as found:
                assert found.keys() == sorted(expected.keys())
                part = found.get_slice("b.weight")
                assert part.get_shape() == [30, 20] and part.get_dtype() == "F32"
                for index in indices:
                    assert torch.equal(part[index], tensors["b.weight"][index]), (source, index)
                for name in found.keys():  # noqa: SIM118, it is no mapping
                    assert_same({name: found.get_tensor(name)}, {name: tensors[name].contiguous()})
        with ours.safe_open(file) as found:
            assert found.metadata()["a"] == "b"
            assert found.offset_keys() == expected.offset_keys()


class Outcome:
    """A tensor, or the type of the error in its place."""

    def __init__(self, part: Any, index: Any) -> None:
        try:
            self.tensor, self.error = part[index], None
        except Exception as error:
            self.tensor, self.error = None, type(error)

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Outcome)
        if self.tensor is None or other.tensor is None:
            return self.error is other.error
        return self.tensor.shape == other.tensor.shape and torch.equal(self.tensor, other.tensor)

    def __repr__(self) -> str:
        return str(self.error or list(self.tensor.shape))


@pytest.mark.filterwarnings("ignore")  # a list that has a slice is deprecated in torch
def test_an_index_is_one_of_the_package(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    tensors = {"w": torch.randn(5, 4, 3), "s": torch.tensor(3.0)}
    ours.save_file(tensors, file)
    dcp.save(tensors, storage_writer=StorageWriter(tmp_path / "ckpt", 1), no_dist=True)
    some = slice(None)
    indices = [
        *((), ..., None, True, "x", 1.0, 7, -9, -1, np.int64(2), torch.tensor(2)),
        *(slice(4, 1), slice(0, 5, 2), slice(10, 20), slice(-30, 3), slice(-3, -1)),
        *(slice(None, None, -1), slice(None, None, 0), slice("a", 3), slice(1.0, 3)),
        *(slice(True, 3), slice(np.int64(1), 3)),
        *([0, 2], [0, -1], [], [7], [1.0], ([2],), torch.tensor([0, 2]), np.array([0, 2])),
        *([True, False, True, False, False], (some, [1, 0, 1]), ([0, 1], [0, 1]), (1, [0, 2])),
        *((0, ..., [0, 1]), (..., 1), (..., slice(0, 2), 1), (..., ...), (None, 1)),
        *((0, 0, 0), (0, 0, 0, 0), (some,) * 4, (slice(2, 4), slice(1, None, 2), -1)),
    ]
    with safetensors.safe_open(file, "pt") as opened:
        for source in (file, tmp_path / "ckpt"):
            with ours.safe_open(source) as found:
                for name in tensors:
                    theirs_part, part = opened.get_slice(name), found.get_slice(name)
                    for index in indices:
                        expected, outcome = Outcome(theirs_part, index), Outcome(part, index)
                        assert outcome == expected, (source, name, index, outcome, expected)
                with pytest.raises(IndexError, match="'w'.*4 indices|'w'.*found 4"):
                    found.get_slice("w")[0, 0, 0, 0]


def test_newer_types_are_read_in_parts(tmp_path: Path) -> None:
    file, folder = tmp_path / "model.safetensors", tmp_path / "ckpt"
    tensors = newer_tensors()
    theirs.save_file(tensors, file)
    dcp.save(tensors, storage_writer=StorageWriter(folder, 1), no_dist=True)
    read = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    dcp.load(read, storage_reader=StorageReader(folder), no_dist=True)
    assert_same(read, tensors)
    assert_same(ours.load_file(folder), tensors)
    assert ckpt.verify(folder)["ok"]
    kinds = {}
    with safetensors.safe_open(file, "pt") as opened:
        for name in tensors:
            part = opened.get_slice(name)
            kinds[name] = (part.get_dtype(), part.get_shape())
    assert kinds["pairs"] == ("F4", [4, 8, 16])
    for source in (file, folder):
        with ours.safe_open(source) as found:
            for name, tensor in tensors.items():
                part = found.get_slice(name)
                assert (part.get_dtype(), part.get_shape()) == kinds[name], name
                same = {"": part[1:2]}, {"": tensor[1:2].contiguous()}
                assert_same(*same)
            pairs = found.get_slice("pairs")
            # Elements of F4, where the package has no slices: two of the last axis are a byte.
            for index, bytes in (
                ((2, slice(1, 8, 3), slice(2, 6)), (2, slice(1, 8, 3), slice(1, 3))),
                ((..., slice(-4, None)), (..., slice(-2, None))),
                (0, 0),
                ((slice(None), slice(9, 3), slice(7, 7)), (slice(None), slice(0), slice(0))),
            ):
                expected = tensors["pairs"].view(torch.uint8)[bytes].contiguous()
                assert_same({"": pairs[index].view(torch.uint8)}, {"": expected})
            for half in (slice(1, 3), slice(0, 3), slice(0, 4, 2), 2):
                with pytest.raises(IndexError, match="'pairs' of type F4.*whole bytes"):
                    pairs[0, 0, half]
            with pytest.raises(TypeError, match="'pairs' of type F4"):
                pairs[[0, 1]]
    step = ckpt.open(folder)
    assert step.read("complex").dtype == np.complex64
    assert np.array_equal(step.read("complex"), tensors["complex"].numpy())
    assert step.entry("pairs") == ("F4_X2", [4, 8, 8])
    for name in ("scales", "fnuz43", "fnuz52", "pairs"):
        assert step.read(name).reshape(-1).tolist() == list(range(256)), name


def test_values_are_those_of_torch(tmp_path: Path) -> None:
    """Of each pattern of each small type: `diff` prints the first values that differ."""
    tensors = newer_tensors()
    del tensors["no pairs"], tensors["complex"]
    tensors["e4m3"] = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    tensors["e5m2"] = torch.arange(256, dtype=torch.uint8).view(torch.float8_e5m2)
    singles = {
        f"{name}.{n}": tensor.reshape(-1)[n : n + 1]
        for name, tensor in tensors.items()
        for n in range(256)
    }
    others = {
        name: (tensor.view(torch.uint8) + 1).view(tensor.dtype) for name, tensor in singles.items()
    }
    for folder, state in (("a", singles), ("b", others)):
        dcp.save(state, storage_writer=StorageWriter(tmp_path / folder, 1), no_dist=True)
    found = {entry["name"]: entry for entry in ckpt.diff(tmp_path / "a", tmp_path / "b")["tensors"]}
    assert len(found) == len(singles)
    # torch converts no F4; these are the values of OCP's Microscaling Formats 1.0.
    quarter = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    quarter += [-value for value in quarter]
    for name, tensor in singles.items():
        if tensor.dtype == torch.float4_e2m1fn_x2:
            expected = quarter[int(tensor.view(torch.uint8)) % 16]
        else:
            expected = tensor.to(torch.float64).item()
        first = found[name]["first_a"]
        assert found[name]["elements_differ"] >= 1
        if np.isfinite(expected):
            assert (first, np.signbit(first)) == (expected, np.signbit(expected)), name
        else:
            assert first is None, name


def test_a_tensor_of_an_unknown_type_is_refused_alone(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    header = {
        "six": {"dtype": "F6_E2M3", "shape": [2, 4], "data_offsets": [0, 6]},
        "f": {"dtype": "F32", "shape": [2], "data_offsets": [6, 14]},
        "half": {"dtype": "F4", "shape": [2, 1], "data_offsets": [14, 15]},
        "x2": {"dtype": "F4_X2", "shape": [1], "data_offsets": [15, 16]},
        "new": {"dtype": "F99", "shape": [7], "data_offsets": [16, 20]},
    }
    text = json.dumps(header).encode()
    data = bytes(6) + np.array([1.5, 2.5], np.float32).tobytes() + bytes(6)
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)
    with ours.safe_open(file) as opened:
        assert opened.keys() == ["f", "half", "new", "six", "x2"]
        assert opened.get_tensor("f").tolist() == [1.5, 2.5]
        assert opened.get_slice("f")[1:].tolist() == [2.5]
        for name, entry in header.items():
            part = opened.get_slice(name)
            assert (part.get_dtype(), part.get_shape()) == (entry["dtype"], entry["shape"])
            if name == "f":
                continue
            for read in (opened.get_tensor, lambda name: opened.get_slice(name)[:1]):
                with pytest.raises(ValueError, match=rf"'{name}' of .*found {entry['dtype']} "):
                    read(name)
    with pytest.raises(ValueError, match="'half' of .*found F4 of shape"):
        ours.load_file(file)


def test_a_lazy_conjugate_is_saved_with_its_values(tmp_path: Path) -> None:
    x = torch.complex(torch.randn(1, 3), torch.randn(1, 3))
    tensors = {"conjugate": x.conj(), "negative": x.clone().conj().imag}
    assert tensors["conjugate"].is_conj() and tensors["negative"].is_neg()
    ours.save_file(tensors, tmp_path / "model.safetensors")
    found = theirs.load_file(tmp_path / "model.safetensors")
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor), name


def test_a_model_with_tied_weights(tmp_path: Path) -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(6, 4)
            self.head = torch.nn.Linear(4, 6, bias=False)
            self.head.weight = self.embedding.weight

    model, other = Tied(), Tied()
    with pytest.raises(ValueError, match=r"embedding\.weight.*save_model"):
        ours.save_file(model.state_dict(), tmp_path / "a.safetensors")
    for save, load in ((ours, theirs), (theirs, ours), (ours, ours)):
        torch.nn.init.zeros_(other.head.weight)
        save.save_model(model, tmp_path / "a.safetensors")
        assert load.load_model(other, tmp_path / "a.safetensors")[1] == []
        assert torch.equal(other.head.weight, model.head.weight)
    with pytest.raises(RuntimeError, match="2 missing"):
        ours.load_model(torch.nn.Linear(2, 2), tmp_path / "a.safetensors")


def test_corruption_is_detected_by_checksums_in_the_metadata(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    ours.save_file(some_tensors(), file)
    with ours.safe_open(file) as opened:
        last = opened.offset_keys()[-1]
    damaged = bytearray(file.read_bytes())
    damaged[-1] ^= 1
    file.write_bytes(damaged)
    theirs.load_file(file)  # has no checksums
    with pytest.raises(feedline.CorruptError, match=last):
        ours.load_file(file)
    file.write_bytes(damaged[:-5])
    with pytest.raises(feedline.CorruptError, match="expected"):
        ours.load_file(file)
    with pytest.raises(FileNotFoundError):
        ours.load_file(tmp_path / "none.safetensors")


@pytest.mark.parametrize("reads", [ours, safetensors])
def test_checksums_that_another_program_copies_are_ignored(tmp_path: Path, reads: object) -> None:
    source, target = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    tensors = {"w": torch.zeros(1000), "b": torch.zeros(3)}
    ours.save_file(tensors, source, {"a": "b"})
    with reads.safe_open(source, "pt") as file:  # type: ignore[attr-defined]
        metadata = file.metadata()
    changed = {name: tensor + 1 for name, tensor in tensors.items()}
    theirs.save_file(changed, target, metadata)
    assert_same(ours.load_file(target), changed)
    with ours.safe_open(target) as file:
        assert file.metadata() == {"a": "b"}
        assert torch.equal(file.get_tensor("b"), changed["b"])
    ours.save_file(changed, target, metadata)
    assert_same(ours.load_file(target), changed)


def split(file: Path) -> tuple[dict[str, dict[str, str]], int, bytes]:
    """The header of a file, its length, and the data."""
    bytes = file.read_bytes()
    length = int.from_bytes(bytes[:8], "little")
    return json.loads(bytes[8 : 8 + length]), length, bytes[8 + length :]


def join(file: Path, header: dict[str, dict[str, str]], length: int, data: bytes) -> None:
    text = json.dumps(header, separators=(",", ":")).encode().ljust(length)
    assert len(text) == length
    file.write_bytes(length.to_bytes(8, "little") + text + data)


def test_checksums_count_in_files_as_they_are_written(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    ours.save_file({"w": torch.zeros(1000)}, file)
    header, length, _ = split(file)
    strings, changed = header["__metadata__"], bytes(3999) + b"?"
    for byte in (0, 3999):
        join(file, header, length, bytes(byte) + b"?" + bytes(3999 - byte))
        with pytest.raises(feedline.CorruptError, match="CRC-64"):
            ours.load_file(file)

    # The header of another program with the same length: without spaces at its end.
    strings["pad"] = ""
    strings["pad"] = "x" * (length - len(json.dumps(header, separators=(",", ":"))))
    join(file, header, length, changed)
    assert ours.load_file(file)["w"][-1] != 0

    # The length of another file.
    del strings["pad"]
    strings["feedline.file_bytes"] = f"{1:016x}"
    join(file, header, length, changed)
    assert ours.load_file(file)["w"][-1] != 0

    # Earlier versions wrote no length, and as few spaces as possible.
    del strings["feedline.file_bytes"]
    free = length - len(json.dumps(header, separators=(",", ":"))) - len(',"pad":""')
    for more in ({}, {"pad": "x" * free}):
        earlier = {**header, "__metadata__": {**strings, **more}}
        join(file, earlier, length, bytes(4000))
        assert ours.load_file(file)["w"].sum() == 0
        join(file, earlier, length, changed)
        with pytest.raises(feedline.CorruptError, match="CRC-64"):
            ours.load_file(file)
    strings["feedline.crc64"] = "no JSON"
    join(file, header, length, changed)
    with pytest.raises(feedline.CorruptError, match="checksums"):
        ours.load_file(file)


def test_a_header_ends_with_spaces(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    for free in range(10):  # bytes up to the next multiple of 4,096
        ours.save_file({"w": torch.ones(3)}, file, {"pad": ""})
        text = json.dumps(split(file)[0], separators=(",", ":"))
        pad = "x" * (4096 - 8 - len(text) - free)
        ours.save_file({"w": torch.ones(3)}, file, {"pad": pad})
        _, length, data = split(file)
        assert 8 + length == (8192 if free < 8 else 4096) and len(data) == 12
        assert file.read_bytes()[length : 8 + length] == b" " * 8
        assert ours.load_file(file)["w"].sum() == 3


def test_the_options_of_a_url_are_not_its_name() -> None:
    step = "s3://bucket/run/step-000000001000?endpoint=http://127.0.0.1:9"
    folder = "s3://bucket/run?endpoint=http://127.0.0.1:9"
    assert _feedline.split_step(step) == (folder, 1000)
    assert _feedline.split_step(folder) is None
    assert _feedline.split_step("run/step-000000001000/") == ("run", 1000)
    assert _feedline.split_step("/step-000000001000") == ("/", 1000)


def test_names_are_added_to_the_path_of_a_url() -> None:
    url = "s3://bucket/run?endpoint=http://h:1&depth=16"
    step = "s3://bucket/run/step-000000000007?endpoint=http://h:1&depth=16"
    assert step_url(url, 7) == step
    assert step_url("file:/d/run/?direct=off", 7) == "file:/d/run/step-000000000007?direct=off"
    assert step_url("run?depth=16", 7) == "run?depth=16/step-000000000007"
    assert (_feedline.file_name(step), _feedline.local_path(step)) == ("step-000000000007", None)
    assert _feedline.local_path("file:///d/a?direct=off") == "/d/a"


def test_files_of_file_urls_are_replaced(tmp_path: Path) -> None:
    for url in (f"file:{tmp_path}/a.safetensors?direct=off", f"file://{tmp_path}/a.safetensors"):
        for value in (1.0, 2.0):
            ours.save_file({"a": torch.full((3,), value)}, url)
            assert torch.equal(ours.load_file(url)["a"], torch.full((3,), value))
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]
