"""Tasks and decoders of one's own, with the mistakes that beginners make: errors name the class and the example."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

import refusion_lit
from cli.conftest import QUICKSTART, REPOSITORY, TINY, TINY_TEST
from refusion_lit.cli import main
from refusion_lit.data.examples import load_examples
from refusion_lit.decoding import Branch, Decoder, Draw, Forward, LLaDA, ModelRequirements, ReFusion, RowState
from refusion_lit.families.defaults import entry_with_decoder
from refusion_lit.metrics import DecodingMetrics
from refusion_lit.objectives import Hybrid
from refusion_lit.tasks import Additions, Example, Task
from refusion_lit.tasks.base import Split, score_response
from refusion_lit.types import Prompt, SamplingParams, SpecialTokens

MODEL = REPOSITORY / "tests" / "goldens" / "models" / "additions-clean"
EXAMPLE = Example(id="e7", query="1+2>", response="3;")


@dataclass(frozen=True)
class Own(Task):
    """A task that returns given examples and a given score."""

    given: Any = (EXAMPLE,)
    value: Any = 1.0

    def examples(self, split: Split) -> Sequence[Example]:
        del split
        return self.given

    def score(self, example: Example, response: str) -> float | None:
        del example, response
        return self.value


@pytest.mark.parametrize("value", [5.0, -0.1, float("nan"), "1", [1.0], 1j])
def test_a_score_that_is_no_number_from_0_to_1_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"^Own\.score: expected a number from 0 to 1, or None, got .*example 'e7'"):
        score_response(Own(value=value), EXAMPLE, "3;")


@pytest.mark.parametrize("value", [0, 1, 0.5, True, None])
def test_numbers_from_0_to_1_and_none_are_taken_as_scores(value: Any) -> None:
    assert score_response(Own(value=value), EXAMPLE, "3;") == (value, {})


class Several(Own):
    """Has two metrics beside the score."""

    metrics = ("letters", "edits")


def test_a_task_may_return_several_metrics() -> None:
    value = {"edits": 3, "score": 0.5, "letters": 0.75}
    assert score_response(Several(value=value), EXAMPLE, "3;") == (0.5, {"letters": 0.75, "edits": 3.0})
    assert score_response(Several(value=None), EXAMPLE, "3;") == (None, {})


@pytest.mark.parametrize(
    "value",
    [1.0, {"score": 1.0}, {"letters": 1.0, "edits": 1.0}, {"score": 1.0, "letters": float("nan"), "edits": 0.0}],
    ids=["a number", "missing", "no score", "not finite"],
)
def test_other_metrics_than_the_named_are_refused(value: Any) -> None:
    expected = r"^Several\.score: expected finite numbers by name: score, letters, edits, got .*'e7'\.$"
    with pytest.raises(ValueError, match=expected):
        score_response(Several(value=value), EXAMPLE, "3;")


@pytest.mark.parametrize("names", [("num_tokens",), ("a b",), "letters"])
def test_names_of_metrics_are_names_of_no_figure(names: Any) -> None:
    with pytest.raises(ValueError, match=r"^task\.metrics: expected names .*; rename them\.$"):
        DecodingMetrics(metrics=names)


def test_further_metrics_reach_table_results_predictions_report_and_score(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The task of a test counts digits; then ``score`` rates its predictions by another task."""

    def count_digits(self: Additions, example: Example, response: str) -> dict[str, float]:
        return {"score": 1.0, "num_digits": float(sum(map(str.isdigit, response)))}

    monkeypatch.setattr(Additions, "score", count_digits)
    monkeypatch.setattr(Additions, "metrics", ("num_digits",))
    command = ["test", "--config", QUICKSTART, *TINY_TEST, f"--ckpt_path={MODEL}", f"--runs_dir={tmp_path}"]
    assert main([*command, "--run_version=v"]) == 0
    run = tmp_path / "quickstart" / "v"
    lines = [json.loads(line) for line in (run / "predictions_refusion.jsonl").read_text().splitlines()]
    counts = [sum(map(str.isdigit, line["response"])) for line in lines]
    assert [line["metrics"] for line in lines] == [{"num_digits": count} for count in counts]
    mean = sum(counts) / len(counts)
    results = json.loads((run / "results.json").read_text())
    assert results["metrics"] == ["num_digits"]
    assert results["results"]["refusion"]["num_digits"] == pytest.approx(mean)
    assert re.search(rf"score . num_digits .*1\.000 . +{mean:.3f}", capsys.readouterr().out, re.DOTALL)
    assert f"<td>{mean:.3f}</td>" in (run / "report" / "report.html").read_text()
    assert main(["report", str(run), "--format=all"]) == 0
    assert f" {mean:.3f} |" in (run / "report" / "table.md").read_text()

    monkeypatch.setattr(Additions, "score", lambda *_: {"score": 0.0, "num_digits": -1.0})
    capsys.readouterr()
    options = [option.replace("data.", "") for option in TINY_TEST if "data.task" in option]
    task = ["--task=Additions", "--task.max_terms=3", *options]
    assert main(["score", str(run / "predictions_refusion.jsonl"), *task]) == 0
    assert json.loads(capsys.readouterr().out)["num_digits"] == -1.0
    scored = (run / "predictions_refusion.scored.jsonl").read_text().splitlines()
    assert all(json.loads(line)["metrics"] == {"num_digits": -1.0} for line in scored)


def test_an_error_of_a_task_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Own, example: Example, response: str) -> float:
        raise KeyError(type(self), example.id, response)

    monkeypatch.setattr(Own, "score", fail)
    with pytest.raises(KeyError) as error:
        score_response(Own(), EXAMPLE, "3;")
    assert error.value.__notes__ == ["Own.score failed on example 'e7', response '3;'"]


def yield_example() -> Iterator[Example]:
    yield EXAMPLE


@pytest.mark.parametrize(
    ("given", "got"),
    [
        (yield_example(), "'generator'"),
        (None, "'NoneType'"),
        ([{"query": "1", "response": "2"}], "'one of dict'"),
        ([None], "'one of NoneType'"),
    ],
)
def test_objects_that_are_no_examples_are_refused(given: Any, got: str) -> None:
    with pytest.raises(ValueError, match=rf"^Own\.examples: expected a sequence of .* got {got}"):
        load_examples(Own(given=given), "test")


def test_a_tests_score_out_of_range_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Additions, "score", lambda *_: 5.0)
    command = ["test", "--config", QUICKSTART, *TINY_TEST, f"--ckpt_path={MODEL}", f"--runs_dir={tmp_path}"]
    assert main(command) == 2
    assert "error: Additions.score: expected a number from 0 to 1, or None, got 5.0" in capsys.readouterr().err


@dataclass(frozen=True, kw_only=True)
class NoYield(Decoder):
    """Returns from its step at once."""

    requires = ModelRequirements(attention="causal", predictions=("mask",))

    def begin(self, prompt: Prompt, sampling: SamplingParams, special_tokens: SpecialTokens) -> RowState:
        return RowState(prompt, sampling, special_tokens)

    def step(self, state: RowState) -> Any:
        state.finished = True


def test_a_step_that_yields_nothing_is_named() -> None:
    model = refusion_lit.load(MODEL)
    with pytest.raises(ValueError, match=r"^NoYield\.step: expected a generator of requests, got None"):
        model.generate(["1+2>"], decoder=NoYield(), max_new_tokens=4)


@dataclass(frozen=True, kw_only=True)
class YieldsOther(NoYield):
    """Yields a text in place of a request, or a forward pass of given branches."""

    branches: Any = None

    def step(self, state: RowState) -> Any:
        yield "tokens" if self.branches is None else Forward(phase="x", branches=self.branches, draw=make_draw(state))


def make_draw(state: RowState) -> Draw:
    """Return the options of a draw."""
    return Draw(sampling=state.sampling)


@pytest.mark.parametrize(
    ("branches", "message"),
    [
        (None, "for each branch of the last Forward, got 'tokens'; see docs/extending.md."),
        ((), "decoder: expected steps that yield a Forward with branches, or MoreDrafts for"),
        (
            Branch(tokens=[1], positions=[0]),
            "decoder: expected steps that yield a Forward with branches, or MoreDrafts",
        ),
        ((Branch(tokens=[], positions=[]),), "decoder: expected branches with tokens, a position from 0 for each, and"),
    ],
)
def test_a_step_that_yields_no_request_is_named(branches: Any, message: str) -> None:
    model = refusion_lit.load(MODEL)
    with pytest.raises(ValueError, match=re.escape(message)):
        model.generate(["1+2>"], decoder=YieldsOther(branches=branches), max_new_tokens=4)


def test_the_default_decoder_fits_a_model_of_masks_alone() -> None:
    model = refusion_lit.load(MODEL)
    model.backbone.traits = replace(model.backbone.traits, predictions=("mask",))
    assert not model.default_decoder.requirements().mismatches(model.backbone.traits)
    model.generate(["1+2>"], max_new_tokens=4)


def test_a_decoder_that_says_nothing_of_its_model_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "from refusion_lit.decoding import Decoder\n\n\nclass Silent(Decoder):\n    def step(self, state): ...\n"
    (tmp_path / "silent.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["generate", "--ckpt_path", str(MODEL), "--decoder", "silent.Silent", "--prompt", "1+2>"]) == 2
    message = capsys.readouterr().err
    assert "decoder: expected what Silent needs of a model, got 'no class attribute requires'" in message


def test_options_without_the_dataclass_decorator_are_named() -> None:
    class Forgotten(ReFusion):
        name: ClassVar[str] = "x"
        strength: float = 0.5

    fix = "put @dataclass(frozen=True, kw_only=True) before class Forgotten, or correct its ranges"
    message = f"Forgotten: expected a dataclass with its own options, got 'none of strength'; {fix}."
    with pytest.raises(ValueError, match=re.escape(message)):
        Forgotten()


NO_STEP = """from dataclasses import dataclass
from refusion_lit.decoding import Decoder
@dataclass(frozen=True, kw_only=True)
class A(Decoder):
    pass
"""


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("class A(\n", "own.A", "'(' was never closed"),
        ("raise RuntimeError('no')", "own.A", ": no"),
        ("", "os.path", "a subclass of "),
        (NO_STEP, "own.A", "abstract"),
    ],
)
@pytest.mark.parametrize("command", ["generate", "fit"])
def test_a_class_of_ones_own_that_cannot_be_used_is_named_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    command: str, text: str, name: str, message: str,
) -> None:  # fmt: skip
    (tmp_path / "own.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own", raising=False)
    if command == "generate":
        args = ["generate", "--ckpt_path", str(MODEL), "--prompt", "1+2>", "--decoder", name]
    elif text == NO_STEP:
        args = ["fit", "--config", QUICKSTART, f"--model.decoders.mine={name}"]
    else:
        args = ["fit", "--config", QUICKSTART, f"--model.objective={name}"]
    assert main(args) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("refusion-lit: error: ")
    assert message in line
    monkeypatch.delitem(sys.modules, "own", raising=False)


def test_a_training_warns_of_decoders_that_do_not_fit_its_objective(tmp_path: Path) -> None:
    options = ["--model.objective=Autoregressive", "--trainer.max_steps=1", f"--runs_dir={tmp_path}"]
    with pytest.warns(UserWarning, match=r"model.decoders.refusion: ReFusion does not fit"):
        assert main(["fit", "--config", QUICKSTART, *TINY, *options]) == 0


def test_an_objective_that_cannot_pack_is_refused_before_anything_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--model.objective=R2FT", "--data.pack_length=256", f"--runs_dir={tmp_path}"]
    assert main(["fit", "--config", QUICKSTART, *TINY, *options]) == 2
    message = capsys.readouterr()
    assert "data.pack_length: expected an objective whose samples can be packed, got 'R2FT'" in message.err
    assert "packed in" not in message.out + message.err


OWN_MODULE = """
from refusion_lit.decoding import LLaDA
from refusion_lit.objectives import Masked


class Ending(Masked):
    pass


class Chunks(LLaDA):
    pass
"""


def _train_own(tmp_path: Path, version: str, objective: str, decoders: str) -> Path:
    overlay = tmp_path / f"{version}.yaml"
    overlay.write_text(f"model: {{objective: {objective}, decoders: {decoders}}}")
    args = ["fit", "--config", QUICKSTART, *TINY, f"--config={overlay}", f"--runs_dir={tmp_path}"]
    assert main([*args, f"--run_version={version}", "--trainer.max_steps=1", "--trainer.limit_val_batches=0"]) == 0
    return tmp_path / "quickstart" / version


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yield a module with an objective and a decoder that a program of a user has."""
    name = "own_ending_module"
    (tmp_path / f"{name}.py").write_text(OWN_MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    sys.modules.pop(name, None)


BIDIRECTIONAL = "{refusion: null, other: null, wrong: ReFusion, mine: {class_path: %s, init_args: {%s}}}"


@pytest.mark.filterwarnings("ignore:model.decoders.wrong")
def test_a_model_of_ones_own_objective_is_decoded_by_the_configs_first_decoder_that_fits(
    tmp_path: Path, own_module: str, capsys: pytest.CaptureFixture[str]
) -> None:
    decoders = BIDIRECTIONAL % ("LLaDA", "block_length: 4")
    run = _train_own(tmp_path, "named", f"{own_module}.Ending", decoders)
    assert refusion_lit.load(run).default_decoder.block_length == 4  # type: ignore[attr-defined]
    assert main(["export", f"--ckpt_path={run}", f"--output={tmp_path / 'exported'}"]) == 0
    entry = json.loads((tmp_path / "exported" / "config.json").read_text())["refusion_lit"]["decoder"]
    assert entry == {"class_path": "LLaDA", "init_args": {"block_length": 4}, "objective": "Ending"}
    assert refusion_lit.load(tmp_path / "exported").default_decoder.block_length == 4  # type: ignore[attr-defined]
    assert "block_length=4" in (tmp_path / "exported" / "README.md").read_text()
    capsys.readouterr()
    options = ["--prompt=1+2>", "--max_new_tokens=8", "--decoder.guidance_scale=0"]
    assert main(["generate", f"--ckpt_path={run}", *options]) == 0
    assert "LLaDA" in capsys.readouterr().err
    # A later training with an objective of the package removes the entry, and keeps what was exported with --decoder.
    traits = refusion_lit.load(run).backbone.traits
    assert entry_with_decoder({"decoder": entry}, traits, [LLaDA()], Hybrid) == {}
    assert entry_with_decoder({"decoder": {"class_path": "LLaDA"}}, traits, [], Hybrid) == {
        "decoder": {"class_path": "LLaDA"}
    }


@pytest.mark.filterwarnings("ignore:model.decoders.wrong")
def test_a_decoder_of_ones_own_is_used_only_if_the_program_has_imported_it(tmp_path: Path, own_module: str) -> None:
    run = _train_own(tmp_path, "own", f"{own_module}.Ending", BIDIRECTIONAL % (f"{own_module}.Chunks", ""))
    module = sys.modules.pop(own_module)
    with pytest.warns(UserWarning, match=rf"{own_module}\.Chunks.*not imported"):
        decoder = refusion_lit.load(run).default_decoder
    assert type(decoder).__name__ == "LLaDA"
    assert own_module not in sys.modules
    sys.modules[own_module] = module
    assert type(refusion_lit.load(run).default_decoder) is module.Chunks
