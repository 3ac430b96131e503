"""Tables and plots of README, docs and experiments are generated from committed JSON files of committed programs."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
REPORTED = ("kv_reuse", "serial_blocks", "slot_certainty", "slot_size", "thresholds")
"""Experiments whose table.md and plot `refusion-lit report` makes, from predictions that are not committed."""


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the registry, filled."""
    monkeypatch.syspath_prepend(str(ROOT))
    from docs.figures import (
        pages,  # noqa: F401 # pyright: ignore[reportMissingImports,reportUnusedImport]
        registry,  # pyright: ignore[reportMissingImports]
    )

    return registry


@pytest.mark.usefixtures("registry")
def test_every_page_and_plot_is_what_the_json_gives() -> None:
    """If this fails, run ``nox -s figures``."""
    from docs.figures.__main__ import outdated  # pyright: ignore[reportMissingImports]

    assert [str(path.relative_to(ROOT)) for path in outdated()] == []


def test_another_figure_in_the_json_makes_another_page_and_plot(
    registry: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "experiments/refusion_pays/README.md"
    read, page = registry.read, (ROOT / name).read_text(encoding="utf-8")

    def change(source: str) -> Any:
        text = json.dumps(read(source))
        text = re.sub(r'("score": \d\.\d*)', r"\g<1>1", text)
        return json.loads(re.sub(r'("perplexity_under_base": )1\.', r"\g<1>9.", text))

    names = "controlled_comparison/score_vs_tokens_per_forward.png", "latin_study/scores.png"
    plots = {name: registry.PLOTS[f"experiments/{name}"] for name in names}
    before = {name: registry.digest(plot.values()) for name, plot in plots.items()}
    monkeypatch.setattr(registry, "read", change)
    filled = registry.fill(page, name)
    assert re.search(r"\| 9\.\d\d \|", filled)
    assert not re.search(r"\| 9\.\d\d \|", page)
    assert all(registry.digest(plot.values()) != before[name] for name, plot in plots.items())


def test_each_table_is_shown_and_each_readme_names_its_source(registry: ModuleType) -> None:
    from docs.figures.pages import pages  # pyright: ignore[reportMissingImports]

    texts = {path: path.read_text(encoding="utf-8") for path in pages()}
    shown = {name for text in texts.values() for name in registry.names_in(text)} | set(registry.FILES.values())
    assert shown == set(registry.TABLES)
    for folder in sorted((ROOT / "experiments").glob("*/results.json")):
        page = folder.parent / "README.md"
        neighbours = page.parent.glob("*.md")
        source = f"<code>experiments/{folder.parent.name}/results.json</code>: "
        assert any(source in path.read_text(encoding="utf-8") for path in neighbours), f"{page} names no source"


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ("<!-- figures: demo -->\nno end", "expected <!-- end --> after each"),
        ("<!-- figures: demo -->\n<!-- figures: demo -->\n<!-- end -->", "expected <!-- end --> after each"),
        (
            "<!-- figures: dmo -->\n<!-- end -->\n<!-- sources -->\n<!-- end -->",
            "expected <!-- figures: NAME -->.*got dmo",
        ),
        ("<!-- figures: demo -->\n<!-- end -->", "expected <!-- sources -->"),
    ],
)
def test_a_wrong_marker_is_refused(registry: ModuleType, page: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"docs/a.md: {message}"):
        registry.fill(page, "docs/a.md")


def test_uncommitted_changes_show_in_the_table(registry: ModuleType) -> None:
    clean, dirty, gone = (letter * 40 for letter in "abc")
    result: dict[str, Any] = {"git": {"commit": clean, "dirty": False}}
    assert registry.provenance(result) == "commit aaaaaaaaaa"
    result["runs"] = [{"git": {"commit": dirty, "dirty": True}}, {"git": {"commit": gone, "dirty": False}}]
    result["commit_note"] = f"commit {gone[:10]} is not in the repository's history"
    text = "commit aaaaaaaaaa; <b>with uncommitted changes</b> to commit bbbbbbbbbb; "
    assert registry.provenance(result) == text + "commit cccccccccc is not in the repository's history"
    assert registry.provenance({"parts": []}) == "no commit recorded"
    page = (ROOT / "experiments" / "infilling" / "README.md").read_text(encoding="utf-8")
    committed = registry.read("experiments/infilling/results.json")["environment"]["git"]
    assert ("<b>with uncommitted changes</b>" in page) == committed["dirty"]


def test_a_picture_says_what_it_was_drawn_from(registry: ModuleType, tmp_path: Path) -> None:
    for name in ("experiments/latin_study/scores.png", "experiments/real_conversion/losses.svg"):
        plot, path = registry.PLOTS[name], tmp_path / Path(name).name
        assert registry.drawn_from(path) is None
        plot.draw(plot.values(), path)
        assert registry.drawn_from(path) is None, "a script that draws alone says nothing"
        registry.draw(plot, path)
        assert registry.drawn_from(path) == registry.digest(plot.values())
        registry.draw(plot, path)
        assert path.read_text(errors="ignore").count("<!-- data: ") == (path.suffix == ".svg")


def _git(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=False)


UNSTAMPED = {
    "experiments/lossless/drafter/drafter.json", "experiments/lossless/training.json",
    "experiments/main_results/published.json", "experiments/refusion_pays/training.json",
}  # fmt: skip
"""Files that no program of ours wrote as its result: two logs of trainings that say so, the paper's, a model's."""


def test_stamped_commits_are_in_the_history_or_the_file_says_that_they_are_not(registry: ModuleType) -> None:
    is_clone = (ROOT / ".git").exists() and shutil.which("git") is not None  # an sdist may lie in another repository
    if not is_clone or _git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("needs the whole history of the repository")
    listed = _git("ls-files", "benchmarks/*.json", "experiments/*.json").stdout.split()
    assert len(listed) > 40
    num_stamps, unstamped = 0, set()
    for name in listed:
        values = registry.read(name)
        unstamped |= {name} - {name for _ in registry.stamps(values)}
        note = values.get("commit_note", "")
        for commit in {commit for commit, _ in registry.stamps(values)}:
            num_stamps += 1
            is_kept = _git("merge-base", "--is-ancestor", commit, "HEAD").returncode == 0
            assert is_kept != (commit[:10] in note), (
                f"{name}: commit {commit} is {'' if is_kept else 'not '}an ancestor of HEAD; "
                f"measure again on a commit, or say so in commit_note, got {note!r}"
            )
    assert num_stamps > 40
    assert unstamped == UNSTAMPED


def test_each_result_of_uncommitted_changes_says_so_where_it_is_shown(registry: ModuleType) -> None:
    from docs.figures.pages import pages  # pyright: ignore[reportMissingImports]

    shown = "".join(path.read_text(encoding="utf-8") for path in [*pages(), *ROOT.glob("experiments/*/table.md")])
    results = {
        name.relative_to(ROOT).as_posix(): registry.read(str(name)) for name in ROOT.glob("experiments/*/*.json")
    }
    dirty = {name for name, values in results.items() if any(changed for _, changed in registry.stamps(values))}
    made_up = {"environment": {"git": {"commit": "0" * 40, "dirty": True}}}
    assert "uncommitted" in registry.provenance(made_up)
    assert registry.provenance(made_up) not in shown
    assert [name for name in dirty if f"<code>{name}</code>: {registry.provenance(results[name])}" not in shown] == []


def test_no_setting_is_chosen_on_the_test_prompts(registry: ModuleType) -> None:
    from experiments.controlled_comparison import plot  # pyright: ignore[reportMissingImports]

    runs = registry.read("experiments/controlled_comparison/results.json")["runs"]
    with pytest.raises(KeyError):
        plot.best(runs, [("soft tail", "soft_tail", "card_t")], ["sheet"])


def test_commands_in_results_run_on_any_machine() -> None:
    """Their paths are relative to the repository: an absolute one is of the machine that measured."""
    results = [path for folder in ("experiments", "benchmarks") for path in sorted((ROOT / folder).rglob("*.json"))]
    stamped = [path for path in results if '"command"' in path.read_text(encoding="utf-8")]
    assert len(stamped) > 20
    absolute = re.compile(r'["=@](/(?!bin/|usr/)[\w.-]+/[^"\s]+)')
    actual = {str(path.relative_to(ROOT)): absolute.findall(path.read_text(encoding="utf-8")) for path in stamped}
    assert {name: paths for name, paths in actual.items() if paths} == {}


@pytest.mark.parametrize("name", REPORTED)
def test_a_report_of_an_experiment_is_of_its_results(name: str) -> None:
    folder = ROOT / "experiments" / name
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))["results"]
    shown = {}
    header, _, *lines = (folder / "table.md").read_text(encoding="utf-8").splitlines()
    titles = [cell.strip() for cell in header.strip("|").split("|")]
    for line in lines:
        cells = [cell.strip().replace("\\", "") for cell in line.strip("|").split("|")]
        row = cells[0].partition(" ")[0]  # the class may stand beside the name
        if row in results:
            figures = (cells[titles.index(title)].partition(" ")[0] for title in ("score %", "tokens/forward"))
            shown[row] = tuple(figures)
    expected = {
        row: (f"{100 * figures['score']:.1f}", f"{figures['tokens_per_forward']:.2f}")
        for row, figures in results.items()
    }
    assert shown == expected
    picture = (folder / "tradeoff.svg").read_text(encoding="utf-8")
    drawn = re.findall(r"(\w+)[^<>\n]*: score ([\d.]+) %[^<>\n]*?, ([\d.]+) tokens per forward", picture)
    assert {row: (score, speed) for row, score, speed in drawn} == expected
