"""Errors of stores and data: their classes, what works after them, and Ctrl-C while a store hangs."""

import _thread
import http.server
import threading

import numpy as np
import pytest

import feedline
from feedline import ckpt

DENIED = b"""<?xml version="1.0" encoding="UTF-8"?>
<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"""


class Endpoint(http.server.ThreadingHTTPServer):
    """A server that denies every request of S3, or leaves it without a response."""

    daemon_threads = True

    def __init__(self, folder):
        super().__init__(("127.0.0.1", 0), Answer)
        self.is_hanging = False
        self.requested = threading.Event()
        self.ended = threading.Event()
        self._credentials = folder / "credentials"
        self._credentials.write_text("[default]\naws_access_key_id=a\naws_secret_access_key=b\n")

    def url(self, key):
        options = f"endpoint=http://127.0.0.1:{self.server_port}&credentials={self._credentials}"
        return f"s3://bucket/{key}?{options}&profile=default"


class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.requested.set()
        if self.server.is_hanging:
            self.server.ended.wait()
            return
        self.send_response(403)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(DENIED)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(DENIED)

    do_HEAD = do_PUT = do_GET

    def log_message(self, *_):
        pass


@pytest.fixture
def endpoint(tmp_path):
    with Endpoint(tmp_path) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}).start()
        yield server
        server.ended.set()
        server.shutdown()


def interrupt_after(event):
    """Interrupts the main thread, as Ctrl-C does, when it waits for the store."""

    def interrupt():
        event.wait()
        _thread.interrupt_main()

    threading.Thread(target=interrupt, daemon=True).start()


def test_a_store_that_denies_access_raises_permission_error(endpoint):
    with pytest.raises(PermissionError) as caught:
        ckpt.ls(endpoint.url("run"))
    assert caught.value.filename.startswith("s3://bucket/run")
    with pytest.raises(PermissionError):
        feedline.open(endpoint.url("corpus"), sequence_length=8, num_samples=1, cache=False)


def test_an_interrupt_ends_the_opening_of_a_store_that_hangs(endpoint):
    endpoint.is_hanging = True
    interrupt_after(endpoint.requested)
    with pytest.raises(KeyboardInterrupt):
        feedline.open(endpoint.url("corpus"), sequence_length=8, num_samples=1, cache=False)


class Copy:
    """A copy of a corpus of which a byte may be changed and restored."""

    def __init__(self, corpus, folder):
        source = {name: open(corpus + name, "rb").read() for name in (".bin", ".idx", ".crc")}
        self.prefix = str(folder / "copy")
        for name, content in source.items():
            with open(self.prefix + name, "wb") as file:
                file.write(content)
        self._place = len(source[".bin"]) // 3
        self._byte = source[".bin"][self._place]

    def _write(self, byte):
        with open(self.prefix + ".bin", "r+b") as file:
            file.seek(self._place)
            file.write(bytes([byte]))

    def damage(self):
        self._write(self._byte ^ 1)

    def repair(self):
        self._write(self._byte)


@pytest.fixture
def copy(corpus, tmp_path):
    return Copy(corpus, tmp_path)


OPTIONS = {"sequence_length": 32, "num_samples": 600, "random_seed": 5, "cache": False}


def test_a_sample_is_readable_again_after_a_repair(corpus, copy):
    dataset = feedline.open(copy.prefix, **OPTIONS)
    copy.damage()
    whole = feedline.open(corpus, **OPTIONS)
    # In sequence, so that samples are read ahead.
    with pytest.raises(feedline.CorruptError):
        for index in range(len(dataset)):
            dataset[index]
    with pytest.raises(feedline.CorruptError):
        dataset[index]
    copy.repair()
    np.testing.assert_array_equal(dataset[index]["tokens"], whole[index]["tokens"])


def test_a_loader_tries_a_failed_batch_again(corpus, copy):
    whole = feedline.Loader(feedline.open(corpus, **OPTIONS), micro_batch_size=4)
    with feedline.Loader(feedline.open(copy.prefix, **OPTIONS), micro_batch_size=4) as loader:
        copy.damage()
        found, errors = [], 0
        # Also samples that are read together with the damaged one may fail at first.
        while errors < 5:
            try:
                found.append(next(loader)["tokens"].copy())
            except feedline.CorruptError:
                errors += 1
        assert 0 < len(found) < len(loader)
        copy.repair()
        found.extend(batch["tokens"].copy() for batch in loader)
    with whole:
        expected = [batch["tokens"].copy() for batch in whole]
    np.testing.assert_array_equal(np.stack(found), np.stack(expected))


def test_a_state_of_other_settings_is_refused(corpus):
    plain = feedline.open(corpus, **OPTIONS)
    reset = feedline.open(
        corpus, **OPTIONS, tokenizer="gpt2", reset_at_document=True, mask_eod_loss=True
    )
    loaders = [feedline.Loader(each, micro_batch_size=2) for each in (plain, reset)]
    for ours, theirs in (loaders, loaders[::-1]):
        with pytest.raises(feedline.OtherDataError, match="reset_at_document"):
            ours.load_state_dict(theirs.state_dict())


def test_spellings_of_a_split_are_the_same_data(corpus):
    splits = ["949,50,1", "949, 50, 1", "949.0,50,1"]
    found = {feedline.open(corpus, **OPTIONS, split=split).fingerprint for split in splits}
    assert len(found) == 1
