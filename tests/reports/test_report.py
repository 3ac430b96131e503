"""Reports of hand-made results: what is read, compared, shown and escaped."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from parsed_page import ParsedPage
from refusion_lit.reports import compare, read_runs, write_report
from refusion_lit.reports.tables import latex_table, markdown_table
from refusion_lit.reports.write import write_test_report
from reports.samples import HOSTILE, QUICK, prediction, predictions, write_run, write_sweep


def _page(path: Path) -> ParsedPage:
    return ParsedPage(path.read_text(encoding="utf-8"))


def test_the_page_loads_nothing_and_escapes_everything(tmp_path: Path) -> None:
    lines = [prediction(f"p{i}{HOSTILE}", 1.0, 4, 2, text=HOSTILE) for i in range(3)]
    run = write_run(tmp_path / "run", {"odd $name_": lines, "_b": lines}, mismatches={"_b": [HOSTILE]})
    files = write_report([run], bootstrap=QUICK)
    assert files[0] == run / "report" / "report.html"
    page = _page(files[0])
    assert page.unsafe == []
    assert page.policy.startswith("default-src 'none'")
    assert "script-src" not in page.policy
    assert page.text.count(HOSTILE) > 6  # prompts, responses, reference, config: shown as they are
    for text in ("refusion-lit test '--x=a b'", "Some GPU", "torch 2.99", "max_steps: 3", "11"):
        assert text in page.text
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in files[1:])


def test_rows_have_intervals_differences_and_marks(tmp_path: Path) -> None:
    good, bad = predictions([1.0] * 20, forwards=1), predictions([0.0] * 20, forwards=5)
    run = write_run(tmp_path / "run", {"good": good, "bad": bad}, mismatches={"bad": ["another attention"]})
    comparison = compare(read_runs([run]), "bad", QUICK)
    first, second = comparison.measured
    assert (first.score.estimate, first.score.low, first.tokens_per_forward.high) == (100, 100, 10)
    assert (first.on_front, second.on_front) == (True, False)
    (difference,) = comparison.differences
    assert difference.score is not None
    assert (difference.row.label, difference.score.low, difference.num_shared) == ("good", 100, 20)
    assert comparison.aup == {"good": (1000.0, 1), "bad": (0.0, 1)}
    markdown, latex = markdown_table(comparison), latex_table(comparison)
    assert "| bad * |" in markdown
    assert "| good |" in markdown
    assert r"bad$^{*}$ &" in latex
    assert "7.5 | 3 |" in markdown
    assert "7.5 & 3 &" in latex
    for table, mark in ((markdown, r"\*"), (latex, "$^{*}$")):
        assert f" {mark}: the model was not trained for this decoder." in table
    write_report([run], tmp_path / "out", formats=("html", "markdown", "latex"), bootstrap=QUICK)
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"report.html", "table.md", "table.tex", "tradeoff.png"}
    assert "another attention" in _page(tmp_path / "out" / "report.html").text


def test_differences_are_paired_by_prompt_id(tmp_path: Path) -> None:
    one = [prediction(f"p{i}", 1.0, 8, 2) for i in range(6)]
    two = [prediction(f"p{i}", 0.0 if i < 6 else 1.0, 8, 1) for i in reversed(range(3, 9))]
    first, second = write_run(tmp_path / "a", {"d": one}), write_run(tmp_path / "b", {"d": two})
    (difference,) = compare(read_runs([first, second]), bootstrap=QUICK).differences
    assert (difference.num_shared, difference.num_only_row, difference.num_only_baseline) == (3, 3, 3)
    assert difference.score is not None
    assert difference.score.estimate == -100  # over the three shared prompts; over all prompts it is -50
    files = write_report([first, second], tmp_path / "out", formats=("html", "markdown"), bootstrap=QUICK)
    page = _page(files[0]).text
    assert "have different prompts: 3 shared, 3 only in the first, 3 only in the second" in page
    assert "In 1 of 1 differences the rows have different prompts" in (tmp_path / "out" / "table.md").read_text()


def test_a_sweep_has_curves_and_heat_maps(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path / "sweep")
    comparison = compare(read_runs([sweep]), bootstrap=QUICK)
    assert len({m.row.label for m in comparison.measured}) == 6
    assert comparison.measured[0].row.label == "refusion (slot_size=4, slot_threshold=0.5)"
    assert comparison.aup["refusion"][1] == 6
    score, speed = comparison.grids
    assert (score.y_values, score.x_values) == (["4", "8", "16"], ["0.5", "0.9"])
    assert [row[0] for row in score.values] == pytest.approx([100 / 3] * 3)
    assert speed.values[2] == pytest.approx([14 / 2, 14 / 3])
    assert any("slot_size=99" in note and "out of memory" in note for note in comparison.collection.notes)
    alone = read_runs([sweep / "points" / "00" / "test" / "results.json"])
    assert [row.label for row in alone.rows] == ["refusion"]
    files = write_report([sweep], bootstrap=QUICK)
    assert len([path for path in files if path.name.startswith("heat_map")]) == 2
    assert [tag for tag, _ in _page(files[0]).elements].count("img") == 3


def test_a_run_next_to_a_sweep_has_no_options(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {"refusion": predictions([1.0])})
    comparison = compare(read_runs([run, write_sweep(tmp_path / "sweep")]), bootstrap=QUICK)
    assert comparison.measured[0].row.label == "run: refusion"
    assert comparison.measured[1].row.label == "sweep: refusion (slot_size=4, slot_threshold=0.5)"
    assert {grid.method for grid in comparison.grids} == {"sweep: refusion"}
    assert comparison.aup["run: refusion"][1] == 1


def test_directories_with_the_same_name_are_distinct_sources(tmp_path: Path) -> None:
    first, second = (write_run(tmp_path / name / "run", {"d": predictions([1.0])}) for name in "ab")
    assert len({row.method for row in read_runs([first, second]).rows}) == 2


def test_a_baseline_given_by_decoder_is_the_one_of_the_same_run(tmp_path: Path) -> None:
    for name, base in (("x", 1.0), ("y", 0.0)):
        write_run(tmp_path / "s" / name, {"base": predictions([base] * 4), "other": predictions([1.0] * 4)})
    collection = read_runs([tmp_path / "s"])
    assert [row.label for row in collection.rows] == ["base [x]", "other [x]", "base [y]", "other [y]"]
    assert [d.score.estimate for d in compare(collection, "base", QUICK).differences if d.score] == [0.0, 100.0]
    with pytest.raises(ValueError, match=r"baseline: expected one of base, other.*got 'none'"):
        compare(collection, "none", QUICK)


def test_incomplete_runs_are_read_as_far_as_possible(tmp_path: Path) -> None:
    decoders = {"a": predictions([1.0, 0.5]), "b": [prediction("p0", None, 3, 1)], "gone": predictions([1.0])}
    run = write_run(tmp_path / "run", decoders)
    (run / "predictions_a.jsonl").rename(run / "predictions_a_rank0.jsonl")
    lines = json.dumps(prediction("p0", 0.0, 9, 9)) + "\n" + json.dumps(prediction("p2", 1.0, 9, 9))[:-9]
    (run / "predictions_a_rank1.jsonl").write_text(lines)
    (run / "predictions_gone.jsonl").unlink()
    for name, content in (("other", '{"exact_match": 1}'), ("damaged", "{")):
        (run / name).mkdir()
        (run / name / "results.json").write_text(content)
    comparison = compare(read_runs([run]), bootstrap=QUICK)
    a, b, gone = comparison.measured
    assert (len(a.row.predictions), a.score.estimate) == (2, 75)  # p0 of the second process is a repetition
    assert b.score.estimate == 0
    assert (gone.has_intervals, gone.score.estimate) == (False, 100)
    notes = " ".join(comparison.collection.notes)
    assert "predictions_a_rank1.jsonl, line 2" in notes
    assert "no predictions of gone" in notes
    assert "damaged/results.json could not be read" in notes
    assert "other" not in notes
    assert "\N{EN DASH}" in _page(write_report([run], bootstrap=QUICK)[0]).text


@pytest.mark.parametrize("exists", [False, True])
def test_directories_without_results_are_refused(tmp_path: Path, exists: bool) -> None:
    if exists:
        (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"RUN: expected .*empty"):
        write_report([tmp_path / "empty"])
    with pytest.warns(match="the results are written, but their report is not: RUN"):
        write_test_report(tmp_path / "empty")


def test_unknown_formats_are_refused(tmp_path: Path) -> None:
    for formats in ((), ("html", "pdf")):
        with pytest.raises(ValueError, match="format: expected some of html, markdown, latex, got"):
            write_report([tmp_path], formats=formats)


def test_latex_and_markdown_escape_names(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {"a_b|50%&<x>": predictions([1.0])})
    comparison = compare(read_runs([run]), bootstrap=QUICK)
    assert r"a\_b|50\%\&\textless{}x\textgreater{} &" in latex_table(comparison)
    row = markdown_table(comparison).splitlines()[2]
    assert r"a\_b\|50%&amp;&lt;x&gt;" in row
    assert len(re.findall(r"(?<!\\)\|", row)) == 9
