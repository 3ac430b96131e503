"""The task Walk: the steps of a walk, determined by a known state and the directions."""

from __future__ import annotations

import re
from collections import Counter

from experiments.tasks import Walk
from hypothesis import given
from hypothesis import strategies as st


def take_step(state: int, step: str) -> int:
    return {"+": (state + 1) % 10, "-": (state - 1) % 10, "~": 9 - state}[step]


@given(index=st.integers(0, 199_999), seed=st.integers(), num_steps=st.integers(13, 30))
def test_the_known_state_and_the_steps_determine_the_walk(index: int, seed: int, num_steps: int) -> None:
    example = Walk(num_steps=num_steps, seed=seed).examples("train")[index]
    assert re.fullmatch(rf"[<>]\d\|(\.[+~-]\.;){{{num_steps}}}", example.query)
    assert re.fullmatch(rf"(\d[+~-]\d;){{{num_steps}}}", example.response)
    steps = example.query[4::4]
    known = int(example.query[1])
    if example.query[0] == ">":
        start = known
    else:  # independent of the inverse steps: try all starts
        [start] = [s for s in range(10) if walk_from(s, steps)[-1] == known]
    states = walk_from(start, steps)
    cells = [f"{a}{step}{b};" for a, step, b in zip(states, steps, states[1:], strict=False)]
    assert example.response == "".join(cells)


def walk_from(state: int, steps: str) -> list[int]:
    states = [state]
    for step in steps:
        states.append(take_step(states[-1], step))
    return states


def test_directions_states_and_steps_are_equally_frequent() -> None:
    examples = Walk().examples("train")[:2000]
    assert all(example.query.count(";") == 16 for example in examples)
    assert 900 < sum(example.query[0] == "<" for example in examples) < 1100  # deviation 22
    known = Counter(example.query[1] for example in examples)
    assert len(known) == 10
    assert all(120 < count < 280 for count in known.values())  # deviation 13
    steps = Counter("".join(example.query[4::4] for example in examples))
    assert all(10_200 < count < 11_133 for count in steps.values())  # deviation 84
