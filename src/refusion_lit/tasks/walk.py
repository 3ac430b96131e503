"""Walk: a chain of steps in Z10. ``>7|.~.;.+.;`` asks for ``7~2;2+3;``.

``+`` goes from s to s + 1, ``-`` to s - 1 and ``~`` to 9 - s. Each cell is state, step and next state.
``>`` gives the walk's start, ``<`` its end: every step can be undone, so the cells are best filled in
from the left or from the right.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import ClassVar

from refusion_lit.tasks.generated import GeneratedTask, check_range, digits
from refusion_lit.types import Example

_STEPS = "+-~"
_NEXT = {"+": "1234567890", "-": "9012345678", "~": "9876543210"}


@dataclass(frozen=True, kw_only=True)
class Walk(GeneratedTask):
    """Sixteen steps of which the start or, half of the time, the end is known.

    The key is the sequence of steps, so the same steps from another start, or asked from the other
    end, never appear in another split.

    Attributes:
        num_steps: Steps in a walk, 1 to 256.
    """

    grows_with: ClassVar[str] = "num_steps"

    num_steps: int = 16

    def __post_init__(self) -> None:
        """Check the options."""
        check_range("num_steps", self.num_steps, 1, 256)
        super().__post_init__()

    @property
    def num_keys(self) -> int:
        """Three choices for each step."""
        return len(_STEPS) ** self.num_steps

    def draw(self, key: int, rng: Random) -> tuple[str, str]:
        """Return a direction, the known state and blank cells; and the cells filled in."""
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
        """Return 1 for exactly the reference, else 0."""
        return float(response == example.response)

    def characters(self) -> str:
        """Return digits, steps, directions, blank and separators."""
        return "0123456789+-~<>|.;"
