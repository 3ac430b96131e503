"""Reports of hand-made results: what is read, compared, shown and escaped."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from scipy.stats import binomtest

from refusion_lit.evaluation.predictions import write_predictions
from refusion_lit.reports.comparison import compare
from refusion_lit.reports.plots import curves_plot, speed_plot
from refusion_lit.reports.rows import read_rows, read_scores
from refusion_lit.reports.tables import markdown_table, print_comparison
from refusion_lit.reports.write import html_report, report_results, write_report
from refusion_lit.types import ModelTraits
from reports.samples import HOSTILE, model_card, prediction, predictions, write_run, write_sweep
from support.parsed_page import ParsedPage

TRAITS = ModelTraits(attention="causal", predictions=("mask", "next_token_in_slot"))
SVG = "{http://www.w3.org/2000/svg}"
# The lower bound, in percent, of the interval of 20 right answers out of 20, by another program.
WILSON_20 = 100 * binomtest(20, 20).proportion_ci(method="wilson").low


@contextmanager
def _edit_results(run: Path) -> Iterator[dict[str, Any]]:
    """Yield the contents of a run's ``results.json`` to change; write them afterwards."""
    path = run / "results.json"
    results = json.loads(path.read_text())
    yield results
    path.write_text(json.dumps(results))


def _page(path: Path) -> ParsedPage:
    return ParsedPage(path.read_text(encoding="utf-8"))


def test_scores_of_other_predictions_are_left_out(tmp_path: Path) -> None:
    """``score`` writes scores into a file beside the predictions, and a test with other weights may replace these."""
    line = {"id": "0", "prompt": "p", "response": "r", "num_tokens": 2, "num_forwards": 1}
    original, scored = tmp_path / "predictions_d.jsonl", tmp_path / "predictions_d.scored.jsonl"
    for weights, expected in (("a", 1.0), ("b", 0.0)):
        write_predictions(original, [{**line, "score": 0.0}], {"weights": "a"})
        write_predictions(scored, [{**line, "score": 1.0}], {"weights": weights})
        notes: list[str] = []
        assert read_scores(tmp_path, "d", notes)["0"].score == expected
        assert ("was left out" in notes[0]) == (expected == 0.0)


def test_the_page_loads_nothing_and_escapes_everything(tmp_path: Path) -> None:
    """Prompts, responses and names are texts of others: in a browser they must not become scripts or tags."""
    lines = [prediction(f"p{i}{HOSTILE}", 1.0, 4, 2, text=HOSTILE) for i in range(3)]
    run = write_run(tmp_path / "run", {"odd $name_": lines, "_b": lines}, mismatches={"_b": [HOSTILE]})
    files = write_report([run])
    assert files[0] == run / "report" / "report.html"
    page = _page(files[0])
    assert page.unsafe == []
    assert page.policy.startswith("default-src 'none'")
    assert "script-src" not in page.policy
    assert page.text.count(HOSTILE) > 6  # prompts, responses, reference, config: shown as they are
    for text in ("refusion-lit test '--x=a b'", "Some GPU", "torch 2.99", "max_steps: 3", "11"):
        assert text in page.text
    assert all(ElementTree.parse(path).getroot().tag.endswith("svg") for path in files[1:])


@pytest.mark.parametrize("field", ["mismatches", "sampling", "environment"])
def test_a_field_of_another_type_is_named(field: str, tmp_path: Path) -> None:
    write_run(tmp_path / "good", {"a": predictions([1.0])})
    run = write_run(tmp_path / "bad", {"a": predictions([1.0])})
    with _edit_results(run) as results:
        results[field] = [1]
    with pytest.raises(ValueError, match=re.escape(f"{run / 'results.json'}: {field}: expected a mapping, got [1]")):
        write_report([run])
    rows, notes = read_rows([tmp_path])
    assert [row.run for row in rows] == ["good"]
    assert field in notes[0]


def test_names_of_metrics_are_a_list(tmp_path: Path) -> None:
    run = write_run(tmp_path / "bad", {"a": predictions([1.0])})
    with _edit_results(run) as results:
        results["metrics"] = "letters"
    expected = f"{run / 'results.json'}: metrics: expected a list of names, got 'letters'"
    with pytest.raises(ValueError, match=re.escape(expected)):
        write_report([run])


def test_fields_may_be_null(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {"a": predictions([1.0])})
    with _edit_results(run) as results:
        results.update(dict.fromkeys(("mismatches", "batch_size", "sampling", "environment", "config")))
    assert write_report([run], formats=("html", "markdown"))


def test_rows_have_intervals_differences_and_marks(tmp_path: Path) -> None:
    good, bad = predictions([1.0] * 20, forwards=1), predictions([0.0] * 20, forwards=5)
    run = write_run(tmp_path / "run", {"good": good, "bad": bad}, mismatches={"bad": ["another attention"]})
    comparison = compare(*read_rows([run]), "bad")
    first, second = comparison.rows
    assert (first.score.estimate, first.score.low, first.tokens_per_forward.high) == pytest.approx((100, WILSON_20, 10))
    assert (first.on_front, second.on_front) == (True, False)
    (compared,) = comparison.compared
    assert (compared.label, len(compared.shared)) == ("good", 20)
    assert compared.score_difference.low == pytest.approx(100 - math.hypot(100 - WILSON_20, 100 - WILSON_20))
    markdown = markdown_table(comparison)
    assert "| bad (ReFusion) * |" in markdown
    assert "| good (ReFusion) |" in markdown
    assert "7.5 | 3 |" in markdown
    assert r" \*: the model was not trained for this decoder." in markdown
    write_report([run], tmp_path / "out", formats=("html", "markdown"))
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"report.html", "table.md", "tradeoff.svg"}
    assert "another attention" in _page(tmp_path / "out" / "report.html").text


def test_a_printed_table_marks_decoders_that_do_not_fit_and_is_whole_in_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "50")  # of the terminal that the command was typed in
    lines = predictions([1.0], tokens=10, forwards=4)
    run = write_run(tmp_path / "run", {"a_decoder_with_a_name": lines, "odd": lines}, mismatches={"odd": ["another"]})
    print_comparison("1 prompts, batch size 7", compare(*read_rows([run])))
    text = capsys.readouterr().out
    assert "1 prompts, batch size 7" in text
    assert "the model was not trained for this decoder" in text
    head = next(line for line in text.splitlines() if line.startswith("┃"))
    titles = ["decoder", "score", "tokens/forward", "tokens/s", "calls/batch"]
    assert [cell.strip() for cell in head.strip("┃").split("┃")] == titles
    rows = [line.strip("│").split("│") for line in text.splitlines() if line.startswith("│")]
    names = ["a_decoder_with_a_name (ReFusion)", "odd (ReFusion) *"]
    assert [[cell.strip() for cell in row[:3]] for row in rows] == [[name, "1.000", "2.50"] for name in names]


def test_differences_are_paired_by_prompt_id(tmp_path: Path) -> None:
    one = [prediction(f"p{i}", 1.0, 8, 2) for i in range(6)]
    two = [prediction(f"p{i}", 0.0 if i < 6 else 1.0, 8, 1) for i in reversed(range(3, 9))]
    first, second = write_run(tmp_path / "a", {"d": one}), write_run(tmp_path / "b", {"d": two})
    (compared,) = compare(*read_rows([first, second])).compared
    assert (len(compared.shared), compared.num_only_row, compared.num_only_baseline) == (3, 3, 3)
    assert compared.score_difference.estimate == -100  # over the three shared prompts; over all prompts it is -50
    files = write_report([first, second], tmp_path / "out", formats=("html", "markdown"))
    page = _page(files[0]).text
    assert "have different prompts: 3 shared, 3 only in the first, 3 only in the second" in page
    assert (
        "Differences from a: d are over the prompts that both rows have." in (tmp_path / "out" / "table.md").read_text()
    )


def test_ids_with_different_prompts_or_references_are_not_paired(tmp_path: Path) -> None:
    """Two runs with different data seeds have equal ids for different prompts."""
    one = [prediction(f"p{i}", 1.0, text=f"seed 1, {i}" if i < 3 else "same") for i in range(4)]
    two = [prediction(f"p{i}", 0.0, text=f"seed 2, {i}" if i < 3 else "same") for i in range(4)]
    two[2] = {**one[2], "reference": "another", "score": 0.0}
    runs = [write_run(tmp_path / name, {"d": lines}) for name, lines in (("a", one), ("b", two))]
    (compared,) = compare(*read_rows(runs)).compared
    assert (len(compared.shared), compared.num_differing) == (1, 3)
    assert (compared.num_only_row, compared.num_only_baseline) == (0, 0)
    files = write_report(runs, tmp_path / "out", formats=("html", "markdown"))
    page = _page(files[0]).text
    assert "1 shared, 0 only in the first, 0 only in the second, 3 with the same id but another prompt" in page
    assert "3 ids have different prompts or references in these rows" in page
    summaries = re.findall(r"<summary>(p\d)</summary>", files[0].read_text())
    assert summaries == ["p0", "p1", "p2", "p3"]  # the wrong answers are b's
    for shown in ("seed 2, 0", "seed 2, 1", "another"):
        assert shown in page
    assert "seed 1, 0" not in page  # right, and no answer to b's p0
    assert "different prompts or references under 3 ids" in files[1].read_text()


def test_the_front_leaves_out_rows_with_other_prompts(tmp_path: Path) -> None:
    """The front are the rows that no row beats in both score and tokens per forward pass, on the same prompts."""
    many = {name: predictions([1.0, 1.0, 0.0, 0.0], forwards=forwards) for name, forwards in (("a", 2), ("b", 4))}
    few = {"lucky": predictions([1.0, 1.0], forwards=1)}
    paths = [write_run(tmp_path / "many", many), write_run(tmp_path / "few", few)]
    comparison = compare(*read_rows(paths))
    assert [(row.name, row.on_front, row.has_other_prompts) for row in comparison.rows] == [
        ("many: a", True, False), ("many: b", False, False), ("few: lucky", False, True),
    ]  # fmt: skip
    (note,) = comparison.notes
    assert "few: lucky" in note
    page = write_report(paths, tmp_path / "out")[0].read_text()
    assert page.count('<tr class="front">') == 1
    assert compare(*read_rows(paths[1:])).notes == []


def test_speeds_of_concurrent_points_are_left_out(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {"a": predictions([1.0, 0.0])})
    assert "| 123 |" in markdown_table(compare(*read_rows([run])))  # the samples' tokens per second, 123.4
    with _edit_results(run) as results:
        results["environment"]["num_concurrent"] = 2
    comparison = compare(*read_rows([run]))
    assert "123" not in markdown_table(comparison)
    assert "num_workers" in comparison.notes[0].replace("\\", "")


def test_speeds_of_short_decodes_are_called_uncertain_unless_they_were_measured_in_turns(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {"a": predictions([1.0, 0.0])})
    for seconds, latency, is_uncertain in [
        (0.4, {}, True),  # a short decode
        (40.0, {}, False),  # a long decode
        (0.4, {"decoders": {"a": {}}}, False),  # a short decode, whose speed was measured apart, in turns
    ]:
        with _edit_results(run) as results:
            results["results"]["a"]["seconds"] = seconds
            results["latency_results"] = latency
        assert ("set latency" in markdown_table(compare(*read_rows([run])))) == is_uncertain


def test_tables_and_plots_for_papers(tmp_path: Path) -> None:
    good, bad = predictions([1.0] * 20, forwards=1), predictions([0.0] * 20, forwards=5)
    run = write_run(tmp_path / "run", {"a_b": good, "bad": bad}, mismatches={"bad": ["another attention"]})
    files = write_report([run], formats=("latex", "csv", "pdf", "png"))
    assert [path.name for path in files] == [
        "table.tex", "table.csv", "tradeoff.pdf", "tradeoff.png", "tradeoff.svg",
    ]  # fmt: skip
    latex = files[0].read_text()
    head, first, _ = (line for line in latex.splitlines() if line.endswith(r" \\"))
    assert head.startswith(r"decoder & prompts & score \% &")
    assert first.startswith(r"a\_b (ReFusion) & 20 & 100.0 [83.9, 100.0] & 10.00")
    assert [part for part in (r"\toprule", r"\midrule", r"\bottomrule") if latex.count(part) != 1] == []
    with files[1].open(newline="") as file:
        row, other = csv.DictReader(file)
    assert (row["decoder"], float(row["score"]), row["num_prompts"]) == ("a_b", 100, "20")
    assert float(row["score_low"]) == pytest.approx(WILSON_20)
    assert (other["mismatch"], float(other["score_difference"])) == ("another attention", -100)
    assert files[2].read_bytes().startswith(b"%PDF")
    assert files[3].read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("speeds", [(503.0, 1100.0, 3318.0), (11.7, 12.8, 14.0), (900.0, 90_000.0, 4.0)])
def test_the_axis_of_speeds_has_plain_numbers(speeds: tuple[float, ...], tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {f"decoder{i}": predictions([1.0, 0.0]) for i in range(len(speeds))})
    decoders = {
        f"decoder{i}": {"1": {"tokens_per_second": speed, "times_baseline": [speed / speeds[0]] * 3}}
        for i, speed in enumerate(speeds)
    }
    with _edit_results(run) as results:
        results["latency_results"] = {"baseline": "decoder0", "decoders": decoders}
    picture = ElementTree.fromstring(speed_plot(compare(*read_rows([run]))))
    texts = ["".join(text.itertext()) for text in picture.iter(f"{SVG}text")]
    title = next(i for i, text in enumerate(texts) if text.startswith("tokens per second"))
    ticks = [float(text) for text in texts[:title] if text]  # the texts before the title of the axis
    # Two numbers near the speeds are enough to read a speed from the axis.
    assert len([tick for tick in ticks if min(speeds) * 0.8 < tick < max(speeds) * 1.2]) >= 2


def test_the_baseline_of_speeds_is_also_the_default_baseline_of_scores(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {name: predictions([1.0, 0.0]) for name in ("first", "slow", "last")})
    ratios = {"first": [2.0, 1.5, 2.5], "slow": [1.0] * 3}  # estimate, lower and upper bound
    decoders = {name: {"1": {"tokens_per_second": 9.0, "times_baseline": ratio}} for name, ratio in ratios.items()}
    with _edit_results(run) as results:
        results["latency_results"] = {"baseline": "slow", "decoders": decoders}
    comparison = compare(*read_rows([run]))
    assert comparison.baseline == "slow"
    assert {row.label for row in comparison.compared} == {"first", "last"}
    # The speeds stay what they are, whatever the scores are compared with.
    again = compare(*read_rows([run]), "last")
    for text, interval in ((markdown_table(again), "2.00 [1.50, 2.50]"), (html_report(again), "1.50 to 2.50")):
        assert "as fast as slow" in text
        assert interval in text


def test_a_sweep_has_a_row_for_each_point(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path / "sweep")
    comparison = compare(*read_rows([sweep]))
    assert len({row.label for row in comparison.rows}) == 6
    assert comparison.rows[0].label == "refusion (slot_size=4, slot_threshold=0.5)"
    assert comparison.rows[0].score.estimate == pytest.approx(100 / 3)
    # The last two points have 14 tokens in an answer, and 2 or 3 forward passes.
    assert [row.tokens_per_forward.estimate for row in comparison.rows[-2:]] == pytest.approx([14 / 2, 14 / 3])
    assert any("slot_size=99" in note and "out of memory" in note for note in comparison.notes)
    alone = compare(*read_rows([sweep / "points" / "00" / "test" / "results.json"]))
    assert [row.label for row in alone.rows] == ["refusion"]


def test_rows_are_in_the_order_of_the_grid_with_a_column_for_each_option(tmp_path: Path) -> None:
    grid = [(size, threshold) for size in (8, 4, 16) for threshold in (0.9, 0.5)]
    ids = [f"{hash((size, threshold)) % 16**12:012x}" for size, threshold in grid]
    for identity, (size, threshold) in zip(ids, grid, strict=True):
        options = {"model.decoders.refusion.slot_size": size, "model.decoders.refusion.slot_threshold": threshold}
        write_run(tmp_path / "points" / identity / "test", {"refusion": predictions([1.0])}, options=options)
    (tmp_path / "sweep.json").write_text(json.dumps({"points": ids}))
    comparison = compare(*read_rows([tmp_path]))
    assert [tuple(row.options.values()) for row in comparison.rows] == [(str(a), str(b)) for a, b in grid]
    files = write_report([tmp_path], tmp_path / "out", formats=("html", "markdown"))
    head = [text for tag, text in _page(files[0]).texts if tag == "th"]
    assert head[:4] == ["decoder", "slot_size", "slot_threshold", "prompts"]
    assert "| refusion | 8 | 0.9 | 1 |" in (tmp_path / "out" / "table.md").read_text()


@pytest.mark.parametrize(("names", "is_shown"), [(("a", "b"), False), (("a", "a"), True)])
def test_decoders_of_points_are_an_option_only_where_their_names_are_equal(
    tmp_path: Path, names: tuple[str, str], is_shown: bool
) -> None:
    for i, name in enumerate(names):
        options = {"seed": i, "model.decoders": {name: {"class_path": "ReFusion", "init_args": {"slot_size": i}}}}
        write_run(tmp_path / str(i) / "test", {name: predictions([1.0])}, options=options)
    comparison = compare(*read_rows([tmp_path]))
    assert ("model.decoders" in comparison.option_names) == is_shown
    assert len({row.label for row in comparison.rows}) == 2


def test_columns_of_options_with_the_same_last_name_have_longer_names(tmp_path: Path) -> None:
    for i in range(2):
        options = {"model.decoders.a.slot_size": i, "model.decoders.b.slot_size": -i, "seed": i}
        options["model.decoders.a"] = {"class_path": f"x.y.Class{i}", "init_args": {"long": "x" * 500}}
        write_run(tmp_path / str(i) / "test", {"a": predictions([1.0])}, options=options)
    comparison = compare(*read_rows([tmp_path]))
    assert list(comparison.option_names.values()) == ["a.slot_size", "b.slot_size", "seed", "a"]
    assert comparison.rows[1].options["model.decoders.a"] == f"Class1(long={'x' * 25}..."


def test_examples_begin_with_wrong_answers(tmp_path: Path) -> None:
    run = write_run(tmp_path / "r", {"a": predictions([1, 1, 1, 1, 0, 1]), "b": predictions([1, 1, 1, 1, 1, 0.5])})
    write_report([run])
    page = (run / "report" / "report.html").read_text()
    assert re.findall(r"<summary>(p\d)</summary>", page) == ["p4", "p5", "p0", "p1"]


def test_a_row_with_few_prompts_says_so(tmp_path: Path) -> None:
    full = [prediction(f"p{i}", float(i % 8 > 0), 10, 5) for i in range(96)]
    run = write_run(tmp_path / "run", {"lucky": predictions([1.0] * 2, forwards=1), "full": full})
    files = write_report([run], baseline="full", formats=("html", "markdown"))
    page = _page(files[0]).text
    assert "2 of 96" in page
    assert page.count("lucky (ReFusion)") == 3, "in the tables of figures and differences, and in the plot's legend"
    assert "| lucky (ReFusion) | 2 of 96 |" in files[1].read_text()


def test_every_point_of_a_plot_has_a_tooltip(tmp_path: Path) -> None:
    _, tradeoff = write_report([write_sweep(tmp_path / "sweep")])
    titles = [element.text or "" for element in ElementTree.parse(tradeoff).iter(f"{SVG}title")]
    assert len(titles) == 6
    assert titles[0].startswith("refusion (slot_size=4, slot_threshold=0.5): score 33.3 % (")


def test_curves_rise_to_the_right_and_name_every_point() -> None:
    curves = {"one & only": [(0, 1.5), (10, 2.5)], "_other": [(5, 2.0)]}
    picture = curves_plot(curves, "steps", "loss")
    assert picture == curves_plot(curves, "steps", "loss")
    root = ElementTree.fromstring(picture)
    points = [group for group in root.iter(f"{SVG}g") if group.get("class") == "point"]
    titles = [group.findtext(f"{SVG}title") for group in points]
    assert titles == [
        "one & only: loss 1.5 at steps 0",
        "one & only: loss 2.5 at steps 10",
        "_other: loss 2 at steps 5",
    ]
    places = [next(group.iter(f"{SVG}use")) for group in points]
    (left, low), (right, high), (middle, between) = [(float(p.attrib["x"]), float(p.attrib["y"])) for p in places]
    assert (middle, between) == pytest.approx(((left + right) / 2, (low + high) / 2), abs=0.02)
    assert left < right
    assert high < low  # pixels are counted from the top
    assert {"one & only", "_other", "steps", "loss"} <= {text.text for text in root.iter(f"{SVG}text")}


def test_a_tested_checkpoint_shows_its_training(tmp_path: Path) -> None:
    untrained = _write_test(tmp_path / "before", tmp_path / "start")
    trained = _write_test(tmp_path / "after", _write_training(tmp_path / "policy" / "first"))
    page = write_report([untrained, trained], tmp_path / "report")[0].read_text()
    titles = re.findall(r"<title>(policy/first: [^<]*)</title>", page)
    # The 121 steps are drawn as means of three steps.
    assert titles[:2] == ["policy/first: reward 0.01 at step 1", "policy/first: reward 0.04 at step 4"]
    assert sum("reward" in title for title in titles) == 41
    assert titles[41:] == [f"policy/first: validation loss 2.5 at step {step}" for step in (0, 50, 100)]
    assert "training loss" not in page
    assert "<h2>Training</h2>" not in write_report([untrained])[0].read_text()


def test_two_trainings_of_one_name_have_a_curve_each(tmp_path: Path) -> None:
    trainings = [_write_training(tmp_path / folder / "policy" / "first") for folder in ("a", "b")]
    runs = [_write_test(tmp_path / f"run{i}", training) for i, training in enumerate(trainings)]
    page = write_report(runs, tmp_path / "report")[0].read_text()
    for training in trainings:
        assert f"<title>{training}: reward 0.01 at step 1</title>" in page


def _write_training(folder: Path) -> Path:
    """Write the metrics of a training of 121 steps: rewards in every step, validations in every fiftieth."""
    folder.mkdir(parents=True)
    rows = [f"{step},{step / 100},{'' if step % 50 else 2.5},nan" for step in range(121)]
    (folder / "metrics.csv").write_text("\n".join(["step,train/reward,val/loss,train/loss", *rows]))
    return folder


def _write_test(run: Path, training: Path) -> Path:
    """Write a run that has tested the last checkpoint of a training."""
    write_run(run, {"a": predictions([1.0])})
    with _edit_results(run) as results:
        results["config"]["ckpt_path"] = str(training / "checkpoints" / "last.ckpt")
    return run


def test_table_heads_have_a_scope(tmp_path: Path) -> None:
    elements = _page(write_report([write_sweep(tmp_path / "sweep")])[0]).elements
    assert {values.get("scope") for tag, values in elements if tag == "th"} == {"col", "row"}


def test_a_run_next_to_a_sweep_has_no_options(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {"refusion": predictions([1.0] * 3)})
    comparison = compare(*read_rows([run, write_sweep(tmp_path / "sweep")]))
    assert comparison.rows[0].label == "run: refusion"
    assert comparison.rows[1].label == "sweep: refusion (slot_size=4, slot_threshold=0.5)"


def test_directories_with_the_same_name_are_distinct_sources(tmp_path: Path) -> None:
    first, second = (write_run(tmp_path / name / "run", {"d": predictions([1.0])}) for name in "ab")
    assert len({row.method for row in compare(*read_rows([first, second])).rows}) == 2


def test_a_baseline_given_by_decoder_is_the_one_of_the_same_run(tmp_path: Path) -> None:
    for name, base in (("x", 1.0), ("y", 0.0)):
        write_run(tmp_path / "s" / name, {"base": predictions([base] * 4), "other": predictions([1.0] * 4)})
    actual = read_rows([tmp_path / "s"])
    assert [row.label for row in compare(*actual).rows] == ["base [x]", "other [x]", "base [y]", "other [y]"]
    assert [row.score_difference.estimate for row in compare(*actual, "base").compared] == [0.0, 100.0]
    apart = read_rows([tmp_path / "s" / "x", tmp_path / "s" / "y"])
    for baseline in ("x", f"{tmp_path}/s/x/"):  # a run's name or path
        labels = [row.baseline.label for row in compare(*apart, baseline).compared]
        assert labels == ["x: base", "x: other"]
    with pytest.raises(ValueError, match=r"baseline: expected one of base, other.*got 'none'"):
        compare(*actual, "none")


def test_incomplete_runs_are_read_as_far_as_possible(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    decoders = {"a": predictions([1.0, 0.5]), "b": [prediction("p0", None, 3, 1)], "gone": predictions([1.0])}
    run = write_run(tmp_path / "run", decoders)
    # A prompt again, and a line that an interruption has cut.
    lines = json.dumps(prediction("p0", 0.0, 9, 9)) + "\n" + json.dumps(prediction("p2", 1.0, 9, 9))[:-9]
    with (run / "predictions_a.jsonl").open("a") as file:
        file.write(lines)
    (run / "predictions_gone.jsonl").unlink()
    for name, content in (("other", '{"exact_match": 1}'), ("damaged", "{")):
        (run / name).mkdir()
        (run / name / "results.json").write_text(content)
    comparison = compare(*read_rows([run]))
    a, b, gone = comparison.rows
    assert (len(a.predictions), a.score.estimate) == (2, 75)  # the second p0 is a repetition
    assert b.score.estimate == 0
    assert (gone.score.estimate, math.isnan(gone.score.low)) == (100, True)
    notes = " ".join(comparison.notes)
    assert "predictions_a.jsonl, line 4" in notes
    assert "no predictions of gone" in notes
    assert "damaged/results.json could not be read" in notes
    assert "other/results.json" not in notes
    assert "\N{EN DASH}" in _page(write_report([run])[0]).text
    assert capsys.readouterr().err == "".join(f"note: {note}\n" for note in comparison.notes)
    assert "json could not be read" in markdown_table(comparison)


def test_a_number_of_prompts_that_is_missing_or_smaller_than_the_largest_is_said(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {"a": predictions([1.0, 0.5]), "b": predictions([1.0]), "c": predictions([0.0])})
    with _edit_results(run) as results:
        del results["results"]["c"]["num_prompts"]
    (run / "predictions_c.jsonl").unlink()
    rows = markdown_table(compare(*read_rows([run]))).splitlines()[2:5]
    assert [row.split(" | ")[1] for row in rows] == ["2", "1 of 2", "unknown"]


@pytest.mark.parametrize("exists", [False, True])
def test_directories_without_results_are_refused(tmp_path: Path, exists: bool) -> None:
    if exists:
        (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"RUN: expected .*empty"):
        write_report([tmp_path / "empty"])


def test_a_report_of_a_test_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {"a": predictions([1.0, 0.0])})
    (run / "report").write_text("in the way")
    with pytest.warns(match="results .*report.*: "):
        report_results(run, "run")


def test_unknown_formats_are_refused(tmp_path: Path) -> None:
    for formats in ((), ("html", "docx")):
        with pytest.raises(ValueError, match="format: expected some of html, markdown, latex, csv, pdf, png, or all"):
            write_report([tmp_path], formats=formats)


def test_markdown_escapes_names(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {"a_b|50%&<x>": predictions([1.0])})
    comparison = compare(*read_rows([run]))
    row = markdown_table(comparison).splitlines()[2]
    assert r"a\_b\|50%&amp;&lt;x&gt;" in row
    assert len(re.findall(r"(?<!\\)\|", row)) == 10, "the row has nine cells, and the name adds no border"


def rescore(run: Path, scores: list[float]) -> None:
    """Write the scores of some predictions and their metric anew, as the command score does."""
    lines = [{**line, "metrics": {"half": line["score"] / 2}} for line in predictions(scores)]
    (run / "predictions_d.scored.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def test_later_scores_bring_their_metrics_along(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {"d": predictions([0.0, 0.0])})
    with _edit_results(run) as results:
        results["metrics"] = ["half"]
        results["results"]["d"]["half"] = 0.0
        del results["results"]["d"]["tokens_per_second"]  # as of an older version
    rescore(run, [1.0, 0.0])
    [row], _ = read_rows([run])
    assert row.figures["score"] == 0.5
    assert row.figures["half"] == 0.25
    card = model_card("m", TRAITS, None, [run])
    assert "value: 0.5" in card
    assert "| 0.250 |" in card
    assert "| -- |" in card


def test_scores_of_some_predictions_only_are_left_out(tmp_path: Path) -> None:
    """The test was resumed after it had been scored."""
    run = write_run(tmp_path / "run", {"d": predictions([0.0, 0.0])})
    rescore(run, [1.0])
    [row], notes = read_rows([run])
    assert [prediction.score for prediction in row.predictions.values()] == [0.0, 0.0]
    assert "predictions_d.scored.jsonl scores other predictions" in notes[0]


def test_points_that_a_sweep_had_before_are_left_out(tmp_path: Path) -> None:
    root = write_sweep(tmp_path / "sweep")
    for points, num_failed in ((["01", "00", "99"], 1), (["01", "00"], 0)):
        (root / "sweep.json").write_text(json.dumps({"swept": [], "points": points}))
        rows, notes = read_rows([root])
        assert [row.run for row in rows] == ["points/01/test", "points/00/test"]
        assert sum("A point of the sweep failed" in note for note in notes) == num_failed


def test_a_checkpoint_at_the_root_has_no_training(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {"d": predictions([1.0])})
    with _edit_results(run) as results:
        results["config"]["ckpt_path"] = "/model.ckpt"
    assert write_report([run])[0].is_file()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"results": {"d": {"score": None}}}, "results.d.score: expected a number, got None"),
        ({"results": {"d": {"score": 1, "tokens_per_forward": None}}}, "tokens_per_forward: expected a number, got"),
        ({"results": {"d": {"score": 1, "num_calls": "2"}}}, "results.d.num_calls: expected a number, got '2'"),
        ({"batch_size": "64"}, "batch_size: expected a number, got '64'"),
        ({"batch_size": ""}, "batch_size: expected a number, got ''"),
        ({"decoders": {"d": "ReFusion"}}, "decoders.d: expected a mapping, got 'ReFusion'"),
    ],
)
def test_a_figure_that_is_no_number_is_named(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {"d": predictions([1.0])})
    with _edit_results(run) as results:
        results.update(changed)
    with pytest.raises(ValueError, match=message):
        read_rows([run])
