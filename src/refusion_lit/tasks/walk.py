"""Walk: a chain of steps in Z10. The response to ``>7|.~.;.+.;`` is ``7~2;2+3;``.

The step ``+`` maps s to s + 1, ``-`` to s - 1 and ``~`` to 9 - s. A cell of the response is a state, the step and the
next state. The query gives the first state after ``>`` or the last after ``<``. All steps are invertible, so the cells
are determined one by one from the known end.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import ClassVar

from refusion_lit.tasks.generated import GeneratedTask, digits
from refusion_lit.types import Example
from refusion_lit.utils.require import require_between

_STEPS = "+-~"
_NEXT = {"+": "1234567890", "-": "9012345678", "~": "9876543210"}


@dataclass(frozen=True, kw_only=True)
class Walk(GeneratedTask):
    """Sixteen steps with a known first state or, with probability 0.5, a known last state.

    The key determines the steps. Walks with the same steps are therefore in the same split, even if one gives the first
    state and the other the last one.

    Attributes:
        num_steps: Number of steps, 1 to 256.
    """

    capacity_option: ClassVar[str] = "num_steps"

    num_steps: int = 16

    def __post_init__(self) -> None:
        require_between("num_steps", self.num_steps, 1, 256)
        super().__post_init__()

    @property
    def num_keys(self) -> int:
        """Three choices for each step."""
        return len(_STEPS) ** self.num_steps

    def draw(self, key: int, rng: Random) -> tuple[str, str]:
        """Return the known state with blank cells, and the complete cells."""
        steps = [_STEPS[digit] for digit in digits(key, len(_STEPS), self.num_steps)]
        start = state = str(rng.randrange(10))
        cells: list[str] = []
        for step in steps:
            following = _NEXT[step][int(state)]
            cells.append(f"{state}{step}{following};")
            state = following
        known = f">{start}" if rng.random() < 0.5 else f"<{state}"
        return f"{known}|" + "".join([f".{step}.;" for step in steps]), "".join(cells)

    def score(self, example: Example, response: str) -> float:
        """Return 1 if the response equals the reference, else 0."""
        return float(response == example.response)

    def characters(self) -> str:
        """Return digits, steps, directions, blank and separators."""
        return "0123456789+-~<>|.;"
