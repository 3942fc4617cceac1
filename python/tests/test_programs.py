"""The programs of the wheel: they behave as native programs, without the interpreter's part."""

import importlib.metadata
import json
import pathlib
import signal
import socket
import subprocess
import sys

import pytest

import feedline

BIN = pathlib.Path(sys.executable).parent
STOPPED = 75
SECONDS_MAX = 60


def run(*command, **options):
    options.setdefault("timeout", SECONDS_MAX)
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def shell(script, *arguments):
    return run("bash", "-c", script, "bash", *arguments)


def start_preprocess(tmp_path):
    """A run that waits for more of its input, which is a pipe."""
    command = [BIN / "preprocess", "--json-in", "-", "--out", tmp_path / "out"]
    pipe = subprocess.PIPE
    child = subprocess.Popen([*command, "--quiet"], stdin=pipe, stdout=pipe, stderr=pipe)
    # The write ends when the program reads: a pipe holds 64 KiB.
    child.stdin.write(b'{"text": "Hello world"}\n' * 100_000)
    child.stdin.flush()
    return child


def ended(child):
    _, errors = child.communicate(timeout=SECONDS_MAX)
    return child.returncode, errors.decode()


@pytest.mark.parametrize("name", ["feedline", "preprocess"])
def test_names_and_exit_codes(name):
    version = run(BIN / name, "--version")
    expected = f"{name} {importlib.metadata.version('feedline')}\n"
    assert (version.returncode, version.stdout, version.stderr) == (0, expected, "")
    usage = run(BIN / name, "--help")
    assert usage.returncode == 0
    assert f"Usage: {name} " in usage.stdout
    refused = run(BIN / name, "--no-such-flag")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith("error: unexpected argument '--no-such-flag'")
    # Bytes that are not UTF-8 reach the program.
    absent = run(BIN / name, *(["inspect"] if name == "feedline" else ["--out", "x", "--input"]),
                 b"/absent/\xff")
    assert absent.returncode == 2
    assert "Traceback" not in absent.stderr


def test_a_failed_check_is_1(corpus, tmp_path):
    assert run(BIN / "feedline", "check", corpus).returncode == 0
    for suffix in (".bin", ".idx", ".crc"):
        raw = bytearray(pathlib.Path(corpus + suffix).read_bytes())
        raw[100] ^= suffix == ".bin"
        (tmp_path / f"broken{suffix}").write_bytes(raw)
    damaged = run(BIN / "feedline", "check", tmp_path / "broken")
    assert (damaged.returncode, damaged.stderr) == (1, "")


def test_the_module_is_the_program(corpus, tmp_path):
    as_script = run(BIN / "feedline", "inspect", corpus, "--json")
    as_module = run(sys.executable, "-m", "feedline", "inspect", corpus, "--json")
    assert (as_module.returncode, as_module.stdout) == (0, as_script.stdout)
    assert "Usage: feedline " in run(sys.executable, "-m", "feedline", "--help").stdout
    # Neither the path of programs nor the current folder matters, nor do slow imports.
    (tmp_path / "feedline").mkdir()
    (tmp_path / "feedline" / "__init__.py").write_text("raise SystemExit('wrong package')")
    found = run(BIN / "feedline", "inspect", corpus, "--json", cwd=tmp_path, env={})
    assert (found.returncode, found.stdout) == (0, as_script.stdout)
    names = "import feedline.__main__, sys; print({'numpy', 'torch'} & {*sys.modules})"
    assert run(sys.executable, "-c", names).stdout == "set()\n"


def test_closed_pipes_and_streams(corpus):
    for program in ("feedline completions bash", "preprocess completions bash"):
        # The reader has ended before the program writes.
        closed = shell(f"{{ sleep 0.2; {BIN}/{program}; echo $? >&2; }} | true")
        assert closed.stderr == "0\n", closed.stderr
    # No file of the program gets the number of a closed stream.
    for streams in (">&-", "<&- >&- 2>&-"):
        assert shell(f'"$1" inspect "$2" {streams}', BIN / "feedline", corpus).returncode == 0


def test_closed_streams_do_not_reach_outputs(tmp_path):
    (tmp_path / "lines.jsonl").write_text('{"text": "Hello world"}\n')
    command = 'cd "$1" && exec "$2" --json-in lines.jsonl --out out <&- >&- 2>&-'
    assert shell(command, tmp_path, BIN / "preprocess").returncode == 0
    assert (tmp_path / "out_text_document.bin").read_bytes() == b"\x88\x3c\xe3\x03"


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_and_the_run_resumes(sent, tmp_path):
    child = start_preprocess(tmp_path)
    child.send_signal(sent)
    code, errors = ended(child)
    assert code == STOPPED
    assert errors.endswith("stopped on request; --resume continues from here\n"), errors


def test_other_signals_have_their_default_action(tmp_path):
    child = start_preprocess(tmp_path)
    child.send_signal(signal.SIGHUP)
    assert ended(child) == (-signal.SIGHUP, "")
    # A verb that only reads does not catch SIGINT, either. This one waits for a server.
    server = socket.create_server(("127.0.0.1", 0))
    server.settimeout(SECONDS_MAX)
    (tmp_path / "keys").write_text("[default]\naws_access_key_id=a\naws_secret_access_key=b\n")
    options = f"endpoint=http://127.0.0.1:{server.getsockname()[1]}&credentials={tmp_path}/keys"
    command = [BIN / "feedline", "inspect", f"s3://bucket/key?{options}&profile=default"]
    pipe = subprocess.PIPE
    with server, subprocess.Popen(command, stdout=pipe, stderr=pipe) as child:
        connection, _ = server.accept()
        child.send_signal(signal.SIGINT)
        with connection:
            assert ended(child) == (-signal.SIGINT, "")


def test_warnings_are_those_of_the_program(tmp_path):
    (tmp_path / "lines.jsonl").write_text('{"text": "good"}\n{"text": 1}\n')
    command = [BIN / "preprocess", "--json-in", tmp_path / "lines.jsonl", "--on-error", "skip"]
    shown = run(*command, "--out", tmp_path / "shown")
    assert shown.returncode == 0
    assert shown.stderr.startswith("warning: line skipped: "), shown.stderr
    assert run(*command, "--out", tmp_path / "quiet", "--quiet").stderr == ""


def test_processes_of_a_benchmark_are_this_program(tmp_path):
    common = ["--rounds", "1", "--processes", "2", "--json"]
    saved = run(BIN / "feedline", "ckpt", "bench", tmp_path, "--bytes", "1MB", "--rows",
                "processes", *common)
    assert saved.returncode == 0, saved.stderr
    assert [row["processes"] for row in json.loads(saved.stdout)["processes"]] == [1, 2]
    measured = run(BIN / "feedline", "bench", tmp_path, "--bytes", "16MiB", "--duration", "50ms",
                   "--files", "8", "--patterns", "names", "--no-fio", *common)
    assert measured.returncode == 0, measured.stderr
    assert list(tmp_path.iterdir()) == []


def test_symbols_of_the_module_are_checked():
    checker = pathlib.Path(__file__).parents[2] / "scripts" / "check_binaries.py"
    module = feedline._feedline.__file__
    for limit, code in (("2.999", 0), ("2.5", 1)):
        checked = run(sys.executable, checker, "--glibc", limit, module)
        assert checked.returncode == code, checked.stderr
        assert "_feedline.abi3.so: glibc 2." in checked.stdout
    assert "expected symbols up to glibc 2.5, found GLIBC_2." in checked.stderr
