"""What a decoder is: an immutable strategy for one prompt that begins a state and advances it by a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from refusion_lit.decoding.requests import Reading, Request
from refusion_lit.types import AttentionKind, ModelTraits, Prediction, Prompt, SamplingParams, SpecialTokens

Steps = Generator[Request, list[Reading], None]
"""A decoder's step: yields requests to the model, is sent one reading a branch."""


@dataclass(frozen=True, kw_only=True)
class ModelRequirements:
    """What a decoder needs of a model.

    Attributes:
        attention: The attention pattern that the decoder's forwards have.
        predictions: Meanings of logits that it relies on.
        mask_token: Whether it feeds mask tokens.
        block_size: Tokens a block, for block-causal attention.
    """

    attention: AttentionKind
    predictions: tuple[Prediction, ...]
    mask_token: bool = True
    block_size: int | None = None

    def mismatches(self, traits: ModelTraits) -> list[str]:
        """Return why a model with these traits was not trained for the decoder; empty if it was (or may have been)."""
        reasons = []
        if traits.attention != self.attention:
            reasons.append(f"it attends {self.attention}ly, the model was trained {traits.attention}")
        elif self.block_size != traits.block_size and self.block_size is not None:
            reasons.append(f"its blocks have {self.block_size} tokens, the model was trained with {traits.block_size}")
        if traits.predictions is not None:
            missing = [name for name in self.predictions if not _covers(traits.predictions, name)]
            if missing:
                reasons.append(
                    f"it needs the predictions {', '.join(missing)}, the model was trained for "
                    f"{', '.join(traits.predictions) or 'none'}"
                )
        return reasons


def _covers(predictions: Sequence[Prediction], name: Prediction) -> bool:
    return name in predictions or (name == "next_token_in_slot" and "next_token" in predictions)


@dataclass(kw_only=True)
class RowState:
    """Everything that is known of one prompt's decoding; made per call, never shared.

    Attributes:
        prompt: The prompt.
        sampling: How much to generate and how tokens are drawn.
        special_tokens: The model's ids with a meaning.
        tokens: The canvas: response tokens in text order; the value at masked places means nothing.
        is_masked: Which places of the canvas are not final. Never derived from token ids.
        committed: Places of the canvas in the order in which they became final.
        commit_rounds: Number of the row's forwards when each place became final; 0 while masked.
        finished: Set by the decoder when nothing is left to do.
        num_forwards: Forwards in which the row took part; kept by the engine.
        schedule_step: Steps done of a bounded schedule, for decoders whose steps may commit nothing.
        schedule_length: Its bound.
    """

    prompt: Prompt
    sampling: SamplingParams
    special_tokens: SpecialTokens
    tokens: list[int]
    is_masked: list[bool]
    committed: list[int] = field(default_factory=list)
    commit_rounds: list[int] = field(default_factory=list)
    finished: bool = False
    num_forwards: int = 0
    schedule_step: int = 0
    schedule_length: int = 0

    def __post_init__(self) -> None:
        """Start with nothing committed."""
        self.commit_rounds = [0] * len(self.tokens)

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt; the canvas begins at this position."""
        return len(self.prompt.token_ids)

    @property
    def num_committed(self) -> int:
        """Places of the canvas that :meth:`commit` has made final."""
        return len(self.committed)

    def commit(self, places: Sequence[int], tokens: Sequence[int]) -> None:
        """Make tokens final.

        Args:
            places: Indices into the canvas (position minus prompt length), all masked.
            tokens: Their tokens.
        """
        for place, token in zip(places, tokens, strict=True):
            assert self.is_masked[place], f"canvas place {place} committed twice"
            self.tokens[place] = token
            self.is_masked[place] = False
            self.committed.append(place)
            self.commit_rounds[place] = self.num_forwards

    def final_prefix(self) -> list[int]:
        """Return the longest final left part of the response, cut behind the first EOS and at ``max_new_tokens``."""
        prefix: list[int] = []
        for token, masked in zip(self.tokens[: self.sampling.max_new_tokens], self.is_masked, strict=False):
            if masked:
                break
            prefix.append(token)
            if token in self.special_tokens.eos_token_ids:
                break
        return prefix

    @property
    def prefix_ends(self) -> bool:
        """Whether the final left part already is the whole response."""
        prefix = self.final_prefix()
        return len(prefix) == min(self.sampling.max_new_tokens, len(self.tokens)) or (
            bool(prefix) and prefix[-1] in self.special_tokens.eos_token_ids
        )


class Decoder(ABC):
    """A decoding strategy: immutable options, no state, no model.

    It is written for one prompt and plain Python numbers. The engine runs many prompts at once, batches
    their forwards, counts, streams and cuts. Rows therefore cannot influence each other.
    Subclasses are frozen, keyword-only dataclasses that check their options on construction.
    """

    requires: ClassVar[ModelRequirements]

    def requirements(self) -> ModelRequirements:
        """Return what this decoder, with its options, needs of a model."""
        return self.requires

    def check(self, sampling: SamplingParams) -> None:  # noqa: B027 - most have nothing to refuse
        """Refuse combinations with sampling parameters that are impossible.

        Raises:
            ValueError: Naming the option, what was expected and what was got.
        """

    @abstractmethod
    def begin(self, prompt: Prompt, sampling: SamplingParams, special_tokens: SpecialTokens) -> RowState:
        """Make the state of one prompt's decoding."""

    @abstractmethod
    def step(self, state: RowState) -> Steps:
        """Commit at least one token, or advance ``schedule_step`` within its bound; set ``finished`` at the end."""


def require(holds: bool, option: str, expected: str, got: object, fix: str) -> None:
    """Raise a user's error unless a condition holds.

    Raises:
        ValueError: ``option: expected ..., got ...; fix``.
    """
    if not holds:
        raise ValueError(f"{option}: expected {expected}, got {got!r}; {fix}.")


def require_probability(option: str, value: float) -> None:
    """Refuse a threshold outside [0, 1]."""
    require(0 <= value <= 1, option, "a probability in [0, 1]", value, f"set {option} between 0 and 1")


def require_choice(option: str, value: str, choices: Sequence[str]) -> None:
    """Refuse a name that is not one of the choices (types are not checked when called from Python)."""
    require(value in choices, option, f"one of {', '.join(choices)}", value, "choose one of them")


def require_positive(option: str, value: int) -> None:
    """Refuse a size below 1."""
    require(value >= 1, option, "an integer of at least 1", value, f"set {option} to 1 or more")
