"""Rewards of answers: the interface, and calls with a time limit whose results are checked."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

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
        """Return the reward of each response to its example, at best a function of the two alone.

        NaN drops a response: it is left out of its group.
        """


def checked_rewards(
    reward: Reward, examples: Sequence[Example], responses: Sequence[str], seconds: float
) -> list[float]:
    """Return the rewards of responses.

    Raises:
        ValueError: In one line, if the reward raises, takes more than the given seconds, or returns something else than
            a number for each response.
    """
    name = f"{type(reward).__name__}.rewards"
    found: dict[str, Any] = {}

    def call() -> None:
        try:
            found["values"] = list(reward.rewards(examples, responses))
        except Exception as error:
            found["error"] = error

    # A daemon, as a thread that hangs cannot be ended and must not keep the process.
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    fix = "the weights are those of the last checkpoint; mend it, then resume with --ckpt_path last"
    require(not thread.is_alive(), name, f"an answer within {seconds:g} s (objective.reward_seconds)", "none", fix)
    require("error" not in found, name, "rewards", found.get("error"), fix)
    values = found["values"]
    require(len(values) == len(responses), name, f"{len(responses)} numbers, one per response", len(values), fix)
    wrong = [value for value in values if not isinstance(value, Real)]
    require(not wrong, name, "numbers", wrong[:1], fix)
    return [float(value) for value in values]
