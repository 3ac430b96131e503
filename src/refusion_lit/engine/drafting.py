"""Whether drafts pay: the share of recent drafts that were accepted, and the layout that costs least per token."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

Layout = Literal["two_forwards", "single_forward"]
"""Where the masks of a round stand: in a forward of their own, or after every possible acceptance of a verification."""

FEW_POSITIONS = 16
"""Up to this many positions, a CPU computes logits hardly slower than for one: reading the LM head's weights dominates.
So masks that may not be needed are read together with everything else."""

_LEAST_GAIN = 0.05
"""Share of the time per token that drafting must save by this estimate: acceptance varies within a text."""

_HALF_LIFE = 16
"""After this many tokens an accepted or rejected draft counts half: a text is easy to draft here and hard there."""


@dataclass(slots=True)
class Acceptance:
    """Counts of recent drafts.

    Attributes:
        num_tested: Drafts compared with the model's own token.
        num_accepted: Those that were equal to it.
    """

    num_tested: float = 0.0
    num_accepted: float = 0.0

    @property
    def rate(self) -> float:
        """Estimated probability that a draft is accepted: the mean of the recent ones, and one half without any."""
        return (self.num_accepted + 2) / (self.num_tested + 4)

    def count(self, num_tokens: int, num_tested: int = 0, num_accepted: int = 0) -> None:
        """Count the drafts of a forward; earlier ones count half every 16 tokens, so that drafting is tried again."""
        decay = 0.5 ** (num_tokens / _HALF_LIFE)
        self.num_tested = decay * (self.num_tested + num_tested)
        self.num_accepted = decay * (self.num_accepted + num_accepted)


@lru_cache(maxsize=1024)
def cheapest(forward_cost: float, adapters: float, acceptance: float, num_masks: int) -> tuple[Layout, int]:
    """Return the layout and number of masks with the lowest cost per token, in positions.

    Each draft is assumed accepted with the same probability a, so that d drafts commit E = a + a^2 + ... + a^d tokens
    besides the model's own. Without drafts, a token costs F + 1 positions, F the fixed cost of a forward.
    ``two_forwards`` commits E + 2 tokens for two forwards, with d masks in the first and d drafts in the second;
    ``single_forward`` commits E + 1 tokens for one, with d drafts and d masks after each of d + 1 acceptances.

    Args:
        forward_cost: F, at least 0.
        adapters: What a drafter's adapters add to a forward with masks, in positions.
        acceptance: a, in [0, 1].
        num_masks: Maximum of d.

    Returns:
        The layout and d; 0 where drafts do not save 5 %.
    """
    best: tuple[float, Layout, int] = ((1 - _LEAST_GAIN) * (forward_cost + 1), "two_forwards", 0)
    expected = 0.0
    for d in range(1, num_masks + 1):
        expected += acceptance**d
        two = (2 * (forward_cost + 1 + d) + adapters) / (2 + expected)
        single = (forward_cost + 1 + d + (d + 1) * d + adapters) / (1 + expected)
        best = min(best, (two, "two_forwards", d), (single, "single_forward", d))
    return best[1], best[2]
