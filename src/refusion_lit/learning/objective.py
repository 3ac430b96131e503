"""The interface for training objectives: corruption of a clean batch, and the loss, computed in chunks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from refusion_lit.learning.batch import IGNORE_INDEX, CorruptedBatch, LossOutput, ResponseBatch
from refusion_lit.learning.draft_figures import count_drafts, read_drafts
from refusion_lit.noise import KeyedNoise
from refusion_lit.types import ModelTraits, SpecialTokens
from refusion_lit.utils.require import check_options, require

LOGITS_BYTES = 64 * 2**20
"""Size limit for a chunk's float32 logits.

The head of a large vocabulary dominates training memory: float32 logits for 4 x 4096 positions and 151 936 ids take
10 GB, and the loss holds several copies.
"""

Head = Callable[[Tensor], Tensor]
"""Maps hidden states ``[token, hidden]`` to logits ``[token, vocab]``."""

MaskRatio = Float[Tensor, " batch"] | None
"""Mask probabilities by row, in (0, 1]; ``None``: they are drawn."""


@dataclass(frozen=True, kw_only=True)
class Objective(ABC):
    """A way to train a language model on prompts with responses.

    A subclass defines its options, ``trained``, :attr:`terms` and :meth:`corrupt`. The loss is shared.

    Attributes:
        chunk_size: Number of labelled positions whose logits are in memory at once, at least 1; ``None``: the largest
            number that fits in 64 MB. Changes memory and speed, not the loss.

    Class attributes:
        ranges: Minimum or interval by numeric option, checked on construction; see ``utils.require.check_options``.
        trained: A trained model's traits: attention pattern and meaning of the logits.
        term: The only loss term's name; objectives with several terms override :attr:`terms`.
        packs: Whether samples can be packed: :meth:`corrupt` marks the real positions.
        step_source: Import path of a ``StepSource`` (``training/step_source.py``) that makes the responses for every
            optimizer step, such as roll-outs; ``None``: the data has the responses.
    """

    trained: ClassVar[ModelTraits]
    ranges: ClassVar[dict[str, float | str]] = {"chunk_size": 1}
    term: ClassVar[str] = "loss"
    packs: ClassVar[bool] = True
    step_source: ClassVar[str | None] = None
    chunk_size: int | None = None

    def __post_init__(self) -> None:
        """Check the options; subclasses extend it."""
        check_options(self, "objective.")

    @property
    def traits(self) -> ModelTraits:
        """Traits of a model trained with this objective: ``trained``, unless options change them."""
        what = f"what {type(self).__name__} trains"
        fix = 'add trained = ModelTraits(attention="causal", predictions=("mask",))'
        trained = getattr(self, "trained", "no class attribute trained")
        require(isinstance(trained, ModelTraits), "objective", what, trained, fix)
        return self.trained

    @property
    def terms(self) -> Mapping[str, float]:
        """Coefficients in the total loss, by the terms' names, in order; by default ``term`` alone."""
        return {self.term: 1.0}

    def at(self, progress: float) -> Objective:  # noqa: ARG002
        """Return the objective at a point in training. It is the same objective unless options change during training.

        Args:
            progress: Finished share of all optimizer steps, from 0.
        """
        return self

    def trained_canvas(self, response_length: int) -> int | None:  # noqa: ARG002
        """Return the canvas length, in tokens, on which a model learns where a response ends.

        Decoders that fill a whole canvas must not have a longer canvas. ``None``: decoders need no such canvas.

        Args:
            response_length: Number of tokens in the longest response.
        """
        return None

    @abstractmethod
    def corrupt(
        self, batch: ResponseBatch, noise: KeyedNoise, special_tokens: SpecialTokens, *, mask_ratio: MaskRatio = None
    ) -> CorruptedBatch:
        """Mask tokens of the responses, and label the tokens to predict.

        A sample's corruption depends on the sample and its noise only, not on the rest of the batch, the padding or
        the device. ``noise`` is the only source of randomness.

        Args:
            batch: Clean prompts and responses.
            noise: The samples' noise, a row per sample.
            special_tokens: The tokenizer's special ids.
            mask_ratio: Probabilities in (0, 1] with which the rows' tokens or slots are masked, instead of random
                probabilities. Validation passes fixed ratios, so that its curves are comparable between runs.

        Raises:
            ValueError: If the objective needs a mask token and there is none, or a ratio is out of range.
        """

    def loss(self, hidden: Float[Tensor, "batch token hidden"], head: Head, corrupted: CorruptedBatch) -> LossOutput:
        """Compute the loss from the backbone's outputs, with logits at labelled positions only, in chunks.

        Args:
            hidden: Hidden states of ``corrupted``, in its order.
            head: Maps hidden states ``[token, hidden]`` to logits ``[token, vocab]``.
            corrupted: The result of :meth:`corrupt`, on the device of ``hidden``.

        Returns:
            The loss. Sums are float32 (float64 for float64 logits). A term without labels is zero, with zero gradients.
        """
        is_labelled = corrupted.labels != IGNORE_INDEX
        selected = is_labelled.flatten().nonzero().squeeze(1)
        labelled = [values.flatten()[selected] for values in (corrupted.labels, corrupted.weights, corrupted.terms)]
        offsets = None if torch.is_grad_enabled() else corrupted.draft_offsets
        reads: list[Tensor] = []

        def chunk_sums(logits: Tensor, targets: Tensor, factors: Tensor, groups: Tensor) -> Tensor:
            if offsets is not None:
                reads.append(read_drafts(logits, targets))
            losses = F.cross_entropy(logits, targets, reduction="none") * factors
            # A one-hot sum rather than index_add, whose order of additions differs from run to run on GPUs.
            return (F.one_hot(groups, len(corrupted.counts)).to(losses.dtype) * losses[:, None]).sum(0)

        states = hidden.flatten(0, 1)[selected]
        sums = torch.stack(map_chunks(chunk_sums, head, states, *labelled, chunk_size=self.chunk_size)).sum(0)
        loss = LossOutput(sums=sums, counts=corrupted.counts.to(sums.dtype), terms=self.terms)
        if offsets is not None:
            loss.draft_counts = count_drafts(torch.cat(reads, 1), offsets[is_labelled])
        return loss


def corrupt_and_check(
    objective: Objective,
    batch: ResponseBatch,
    noise: KeyedNoise,
    special_tokens: SpecialTokens,
    *,
    mask_ratio: MaskRatio = None,
) -> CorruptedBatch:
    """Corrupt a batch with an objective, and check the result; see :meth:`Objective.corrupt`.

    Raises:
        ValueError: If shapes do not fit, or if attention is not causal but ``visible`` is missing. Training would
            silently use wrong targets or causal attention.
    """
    corrupted = objective.corrupt(batch, noise, special_tokens, mask_ratio=mask_ratio)
    name = f"{type(objective).__name__}.corrupt"
    require(isinstance(corrupted, CorruptedBatch), name, "a CorruptedBatch", corrupted, "return one")
    shape = corrupted.input_ids.shape
    num_rows = corrupted.num_views * len(batch.prompt_lengths)
    fix = "give it rows (view sample) and all tensors one shape; see docs/extending.md"
    require(shape[0] == num_rows, f"{name}: input_ids", f"{num_rows} rows, one per view and sample", shape[0], fix)
    for part in ("position_ids", "labels", "weights", "terms"):
        got = getattr(corrupted, part).shape
        require(got == shape, f"{name}: {part}", f"the shape of input_ids, {tuple(shape)}", tuple(got), fix)
    counts_shape, expected = tuple(corrupted.counts.shape), (len(objective.terms),)
    require(counts_shape == expected, f"{name}: counts", f"one per term, {expected}", counts_shape, fix)
    attention = objective.traits.attention
    is_stated = corrupted.visible is not None or attention == "causal"
    require(
        is_stated,
        f"{name}: visible",
        f"the ranges of {attention} attention",
        None,
        "set them; None means causal attention",
    )
    return corrupted


def map_chunks(
    function: Callable[..., Tensor],
    head: Head,
    states: Float[Tensor, "position hidden"],
    *others: Shaped[Tensor, "position ..."],
    chunk_size: int | None,
) -> list[Tensor]:
    """Compute logits in chunks of positions, in float32 or higher precision; return a function's results by chunk.

    With gradients and several chunks, the backward pass recomputes the logits, so that they need not be kept.

    Args:
        function: Takes a chunk's logits, and the same chunk of ``others``.
        head: The head; called with chunks of hidden states.
        states: Hidden states.
        others: Further values by position, such as labels.
        chunk_size: Number of positions in a chunk, at least 1; ``None``: the largest number that keeps the chunk's
            float32 logits below ``LOGITS_BYTES``.
    """
    if chunk_size is None:
        with torch.no_grad():
            vocab_size = head(states[:0]).shape[-1]
        chunk_size = max(1, LOGITS_BYTES // (4 * vocab_size))

    def run_chunk(states: Tensor, *others: Tensor) -> Tensor:
        logits = head(states)
        return function(logits.to(torch.promote_types(logits.dtype, torch.float32)), *others)

    # Splitting an empty tensor gives an empty chunk: the loss then stays attached to the weights, as DDP needs.
    chunks = list(zip(*(tensor.split(chunk_size) for tensor in (states, *others)), strict=True))
    if len(chunks) == 1 or not torch.is_grad_enabled():
        return [run_chunk(*chunk) for chunk in chunks]
    return [checkpoint(run_chunk, *chunk, use_reentrant=False) for chunk in chunks]  # type: ignore[misc]


def required_mask_id(objective: object, special_tokens: SpecialTokens) -> int:
    """Return the mask token's id.

    Raises:
        ValueError: If the model has no mask token.
    """
    if special_tokens.mask_token_id is None:
        raise ValueError(
            f"mask_token_id: expected a mask token for the objective {type(objective).__name__}, got none. "
            "Let the backbone add one, or train with the objective Autoregressive."
        )
    return special_tokens.mask_token_id


def mask_probability(noise: KeyedNoise, eps: float, mask_ratio: MaskRatio) -> Float[Tensor, " batch"]:
    """Return mask probabilities by row: ``(1 - eps) t + eps`` with t uniform in [0, 1), or the given ratios.

    Raises:
        ValueError: If a given ratio is outside (0, 1].
    """
    if mask_ratio is None:
        return (1 - eps) * noise.uniform("mask_ratio", 1)[:, 0] + eps
    in_range = bool(((mask_ratio > 0) & (mask_ratio <= 1)).all())
    require(in_range, "mask_ratio", "values in (0, 1]", mask_ratio.tolist(), "pass ratios in that range")
    return mask_ratio.double()
