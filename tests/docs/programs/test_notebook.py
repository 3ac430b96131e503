"""The notebook runs from the first cell to the last; training and test are made short."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[3] / "docs" / "notebooks" / "tour.ipynb"


def _read_figures(notebook: Any) -> dict[str, float]:
    """Return the tokens per forward that each decoder's line says."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    text = "".join(output.text for output in outputs if output.get("name") == "stdout")
    return {
        name: float(tokens) for name, tokens in re.findall(r"^(\w+) .* ([\d.]+) tokens/forward$", text, re.MULTILINE)
    }


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_the_tour_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    monkeypatch.chdir(tmp_path)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    stored = _read_figures(notebook)
    (training,) = (cell for cell in notebook.cells if cell.source.startswith("max_steps = "))
    training.source = "max_steps = 20\n" + training.source.partition("\n")[2]
    (data,) = (cell for cell in notebook.cells if "num_test=100" in cell.source)
    data.source = data.source.replace("num_test=100", "num_test=8")
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()

    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    printed = _read_figures(notebook)
    assert list(printed) == list(stored) == ["ReFusion", "RecomputeKV", "SelfSpeculative"]
    # 20 steps do not give the stored figures, but where no drafts are made it is 1.0 after any training.
    assert all(figures["SelfSpeculative"] > 1 for figures in (stored, printed)), (stored, printed)
    kinds = {kind for output in outputs for kind in output.get("data", {})}
    assert {"text/html", "image/png"} <= kinds
    assert "iframe" in "".join(output["data"].get("text/html", "") for output in outputs if "data" in output)
