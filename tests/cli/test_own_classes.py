"""Tasks and decoders of one's own, with the mistakes that beginners make: errors name the class and the example."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

import refusion_lit
from cli.conftest import QUICKSTART, REPOSITORY, TINY
from refusion_lit.cli import main
from refusion_lit.decoding import Decoder, ModelRequirements, RowState
from refusion_lit.tasks import Additions, Task
from refusion_lit.tasks.base import Split, examples_of, score_of
from refusion_lit.types import Example, Prompt, SamplingParams, SpecialTokens

MODEL = REPOSITORY / "tests" / "goldens" / "models" / "additions-clean"
EXAMPLE = Example(id="e7", query="1+2>", response="3;")


@dataclass(frozen=True)
class Own(Task):
    """Returns what it is given."""

    given: Any = (EXAMPLE,)
    value: Any = 1.0

    def examples(self, split: Split) -> Sequence[Example]:
        del split
        return self.given

    def score(self, example: Example, response: str) -> float | None:
        del example, response
        return self.value


@pytest.mark.parametrize("value", [5.0, -0.1, float("nan"), "1", [1.0], 1j])
def test_a_score_that_is_none_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"^Own\.score: expected a number from 0 to 1, or None, got .*example 'e7'\.$"):
        score_of(Own(value=value), EXAMPLE, "3;")


@pytest.mark.parametrize("value", [0, 1, 0.5, True, None])
def test_other_scores_are_taken(value: Any) -> None:
    assert score_of(Own(value=value), EXAMPLE, "3;") == value


def test_an_error_of_a_task_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Own, example: Example, response: str) -> float:
        raise KeyError(type(self), example.id, response)

    monkeypatch.setattr(Own, "score", broken)
    with pytest.raises(KeyError) as error:
        score_of(Own(), EXAMPLE, "3;")
    assert error.value.__notes__ == ["Own.score failed on example 'e7', response '3;'"]


def generated() -> Iterator[Example]:
    yield EXAMPLE


@pytest.mark.parametrize(
    ("given", "got"),
    [(generated(), "'generator'"), (None, "'NoneType'"), ([{"query": "1", "response": "2"}], "'one of dict'")],
)
def test_examples_that_are_none_are_refused(given: Any, got: str) -> None:
    with pytest.raises(ValueError, match=rf"^Own\.examples: expected a sequence of .* got {got}; return a list of Ex"):
        examples_of(Own(given=given), "test")


def test_a_tests_score_out_of_range_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Additions, "score", lambda *_: 5.0)
    options = [option for option in TINY if "trainer." not in option and "backbone" not in option]
    command = ["test", "--config", QUICKSTART, *options, f"--ckpt_path={MODEL}", f"--runs_dir={tmp_path}"]
    assert main(command) == 2
    assert "error: Additions.score: expected a number from 0 to 1, or None, got 5.0; see" in capsys.readouterr().err


@dataclass(frozen=True, kw_only=True)
class NoYield(Decoder):
    """Returns from its step at once."""

    requires: ClassVar[ModelRequirements] = ModelRequirements(attention="causal", predictions=("mask",))

    def begin(self, prompt: Prompt, sampling: SamplingParams, special_tokens: SpecialTokens) -> RowState:
        return RowState.blank(prompt, sampling, special_tokens)

    def step(self, state: RowState) -> Any:
        state.finished = True


def test_a_step_that_yields_nothing_is_named() -> None:
    model = refusion_lit.load(MODEL)
    with pytest.raises(ValueError, match=r"^NoYield\.step: expected a generator of requests, got 'NoneType'; yield a"):
        model.generate(["1+2>"], decoder=NoYield(), max_new_tokens=4)


def test_the_default_decoder_fits_a_model_of_masks_alone() -> None:
    model = refusion_lit.load(MODEL)
    model.backbone.traits = replace(model.backbone.traits, predictions=("mask",))
    assert not model.default_decoder.requirements().mismatches(model.backbone.traits)
    model.generate(["1+2>"], max_new_tokens=4)
