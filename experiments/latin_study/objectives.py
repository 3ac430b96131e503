"""Variants of the hybrid objective that only this study needs; Python finds them beside ``run.py``."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from refusion_lit.learning.batch import CorruptedBatch, ResponseBatch
from refusion_lit.noise import KeyedNoise
from refusion_lit.objectives import Hybrid
from refusion_lit.types import SpecialTokens


@dataclass(frozen=True, kw_only=True)
class SkewedHybrid(Hybrid):
    """The hybrid objective with more or fewer masked slots.

    Attributes:
        power: The share of masked slots is t^power with t uniform: below 1 more are masked, above 1 fewer.
    """

    power: float = 1.0

    def corrupt(
        self,
        batch: ResponseBatch,
        noise: KeyedNoise,
        special_tokens: SpecialTokens,
        *,
        mask_ratio: Float[Tensor, " batch"] | None = None,
    ) -> CorruptedBatch:
        """Corrupt with a skewed share of masked slots; see :meth:`Hybrid.corrupt`."""
        if mask_ratio is None:
            mask_ratio = (noise.uniform("skewed_ratio", 1)[:, 0] ** self.power).clamp(min=self.eps)
        return super().corrupt(batch, noise, special_tokens, mask_ratio=mask_ratio)
