"""Regression tests for the defects that fuzzing found."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from cli.conftest import QUICKSTART
from hardness.malformed import nest_lists
from refusion_lit.cli.generate import read_prompts
from refusion_lit.cli.lightning import RefusionCLI, parse_only
from refusion_lit.evaluation.predictions import PredictionsFile
from refusion_lit.reports.rows import read_rows
from refusion_lit.utils.files import meta_path, read_yaml


@pytest.fixture(scope="module")
def fit_cli() -> RefusionCLI:
    return parse_only("fit")


def test_only_newlines_separate_prompts(tmp_path: Path) -> None:
    prompts = ["a\u2028b", "c\x85d\x0be", "f\x0cg"]
    for name, lines in (
        ("p.txt", prompts),
        ("p.jsonl", [json.dumps({"prompt": p}, ensure_ascii=False) for p in prompts]),
    ):
        (tmp_path / name).write_bytes(("\ufeff" + "\r\n".join(lines) + "\n").encode())
        assert [request.prompt for request in read_prompts(str(tmp_path / name))] == prompts


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "\\ud800"}', "a lone surrogate; remove"),
        ('{"prompt": "a", "id": "\\ud800"}', "a lone surrogate; remove"),
        ('{"prompt": "a", "reference": "\\udfff"}', "a lone surrogate; remove"),
        (nest_lists(100_000), "broken JSON"),
        (f'{{"prompt": "a", "id": {"7" * 5000}}}', "broken JSON"),
    ],
)
def test_invalid_prompts_are_refused_with_their_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(f'{{"prompt": "a"}}\n{line}\n')
    with pytest.raises(ValueError, match=f"prompts: .*p.jsonl:2.*{message}"):
        list(read_prompts(str(path)))


def test_an_id_of_null_is_none(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a", "id": null}\n{"prompt": "b", "id": null}\n{"prompt": "c", "id": 7}\n')
    assert [request.id for request in read_prompts(str(path))] == ["0", "1", "7"]


def interrupted_predictions(path: Path) -> Path:
    """Write one prediction as an interrupted run does, and return where its fingerprint lies."""
    file = PredictionsFile(path, {"weights": "w"})
    file.write([{"id": "é"}])
    file.close()
    return meta_path(path)


def test_predictions_cut_inside_a_character_can_be_resumed(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    interrupted_predictions(path)
    whole = path.read_bytes()
    path.write_bytes(whole + '{"id": "é'.encode()[:-1])
    file = PredictionsFile(path, {"weights": "w"}, resume=True)
    file.close()
    assert file.done == {"é"}
    assert path.read_bytes() == whole


@pytest.mark.parametrize("content", [nest_lists(100_000) + "\n", "", "3\n", '{"name": "é"}\n', "\xff\n"])
def test_damaged_predictions_are_refused_and_kept(tmp_path: Path, content: str) -> None:
    path = tmp_path / "a.jsonl"
    interrupted_predictions(path)
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError, match=r"^resume: expected the predictions of an interrupted run in .*a\.jsonl"):
        PredictionsFile(path, {"weights": "w"}, resume=True)
    assert path.read_bytes() == content.encode("latin-1")


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"fingerprint": 1},
        {"fingerprint": {}},
        {"progress": {"num_lines": 1}},
        {"progress": {"num_lines": 10**400, "state": None}},
        {"progress": {"num_lines": math.inf, "state": None}},
        {"progress": {"num_lines": "x", "state": None}},
        {"progress": [1]},
    ],
)
def test_a_damaged_fingerprint_is_refused_and_the_predictions_kept(tmp_path: Path, change: dict[str, object]) -> None:
    path = tmp_path / "a.jsonl"
    meta = interrupted_predictions(path)
    before = path.read_bytes()
    for damaged in (
        json.dumps({**json.loads(meta.read_text()), **change}) if change else "{",
        "[]",
        nest_lists(100_000),
    ):
        meta.write_text(damaged)
        with pytest.raises(ValueError, match=r"^resume: expected the predictions of an interrupted run in .*a\.jsonl"):
            PredictionsFile(path, {"weights": "w"}, resume=True)
        assert path.read_bytes() == before
        assert meta.read_text() == damaged


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"class_path: \xe9", "not UTF-8"),
        (b"a: !!timestamp x", "not YAML"),
        (b"a: !!int x", "not YAML"),
        (b"a: 2001-99-99", "not YAML"),
        (b"a: 2001-01-01", "not YAML of .*date"),
        (b"a: &b [*b]", "not YAML of .*"),
        (b"a: !!set {b}", "not YAML of .*set"),
        (b"[\n" * 5000, "not YAML"),
        (b"- 1", "expected a mapping of options"),
        (b"a: {b: 1}\nc: {b: 1}\na: 2", r"a is given twice .*line 3"),
        (b"a: {b: 1, c: 2, b: 3}", r"b is given twice .*column 17"),
    ],
)
def test_yaml_without_options_is_refused(tmp_path: Path, fit_cli: RefusionCLI, content: bytes, message: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"^base: .*{message}") as refused:
        read_yaml(path, "base")
    assert str(path) in str(refused.value)
    with pytest.raises(ValueError, match=r"model.decoders.x: .*x\.yaml"):
        fit_cli.parse(["fit", f"--model.decoders.x={path}"])


@pytest.mark.parametrize("content", [b"data: \xe9", b"data: !!timestamp x"])
def test_an_invalid_config_is_refused_with_its_name(tmp_path: Path, fit_cli: RefusionCLI, content: bytes) -> None:
    path = tmp_path / "x.yaml"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"config: .*x\.yaml is not"):
        fit_cli.parse(["fit", "--config", QUICKSTART, f"--config={path}"])


@pytest.mark.parametrize(
    "change",
    [{"score": math.nan}, {"score": 7}, {"num_tokens": math.inf}, {"num_forwards": 10**400}, {"prompt": "\ud800"}],
)
def test_predictions_out_of_range_are_left_out_of_a_report(tmp_path: Path, change: dict[str, object]) -> None:
    line = {"id": "0", "prompt": "p", "response": "r", "score": 1.0, "num_tokens": 2, "num_forwards": 1}
    (tmp_path / "results.json").write_text(json.dumps({"results": {"d": {"score": 1.0, "num_prompts": 1}}}))
    (tmp_path / "predictions_d.jsonl").write_text(f"{json.dumps(line)}\n{json.dumps({**line, 'id': '1', **change})}\n")
    (row,), notes = read_rows([tmp_path])
    assert list(row.predictions) == ["0"]
    assert any("line 2: not a prediction" in note for note in notes)
