"""The Python of docs/python.md and of the notebook runs as it stands there."""

import json
import re
from pathlib import Path

import matplotlib
import pytest

from common import load

DOCS = Path(__file__).parents[1] / "docs"
NOTEBOOK = DOCS / "notebooks" / "cartpole.ipynb"

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def execute(pieces, tmp_path, monkeypatch):
    """Run pieces of code one after the other in an empty folder; return their names."""
    monkeypatch.chdir(tmp_path)
    matplotlib.use("Agg")
    scope = {"__name__": "__main__"}
    for number, code in enumerate(pieces):
        exec(compile(code, f"<piece {number}>", "exec"), scope)
    return scope


def test_the_page(tmp_path, monkeypatch, capsys):
    page = (DOCS / "python.md").read_text()
    scope = execute(re.findall(r"```python\n(.*?)```", page, re.DOTALL), tmp_path, monkeypatch)
    assert capsys.readouterr().out.splitlines()[-1] == "12000"
    assert scope["total"] >= 8
    assert [load(tmp_path / "runs/by_hand", step).step for step in (8000, 10000)] == [8000, 10000]


def test_the_notebook(tmp_path, monkeypatch, capsys):
    notebook = json.loads(NOTEBOOK.read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids)
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in code)
    scope = execute(["".join(cell["source"]) for cell in code], tmp_path, monkeypatch)
    assert re.search(r"^\d+\.\d ± \d+\.\d$", capsys.readouterr().out, re.MULTILINE)
    # It learns: 9 is what an untrained policy gets.
    assert scope["mean"] > 50 and max(scope["returns"].values()) > 50
    assert len(scope["upper"].lines) == len(scope["lower"].lines) == 1
    assert load(scope["folder"]).step == 24_000
    assert f"({NOTEBOOK.relative_to(DOCS)})" in (DOCS / "python.md").read_text()
