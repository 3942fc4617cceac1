"""Data and checkpoints on S3, with moto as the server and boto3 as the other client."""

from __future__ import annotations

import _thread
import logging
import socket
import socketserver
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import botocore.config
import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from moto.server import ThreadedMotoServer
from torch.utils.data import DataLoader

import feedline
from feedline import ckpt
from feedline import safetensors as ours
from feedline.dcp import StorageReader, StorageWriter

BUCKET = "bucket"


class Server:
    """A server of S3 with one bucket, and a client for it."""

    def __init__(self, endpoint: str, credentials: Path) -> None:
        self.endpoint = endpoint
        self._credentials = credentials
        self.client: Any = boto3.client(
            "s3",
            endpoint_url=endpoint,
            region_name="us-east-1",
            aws_access_key_id="a",
            aws_secret_access_key="b",
            config=botocore.config.Config(proxies={}),
        )

    def url(self, key: str, bucket: str = BUCKET, endpoint: str | None = None) -> str:
        options = f"endpoint={endpoint or self.endpoint}&credentials={self._credentials}"
        return f"s3://{bucket}/{key}?{options}&profile=default"

    def keys(self, prefix: str) -> list[str]:
        found = self.client.list_objects_v2(Bucket=BUCKET, Prefix=prefix).get("Contents", [])
        return [entry["Key"] for entry in found]

    def read(self, key: str) -> bytes:
        content: bytes = self.client.get_object(Bucket=BUCKET, Key=key)["Body"].read()
        return content


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        credentials = tmp_path_factory.mktemp("s3") / "credentials"
        credentials.write_text("[default]\naws_access_key_id = a\naws_secret_access_key = b\n")
        found = Server(f"http://{host}:{port}", credentials)
        found.client.create_bucket(Bucket=BUCKET)
        yield found
    finally:
        server.stop()


class Proxy(socketserver.ThreadingTCPServer):
    """Passes connections on to a server, until it `hangs`: then nothing is passed on."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, endpoint: str) -> None:
        super().__init__(("127.0.0.1", 0), PassOn)
        host, port = endpoint.removeprefix("http://").split(":")
        self.target = (host, int(port))
        self.endpoint = f"http://127.0.0.1:{self.server_address[1]}"
        self.passes = threading.Event()
        self.passes.set()
        self.was_asked = threading.Event()

    def hang(self) -> None:
        self.was_asked.clear()
        self.passes.clear()


class PassOn(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        with socket.create_connection(self.server.target) as target:
            back = threading.Thread(target=self._copy, args=(target, self.request), daemon=True)
            back.start()
            self._copy(self.request, target)

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while content := source.recv(1 << 16):
                self.server.was_asked.set()
                self.server.passes.wait()
                target.sendall(content)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            pass


@pytest.fixture
def proxy(s3: Server) -> Iterator[Proxy]:
    with Proxy(s3.endpoint) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}).start()
        yield server
        server.passes.set()
        server.shutdown()


def a_state() -> dict[str, Any]:
    torch.manual_seed(3)
    return {
        "model": {"w": torch.randn(500, 300), "b": torch.randn(9).to(torch.bfloat16)},
        "optim": {"state": {"w": {"exp_avg": torch.randn(500, 300)}}},
        "step": 3,
    }


def an_empty_state() -> dict[str, Any]:
    return {
        "model": {"w": torch.zeros(500, 300), "b": torch.zeros(9, dtype=torch.bfloat16)},
        "optim": {"state": {"w": {"exp_avg": torch.zeros(500, 300)}}},
        "step": None,
    }


def assert_loads(folder: str) -> None:
    found, expected = an_empty_state(), a_state()
    dcp.load(found, storage_reader=StorageReader(folder))
    assert found["step"] == expected["step"]
    for name in ("w", "b"):
        assert torch.equal(found["model"][name], expected["model"][name])
    moment = found["optim"]["state"]["w"]["exp_avg"]
    assert torch.equal(moment, expected["optim"]["state"]["w"]["exp_avg"])


def raised(failure: dcp.api.CheckpointException) -> BaseException:
    ((exception, _),) = failure.failures.values()
    return exception


def test_samples_are_those_of_the_local_files(s3: Server, corpus: str, tmp_path: Path) -> None:
    for suffix in (".bin", ".idx"):
        s3.client.upload_file(corpus + suffix, BUCKET, "data/corpus" + suffix)
    options = {"sequence_length": 64, "num_samples": 400, "random_seed": 5, "tokenizer": "gpt2"}
    local = feedline.open(corpus, path_to_cache=tmp_path / "local", **options)
    remote = feedline.open(s3.url("data/corpus"), path_to_cache=tmp_path / "remote", **options)
    np.testing.assert_array_equal(remote[17]["tokens"], local[17]["tokens"])
    numbers = [399, 0, 17, 17]
    for one, other in zip(
        remote.__getitems__(numbers), local.__getitems__(numbers), strict=True
    ):
        np.testing.assert_array_equal(one["tokens"], other["tokens"])
    with feedline.Loader(local, micro_batch_size=8) as loader:
        expected = [batch["tokens"].copy() for batch in loader]
    with feedline.Loader(remote, micro_batch_size=8) as loader:
        found = [next(loader)["tokens"].copy() for _ in range(20)]
        state = loader.state_dict()
    # A run continues from the other store, because its data are the same.
    for source in (remote, local):
        with feedline.Loader(source, micro_batch_size=8) as loader:
            loader.load_state_dict(state)
            rest = [batch["tokens"].copy() for batch in loader]
        np.testing.assert_array_equal(np.stack(found + rest), np.stack(expected))


def test_workers_after_fork_read_from_the_server(s3: Server, corpus: str) -> None:
    for suffix in (".bin", ".idx"):
        s3.client.upload_file(corpus + suffix, BUCKET, "forked/corpus" + suffix)
    options = {"sequence_length": 64, "num_samples": 100, "random_seed": 5, "cache": False}
    remote = feedline.open(s3.url("forked/corpus"), **options)
    expected = [torch.as_tensor(sample["tokens"]) for sample in feedline.open(corpus, **options)]
    # The workers inherit an open connection.
    assert torch.equal(torch.as_tensor(remote[0]["tokens"]), expected[0])
    loader = DataLoader(remote, num_workers=2, multiprocessing_context="fork", timeout=60)
    found = [batch["tokens"][0] for batch in loader]
    assert torch.equal(torch.stack(found), torch.stack(expected))


def test_an_interrupted_read_leaves_the_dataset_usable(
    s3: Server, proxy: Proxy, corpus: str
) -> None:
    for suffix in (".bin", ".idx"):
        s3.client.upload_file(corpus + suffix, BUCKET, "hanging/corpus" + suffix)
    options = {"sequence_length": 64, "num_samples": 100, "random_seed": 5, "cache": False}
    url = s3.url("hanging/corpus", endpoint=proxy.endpoint)
    remote, local = feedline.open(url, **options), feedline.open(corpus, **options)
    remote[50]

    def interrupt() -> None:
        proxy.was_asked.wait()
        _thread.interrupt_main()

    proxy.hang()
    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        remote[7]
    proxy.passes.set()
    np.testing.assert_array_equal(remote[7]["tokens"], local[7]["tokens"])


def test_a_step_is_saved_and_loaded(s3: Server) -> None:
    folder = s3.url("run")
    dcp.save(a_state(), storage_writer=StorageWriter(folder, 3))
    assert_loads(folder)
    assert ckpt.ls(folder)["newest"] == 3
    assert ckpt.verify(folder, progress=False)["ok"]
    # Other programs read its weights.
    shards = [key for key in s3.keys("run/step-000000000003/") if key.endswith(".safetensors")]
    weights = {
        name: tensor
        for key in shards
        for name, tensor in safetensors.torch.load(s3.read(key)).items()
    }
    assert torch.equal(weights["w"], a_state()["model"]["w"])
    with pytest.raises(dcp.api.CheckpointException) as caught:
        dcp.save(a_state(), storage_writer=StorageWriter(folder, 3))
    assert isinstance(raised(caught.value), FileExistsError)
    assert not any("lease" in key for key in s3.keys("run/"))


def test_old_steps_are_deleted(s3: Server) -> None:
    folder = s3.url("kept")
    for step in (1, 2, 3):
        dcp.save(a_state(), storage_writer=StorageWriter(folder, step, keep_last=2))
    assert ckpt.open(folder).step == 3
    assert not s3.keys("kept/step-000000000001/")
    assert_loads(s3.url("kept/step-000000000002"))


def test_steps_are_copied_from_a_disk(s3: Server, tmp_path: Path) -> None:
    far = s3.url("far")
    dcp.save(a_state(), storage_writer=StorageWriter(tmp_path, 4, drain_to=far))
    for thread in threading.enumerate():
        if thread.name == "feedline-drain":
            thread.join(60)
    assert_loads(far)
    assert ckpt.diff(tmp_path, far)["same"]


def test_a_changed_byte_is_found(s3: Server) -> None:
    folder = s3.url("damaged")
    dcp.save(a_state(), storage_writer=StorageWriter(folder, 1))
    key = next(key for key in s3.keys("damaged/") if key.endswith(".safetensors"))
    content = bytearray(s3.read(key))
    content[-5] ^= 1
    s3.client.put_object(Bucket=BUCKET, Key=key, Body=bytes(content))
    assert not ckpt.verify(folder, progress=False)["ok"]
    with pytest.raises(dcp.api.CheckpointException) as caught:
        dcp.load(an_empty_state(), storage_reader=StorageReader(folder))
    assert isinstance(raised(caught.value), feedline.CorruptError)


def test_files_of_safetensors(s3: Server) -> None:
    url, tensors = s3.url("model.safetensors"), a_state()["model"]
    ours.save_file(tensors, url, {"format": "pt"})
    theirs = safetensors.torch.load(s3.read("model.safetensors"))
    for found in (theirs, ours.load_file(url)):
        assert sorted(found) == sorted(tensors)
        assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    with ours.safe_open(url) as file:
        assert torch.equal(file.get_slice("w")[3:5], tensors["w"][3:5])
    with pytest.raises(FileExistsError):
        ours.save_file(tensors, url)


def test_what_is_missing_has_its_own_exception(s3: Server) -> None:
    with pytest.raises(FileNotFoundError, match="none"):
        feedline.open(s3.url("none"), sequence_length=8, num_samples=1, cache=False)
    with pytest.raises(FileNotFoundError):
        ours.load_file(s3.url("none.safetensors"))
    with pytest.raises(OSError, match="bucket"):
        ckpt.ls(s3.url("run", bucket="no-such-bucket"))
