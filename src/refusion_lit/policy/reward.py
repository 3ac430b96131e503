"""Rewards of answers: the interface, and calls with a time limit whose results are checked."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real

from refusion_lit.types import Example
from refusion_lit.utils.require import require, require_number


@dataclass(frozen=True, kw_only=True)
class Reward(ABC):
    """A reward of answers: one file with a subclass, named by its class path.

    Attributes:
        weight: Factor of this reward in the sum of all, a finite number.
    """

    weight: float = 1.0

    def __post_init__(self) -> None:
        """Check the options."""
        require_number("objective.rewards.weight", self.weight, "(-inf, inf)", "use 1, say")

    @abstractmethod
    def rewards(self, examples: Sequence[Example], responses: Sequence[str]) -> Sequence[float]:
        """Return the reward of each response, at best a function of example and response alone.

        NaN drops a response: it is left out of its group.

        Args:
            examples: The example that each response answers.
            responses: The texts, without end of sequence.
        """


def checked_rewards(
    reward: Reward, examples: Sequence[Example], responses: Sequence[str], seconds: float
) -> list[float]:
    """Return the rewards of responses.

    Args:
        reward: The reward.
        examples: The example that each response answers.
        responses: The texts.
        seconds: Time limit of the call.

    Raises:
        ValueError: In one line, if the reward raises, takes longer, or returns something else than a number for each
            response.
    """
    name = f"{type(reward).__name__}.rewards"
    found: list[object] = []
    failed: list[Exception] = []

    def call() -> None:
        try:
            found.append(reward.rewards(examples, responses))
        except Exception as error:
            failed.append(error)

    # A daemon, as a thread that hangs cannot be ended and must not keep the process.
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    fix = "the weights are those of the last checkpoint; mend it, then resume with --ckpt_path last"
    require(not thread.is_alive(), name, f"an answer within {seconds:g} s (objective.reward_seconds)", "none", fix)
    if failed:
        raise ValueError(f"{name}: expected rewards, got {type(failed[0]).__name__} ({failed[0]}); {fix}.") from failed[
            0
        ]
    values = found[0]
    is_sequence = hasattr(values, "__len__") and hasattr(values, "__getitem__")
    size = len(values) if is_sequence else None  # type: ignore[arg-type]
    require(size == len(responses), name, f"{len(responses)} numbers, one for each response", size or values, fix)
    wrong = [value for value in values if not isinstance(value, Real)]  # type: ignore[union-attr]
    require(not wrong, name, "numbers", wrong[0] if wrong else None, fix)
    return [float(value) for value in values]  # type: ignore[union-attr]
