"""Likelihoods for policy optimisation: how an answer is laid out for the training forward."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from refusion_lit.engine.decoder import Decoder
from refusion_lit.families.autoregressive import objective as autoregressive
from refusion_lit.families.autoregressive.decoder import Autoregressive
from refusion_lit.families.speculative.decoder import SelfSpeculative
from refusion_lit.learning.batch import IGNORE_INDEX, CorruptedBatch, ResponseBatch
from refusion_lit.learning.objective import required_mask_id
from refusion_lit.learning.text_order import text_then_masks
from refusion_lit.noise import KeyedNoise
from refusion_lit.refusion.objective import Hybrid, next_in_slot
from refusion_lit.types import ModelTraits, SpecialTokens
from refusion_lit.utils.require import require_at_least


@dataclass(kw_only=True)
class Answers(ResponseBatch):
    """Prompts with answers from a roll-out.

    Attributes:
        advantages: Difference of an answer's reward to other rewards in its group, per answer.
        engine: The engine's log-probability of the response token; NaN elsewhere.
        trajectories: How the answers were decoded (:class:`~refusion_lit.contrib.rl.Trajectory`).
    """

    advantages: Float[Tensor, " batch"] | None = None
    engine: Float[Tensor, "batch token"] | None = None
    trajectories: list[Any] = field(default_factory=list)


@dataclass(kw_only=True)
class LaidOut(CorruptedBatch):
    """Answers, or other texts, laid out for a training forward.

    Attributes:
        places: Place of the target in the response, by labelled position; -1 elsewhere.
        lengths: Number of response tokens per sample.
        allowed: Whether a decoder may draw an id, by id.
        advantages: Advantage per sample; ``None``: the samples are texts, not answers from a roll-out.
        engine: Log-probability that the engine gave to the target when it was drawn; NaN if unknown.
        old: Log-probability of the target before the first update on these answers; ``None`` in the first update.
        reference: Log-probability of the target under the frozen reference.
    """

    places: Int[Tensor, "batch token"] | None = None
    lengths: Int[Tensor, " sample"] | None = None
    allowed: Bool[Tensor, " vocab"] | None = None
    advantages: Float[Tensor, " sample"] | None = None
    engine: Float[Tensor, "batch token"] | None = None
    old: Float[Tensor, "batch token"] | None = None
    reference: Float[Tensor, "batch token"] | None = None


@dataclass(frozen=True, kw_only=True)
class Likelihood(ABC):
    """The log-probability of an answer, or a bound, as a weighted sum of token log-probabilities.

    Class attributes:
        traits: What a model must be trained for.
        is_exact: Whether the sum equals the log-probability with which :attr:`decoders` sample the answer. Otherwise,
            the sum is a bound or an approximation, and only ratios per sequence are defined.
        decoders: Decoders whose answers have this likelihood.
    """

    traits: ClassVar[ModelTraits]
    is_exact: ClassVar[bool] = False
    decoders: ClassVar[tuple[type[Decoder], ...]] = ()

    def refusal(self, decoder: Decoder) -> str | None:
        """Return why the likelihood does not apply to answers from a decoder; ``None`` if it applies."""
        name = type(decoder).__name__
        if type(decoder) not in self.decoders:
            known = ", ".join(cls.__name__ for cls in self.decoders)
            return f"{type(self).__name__} gives the likelihood of answers of {known}, not of {name}"
        sizes = (getattr(decoder, "slot_size", None), getattr(self, "slot_size", None))
        return None if sizes[0] == sizes[1] else f"{name} has slot_size {sizes[0]}, {type(self).__name__} {sizes[1]}"

    @abstractmethod
    def layout(self, batch: ResponseBatch, noise: KeyedNoise, special_tokens: SpecialTokens) -> LaidOut:
        """Lay answers out for a training forward.

        Returns:
            A batch whose labelled positions predict answer tokens. ``weights`` are coefficients in the weighted sum,
            ``places`` the places of the targets, if no place has two targets. ``terms`` and ``counts`` are unused.
        """


def lay_out(labels: Int[Tensor, "batch token"], **fields: object) -> LaidOut:
    """Build a batch; labels have weight 1 unless ``weights`` is given."""
    fields.setdefault("weights", (labels != IGNORE_INDEX).float())
    counts = torch.zeros(1, device=labels.device)
    return LaidOut(labels=labels, terms=torch.zeros_like(labels), counts=counts, **fields)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class NextToken(Likelihood):
    """Exact likelihood in a single forward: the sum of next-token log-probabilities.

    For next-token models that ``Autoregressive`` or ``SelfSpeculative`` decodes; both sample the same distribution.

    >>> from refusion_lit.decoding import ReFusion
    >>> NextToken().is_exact, NextToken().refusal(Autoregressive()), NextToken().refusal(ReFusion()) is None
    (True, None, False)
    """

    traits = autoregressive.Autoregressive.trained
    is_exact = True
    decoders = (Autoregressive, SelfSpeculative)

    def layout(self, batch: ResponseBatch, noise: KeyedNoise, special_tokens: SpecialTokens) -> LaidOut:
        """Label tokens with their next token; see :meth:`Likelihood.layout`."""
        corrupted = autoregressive.Autoregressive().corrupt(batch, noise, special_tokens)
        places = corrupted.position_ids + 1 - batch.prompt_lengths[:, None]
        return LaidOut(**vars(corrupted), places=places.where(corrupted.labels != IGNORE_INDEX, -1))


@dataclass(frozen=True, kw_only=True)
class LeftToRight(Likelihood):
    """Exact likelihood in a single forward: a hybrid model fills slots from left to right.

    The decoder is ``SelfSpeculative(slot_size=K)``. A mask predicts a slot's first token; the other tokens are
    predicted at the token before them. The forward feeds prompt and answer in text order, then a mask per slot, which
    sees the text before the slot and itself. That makes P + L + ceil((P + L) / K) positions; the number of masks,
    padding included, is known without waiting for a device. The probabilities of all answers add up to 1.

    Attributes:
        slot_size: Tokens per slot, K, as in the decoder.

    >>> LeftToRight(slot_size=4).refusal(SelfSpeculative(slot_size=4)) is None
    True
    """

    traits = Hybrid.trained
    is_exact = True
    decoders = (SelfSpeculative,)
    slot_size: int = 8

    def __post_init__(self) -> None:
        require_at_least("objective.likelihood.slot_size", self.slot_size, 1)

    def layout(self, batch: ResponseBatch, noise: KeyedNoise, special_tokens: SpecialTokens) -> LaidOut:  # noqa: ARG002
        """Append a mask per slot, for its first place; see :meth:`Likelihood.layout`."""
        size = self.slot_size
        num_samples, num_tokens = batch.input_ids.shape
        positions = batch.positions
        places = positions - batch.prompt_lengths[:, None]
        rest = next_in_slot(batch, torch.full_like(batch.prompt_lengths, size))
        starts = (torch.arange(-(-num_tokens // size), device=positions.device) * size).expand(num_samples, -1)
        exists = starts < batch.response_lengths[:, None]
        firsts = batch.prompt_lengths[:, None] + starts
        first_tokens = batch.input_ids.gather(1, firsts.clamp(max=num_tokens - 1)).where(exists, IGNORE_INDEX)
        mask = required_mask_id(self, special_tokens)
        masks = torch.full_like(firsts, mask).where(exists, special_tokens.pad_token_id)
        labels = torch.cat((rest, first_tokens), 1)
        return lay_out(
            labels,
            input_ids=torch.cat((batch.input_ids, masks), 1),
            position_ids=torch.cat((positions.expand_as(rest), firsts.where(exists, num_tokens)), 1),
            visible=text_then_masks(num_tokens, firsts.where(exists, 0), torch.zeros_like(firsts)),
            is_masked=F.pad(exists, (num_tokens, 0)),
            is_real=torch.cat((batch.is_real, exists), 1),
            places=torch.cat((places + 1, starts), 1).where(labels != IGNORE_INDEX, -1),
        )
