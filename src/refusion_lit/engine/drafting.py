"""What decoders that draft by masks share: how many recent drafts were accepted, and what is read at once."""

from __future__ import annotations

from dataclasses import dataclass

FEW_POSITIONS = 16
"""Up to this many positions, a CPU computes logits hardly slower than for one: reading the LM head's weights dominates.
So masks that may not be needed are read together with everything else."""


@dataclass(slots=True)
class Acceptance:
    """Counts of recent drafts.

    Attributes:
        num_tested: Drafts compared with the model's own token.
        num_accepted: Those that were equal to it.
        num_assumed: Drafts that are counted beside them, half of them as accepted.
        half_life: After this many tokens a draft counts half: a text is easy to draft here and hard there.
    """

    num_tested: float = 0.0
    num_accepted: float = 0.0
    num_assumed: float = 4.0
    half_life: float = 16.0

    @property
    def rate(self) -> float:
        """Estimated probability that a draft is accepted: the mean of the recent ones, and one half without any."""
        return (self.num_accepted + self.num_assumed / 2) / (self.num_tested + self.num_assumed)

    def count(self, num_tokens: int, num_tested: int = 0, num_accepted: int = 0) -> None:
        """Count the drafts of a forward; earlier ones count less and less, so that drafting is tried again."""
        decay = 0.5 ** (num_tokens / self.half_life)
        self.num_tested = decay * (self.num_tested + num_tested)
        self.num_accepted = decay * (self.num_accepted + num_accepted)
