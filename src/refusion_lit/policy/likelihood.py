"""Likelihoods of answers for policy optimisation: the interface, exact ones, and the mean-field baseline.

A likelihood lays an answer out for one training forward and says which positions predict which of its tokens. Bounds
for masked, block and slot models are in :mod:`refusion_lit.policy.bounds`, that of ReFusion's decoder in
:mod:`refusion_lit.policy.rounds`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from refusion_lit.engine.decoder import Decoder
from refusion_lit.families.autoregressive import objective as autoregressive
from refusion_lit.families.autoregressive.decoder import Autoregressive
from refusion_lit.families.llada.decoder import LLaDA
from refusion_lit.families.llada.fast_dllm import FastDLLM
from refusion_lit.families.llada.objective import all_of
from refusion_lit.families.speculative.decoder import SelfSpeculative
from refusion_lit.learning.batch import IGNORE_INDEX, CorruptedBatch, ResponseBatch
from refusion_lit.learning.objective import response_positions
from refusion_lit.noise import KeyedNoise
from refusion_lit.refusion.decoder import ReFusion
from refusion_lit.refusion.objective import next_in_slot
from refusion_lit.types import ModelTraits, SpecialTokens
from refusion_lit.utils.require import require, require_at_least, require_choice


@dataclass(frozen=True, kw_only=True)
class Likelihood(ABC):
    """The log-probability of an answer, or a bound of it, as a weighted sum of its tokens' log-probabilities.

    Class attributes:
        is_exact: Whether the sum is the log-probability with which :attr:`decoders` sample the answer; else it is a
            bound or an approximation, as the class says.
        decoders: Decoders that may roll answers out.
        has_tokens: Whether each response token has one log-probability of its own, so that ratios of tokens and slots
            are defined; else only those of sequences are.
    """

    is_exact: ClassVar[bool] = False
    has_tokens: ClassVar[bool] = False
    decoders: ClassVar[tuple[type[Decoder], ...]] = ()

    @property
    @abstractmethod
    def traits(self) -> ModelTraits:
        """What a model must be trained for."""

    @property
    def num_forwards(self) -> int:
        """Forwards per answer and update."""
        return 1

    def refusal(self, decoder: Decoder) -> str | None:
        """Return why the answers of a decoder have no such likelihood; ``None`` if they have."""
        name = type(decoder).__name__
        if type(decoder) not in self.decoders:
            known = ", ".join(cls.__name__ for cls in self.decoders)
            return f"{type(self).__name__} gives the likelihood of answers of {known}, not of {name}"
        sizes = (getattr(decoder, "slot_size", None), getattr(self, "slot_size", None))
        return None if sizes[0] == sizes[1] else f"{name} has slot_size {sizes[0]}, {type(self).__name__} {sizes[1]}"

    @abstractmethod
    def layout(self, batch: ResponseBatch, noise: KeyedNoise, special_tokens: SpecialTokens) -> CorruptedBatch:
        """Lay answers out for a training forward.

        Returns:
            A batch whose labelled positions predict tokens of the answers. ``weights`` are the coefficients of their
            log-probabilities in the likelihood, ``places`` the places of their targets. ``terms`` and ``counts`` are
            unused.
        """


def laid_out(labels: Int[Tensor, "batch token"], **fields: object) -> CorruptedBatch:
    """Return a batch with weight 1 for every label, unless ``weights`` says otherwise."""
    fields.setdefault("weights", (labels != IGNORE_INDEX).float())
    counts = torch.zeros(1, device=labels.device)
    return CorruptedBatch(labels=labels, terms=torch.zeros_like(labels), counts=counts, **fields)  # type: ignore[arg-type]


def mask_id(likelihood: Likelihood, special_tokens: SpecialTokens) -> int:
    """Return the mask token's id.

    Raises:
        ValueError: If the model has no mask token.
    """
    mask = special_tokens.mask_token_id
    fix = "use NextToken for a model without one"
    require(mask is not None, "mask_token_id", f"a mask token for {type(likelihood).__name__}", None, fix)
    assert mask is not None
    return mask


@dataclass(frozen=True, kw_only=True)
class NextToken(Likelihood):
    """Exact, one forward: the sum of next-token log-probabilities.

    For next-token models decoded by ``Autoregressive`` or ``SelfSpeculative``, whose text has the same distribution.
    """

    is_exact = True
    has_tokens = True
    decoders = (Autoregressive, SelfSpeculative)

    @property
    def traits(self) -> ModelTraits:
        """Causal attention; every token predicts the next."""
        return ModelTraits(attention="causal", predictions=("next_token",))

    def layout(self, batch: ResponseBatch, noise: KeyedNoise, special_tokens: SpecialTokens) -> CorruptedBatch:
        """Label each token with the next one; see :meth:`Likelihood.layout`."""
        corrupted = autoregressive.Autoregressive().corrupt(batch, noise, special_tokens)
        places = corrupted.position_ids + 1 - batch.prompt_lengths[:, None]
        return replace(corrupted, places=places.where(corrupted.labels != IGNORE_INDEX, -1))


@dataclass(frozen=True, kw_only=True)
class LeftToRight(Likelihood):
    """Exact, one forward: a hybrid model that fills slots from left to right, as ``SelfSpeculative(slot_size=K)``.

    A slot's first token is predicted by its mask, each other one by the token before it. The forward feeds prompt and
    answer in text order, then the mask of each slot's first place, which sees the text before its slot and itself. So
    it computes P + L + ceil(L / K) positions, and the sum over all answers of their probabilities is 1.

    Attributes:
        slot_size: Tokens per slot, K; that of the decoder.
    """

    is_exact = True
    has_tokens = True
    decoders = (SelfSpeculative,)
    slot_size: int = 8

    def __post_init__(self) -> None:
        """Check the options."""
        require_at_least("objective.likelihood.slot_size", self.slot_size, 1)

    @property
    def traits(self) -> ModelTraits:
        """The traits of the hybrid objective."""
        return ModelTraits(attention="causal", predictions=("mask", "next_token_in_slot"))

    def layout(self, batch: ResponseBatch, noise: KeyedNoise, special_tokens: SpecialTokens) -> CorruptedBatch:  # noqa: ARG002
        """Append the masks of the slots' first places; see :meth:`Likelihood.layout`."""
        size = self.slot_size
        num_samples, num_tokens = batch.input_ids.shape
        positions, in_response = response_positions(batch)
        ends = batch.prompt_lengths + batch.response_lengths
        places = positions - batch.prompt_lengths[:, None]
        slot_sizes = torch.full_like(batch.prompt_lengths, size)
        rest = next_in_slot(batch, in_response, places.clamp(min=0), slot_sizes)

        slots = torch.arange(-(-num_tokens // size), device=positions.device)
        firsts = batch.prompt_lengths[:, None] + slots * size
        exists = slots * size < batch.response_lengths[:, None]
        targets = batch.input_ids.gather(1, firsts.clamp(max=num_tokens - 1)).where(exists, IGNORE_INDEX)
        masks = torch.full_like(firsts, mask_id(self, special_tokens)).where(exists, special_tokens.pad_token_id)
        own = num_tokens + slots.expand(num_samples, -1)
        itself = torch.stack((own, own + 1), -1)
        before = torch.stack((torch.zeros_like(firsts), firsts.where(exists, 0)), -1)
        causal = torch.stack((torch.zeros_like(positions), positions + 1), -1).expand(num_samples, -1, -1)
        nothing = torch.zeros_like(causal)
        labels = torch.cat((rest, targets), 1)
        targets_at = torch.cat((places + 1, (slots * size).expand(num_samples, -1)), 1)
        return laid_out(
            labels,
            input_ids=torch.cat((batch.input_ids, masks), 1),
            position_ids=torch.cat((positions.expand_as(rest), firsts.where(exists, num_tokens)), 1),
            visible=torch.cat((torch.stack((causal, nothing), 2), torch.stack((before, itself), 2)), 1),
            is_masked=F.pad(exists, (num_tokens, 0)),
            is_real=torch.cat((positions < ends[:, None], exists), 1),
            places=targets_at.where(labels != IGNORE_INDEX, -1),
        )


@dataclass(frozen=True, kw_only=True)
class MeanField(Likelihood):
    """Approximation, one forward: every response token is masked, as if all were drawn at once (d1, arXiv 2504.12216).

    It is neither the policy nor a bound of it; the baseline that the others are compared with.

    Attributes:
        attention: ``bidirectional`` for masked models (``LLaDA``, ``FastDLLM``), ``causal`` for hybrid ones
            (``SelfSpeculative`` and ``ReFusion`` with slots).
        slot_size: Tokens per slot of the decoder, for hybrid models; ``None`` for masked ones.
    """

    has_tokens = True
    decoders = (LLaDA, FastDLLM, SelfSpeculative, ReFusion)
    attention: Literal["bidirectional", "causal"] = "bidirectional"
    slot_size: int | None = None

    def __post_init__(self) -> None:
        """Check the options."""
        require_choice("objective.likelihood.attention", self.attention, ("bidirectional", "causal"))
        require_at_least("objective.likelihood.slot_size", self.slot_size, 1, optional=True)

    @property
    def traits(self) -> ModelTraits:
        """Masks predict themselves."""
        predictions = ("mask",) if self.attention == "bidirectional" else ("mask", "next_token_in_slot")
        return ModelTraits(attention=self.attention, predictions=predictions)

    def layout(self, batch: ResponseBatch, noise: KeyedNoise, special_tokens: SpecialTokens) -> CorruptedBatch:  # noqa: ARG002
        """Mask every response token; see :meth:`Likelihood.layout`."""
        positions, in_response = response_positions(batch)
        ends = batch.prompt_lengths + batch.response_lengths
        return laid_out(
            batch.input_ids.where(in_response, IGNORE_INDEX),
            input_ids=batch.input_ids.masked_fill(in_response, mask_id(self, special_tokens)),
            position_ids=positions.expand_as(batch.input_ids),
            visible=all_of(ends, len(positions)) if self.attention == "bidirectional" else None,
            is_masked=in_response,
            is_real=positions < ends[:, None],
            places=(positions - batch.prompt_lengths[:, None]).where(in_response, -1),
        )


def repeated(batch: ResponseBatch, num_views: int) -> ResponseBatch:
    """Return a batch with each sample once per view, view-major."""
    return ResponseBatch(
        input_ids=batch.input_ids.repeat(num_views, 1),
        prompt_lengths=batch.prompt_lengths.repeat(num_views),
        response_lengths=batch.response_lengths.repeat(num_views),
        sample_keys=batch.sample_keys.repeat(num_views),
    )


def stratified(noise: KeyedNoise, stream: str, num_strata: int) -> Float[Tensor, "stratum batch"]:
    """Return numbers in [0, 1): for each sample evenly spaced ones from a random start."""
    start = noise.uniform(stream, 1)[:, 0]
    return (start + torch.arange(num_strata, device=start.device)[:, None] / num_strata) % 1
