"""The page of results is what its program makes of the JSON beside it."""

from __future__ import annotations

import shutil
from pathlib import Path

from benchmarks.common import RESULTS
from benchmarks.table import main


def test_the_page_is_current(tmp_path: Path) -> None:
    for path in RESULTS.glob("*.json"):
        shutil.copy(path, tmp_path)
    main(str(tmp_path))
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == (RESULTS / "README.md").read_text(encoding="utf-8")
