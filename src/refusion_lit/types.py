"""Values that travel between the layers: examples, batches, losses, generation results.

This module is the lowest layer: it imports torch and nothing of the project.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

IGNORE_INDEX = -100
"""Label of a position that has no target."""

AttentionKind = Literal["causal", "bidirectional", "block_causal"]
Prediction = Literal["mask", "mask_shifted", "next_token_in_slot", "next_token"]


@dataclass(frozen=True, kw_only=True)
class ModelTraits:
    """What a model was trained to do; stored with its weights and checked against decoders.

    Attributes:
        attention: ``causal`` (in sequence order), ``bidirectional``, or ``block_causal``
            (bidirectional inside a block of ``block_size`` positions, causal between blocks).
        block_size: Tokens a block; only with ``block_causal``.
        predictions: What its logits mean. ``mask``: a mask predicts its own position;
            ``mask_shifted``: a mask is predicted by the position before it;
            ``next_token_in_slot``: a clean token predicts the next one of its slot;
            ``next_token``: a clean token predicts the next one everywhere.
            ``None``: unknown (a directory that says nothing), which no decoder is refused on.
    """

    attention: AttentionKind = "causal"
    block_size: int | None = None
    predictions: tuple[Prediction, ...] | None = None

    def __post_init__(self) -> None:
        """Check that a block size is given exactly when the attention needs one."""
        if (self.attention == "block_causal") != (self.block_size is not None):
            raise ValueError(
                f"block_size: expected a value exactly with attention 'block_causal', got "
                f"attention={self.attention!r} and block_size={self.block_size!r}. Set both or neither."
            )

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values (stored under ``refusion_lit`` in a model's config)."""
        predictions = None if self.predictions is None else list(self.predictions)
        return {"attention": self.attention, "block_size": self.block_size, "predictions": predictions}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ModelTraits:
        """Read what :meth:`to_dict` wrote; unknown keys are ignored."""
        predictions = values.get("predictions")
        return cls(
            attention=values.get("attention", "causal"),
            block_size=values.get("block_size"),
            predictions=None if predictions is None else tuple(predictions),
        )


@dataclass(frozen=True, kw_only=True)
class SpecialTokens:
    """Ids with a meaning of their own, read from tokenizer and config, never literals.

    Attributes:
        mask_token_id: The mask token, ``None`` for a model without one.
        eos_token_ids: Ids that end a response.
        pad_token_id: Fills up batches; may be one of ``eos_token_ids``.
        vocab_size: Number of ids that the tokenizer knows; head rows from here on are never produced.
    """

    mask_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int
    vocab_size: int

    @property
    def banned_token_ids(self) -> tuple[int, ...]:
        """Ids below ``vocab_size`` that a decoder never produces: mask, and padding unless it ends a response."""
        banned = {self.mask_token_id, self.pad_token_id} - {None, *self.eos_token_ids}
        return tuple(sorted(token for token in banned if token is not None))


@dataclass(frozen=True, kw_only=True)
class Example:
    """One query with its reference response.

    Attributes:
        id: Unique within the task; names the example in results and keys its noise.
        query: What is asked, before any template; ignored where ``messages`` is given.
        response: The reference response, without end-of-sequence token.
        messages: Chat turns before the response (``{"role": ..., "content": ...}``), for chat data.
        meta: Whatever the task's checker needs.
    """

    id: str
    query: str
    response: str
    messages: tuple[Mapping[str, str], ...] = ()
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class ResponseBatch:
    """A clean training batch: prompts and responses, padded on the right.

    Attributes:
        input_ids: Prompt, then response with its end-of-sequence token, then padding.
        prompt_lengths: Number of prompt tokens of each row.
        response_lengths: Number of response tokens of each row, end of sequence included; at least 1.
        sample_keys: Stable 64-bit key of each sample (a hash of its id); noise depends on it alone.
        ids: The samples' ids.
        rows: Row of each sample, from 0 without gaps, when several samples are to share a row in the forward pass;
            ``None``: a row for each.
        following: On the first batch of an optimizer step the step's other batches, over which gradients are
            accumulated; ``None`` elsewhere.
    """

    input_ids: Int[Tensor, "batch token"]
    prompt_lengths: Int[Tensor, " batch"]
    response_lengths: Int[Tensor, " batch"]
    sample_keys: Int[Tensor, " batch"]
    ids: list[str] = field(default_factory=list)
    rows: Int[Tensor, " batch"] | None = None
    following: tuple[ResponseBatch, ...] | None = None

    def to(self, device: torch.device | str, non_blocking: bool = False) -> ResponseBatch:
        """Return the batch on a device."""
        return _moved(self, device, non_blocking)

    @property
    def num_tokens(self) -> int:
        """Prompt and response tokens of the batch, padding excluded."""
        return int((self.prompt_lengths + self.response_lengths).sum())


@dataclass(kw_only=True)
class CorruptedBatch:
    """What an objective hands to the backbone, and what it expects back.

    Each labelled position belongs to one term of the loss and has a weight in that term's sum.

    Attributes:
        input_ids: Tokens in sequence order (which need not be text order).
        position_ids: Place of each token in the final text.
        labels: Target of each position's logits, or ``IGNORE_INDEX``. No further shift is applied.
        weights: Weight of each position's cross-entropy in its term's sum; used where labelled.
        terms: Index into ``term_names`` of each labelled position.
        term_names: The loss terms, in order, e.g. ``("ar", "mdm")``.
        counts: What each term's sum is divided by (tokens or samples).
        coefficients: Factor of each term in the total loss.
        attention_mask: ``True`` where a query may see a key; ``None`` means plain causal attention
            over the sequence with padding on the right.
        is_masked: Which positions hold the mask token by corruption.
        is_real: Which positions hold something of a sample and not mere padding; ``None`` where an objective does
            not say, whose samples cannot be packed.
    """

    input_ids: Int[Tensor, "batch token"]
    position_ids: Int[Tensor, "batch token"]
    labels: Int[Tensor, "batch token"]
    weights: Float[Tensor, "batch token"]
    terms: Int[Tensor, "batch token"]
    term_names: tuple[str, ...]
    counts: Float[Tensor, " term"]
    coefficients: tuple[float, ...]
    attention_mask: Bool[Tensor, "batch token token"] | None = None
    is_masked: Bool[Tensor, "batch token"] | None = None
    is_real: Bool[Tensor, "batch token"] | None = None

    def to(self, device: torch.device | str, non_blocking: bool = False) -> CorruptedBatch:
        """Return the batch on a device."""
        return _moved(self, device, non_blocking)


@dataclass(kw_only=True)
class LossOutput:
    """A loss as sums and counts, so that means over micro-batches and processes stay exact.

    Attributes:
        sums: Weighted sum of cross-entropies for each term, in nats.
        counts: What each sum is divided by.
        coefficients: Factor of each term in the total.
        names: The terms' names, in order.
    """

    sums: Float[Tensor, " term"]
    counts: Float[Tensor, " term"]
    coefficients: tuple[float, ...]
    names: tuple[str, ...]

    @property
    def means(self) -> Float[Tensor, " term"]:
        """Each term's mean; zero, not NaN, where a term has no targets."""
        empty = self.counts == 0
        return torch.where(empty, torch.zeros_like(self.sums), self.sums / self.counts.masked_fill(empty, 1.0))

    @property
    def total(self) -> Float[Tensor, ""]:
        """The loss to minimise: the coefficients times the means, summed."""
        return (self.means * self.means.new_tensor(self.coefficients)).sum()

    def named_means(self) -> dict[str, Tensor]:
        """Return each term's detached mean by name."""
        return dict(zip(self.names, self.means.detach().unbind(), strict=True))


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One prompt to decode.

    Attributes:
        token_ids: Prompt tokens, template and all; may contain any id, the mask's included.
        id: Names the prompt in results and keys its sampling noise.
    """

    token_ids: tuple[int, ...]
    id: str


@dataclass(kw_only=True)
class PromptBatch:
    """Prompts to decode with the examples that they come from, in the same order."""

    prompts: list[Prompt]
    examples: list[Example]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> PromptBatch:  # noqa: ARG002
        """Return the batch: it holds no tensors, and Lightning would otherwise walk through its examples."""
        return self


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How much to generate and how tokens are drawn.

    Attributes:
        max_new_tokens: At most so many tokens are returned for a prompt, end of sequence included; at least 1.
        temperature: 0 takes the most probable token; from 1e-30 to 1e30 draws from the softmax of logits / temperature
            (beyond, float32 would overflow and a forbidden token could be drawn).
        top_p: Nucleus in (0, 1]; 1 keeps everything. Has no effect at temperature 0.
        top_k: Keep the so many most probable tokens; ``None`` keeps all. Has no effect at temperature 0.
        seed: Sampling noise is a function of seed, prompt id, round and position alone.
        stop: Strings that end a response; text is cut before the first of them.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int | None = None
    seed: int = 0
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse what no decoder could do."""
        _require(self.max_new_tokens >= 1, "max_new_tokens", "an integer of at least 1", self.max_new_tokens)
        in_range = self.temperature == 0 or 1e-30 <= self.temperature <= 1e30
        _require(in_range, "temperature", "0, or a number from 1e-30 to 1e30", self.temperature)
        _require(0 < self.top_p <= 1, "top_p", "a number in (0, 1]", self.top_p)
        _require(self.top_k is None or self.top_k >= 1, "top_k", "an integer of at least 1, or null", self.top_k)

    def greedy(self) -> SamplingParams:
        """Return the same parameters at temperature 0."""
        return replace(self, temperature=0.0)


def _require(holds: bool, option: str, expected: str, got: object) -> None:
    if not holds:
        raise ValueError(
            f"{option}: expected {expected}, got {got!r}. Change {option} in the config or on the command line."
        )


def _moved(batch: Any, device: torch.device | str, non_blocking: bool) -> Any:  # noqa: ANN401 - any of our batches
    tensors = {
        f.name: value.to(device, non_blocking=non_blocking)
        for f in fields(batch)
        if isinstance(value := getattr(batch, f.name), Tensor)
    }
    return replace(batch, **tensors)
