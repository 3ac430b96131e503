"""What a task of one's own returns is checked before anything depends on it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from refusion_lit.data.examples import load_examples
from refusion_lit.tasks import Example
from refusion_lit.tasks.base import Task, score_response


@dataclass(frozen=True, kw_only=True)
class Own(Task):
    """One example."""

    response: Any = "b"
    name: Any = None

    def examples(self, split: str) -> list[Example]:
        return [Example(id=self.name or split, query="a", response=self.response)]

    def score(self, example: Example, response: str) -> Any:
        return np.float32(0.5)


def test_scores_of_any_real_type_can_be_written() -> None:
    score, _ = score_response(Own(), Own().examples("test")[0], "b")
    assert json.dumps(score) == "0.5"


def test_examples_are_texts() -> None:
    assert len(load_examples(Own(), "test")) == 1
    for wrong in (Own(response=5), Own(name=7)):  # a resumed test looks for ids as they stand in a file
        with pytest.raises(ValueError, match=r"examples: .*id, query and response"):
            load_examples(wrong, "test")
