"""Values that the layers share: special tokens, prompts, and the options of decoding and sampling."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from numbers import Integral, Real

from refusion_lit.constraints import Constraint, ConstraintState
from refusion_lit.traits import AttentionKind, ModelTraits, Prediction
from refusion_lit.utils.require import check_options, is_number, require, require_number

__all__ = [
    "AttentionKind", "Constraint", "ConstraintState", "DecodingOptions", "ModelTraits", "Prediction", "Prompt",
    "SamplingParams", "SpecialTokens",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SpecialTokens:
    """Ids with a meaning of their own, read from tokenizer and config, never literals.

    Attributes:
        mask_token_id: The mask token, ``None`` for a model without one.
        eos_token_ids: Ids that end a response.
        pad_token_id: Fills up batches; may be one of ``eos_token_ids``.
        vocab_size: Number of ids that the tokenizer knows; head rows from here on are never produced.
        draft_token_ids: Ids of a drafter's masks, the first one for the nearest token; beyond all rows of the
            embedding, never part of a text.
    """

    mask_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int
    vocab_size: int
    draft_token_ids: tuple[int, ...] = ()

    @property
    def banned_token_ids(self) -> tuple[int, ...]:
        """Ids below ``vocab_size`` that a decoder never produces: mask, and padding unless it ends a response."""
        banned = {self.mask_token_id, self.pad_token_id} - {None, *self.eos_token_ids}
        return tuple(sorted(token for token in banned if token is not None))


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One prompt to decode.

    Attributes:
        token_ids: Prompt tokens, template included; may contain any id, the mask's too.
        id: Names the prompt in results and keys its sampling noise.
        given: Known part of the response, from its first token on: a token id, or ``None`` for a token to generate.
            Unknown tokens before the last given one are spans. The response continues after the last given token,
            unless that is an EOS token. Empty: nothing is given.
        num_filled: Number of given tokens that count towards ``max_new_tokens``, because they fill spans of another
            prompt.
        constraint: Which tokens may be drawn, such as those of a JSON schema; ``None``: all.
    """

    token_ids: tuple[int, ...]
    id: str
    given: tuple[int | None, ...] = ()
    num_filled: int = 0
    constraint: Constraint | None = None

    @property
    def num_given(self) -> int:
        """Given tokens of the response."""
        return len(self.given) - self.given.count(None)

    @property
    def num_uncounted(self) -> int:
        """Given tokens that do not count towards ``max_new_tokens``."""
        return self.num_given - self.num_filled

    @property
    def given_length(self) -> int:
        """Length of the response up to its last given token."""
        return max((place + 1 for place, token in enumerate(self.given) if token is not None), default=0)

    @property
    def num_to_fill(self) -> int:
        """Tokens to generate before the last given one."""
        return self.given_length - self.num_given


@dataclass(frozen=True, kw_only=True)
class DecodingOptions:
    """How prompts are batched and decoded; but for ``allow_mismatch``, tokens change by rounding at most.

    Attributes:
        batch_size: Maximum number of prompts decoded concurrently, at least 1; a finished prompt frees its row for the
            next one (continuous batching).
        max_tokens_per_forward: Maximum number of positions, padding included, that one batched forward pass computes,
            at least 1; prompts that do not fit wait. ``None``: no limit.
        max_cache_tokens: Maximum number of KV cache entries (tokens of prompts and responses) of all prompts in flight,
            at least 1; long prompts then run with fewer others at a time. ``None``: no limit.
        share_prefixes: Compute the common beginning of several prompts once and copy its cache entries.
        allow_mismatch: Run a decoder that the model was not trained for; tables mark it.
    """

    ranges = {"batch_size": 1, "max_tokens_per_forward": 1, "max_cache_tokens": 1}
    batch_size: int = 1
    max_tokens_per_forward: int | None = None
    max_cache_tokens: int | None = None
    share_prefixes: bool = True
    allow_mismatch: bool = False

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How much to generate and how tokens are drawn.

    Attributes:
        max_new_tokens: Maximum number of response tokens, EOS token included; at least 1.
        temperature: 0 takes the most probable token; from 1e-30 to 1e30 draws from the softmax of logits / temperature
            (beyond, float32 would overflow and a forbidden token could be drawn).
        top_p: Nucleus in (0, 1]; 1 keeps everything. At temperature 0 it changes no token, but Dream's confidences.
        top_k: Number of most probable tokens to keep; ``None`` keeps all. At temperature 0 as ``top_p``.
        seed: Sampling noise is a function of seed, prompt id, round and position alone.
        stop: Strings that end a response; text is cut before the first of them.
        min_entropy: End a response that repeats itself: at the first token, in text order, that has more than
            ``entropy_window`` tokens up to it, the last of which have token counts of an entropy, in nats, below this.
            They are left out. BD3-LM (arXiv 2503.09573) has 4 nats over 256 tokens, prompt included, and looks at the
            end of each block; here every token of the response counts. ``None``: no such end.
        entropy_window: Number of tokens whose entropy is computed, at least 2.
    """

    ranges = {"max_new_tokens": 1, "top_p": "(0, 1]", "top_k": 1, "entropy_window": 2}
    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int | None = None
    seed: int = 0
    stop: tuple[str, ...] = ()
    min_entropy: float | None = None
    entropy_window: int = 256

    def __post_init__(self) -> None:
        check_options(self)
        in_range = is_number(self.temperature, Real) and (self.temperature == 0 or 1e-30 <= self.temperature <= 1e30)
        require(in_range, "temperature", "0, or a number from 1e-30 to 1e30", self.temperature, "use 0.7, say")
        require(is_number(self.seed, Integral), "seed", "an integer", self.seed, "use 0, say")
        holds = isinstance(self.stop, list | tuple) and all(isinstance(text, str) and text for text in self.stop)
        require(holds, "stop", "a list of texts, none of them empty", self.stop, "put a single text in a list")
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "seed", int(self.seed))  # keys of noise name the type
        if self.min_entropy is not None:
            most = math.log(self.entropy_window)  # the entropy of different tokens
            require_number("min_entropy", self.min_entropy, f"(0, {most:.2f}]", "lower it, or raise entropy_window")

    def greedy(self) -> SamplingParams:
        """Return the same parameters at temperature 0."""
        return replace(self, temperature=0.0)
