"""The report of written runs: what is read, compared, shown and escaped."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path

import pytest

from refusion_lit.reports import compare, read_runs, write_report
from refusion_lit.reports.intervals import Resampling
from refusion_lit.reports.papers import latex_table, markdown_table

QUICK = Resampling(num_resamples=50)
EVIL = "<script>alert(1)</script>&\"'$x_1$"


def _line(identity: str, score: float | None, tokens: int, forwards: int, text: str = "answer") -> str:
    return json.dumps(
        {"id": identity, "prompt": text, "response": text, "response_ids": [], "reference": text, "score": score,
         "num_tokens": tokens, "num_forwards": forwards, "seconds": 0.1}
    )  # fmt: skip


def _run(
    folder: Path,
    decoders: dict[str, Sequence[str]],
    *,
    mismatches: dict[str, list[str]] | None = None,
    options: dict[str, object] | None = None,
) -> Path:
    """Write a run as ``test`` does; ``decoders`` maps names to lines of predictions."""
    folder.mkdir(parents=True)
    results = {}
    for name, lines in decoders.items():
        values = [json.loads(line) for line in lines]
        (folder / f"predictions_{name}.jsonl").write_text("".join(f"{line}\n" for line in lines))
        tokens, forwards = (sum(v[key] for v in values) for key in ("num_tokens", "num_forwards"))
        results[name] = {
            "score": sum(v["score"] or 0 for v in values) / len(values), "tokens_per_forward": tokens / forwards,
            "num_prompts": len(values), "num_forwards": forwards, "calls_per_batch": 7.5, "tokens_per_second": 123.4,
            "positions_per_token": 2.0, "latency_median": 0.1, "latency_p95": 0.2,
        }  # fmt: skip
    content = {
        "sampling": {"max_new_tokens": 8, "temperature": 0.0}, "batch_size": 3,
        "decoders": {name: {"class": "ReFusion"} for name in decoders}, "results": results,
        "mismatches": mismatches or {},
        "environment": {"command": ["refusion-lit", "test", "--x=a b"], "seed": 11, "git": None,
                        "packages": {"torch": "2.99"}, "hardware": {"devices": ["Some GPU"], "num_cpus": 4}},
        "config": {"trainer": {"max_steps": 3}, "note": EVIL},
    }  # fmt: skip
    (folder / "results.json").write_text(json.dumps(content))
    if options is not None:
        (folder.parent / "point.json").write_text(json.dumps({"options": options}))
    return folder


def _lines(scores: Sequence[float], tokens: int = 10, forwards: int = 2) -> list[str]:
    return [_line(f"p{i}", score, tokens, forwards) for i, score in enumerate(scores)]


def _sweep(root: Path) -> Path:
    for i, size in enumerate((4, 8, 16)):
        for j, threshold in enumerate((0.5, 0.9)):
            options = {"model.decoders.refusion.slot_size": size, "model.decoders.refusion.slot_threshold": threshold}
            lines = _lines([1.0, float(j), 0.0], tokens=10 + 2 * i, forwards=2 + j)
            _run(root / "points" / f"{i}{j}" / "test", {"refusion": lines}, options=options)
    failed = root / "points" / "99"
    failed.mkdir()
    (failed / "point.json").write_text(json.dumps({"options": {"model.decoders.refusion.slot_size": 99}}))
    (failed / "outcome.json").write_text(json.dumps({"status": "failed", "error": "log\nout of memory"}))
    return root


class _Page(HTMLParser):
    """Collects tags, attributes that could load something, and the text outside styles."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.loads: list[str] = []
        self.text = ""
        self.policy = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        values = dict(attrs)
        assert not any(name.startswith("on") for name in values)
        self.loads += [values[name] or "" for name in ("src", "href", "srcset", "action", "data") if name in values]
        if values.get("http-equiv") == "Content-Security-Policy":
            self.policy = values["content"] or ""

    def handle_data(self, data: str) -> None:
        self.text += data


def _page(path: Path) -> _Page:
    page = _Page()
    page.feed(path.read_text(encoding="utf-8"))
    return page


def test_the_page_loads_nothing_and_escapes_everything(tmp_path: Path) -> None:
    lines = [_line(f"p{i}{EVIL}", 1.0, 4, 2, text=EVIL) for i in range(3)]
    run = _run(tmp_path / "run", {"odd $name_": lines, "_b": lines}, mismatches={"_b": [EVIL]})
    files = write_report([run], resampling=QUICK)
    assert files[0] == run / "report" / "report.html"
    page = _page(files[0])
    assert not {"script", "iframe", "link", "object", "embed", "base"} & set(page.tags)
    assert page.loads
    assert all(value.startswith("data:image/png;base64,") for value in page.loads)
    assert page.policy.startswith("default-src 'none'")
    assert "script-src" not in page.policy
    assert page.text.count(EVIL) > 6  # prompts, responses, reference, config: shown as they are
    for text in ("refusion-lit test '--x=a b'", "Some GPU", "torch 2.99", "max_steps: 3", "11"):
        assert text in page.text
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in files[1:])


def test_rows_have_intervals_differences_and_marks(tmp_path: Path) -> None:
    good, bad = _lines([1.0] * 20, forwards=1), _lines([0.0] * 20, forwards=5)
    run = _run(tmp_path / "run", {"good": good, "bad": bad}, mismatches={"bad": ["it attends otherwise"]})
    comparison = compare(read_runs([run]), "bad", QUICK)
    first, second = comparison.measured
    assert (first.score.estimate, first.score.low, first.tokens_per_forward.high) == (100, 100, 10)
    assert (first.on_front, second.on_front) == (True, False)
    (difference,) = comparison.differences
    assert difference.score is not None
    assert (difference.row.label, difference.score.low, difference.num_shared) == ("good", 100, 20)
    assert comparison.areas == {"good": (1000.0, 1), "bad": (0.0, 1)}
    markdown, latex = markdown_table(comparison), latex_table(comparison)
    assert "| bad * |" in markdown
    assert "| good |" in markdown
    assert r"bad$^{*}$ &" in latex
    assert "7.5 | 3 |" in markdown
    assert "7.5 & 3 &" in latex
    for table in (markdown, latex):
        assert "the model was not trained for this decoder" in table
    write_report([run], tmp_path / "out", formats=("html", "markdown", "latex"), resampling=QUICK)
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"report.html", "table.md", "table.tex", "tradeoff.png"}
    assert "it attends otherwise" in _page(tmp_path / "out" / "report.html").text


def test_differences_are_paired_by_prompt_id(tmp_path: Path) -> None:
    one = [_line(f"p{i}", 1.0, 8, 2) for i in range(6)]
    two = [_line(f"p{i}", 0.0 if i < 6 else 1.0, 8, 1) for i in reversed(range(3, 9))]
    first, second = _run(tmp_path / "a", {"d": one}), _run(tmp_path / "b", {"d": two})
    (difference,) = compare(read_runs([first, second]), resampling=QUICK).differences
    assert (difference.num_shared, difference.num_only_row, difference.num_only_baseline) == (3, 3, 3)
    assert difference.score is not None
    assert difference.score.estimate == -100  # over the shared three; over all it is -50
    page = _page(write_report([first, second], tmp_path / "out", resampling=QUICK)[0]).text
    assert "did not see the same prompts: 3 shared, 3 only in the first, 3 only in the second" in page


def test_a_sweep_has_curves_and_heat_maps(tmp_path: Path) -> None:
    collection = read_runs([_sweep(tmp_path / "sweep")])
    comparison = compare(collection, resampling=QUICK)
    assert len({m.row.label for m in comparison.measured}) == 6
    assert comparison.measured[0].row.label == "refusion (slot_size=4, slot_threshold=0.5)"
    assert comparison.areas["refusion"][1] == 6
    score, speed = comparison.grids
    assert (score.y_values, score.x_values) == (["4", "8", "16"], ["0.5", "0.9"])
    assert [row[0] for row in score.values] == pytest.approx([100 / 3] * 3)
    assert speed.values[2] == pytest.approx([14 / 2, 14 / 3])
    assert any("slot_size=99" in note and "out of memory" in note for note in comparison.collection.notes)
    alone = read_runs([tmp_path / "sweep" / "points" / "00" / "test" / "results.json"])
    assert [row.label for row in alone.rows] == ["refusion"]
    files = write_report([tmp_path / "sweep"], resampling=QUICK)
    assert len([path for path in files if path.name.startswith("heat_map")]) == 2
    assert _page(files[0]).tags.count("img") == 3


def test_a_run_beside_a_sweep_has_no_options(tmp_path: Path) -> None:
    run = _run(tmp_path / "run", {"refusion": _lines([1.0])})
    comparison = compare(read_runs([run, _sweep(tmp_path / "sweep")]), resampling=QUICK)
    assert comparison.measured[0].row.label == "run: refusion"
    assert comparison.measured[1].row.label == "sweep: refusion (slot_size=4, slot_threshold=0.5)"
    assert {grid.method for grid in comparison.grids} == {"sweep: refusion"}
    assert comparison.areas["run: refusion"][1] == 1


def test_folders_of_the_same_name_are_told_apart(tmp_path: Path) -> None:
    first, second = (_run(tmp_path / name / "run", {"d": _lines([1.0])}) for name in "ab")
    assert len({row.method for row in read_runs([first, second]).rows}) == 2


def test_a_baseline_by_decoder_is_each_runs_own(tmp_path: Path) -> None:
    for name, base in (("x", 1.0), ("y", 0.0)):
        _run(tmp_path / "s" / name, {"base": _lines([base] * 4), "other": _lines([1.0] * 4)})
    differences = compare(read_runs([tmp_path / "s"]), "base", QUICK).differences
    assert [d.score.estimate for d in differences if d.score] == [0.0, 100.0]
    with pytest.raises(ValueError, match=r"baseline: expected one of base, other.*got 'none'"):
        compare(read_runs([tmp_path / "s"]), "none", QUICK)


def test_incomplete_folders_are_read_as_far_as_they_go(tmp_path: Path) -> None:
    run = _run(tmp_path / "run", {"a": _lines([1.0, 0.5]), "b": [_line("p0", None, 3, 1)], "gone": _lines([1.0])})
    path = run / "predictions_a.jsonl"
    path.rename(run / "predictions_a_rank0.jsonl")
    (run / "predictions_a_rank1.jsonl").write_text(_line("p0", 0.0, 9, 9) + "\n" + _line("p2", 1.0, 9, 9)[:-9])
    (run / "predictions_gone.jsonl").unlink()
    (tmp_path / "run" / "other").mkdir()
    (tmp_path / "run" / "other" / "results.json").write_text('{"exact_match": 1}')
    comparison = compare(read_runs([run]), resampling=QUICK)
    a, b, gone = comparison.measured
    assert (len(a.row.predictions), a.score.estimate) == (2, 75)  # the repeated p0 counts once
    assert b.score.estimate == 0
    assert (gone.has_intervals, gone.score.estimate) == (False, 100)
    notes = " ".join(comparison.collection.notes)
    assert "predictions_a_rank1.jsonl, line 2" in notes
    assert "no predictions of gone" in notes
    assert "\N{EN DASH}" in _page(write_report([run], resampling=QUICK)[0]).text


@pytest.mark.parametrize("exists", [False, True])
def test_folders_without_results_are_refused(tmp_path: Path, exists: bool) -> None:
    if exists:
        (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"RUN: expected .*empty"):
        write_report([tmp_path / "empty"])


def test_latex_and_markdown_escape_names(tmp_path: Path) -> None:
    run = _run(tmp_path / "run", {"a_b|50%&<x>": _lines([1.0])})
    comparison = compare(read_runs([run]), resampling=QUICK)
    assert r"a\_b|50\%\&\textless{}x\textgreater{} &" in latex_table(comparison)
    row = markdown_table(comparison).splitlines()[2]
    assert r"a\_b\|50%&amp;&lt;x&gt;" in row
    assert len(re.findall(r"(?<!\\)\|", row)) == 9
