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
