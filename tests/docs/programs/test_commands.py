"""Every command of the documentation runs as printed, made small; those marked ``not run`` have options that exist.

A block that needs data, a GPU, a large model or the network has ``<!-- not run: WHY -->`` above it. Sweeps are listed,
not run: ``tests/cli/test_sweep.py`` runs them.
"""

from __future__ import annotations

import io
import json
import re
import shlex
import shutil
from importlib import import_module
from pathlib import Path

import pytest

from cli.conftest import QUICKSTART, TINY
from refusion_lit.cli import COMMANDS, main
from refusion_lit.cli.lightning import parse_only

ROOT = Path(__file__).parents[3]
GOLDEN = str(ROOT / "tests" / "goldens" / "models" / "additions-clean")
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "experiments").glob("*/README.md")),
]
BLOCK = re.compile(r"(<!-- not run: [\w ]+ -->\n)?^ *```(\w*)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
FEW = ["--data.max_eval_prompts=1", "--num_threads=1", "--trainer.enable_progress_bar=false"]
SMALL = {"fit": TINY, "test": FEW, "predict": FEW, "sweep": ["--dry_run"]}


def commands(page: Path) -> list[tuple[list[str], bool]]:
    """Return the commands of a page in order, and whether each one runs here."""
    blocks = BLOCK.findall(page.read_text(encoding="utf-8"))
    lines = [
        (line, not mark)
        for mark, language, block in blocks
        if not language
        for line in block.replace("\\\n", " ").splitlines()
    ]
    named = [(line, runs) for line, runs in lines if line.startswith("refusion-lit ")]
    return [(shlex.split(line, comments=True)[1:], runs) for line, runs in named]


RUN = [page for page in PAGES if any(runs for _, runs in commands(page))]


def _without_missing(option: re.Match[str]) -> str:
    """Leave out runs of the reader, and config files that are not in the repository."""
    return option[0] if option[1] and (ROOT / option[1]).is_file() else ""


def test_all_options_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    cli, checked = parse_only(), 0
    for page in PAGES:
        for (command, *args), _ in commands(page):
            args = [GOLDEN if arg == "MODEL" else arg for arg in args]  # a decoder's options need its model's config
            given = shlex.split(re.sub(r"--config (\S+)|--resume \S+", _without_missing, shlex.join(args)))
            if command not in COMMANDS:
                cli.parse([command, "--config", QUICKSTART, *given])
                checked += 1
            elif hasattr(
                module := import_module(f"refusion_lit.cli.{COMMANDS[command].partition('.')[0]}"), "build_parser"
            ):
                module.build_parser().parse(given)
                checked += 1
    assert checked > 25


@pytest.mark.filterwarnings("ignore:.*all answers of a roll-out got")  # of a model that is hardly trained here
@pytest.mark.parametrize("page", RUN, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_run_in_order(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The recipes of experiments are run in the repository.
    monkeypatch.chdir(ROOT if "experiments" in page.parts else tmp_path)
    (tmp_path / "questions.txt").write_text("12+34,56+78>\n11+22>\n")
    shutil.copy(ROOT / "docs" / "examples" / "record.txt", tmp_path)
    dates = [{"id": str(day), "query": f"Nov {day} 2026", "response": f"2026-11-{day:02}"} for day in range(1, 31)]
    (tmp_path / "dates.jsonl").write_text("".join(json.dumps(row) + "\n" for row in dates))
    if page.name in ("commands.md", "own_data.md", "projection.md"):
        assert main(["init", "."]) == 0
    for args, runs in commands(page):
        if runs:
            monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"12+34>\n")))
            small = SMALL.get(args[0], [])
            if any("own_data" in arg for arg in args):  # a file has all its rows
                small = [option for option in small if not option.startswith("--data.task")]
            assert main([*args, *(option for option in small if option not in args)]) == 0, shlex.join(args)


def test_the_documentation_shows_what_each_command_prints() -> None:
    pages = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))]
    shown = {name for page in pages for block in re.findall(r"```text\n(.*?)```", page, re.DOTALL)
             for name in re.findall(r"^\$ refusion-lit (\S+) .*\n[^$]", block, re.MULTILINE)}  # fmt: skip
    assert shown >= {*COMMANDS, "fit", "validate", "test", "predict"}


def test_the_pages_of_a_newcomer_are_among_those_that_run() -> None:
    names = {str(page.relative_to(ROOT)) for page in RUN}
    assert {"README.md", "docs/index.md", "docs/commands.md", "docs/own_data.md"} <= names
