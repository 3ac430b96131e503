"""The rewards of the experiment with a real model."""

from __future__ import annotations

import pytest
from experiments.policy_real.rewards import Format, right_share


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("48 / 2 = 24 and 3 x 4 = $13.", 0.5),
        ("so <<48/2=24>>24", 1.0),
        ("1,000 * 2 = 2,000", 1.0),
        ("she has 5 + (3*2) = 11 eggs and 2 + 2 = 5", 0.5),
        ("x = 5", 0.0),
        ("5 = 5", 0.0),
        ("no equation", 0.0),
        ("-" * 5000 + " = 1", 0.0),
    ],
)
def test_share_of_equations_that_hold(text: str, expected: float) -> None:
    assert right_share(text) == expected


def test_format_wants_a_final_number() -> None:
    assert Format().rewards([], ["so #### 24", "the answer is 24", r"\boxed{24}"]) == [1.0, 0.0, 1.0]
