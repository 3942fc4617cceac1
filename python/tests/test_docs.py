"""The Python code of the pages runs unchanged."""

import pathlib
import re

import pytest

from conftest import write_documents

ROOT = pathlib.Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"<!-- run by make test-python -->\n```python\n(.*?)```\n", re.DOTALL)
PAGES = ["README.md", "python/README.md"]


@pytest.mark.parametrize("page", PAGES)
def test_blocks_run(page, tmp_path, monkeypatch):
    blocks = BLOCK.findall((ROOT / page).read_text())
    assert blocks
    monkeypatch.chdir(tmp_path)
    for name in ("my.jsonl", "text.jsonl"):
        write_documents(tmp_path / name, 2000, seed=6)
    (tmp_path / "tokens").mkdir()
    names = {}
    for block in blocks:
        exec(compile(block, page, "exec"), names)  # in one namespace, as a reader would
    rows, length = names["batch"]["tokens"].shape
    assert rows == 8 and length in (1024, 2048)


ROW = re.compile(r"\| `([\w-]+)` \| ([\d.]+) \| ([\d.]+) \|")
PIN = re.compile(r'([\w.-]+)==(\S+)(?: ; python_version >= "3\.12")?')


def pins(name):
    lines = (ROOT / "scripts" / name).read_text().splitlines()
    return {match[1]: match[2] for match in map(PIN.fullmatch, lines) if match}


def test_the_table_of_frameworks_has_the_tested_releases():
    rows = ROW.findall((ROOT / "docs/reference/frameworks.md").read_text())
    oldest = {name.replace("-", "_"): pin for name, pin in pins("sockets-oldest.txt").items()}
    newest = pins("sockets.txt")
    assert len(rows) == 13
    for name, first, last in rows:
        assert (oldest[name.replace("-", "_")], newest[name]) == (first, last), name


def test_the_package_page_has_the_tested_releases():
    page = " ".join((ROOT / "python/README.md").read_text().split())
    newest = pins("sockets.txt")
    names = {"Megatron-core": "megatron-core", "Lightning": "lightning", "Grain": "grain"}
    line = re.search(r"The tests use (.*?)\. \[", page)[1]
    found = re.findall(r"([\w-]+) (\d[\d.]*\d)(?: to (\d[\d.]*\d))?", line)
    assert len(found) == 8
    for name, first, last in found:
        assert newest[names.get(name, name)] == (last or first), name


FRAMEWORKS = "torch torchdata Lightning HF_Trainer accelerate Megatron torchtitan Grain".split()
PARTS = ["first loop", "second loop", "evaluation", "workers", "resume", "ranks"]
LOOP = re.compile(r"\| ([\w ]+) \| ([a-z ]+) \| ([^|]+) \| `(\w+)` \|")


def test_each_cell_of_the_table_of_loops_has_a_test():
    page = (ROOT / "docs/reference/frameworks.md").read_text()
    rows = LOOP.findall(page.split("## Loops")[1].split("\n## ")[0])
    cells = [(framework.replace("_", " "), part) for framework in FRAMEWORKS for part in PARTS]
    assert [(framework, part) for framework, part, _, _ in rows] == cells
    sources = (ROOT / "python/tests/sockets").glob("test_*.py")
    tests = set(re.findall(r"^def test_(\w+)\(", "".join(map(pathlib.Path.read_text, sources)), re.M))
    assert {test for _, _, _, test in rows} - tests == set()
