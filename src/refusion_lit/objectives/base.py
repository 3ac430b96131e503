"""What an objective is: how a clean batch is corrupted, and what the model is to predict from it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from refusion_lit.modeling.transfer import to_host
from refusion_lit.noise import KeyedNoise
from refusion_lit.objectives.batch import CorruptedBatch, LossOutput, ResponseBatch
from refusion_lit.objectives.cross_entropy import Head, Kernel, chunked_cross_entropy
from refusion_lit.types import ModelTraits, SpecialTokens


@dataclass(frozen=True, kw_only=True)
class Objective(ABC):
    """A way to train a language model on prompts with responses.

    An objective is one file: its options, :attr:`traits` and :meth:`corrupt`; the loss is shared.

    Attributes:
        chunk_size: Labelled positions whose logits the loss holds at a time, at least 1; ``None``: as many
            as fit in 64 MB. Changes memory and speed, not the loss.
        kernel: What computes head and cross-entropy when training: ``torch``, in chunks, or ``liger``, a fused kernel
            of liger-kernel (``pip install refusion-lit[liger]``) for GPUs. Changes the loss by rounding alone.
    """

    chunk_size: int | None = None
    kernel: Kernel = "torch"

    def __post_init__(self) -> None:
        """Check the options; subclasses extend it."""
        require_option(
            self.chunk_size is None or self.chunk_size >= 1, "chunk_size", "at least 1, or null", self.chunk_size
        )
        require_option(self.kernel in ("torch", "liger"), "kernel", "'torch' or 'liger'", self.kernel)

    @property
    @abstractmethod
    def traits(self) -> ModelTraits:
        """What a model trained so can do: its attention pattern and what its logits mean."""

    @abstractmethod
    def corrupt(
        self,
        batch: ResponseBatch,
        noise: KeyedNoise,
        special_tokens: SpecialTokens,
        *,
        mask_ratio: Float[Tensor, " batch"] | None = None,
    ) -> CorruptedBatch:
        """Hide part of the responses and say what is to be predicted where.

        A sample's corruption depends on the sample and its noise alone, not on the rest of the batch, on
        the padding or on the device; the only randomness is ``noise``.

        Args:
            batch: Clean prompts and responses.
            noise: The samples' noise, a row for each.
            special_tokens: The tokenizer's ids with a meaning.
            mask_ratio: Probability in (0, 1] with which each row's tokens or slots are masked, instead of a
                drawn one; validation gives fixed ratios, so that its curves can be compared between runs.

        Raises:
            ValueError: If the objective needs a mask token and there is none, or a ratio is out of range.
        """

    def loss(self, hidden: Float[Tensor, "batch token hidden"], head: Head, corrupted: CorruptedBatch) -> LossOutput:
        """Compute the loss from the backbone's outputs.

        Args:
            hidden: Hidden states for ``corrupted``, in its order.
            head: Turns hidden states ``[token, hidden]`` into logits ``[token, vocab]``; a linear layer for a kernel
                other than torch's.
            corrupted: What :meth:`corrupt` returned, on the device of ``hidden``.

        Returns:
            Sums and counts for each term, so that means over micro-batches and processes can be exact.
        """
        sums = chunked_cross_entropy(
            hidden,
            head,
            corrupted.labels,
            corrupted.weights,
            corrupted.terms,
            num_terms=len(corrupted.term_names),
            chunk_size=self.chunk_size,
            kernel=self.kernel,
        )
        return LossOutput(
            sums=sums,
            counts=corrupted.counts.to(sums.dtype),
            coefficients=corrupted.coefficients,
            names=corrupted.term_names,
        )


def require_option(holds: bool, option: str, expected: str, got: object) -> None:
    """Raise a ValueError for users unless an option's condition holds."""
    if not holds:
        raise ValueError(f"objective.{option}: expected {expected}, got {got!r}. Change it in the config.")


def required_mask_id(objective: Objective, special_tokens: SpecialTokens) -> int:
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


def mask_probability(
    noise: KeyedNoise, eps: float, mask_ratio: Float[Tensor, " batch"] | None
) -> Float[Tensor, " batch"]:
    """Return each row's mask probability: (1 - eps) t + eps with t uniform in [0, 1), or the ratio given.

    Raises:
        ValueError: If a given ratio is outside (0, 1].
    """
    if mask_ratio is None:
        return (1 - eps) * noise.uniform("mask_ratio", 1)[:, 0] + eps
    if not bool(((mask_ratio > 0) & (mask_ratio <= 1)).all()):
        raise ValueError(f"mask_ratio: expected values in (0, 1], got {mask_ratio.tolist()}. Give a ratio in range.")
    return mask_ratio.double()


def response_places(batch: ResponseBatch) -> tuple[Int[Tensor, " token"], Bool[Tensor, "batch token"]]:
    """Return the places 0, 1, 2, ... of a batch's tokens, and which of them belong to a response."""
    places = torch.arange(batch.input_ids.shape[1], device=batch.input_ids.device)
    ends = batch.prompt_lengths + batch.response_lengths
    return places, (places >= batch.prompt_lengths[:, None]) & (places < ends[:, None])


def extend_responses(
    batch: ResponseBatch, lengths: Int[Tensor, " batch"], *, token_id: int, pad_token_id: int
) -> ResponseBatch:
    """Lengthen responses with one token.

    Args:
        batch: A clean batch.
        lengths: The new response lengths, not below the old ones.
        token_id: What the new places hold.
        pad_token_id: Fills up the batch, which becomes as wide as its longest row.
    """
    ends = batch.prompt_lengths + lengths
    width = to_host(ends.max())
    added = max(0, width - batch.input_ids.shape[1])
    input_ids = functional.pad(batch.input_ids, (0, added), value=pad_token_id)[:, :width]
    places = torch.arange(width, device=input_ids.device)
    is_new = (places >= (batch.prompt_lengths + batch.response_lengths)[:, None]) & (places < ends[:, None])
    return replace(batch, input_ids=input_ids.masked_fill(is_new, token_id), response_lengths=lengths)


def shift_left(values: Tensor, fill: int | float) -> Tensor:
    """Move what stands at place i + 1 to place i, so that a token is predicted by the one before it."""
    return torch.cat((values[:, 1:], torch.full_like(values[:, :1], fill)), dim=1)
