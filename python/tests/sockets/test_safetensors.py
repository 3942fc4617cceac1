"""feedline.safetensors compared with the package safetensors."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import safetensors
import safetensors.torch as theirs
import torch
import torch.distributed.checkpoint as dcp

import feedline
from feedline import _feedline
from feedline import safetensors as ours
from feedline.dcp import StorageWriter


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
    file = tmp_path / "model.safetensors"
    save.save_file(tensors, file, {"format": "pt"})  # type: ignore[attr-defined]
    assert_same(load.load_file(file), tensors)  # type: ignore[attr-defined]
    assert os.listdir(tmp_path) == [file.name]


def test_a_file_is_replaced_atomically(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    for value in (1.0, 2.0):
        ours.save_file({"w": torch.full((3,), value)}, file)
    assert ours.load_file(file)["w"].tolist() == [2.0, 2.0, 2.0]
    with pytest.raises(ValueError, match="complex64"):
        ours.save_file({"w": torch.zeros(2, dtype=torch.complex64)}, file)
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
    for wrong, error in (((0, 0, 0), IndexError), (30, IndexError), ("x", TypeError)):
        with pytest.raises(error):
            part[wrong]


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
