"""Values shared by all layers: special tokens, model traits, prompts, constraints, and options."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Literal, get_args

from refusion_lit.utils.require import check_options, is_number, require, require_at_least, require_choice

if TYPE_CHECKING:
    import torch

AttentionKind = Literal["causal", "bidirectional", "block_causal"]
Prediction = Literal[
    "mask", "mask_shifted", "isolated_mask", "block_mask", "visible", "next_token_in_slot", "next_token", "verifier"
]


@dataclass(frozen=True, kw_only=True)
class SpecialTokens:
    """Special token ids, read from the tokenizer and the model's config.

    Attributes:
        mask_token_id: The mask token, ``None`` for a model without a mask token.
        eos_token_ids: Ids that end a response.
        pad_token_id: Fills up batches; may be an EOS token.
        vocab_size: The tokenizer's highest id plus 1. Decoders never produce ids from here on.
        draft_token_ids: A drafter's mask ids, nearest token first. They lie beyond all embedding rows and never
            appear in a text.
        draws_padding: Whether padding is a token that the model predicts, as in DiffusionGemma's canvases.
        unused_token_ids: Ids below ``vocab_size`` that belong to no token of the tokenizer.
        drafts_block: Whether the drafter drafts a block in separate forwards (DFlash): its masks see one another and
            predict their own positions.
    """

    mask_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int
    vocab_size: int
    draft_token_ids: tuple[int, ...] = ()
    draws_padding: bool = False
    unused_token_ids: tuple[int, ...] = ()
    drafts_block: bool = False

    @property
    def banned_token_ids(self) -> tuple[int, ...]:
        """Ids below ``vocab_size`` that a decoder never produces: mask, gaps, and padding unless it is predicted."""
        allowed = {None, *self.eos_token_ids} | ({self.pad_token_id} if self.draws_padding else set())
        banned = {self.mask_token_id, self.pad_token_id, *self.unused_token_ids} - allowed
        return tuple(sorted(token for token in banned if token is not None))


@dataclass(frozen=True, kw_only=True)
class ModelTraits:
    """What a model was trained to do. Traits are stored with the weights and checked against decoders.

    >>> traits = ModelTraits(attention="causal", predictions=("mask", "next_token_in_slot"))
    >>> ModelTraits.from_dict(traits.to_dict()) == traits
    True

    Attributes:
        attention: ``causal`` (in sequence order), ``bidirectional``, or ``block_causal``
            (bidirectional inside blocks, causal between blocks).
        block_size: Tokens per block; only with ``block_causal``.
        prompt_is_block: With ``block_causal``, the prompt is one block and blocks are counted from the response (D2F).
            Otherwise blocks are counted from position 0, prompt included.
        predictions: What the logits mean. ``mask``: a mask predicts its own position;
            ``mask_shifted``: the position before a mask predicts the mask;
            ``isolated_mask``: a mask that sees no other mask predicts its own position;
            ``block_mask``: a mask in a block that sees all of itself, after causal text, predicts its own position;
            ``visible``: a token that is no mask predicts what belongs at its own position (with ``causal``: the tokens
            of a canvas, which see the whole canvas);
            ``next_token_in_slot``: a clean token predicts the next token of its slot;
            ``next_token``: a clean token predicts the next token everywhere;
            ``verifier``: a second model, which predicts the next token, runs the forwards with a cache.
            ``None``: unknown (the model's directory does not state it), which fits every decoder.
    """

    attention: AttentionKind = "causal"
    block_size: int | None = None
    predictions: tuple[Prediction, ...] | None = None
    prompt_is_block: bool = False

    def __post_init__(self) -> None:
        """Check the names, and that a block size is given exactly when the attention needs it."""
        require_choice("attention", self.attention, get_args(AttentionKind))
        for prediction in self.predictions or ():
            require_choice("predictions", prediction, get_args(Prediction))
        has_blocks = self.attention == "block_causal"
        is_paired = has_blocks == (self.block_size is not None)
        expected = "a value if and only if attention is 'block_causal'"
        fix = f"set both or neither (attention is {self.attention})"
        require(is_paired, "block_size", expected, self.block_size, fix)
        if self.block_size is not None:
            require_at_least("block_size", self.block_size, 1)
        is_allowed = has_blocks or not self.prompt_is_block
        require(is_allowed, "prompt_is_block", "attention 'block_causal'", self.attention, "leave it out")

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values (stored under ``refusion_lit`` in a model's config)."""
        predictions = None if self.predictions is None else list(self.predictions)
        values = {"attention": self.attention, "block_size": self.block_size, "predictions": predictions}
        return values | ({"prompt_is_block": True} if self.prompt_is_block else {})

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ModelTraits:
        """Read what :meth:`to_dict` wrote; unknown keys are ignored."""
        known = {name: values[name] for name in cls.__dataclass_fields__ if name in values}
        if known.get("predictions") is not None:
            known["predictions"] = tuple(known["predictions"])
        return cls(**known)


class ConstraintState(ABC):
    """Constraint on one response while it is decoded.

    Both methods take ``place``, the number of response tokens before the token, and ``before``: these tokens, if the
    decoder draws from left to right. They include drafts under verification, and masks.
    """

    @abstractmethod
    def allowed_tokens(self, place: int, before: Sequence[int]) -> torch.Tensor | None:
        """Return which tokens may stand at a place, bool [vocab] on the CPU. ``None`` allows all tokens."""

    def settle(self, place: int, before: Sequence[int], token: int) -> int:  # noqa: ARG002
        """Return the token to take in place of a drawn token; by default the drawn token."""
        return token


@dataclass(frozen=True, kw_only=True)
class Constraint:
    """Constrains a prompt's responses, token by token. Several prompts may share a constraint.

    Attributes:
        begin: Returns the state for a response. The argument is the response's maximum length in tokens.
        left_to_right: Whether the constraint needs all tokens before a place. Only left-to-right decoders know them.
    """

    begin: Callable[[int], ConstraintState]
    left_to_right: bool


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One prompt to decode.

    >>> prompt = Prompt(token_ids=(4, 5, 6), id="0", given=(None, None, 7))
    >>> prompt.num_given, prompt.num_to_fill
    (1, 2)

    Attributes:
        token_ids: Prompt tokens, template included; may contain any id, even the mask's.
        id: Names the prompt in results and keys its sampling noise.
        given: Known part of the response, from its first token on: a token id, or ``None`` for a token to generate.
            Unknown tokens before the last given token are spans. The response continues after the last given token,
            unless that is an EOS token. Empty: nothing is given.
        num_filled: Number of given tokens that count towards ``max_new_tokens``, because they fill spans of another
            prompt.
        constraint: Which tokens may be drawn, for example by a JSON schema; ``None``: all tokens.
    """

    token_ids: tuple[int, ...]
    id: str
    given: tuple[int | None, ...] = ()
    num_filled: int = 0
    constraint: Constraint | None = None

    @property
    def num_given(self) -> int:
        """How many response tokens are given."""
        return len(self.given) - self.given.count(None)

    @property
    def num_uncounted(self) -> int:
        """Given tokens that do not count towards ``max_new_tokens``."""
        return self.num_given - self.num_filled

    @property
    def given_length(self) -> int:
        """The response's length up to its last given token."""
        return max((place + 1 for place, token in enumerate(self.given) if token is not None), default=0)

    @property
    def num_to_fill(self) -> int:
        """Tokens to generate before the last given token."""
        return self.given_length - self.num_given


@dataclass(frozen=True, kw_only=True)
class DecodingOptions:
    """How prompts are batched and decoded. Except for ``allow_mismatch``, options change tokens by rounding at most.

    Attributes:
        batch_size: Maximum number of prompts decoded concurrently, at least 1. A finished prompt frees its row for the
            next prompt (continuous batching).
        max_tokens_per_forward: Maximum number of positions, padding included, that a batched forward pass computes,
            at least 1; prompts that do not fit wait. ``None``: no limit.
        max_cache_tokens: Maximum number of KV cache entries (tokens in prompts and responses) for all prompts in
            flight, at least 1. With long prompts, fewer prompts then run at a time. ``None``: no limit.
        share_prefixes: Compute the common beginning of several prompts once and copy its cache entries.
        allow_mismatch: Run a decoder that the model was not trained for; tables mark it.
    """

    ranges = {"batch_size": 1, "max_tokens_per_forward": 1, "max_cache_tokens": 1}
    batch_size: int = 16
    max_tokens_per_forward: int | None = None
    max_cache_tokens: int | None = None
    share_prefixes: bool = True
    allow_mismatch: bool = False

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, kw_only=True)
class LatencyOptions:
    """Options for measuring speeds after a test or a sweep.

    Attributes:
        num_prompts: Number of prompts that every decoder decodes at every batch size; at least 1.
        batch_sizes: Numbers of prompts that are decoded together; 1 decodes one prompt at a time.
        min_batches: Minimum number of batches at every batch size, at least 2. If ``num_prompts`` fill fewer batches,
            more prompts are decoded, because the interval is over batches.
    """

    ranges = {"num_prompts": 1, "min_batches": 2}
    num_prompts: int = 32
    batch_sizes: tuple[int, ...] = (1, 16, 64)
    min_batches: int = 6

    def __post_init__(self) -> None:
        check_options(self)
        sizes = self.batch_sizes
        are_sizes = bool(sizes) and all(isinstance(size, int) and size > 0 for size in sizes)
        require(are_sizes, "batch_sizes", "a list of integers of at least 1", sizes, "write a list such as [1, 16]")


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Options for generation: length limit, temperature, filters, seed, stop strings.

    >>> sampling = SamplingParams(max_new_tokens=64, temperature=0.7, top_p=0.9, stop=["END"])
    >>> sampling.greedy().temperature
    0.0

    Attributes:
        max_new_tokens: Maximum number of response tokens, EOS token included; at least 1.
        temperature: 0 takes the most probable token; from 1e-30 to 1e30 draws from the softmax of logits / temperature
            (beyond, float32 would overflow and a forbidden token could be drawn).
        top_p: Nucleus in (0, 1]; 1 keeps everything. At temperature 0 it changes no token, but Dream's confidences.
        top_k: Number of most probable tokens to keep; ``None`` keeps all. At temperature 0 as ``top_p``.
        seed: Sampling noise depends on seed, prompt id, round and position alone.
        stop: Strings that end a response; the text is cut before the first stop string.
    """

    ranges = {"max_new_tokens": 1, "top_p": "(0, 1]", "top_k": 1}
    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int | None = None
    seed: int = 0
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_options(self)
        in_range = is_number(self.temperature, Real) and (self.temperature == 0 or 1e-30 <= self.temperature <= 1e30)
        require(in_range, "temperature", "0, or a number from 1e-30 to 1e30", self.temperature, "use 0.7, say")
        require(is_number(self.seed, Integral), "seed", "an integer", self.seed, "use 0, say")
        are_texts = isinstance(self.stop, list | tuple) and all(isinstance(text, str) and text for text in self.stop)
        require(are_texts, "stop", "a list of texts, none of them empty", self.stop, "put a single text in a list")
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "seed", int(self.seed))  # keys of noise name the type

    def greedy(self) -> SamplingParams:
        """Return the same parameters at temperature 0."""
        return replace(self, temperature=0.0)
