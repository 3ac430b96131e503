"""Filling templates from the command line, from Python and in a test."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
from experiments.tasks import Spans

import refusion_lit
from cli.conftest import REPOSITORY
from refusion_lit.cli import main
from refusion_lit.constraints import templates
from refusion_lit.decoding import Generation, GenerationCallback, ReFusion
from refusion_lit.tasks import Additions
from refusion_lit.types import SamplingParams

MODELS = REPOSITORY / "tests" / "goldens" / "models"
MODEL = str(MODELS / "additions-clean")
GENERATE = ["generate", f"--ckpt_path={MODEL}", "--decoder=ReFusion", "--max_new_tokens=32"]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("12+34={{2}};56+78={{3}};", "12+34=46;56+78=134;"),
        ("12+34={{1-3}};56+{{2}}=134;", "12+34=46;56+78=134;"),
        ("12+34=46;{{...}}", "12+34=46;56+78=134;"),
        ("12+34=99;56+78=99;", "12+34=99;56+78=99;"),
    ],
)
def test_generate_fills_a_template(
    template: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "t.txt").write_text(template + "\n")
    assert main([*GENERATE, "--prompt=12+34,56+78>", f"--template={tmp_path / 't.txt'}"]) == 0
    assert capsys.readouterr().out == expected + "\n"


def test_responses_within_spans_of_several_lengths_are_told_slice_by_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    """So an interrupted command has what was told."""
    model = refusion_lit.load(MODEL)
    events: list[object] = []

    class Told(GenerationCallback):
        def on_finished(self, index: int, generation: Generation) -> None:
            events.append((index, generation.text))

    decode = model.decode

    def record(*args: Any, **options: Any) -> Any:
        events.append("decode")
        return decode(*args, **options)

    monkeypatch.setattr(model, "decode", record)
    options: Any = {"decoder": ReFusion(), "max_new_tokens": 32, "templates": ["{{1-3}}+{{2}}{{...}}"] * 3}
    queries = ["12+34,56+78>", "11+22,33+44>", "50+60,10+20>"]
    together = [row.text for row in model.generate(queries, **options)]
    events.clear()
    monkeypatch.setattr(templates, "_NUM_TOGETHER", 2)
    assert [row.text for row in model.generate(queries, callbacks=[Told()], **options)] == together
    (first, second, third) = enumerate(together)
    assert events == ["decode", "decode", first, second, "decode", "decode", third]


def test_a_file_of_prompts_mixes_templates_and_none(tmp_path: Path) -> None:
    prompts, output = tmp_path / "p.jsonl", tmp_path / "out.jsonl"
    rows = [
        {"prompt": "12+34,56+78>", "template": "12+34={{1-2}};56+78={{3}};"},
        {"prompt": "11+22,33+44>"},
        {"prompt": "50+60,10+20>", "template": "{{2}}+60=110;10+20={{2}};", "id": "third"},
    ]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main([*GENERATE, f"--prompts={prompts}", f"--output={output}"]) == 0
    actual = {line["id"]: line for line in map(json.loads, output.read_text().splitlines())}
    expected = {"0": "12+34=46;56+78=134;", "1": "11+22=33;33+44=77;", "third": "50+60=110;10+20=30;"}
    assert {name: line["response"] for name, line in actual.items()} == expected
    assert actual["third"]["num_tokens"] == 4
    assert len(actual["third"]["response_ids"]) == 20
    assert main([*GENERATE, f"--prompts={prompts}", f"--output={output}", "--resume"]) == 0
    prompts.write_text(prompts.read_text().replace("{{2}}+60", "{{2}}+6{{1}}"))
    assert main([*GENERATE, f"--prompts={prompts}", f"--output={output}", "--resume"]) == 2


def test_python_fills_templates_with_every_family() -> None:
    model = refusion_lit.load(MODEL)
    queries, templates = ["12+34,56+78>", "11+22,33+44>"], ["12+34={{1-3}};56+78={{1-3}};", None]
    first, second = model.generate(queries, templates=templates, decoder=ReFusion(slot_size=8), batch_size=2)
    assert (first.text, second.text) == ("12+34=46;56+78=134;", "11+22=33;33+44=77;")
    assert (first.num_given, first.num_tokens) == (15, 5)
    masked = refusion_lit.load(MODELS / "additions-bidirectional")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        [row] = masked.generate(["12+34,56+78>"], templates=["12+34={{2}};56+78=134;"])
    assert re.fullmatch(r"12\+34=..;56\+78=134;", row.text)
    assert row.num_tokens == 2


@pytest.mark.parametrize("stop", [";", "46", "5", "8=1"])
def test_a_stop_string_may_cut_any_of_the_lengths(stop: str) -> None:
    model = refusion_lit.load(MODEL)
    options = {"decoder": ReFusion(slot_size=8), "sampling": SamplingParams(max_new_tokens=32, stop=(stop,))}
    [row] = model.generate(["12+34,56+78>"], templates=["12+34={{1-3}};56+78={{1-3}};"], **options)
    assert row.text == "12+34=46;56+78=134;".partition(stop)[0]
    assert row.finish_reason == "stop"
    assert not row.trace


ADDITIONS = {"class_path": "Additions", "init_args": {"num_train": 64, "num_test": 3}}
TASK = {"class_path": "experiments.tasks.Spans", "init_args": {"task": ADDITIONS}}
HOLES = [
    "--config",
    str(REPOSITORY / "experiments" / "controlled_comparison" / "common.yaml"),
    "--model.objective={class_path: experiments.infilling.objective.Grouped, init_args: {slot_sizes: [2, 4]}}",
    "--model.decoders={refusion: {class_path: ReFusion}}",
    "--model.sampling.max_new_tokens=64",
    f"--data.task={json.dumps(TASK)}",
    "--trainer.val_check_interval=2",
    "--num_threads=1",
]


def test_a_test_gives_all_text_but_the_holes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    places = [f"--runs_dir={tmp_path}", "--run_name=holes", "--run_version"]
    tiny = ["--model.backbone.config.hidden_size=16", "--model.backbone.config.num_hidden_layers=1"]
    assert main(["fit", *HOLES, *tiny, *places, "fit", "--trainer.max_steps=2"]) == 0
    path = tmp_path / "holes" / "fit" / "checkpoints" / "last.ckpt"
    assert main(["test", *HOLES, *places, "test", f"--ckpt_path={path}"]) == 0
    lines = (tmp_path / "holes" / "test" / "predictions_refusion.jsonl").read_text().splitlines()
    examples = Spans(task=Additions(num_test=3)).examples("test")
    for line, example in zip(map(json.loads, lines), examples, strict=True):
        response = line["response"]
        assert len(response) == len(example.response)
        holes = {place for hole in example.spans for place in range(*hole)}
        assert {i for i, (a, b) in enumerate(zip(response, example.response, strict=True)) if a != b} <= holes
        assert line["num_tokens"] == len(holes)
        assert line["score"] == (response == example.response)
    capsys.readouterr()
    other = "--model.decoders={ar: {class_path: Autoregressive}}"
    mismatch = "--model.decoding.allow_mismatch=true"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert main(["test", *HOLES, *places, "other", f"--ckpt_path={path}", other, mismatch]) == 2
    assert "decoder: Autoregressive cannot keep the template of prompt test-0" in capsys.readouterr().err


def test_the_task_inside_is_named_shortly_and_has_known_values(capsys: pytest.CaptureFixture[str]) -> None:
    named = [
        f"--data.task={json.dumps(TASK | {'init_args': {'task': {'class_path': name}}})}"
        for name in ("Records", "Sheet")
    ]
    assert main(["fit", *HOLES, named[0], "--print_config"]) == 0
    assert "class_path: refusion_lit.tasks.Records" in capsys.readouterr().out
    assert main(["fit", *HOLES, named[1], "--run_name=none"]) == 2
    assert "task.task: expected Additions or Records, got 'Sheet'" in capsys.readouterr().err
