"""Group-relative policy optimisation for models with a likelihood of answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor

from refusion_lit.contrib.rl.likelihood import Answers, LaidOut, Likelihood, NextToken
from refusion_lit.engine.decoder import Decoder
from refusion_lit.learning.batch import IGNORE_INDEX, LossOutput, ResponseBatch
from refusion_lit.learning.objective import Head, MaskRatio, Objective, map_chunks
from refusion_lit.noise import KeyedNoise
from refusion_lit.tasks.base import Example
from refusion_lit.types import ModelTraits, SamplingParams, SpecialTokens
from refusion_lit.utils.require import require, require_number


@dataclass(frozen=True, kw_only=True)
class Reward(ABC):
    """A reward for answers. Write a subclass, and name its class path.

    Attributes:
        weight: Factor in the sum of all rewards, a finite number.
    """

    weight: float = 1.0

    def __post_init__(self) -> None:
        require_number("objective.rewards.weight", self.weight, "(-inf, inf)", "use 1, say")

    @abstractmethod
    def rewards(self, examples: Sequence[Example], responses: Sequence[str]) -> Sequence[float]:
        """Return rewards of responses to examples; a reward should depend only on example and response.

        NaN drops a response from its group.
        """


@dataclass(frozen=True, kw_only=True)
class GroupPolicy(Objective):
    """Raises the rewards of the model's own answers, with clipped likelihood ratios (GRPO).

    A step decodes ``group_size`` answers per prompt with the first decoder in ``model.decoders`` and scores them. An
    answer's advantage, the difference of its reward to its group's rewards, weighs its log-likelihood in the gradient
    (arXiv 2402.03300). With ratio r = pi / pi_old and advantage A, the loss per unit is -min(r A, clip(r, 1 - clip_low,
    1 + clip_high) A). The first update on new answers is on-policy: r is 1, and old log-probabilities come from the
    training forward.

    Terms: ``policy``, and ``kl``, an estimate (k2) of the divergence from the frozen base model. Figures without
    gradients: ``clipped_low`` and ``clipped_high``, the shares of clipped units with negative and positive advantage;
    ``entropy`` per predicted token; ``engine_kl``, the divergence (k3) between the drawn tokens' probabilities in
    trainer and engine. On other texts, as in validation, ``policy`` is the negative log-likelihood per token.

    Attributes:
        likelihood: Likelihood of answers; must support the decoder.
        rewards: Rewards, summed with their weights. Empty: :meth:`~refusion_lit.tasks.base.Task.reward` of the task.
        group_size: Answers per prompt, at least 2.
        temperature: Temperature of roll-outs and likelihood, above 0. Top-k and top-p are refused: they change the
            policy.
        clip_low: Ratios below 1 - ``clip_low`` are clipped, in [0, 1].
        clip_high: Ratios above 1 + ``clip_high`` are clipped, at least 0; a larger value than ``clip_low``
            ("clip-higher", DAPO, arXiv 2503.14476) keeps rare tokens alive.
        unit: ``token``: a ratio per token; losses are summed and divided by ``max_new_tokens``, which favours no
            length. ``sequence``: a ratio per answer, from the mean log-ratio over its tokens (GSPO, ESPO), for bounds.
        scale_rewards: Divide advantages by the group's standard deviation; ``False``: leave-one-out, unscaled.
        kl_weight: Coefficient of ``kl``, at least 0; above 0 it needs ``model.backbone.lora``.
        num_updates: Updates per roll-out (mu), at least 1; batches between roll-outs are not used. A step with a
            different number of micro-batches, such as the last step in an epoch, starts a new roll-out early.
        max_new_tokens: Length limit of answers, EOS included, at least 1; replaces the limit in ``model.sampling``.
        overlong: Reward of answers that are cut at the length limit. ``lowest``: the lowest reward of their group.
            ``drop``: they are left out of their group, as NaN rewards are. ``zero``: 0, which penalises them only if
            other rewards are above 0.

    >>> from refusion_lit.contrib.rl import LeftToRight
    >>> objective = GroupPolicy(likelihood=LeftToRight(slot_size=8), group_size=16)
    >>> objective.traits.predictions  # of the models that it trains
    ('mask', 'next_token_in_slot')
    """

    step_source = "refusion_lit.contrib.rl.rollouts.Rollouts"
    ranges = {
        "group_size": 2,
        "temperature": "(0, inf)",
        "clip_low": "[0, 1]",
        "clip_high": 0.0,
        "kl_weight": 0.0,
        "num_updates": 1,
        "max_new_tokens": 1,
    }
    likelihood: Likelihood = NextToken()  # noqa: RUF009 - immutable
    rewards: tuple[Reward, ...] = ()
    group_size: int = 8
    temperature: float = 1.0
    clip_low: float = 0.2
    clip_high: float = 0.2
    unit: Literal["token", "sequence"] = "token"
    scale_rewards: bool = True
    kl_weight: float = 0.0
    num_updates: int = 1
    max_new_tokens: int = 128
    overlong: Literal["lowest", "drop", "zero"] = "lowest"

    def __post_init__(self) -> None:
        super().__post_init__()
        fits = self.unit == "sequence" or self.likelihood.is_exact
        name = type(self.likelihood).__name__
        require(fits, "objective.unit", f"sequence with {name}, which is a bound", self.unit, "set it to sequence")

    @property
    def traits(self) -> ModelTraits:
        """Traits that the likelihood needs."""
        return self.likelihood.traits

    @property
    def terms(self) -> Mapping[str, float]:
        """Coefficients of the terms; figures have coefficient 0."""
        figures = dict.fromkeys(("clipped_low", "clipped_high", "entropy", "engine_kl"), 0.0)
        return {"policy": 1.0, "kl": self.kl_weight, **figures}

    def check(self, decoder: Decoder, sampling: SamplingParams) -> None:
        """Refuse roll-outs whose likelihood is unknown.

        Raises:
            ValueError: If the decoder or a sampling option does not fit the likelihood.
        """
        reason = self.likelihood.refusal(decoder)
        fix = "name another likelihood, or another first decoder"
        require(reason is None, "objective.likelihood", "one for the first of model.decoders", reason, fix)
        for option, none in (("top_p", 1), ("top_k", None), ("stop", ())):
            value, expected = getattr(sampling, option), f"{none}, as roll-outs with it have another likelihood"
            require(value == none, f"model.sampling.{option}", expected, value, "leave it out")

    def corrupt(
        self, batch: ResponseBatch, noise: KeyedNoise, special_tokens: SpecialTokens, *, mask_ratio: MaskRatio = None
    ) -> LaidOut:
        """Lay answers out for the likelihood; see :meth:`Objective.corrupt`. Mask ratios have no effect."""
        del mask_ratio  # likelihoods draw their own masks
        laid = self.likelihood.layout(batch, noise, special_tokens)
        is_labelled = laid.labels != IGNORE_INDEX
        allowed = torch.ones(special_tokens.vocab_size, dtype=torch.bool, device=laid.labels.device)
        for token in special_tokens.banned_token_ids:  # a list as an index would make the host wait for the device
            allowed[token] = False
        advantages = batch.advantages if isinstance(batch, Answers) else None
        engine = None
        if isinstance(batch, Answers) and batch.engine is not None and laid.places is not None:
            index = (batch.prompt_lengths[:, None] + laid.places).clamp(0, batch.engine.shape[1] - 1)
            engine = batch.engine.gather(1, index).where(is_labelled, torch.nan)
        num_labels = is_labelled.sum().float()
        num_samples = torch.full_like(num_labels, len(batch.response_lengths))
        num_units = num_samples if self.unit == "sequence" else num_labels
        num_drawn = torch.zeros_like(num_labels) if engine is None else engine.isfinite().sum().float()
        counts = torch.stack((num_samples, num_samples, num_units, num_units, num_labels, num_drawn))
        fields = {"lengths": batch.response_lengths, "advantages": advantages, "engine": engine}
        return replace(laid, counts=counts, allowed=allowed, **fields)

    def loss(self, hidden: Float[Tensor, "batch token hidden"], head: Head, corrupted: LaidOut) -> LossOutput:
        """Compute the loss; see :meth:`Objective.loss`."""
        values, plain, entropy = self.log_probabilities(hidden, head, corrupted)
        sums = dict.fromkeys(self.terms, values.new_zeros(()))
        sums["entropy"] = entropy.sum()
        if corrupted.advantages is None:
            sums["policy"] = -self._units(values, corrupted, "sequence").sum()
        else:
            old = values.detach() if corrupted.old is None else corrupted.old.to(values.dtype)
            log_ratio = self._units(values - old, corrupted)
            ratio = log_ratio.exp()
            clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
            advantages = corrupted.advantages.to(values.dtype)[:, None]
            is_unit = self._units((corrupted.labels != IGNORE_INDEX).to(values.dtype), corrupted) != 0
            length = self.max_new_tokens if self.unit == "token" else 1
            gains = torch.minimum(ratio * advantages, clipped * advantages).where(is_unit, 0.0)
            sums["policy"] = -gains.sum() / length
            sums["clipped_low"] = ((ratio < clipped) & (advantages < 0)).sum().to(values.dtype)
            sums["clipped_high"] = ((ratio > clipped) & (advantages > 0)).sum().to(values.dtype)
            if corrupted.reference is not None:
                log_ratio = self._units(values - corrupted.reference.to(values.dtype), corrupted)
                sums["kl"] = log_ratio.square().sum() / 2 / length
            if corrupted.engine is not None:
                difference = plain.double() - corrupted.engine
                sums["engine_kl"] = (difference.expm1() - difference).nan_to_num(nan=0.0).sum().to(values.dtype)
        joined = torch.stack(list(sums.values()))
        return LossOutput(sums=joined, counts=corrupted.counts.to(joined.dtype), terms=self.terms)

    def log_probabilities(
        self, hidden: Float[Tensor, "batch token hidden"], head: Head, corrupted: LaidOut
    ) -> tuple[Float[Tensor, "batch token"], Float[Tensor, "batch token"], Float[Tensor, "batch token"]]:
        """Compute the log-probabilities of labels in chunks; 0 without a label.

        Returns:
            Log-probabilities under the distribution that decoders sample: after temperature, without banned ids. Then,
            without gradients, log-probabilities under the plain softmax, and the entropy of the first distribution.
        """
        rows, columns = (corrupted.labels != IGNORE_INDEX).nonzero().unbind(1)
        states = hidden[rows, columns]
        labels = corrupted.labels[rows, columns]
        allowed = corrupted.allowed
        assert allowed is not None

        def read(logits: Tensor, labels: Tensor) -> Tensor:
            scaled = logits[:, : len(allowed)].masked_fill(~allowed, -torch.inf) / self.temperature
            drawn = scaled.log_softmax(-1)
            with torch.no_grad():
                plain = logits.log_softmax(-1).gather(1, labels[:, None])[:, 0]
                entropy = torch.special.entr(drawn.exp()).sum(-1)
            return torch.stack((drawn.gather(1, labels[:, None])[:, 0], plain, entropy))

        values = torch.cat(map_chunks(read, head, states, labels, chunk_size=self.chunk_size), 1)
        spread = values.new_zeros(3, *corrupted.labels.shape)
        spread[:, rows, columns] = values
        return spread[0], spread[1].detach(), spread[2].detach()

    def _units(
        self, values: Float[Tensor, "batch token"], corrupted: LaidOut, unit: str | None = None
    ) -> Float[Tensor, "sample unit"]:
        """Weight label values and return them by unit; a sequence has the sum divided by its length."""
        weighted = corrupted.weights.to(values.dtype) * values
        by_sample = rearrange(weighted, "(view sample) token -> sample (view token)", view=corrupted.num_views)
        if (unit or self.unit) == "token":
            return by_sample
        assert corrupted.lengths is not None
        return by_sample.sum(1, keepdim=True) / corrupted.lengths[:, None]


def replace_overlong_rewards(
    rewards: Float[Tensor, "prompt answer"],
    is_overlong: Bool[Tensor, "prompt answer"],
    overlong: Literal["lowest", "drop", "zero"],
) -> Float[Tensor, "prompt answer"]:
    """Replace the rewards of answers that were cut at the length limit.

    Args:
        rewards: Rewards of each prompt's answers; NaN rewards stay NaN.
        is_overlong: Whether an answer was cut.
        overlong: See :class:`GroupPolicy`.

    >>> rewards = torch.tensor([[-2.0, -1.0, -3.0]])
    >>> replace_overlong_rewards(rewards, torch.tensor([[False, True, False]]), "lowest")
    tensor([[-2., -3., -3.]])
    """
    lowest = rewards.nan_to_num(nan=torch.inf).amin(1, keepdim=True)
    value = {"lowest": lowest, "drop": torch.full_like(lowest, torch.nan), "zero": torch.zeros_like(lowest)}[overlong]
    return rewards.where(~is_overlong | rewards.isnan(), value)


def group_advantages(rewards: Float[Tensor, "prompt answer"], *, scale: bool) -> Float[Tensor, "prompt answer"]:
    """Return the advantages of answers in their groups; 0 if all rewards are equal, and for NaN.

    Args:
        rewards: Rewards by prompt and answer; NaN is left out.
        scale: (r - mean) / (std + 1e-4); otherwise r minus the mean of the other rewards.

    >>> group_advantages(torch.tensor([[0.0, 1.0], [1.0, 1.0]]), scale=False)
    tensor([[-1.,  1.],
            [ 0.,  0.]])
    """
    num_finite = rewards.isfinite().sum(1, keepdim=True)
    centred = (rewards - rewards.nanmean(1, keepdim=True)).nan_to_num(nan=0.0)
    highest, lowest = rewards.nan_to_num(nan=-torch.inf).amax(1), rewards.nan_to_num(nan=torch.inf).amin(1)
    # In floating point, equal rewards minus their mean may differ from 0, and the scale would enlarge the difference.
    centred = centred.where((highest > lowest)[:, None], 0.0)
    if scale:
        return centred / ((centred.square().sum(1, keepdim=True) / (num_finite - 1).clamp(min=1)).sqrt() + 1e-4)
    return centred * num_finite / (num_finite - 1).clamp(min=1)
