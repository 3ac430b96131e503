"""The decoder interface: an immutable strategy that creates a prompt's state and advances it step by step."""

# No postponed annotations: jsonargparse would evaluate Decoder's annotations in the modules of its subclasses. If a
# module did not import the names in an annotation, jsonargparse would not check the option's type.
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field, replace
from typing import ClassVar, Literal

from refusion_lit.engine.requests import Steps
from refusion_lit.modeling.interface import LanguageModel
from refusion_lit.types import AttentionKind, ModelTraits, Prediction, Prompt, SamplingParams, SpecialTokens
from refusion_lit.utils.require import check_options, require


@dataclass(frozen=True, kw_only=True)
class ModelRequirements:
    """Traits that a model must have for a decoder to run on it.

    Attributes:
        attention: Attention pattern of the decoder's forwards.
        predictions: The meaning that the logits must have.
        drafter: Whether the decoder needs a drafter attached to the model.
        block_size: Tokens per block, for block-causal attention; ``None``: any size.
        prompt_is_block: For block-causal attention: the prompt is a single block, and counting blocks starts at the
            response.
    """

    attention: AttentionKind
    predictions: tuple[Prediction, ...]
    drafter: bool = False
    block_size: int | None = None
    prompt_is_block: bool = False

    def mismatches(self, traits: ModelTraits) -> list[str]:
        """Return the reasons why a model with these traits does not fit; empty if it fits or nothing is known."""
        reasons = []
        if traits.attention != self.attention:
            reasons.append(
                f"it uses {self.attention} attention, the model was trained with {traits.attention} attention"
            )
        elif self.block_size not in (None, traits.block_size):
            reasons.append(f"its blocks have {self.block_size} tokens, the model was trained with {traits.block_size}")
        elif self.prompt_is_block != traits.prompt_is_block:
            origin = "the response" if self.prompt_is_block else "position 0"
            reasons.append(f"its blocks are counted from {origin}, the model's are not")
        if traits.predictions is not None:
            known = {*traits.predictions} | ({"next_token_in_slot"} if "next_token" in traits.predictions else set())
            missing = [name for name in self.predictions if name not in known]
            if missing:
                trained = ", ".join(traits.predictions) or "none"
                reasons.append(f"it needs the predictions {', '.join(missing)}, the model was trained for {trained}")
        return reasons


@dataclass
class RowState:
    """Decoding state: a prompt's canvas and counters. Every call creates new states.

    Attributes:
        prompt: The prompt.
        sampling: Length limit and sampling options.
        special_tokens: The model's special ids.
        length: The canvas's number of tokens, by default :func:`max_length`.
        tokens: The canvas: response tokens in text order; values at masked places are undefined.
        is_masked: Which places are not final. Never derived from token ids. Given tokens are final from
            the start, and never committed.
        committed: Places, in the order in which they were committed.
        commit_rounds: Which forward committed a place, from 1; 0 while masked, and for given tokens.
        finished: Set by the decoder when nothing is left to do.
        num_forwards: Forwards in which the prompt took part; counted by the engine.
        schedule_length: Maximum number of forwards if steps may commit nothing; 0 for other decoders.
        forward_cost: Fixed cost of a forward on the model's device, in positions. Set by the engine.
        num_rows: Number of prompts that share the cost of a forward. Set by the engine.
        num_shared: Number of prompt tokens, from the start, that are in the KV cache before the first forward, at
            indices equal to their positions. The decoder does not feed them. Set by the engine.
        num_cached: Cache entries with final text, for decoders that count them; ``num_shared`` at first.
        max_length: The response's maximum length; its actual length once the final prefix has an EOS.
        prompt_length: The prompt's number of tokens; the canvas starts at this position.
        num_final: Leading final places that :meth:`final_prefix` has counted so far.
    """

    prompt: Prompt
    sampling: SamplingParams
    special_tokens: SpecialTokens
    length: InitVar[int | None] = None
    _: KW_ONLY
    tokens: list[int] = field(init=False)
    is_masked: list[bool] = field(init=False)
    committed: list[int] = field(default_factory=list)
    commit_rounds: list[int] = field(init=False)
    finished: bool = False
    num_forwards: int = 0
    schedule_length: int = 0
    forward_cost: float = 32.0
    num_rows: int = 1
    num_shared: int = 0
    num_cached: int = 0
    num_final: int = 0
    max_length: int = field(init=False)
    prompt_length: int = field(init=False)

    def __post_init__(self, length: int | None) -> None:
        """Create the canvas: masks and given tokens."""
        self.max_length = max_length(self.prompt, self.sampling, self.special_tokens)
        self.prompt_length = len(self.prompt.token_ids)
        length = self.max_length if length is None else length
        given = [*self.prompt.given[:length], *[None] * (length - len(self.prompt.given))]
        self.tokens = [self.special_tokens.pad_token_id if token is None else token for token in given]
        self.is_masked = [token is None for token in given]
        self.commit_rounds = [0] * length

    @property
    def known_tokens(self) -> list[tuple[int, int]]:
        """Tokens and positions that are known before the first forward: the prompt, then given tokens."""
        text = [*self.prompt.token_ids, *self.prompt.given]
        return [(token, position) for position, token in enumerate(text) if token is not None]

    @property
    def num_committed(self) -> int:
        """How many places are committed."""
        return len(self.committed)

    @property
    def mask_token_id(self) -> int:
        """The mask token. If the decoder needs masks, the engine refuses models without a mask token."""
        mask = self.special_tokens.mask_token_id
        assert mask is not None, "the decoder feeds mask tokens, but requires no prediction of a mask"
        return mask

    def commit(self, places: Sequence[int], tokens: Sequence[int]) -> None:
        """Make tokens final.

        Args:
            places: Where (position minus prompt length); all must be masked.
            tokens: Their tokens.
        """
        known = self.special_tokens
        has_mask = known.mask_token_id in tokens and known.mask_token_id not in known.eos_token_ids
        masked = {place for place in places if 0 <= place < len(self.tokens) and self.is_masked[place]}
        are_masked = len(masked) == len(places) == len(tokens)
        if has_mask or not are_masked or not 0 <= min(tokens, default=0) <= max(tokens, default=0) < known.vocab_size:
            got = f"{list(tokens)!r:.40} at {list(places)!r:.40}"  # no option is named, so that file and line are
            raise ValueError(
                f"decoder: a step commits {got}; expected ids below {known.vocab_size} other than the mask token, each "
                f"at a masked place below {len(self.tokens)}: commit every drawn token once."
            )
        for place, token in zip(places, tokens, strict=True):
            self.tokens[place] = token
            self.is_masked[place] = False
            self.committed.append(place)
            self.commit_rounds[place] = self.num_forwards

    def first_eos(self, tokens: Sequence[int]) -> int | None:
        """Return the first EOS token's index, or ``None``."""
        return next((i for i, token in enumerate(tokens) if token in self.special_tokens.eos_token_ids), None)

    def final_prefix(self) -> list[int]:
        """Return the longest final prefix of the response, cut after the first EOS and at :attr:`max_length`.

        The search resumes where it last ended, because final places stay final.
        """
        while self.num_final < min(self.max_length, len(self.tokens)) and not self.is_masked[self.num_final]:
            self.num_final += 1
            if self.tokens[self.num_final - 1] in self.special_tokens.eos_token_ids:
                self.max_length = self.num_final
        return self.tokens[: self.num_final]

    @property
    def prefix_ends(self) -> bool:
        """Whether the final prefix is the whole response."""
        return len(self.final_prefix()) == min(self.max_length, len(self.tokens))


def max_length(prompt: Prompt, sampling: SamplingParams, special_tokens: SpecialTokens) -> int:
    """Return a response's maximum length: ``max_new_tokens`` and the given tokens, or up to a given EOS."""
    given = prompt.given
    if given and given[-1] in special_tokens.eos_token_ids:
        return len(given)
    return sampling.max_new_tokens + prompt.num_uncounted


class Decoder(ABC):
    """A decoding strategy: immutable options, no state, no model.

    A decoder handles one prompt and plain Python numbers. The engine runs many prompts at once: it batches their
    forwards, counts, streams and cuts, so prompts cannot influence each other. Subclasses are frozen, keyword-only
    dataclasses that check their options on construction.

    Class attributes:
        requires: The decoder's requirements on a model; override :meth:`requirements` if they depend on options.
        ranges: Minimum or interval of numeric options, checked on construction; see ``utils.require.check_options``.
        shares: Which common tokens of prompts may be copied; see :meth:`num_shareable`. ``all`` where the first forward
            reads masks after the prompt, ``all_but_last`` where it reads the logits at the prompt's last token.
        refuses: Reason why the decoder cannot keep given tokens in place; ``None`` if it can. Override :meth:`refusal`
            if the reason depends on options.
        state: The states' class.
        stop_at_eos: Whether the engine finishes a response once its final prefix has an EOS or is the whole response.
            If not, the decoder sets ``finished``.
        shifted: Whether the position before a mask predicts the mask.
    """

    requires: ClassVar[ModelRequirements]
    ranges: ClassVar[dict[str, float | str]] = {}
    shares: ClassVar[Literal["nothing", "all", "all_but_last"]] = "nothing"
    refuses: ClassVar[str | None] = "it does not override Decoder.refusal, which says whether it can"
    state: ClassVar[type[RowState]] = RowState
    stop_at_eos: bool = True  # an option of some subclasses
    shifted: bool = False  # likewise

    def __post_init__(self) -> None:
        """Check the options; subclasses extend it."""
        check_options(self)  # pyright: ignore[reportArgumentType] - subclasses are dataclasses

    @property
    def is_left_to_right(self) -> bool:
        """Whether tokens are drawn in the order of the text, as decoders for next-token models do."""
        return self.requirements().predictions == ("next_token",)

    @property
    def keeps_text_order(self) -> bool:
        """Whether tokens stand in the KV cache in the order of the text, so that sliding windows are exact."""
        return self.is_left_to_right

    def requirements(self) -> ModelRequirements:
        """Return the requirements on a model, given the decoder's options."""
        what = f"what {type(self).__name__} needs of a model"
        fix = 'add requires = ModelRequirements(attention="causal", predictions=("mask",))'
        require(hasattr(self, "requires"), "decoder", what, "no class attribute requires", fix)
        if not self.shifted:
            return self.requires
        predictions: tuple[Prediction, ...] = tuple(
            "mask_shifted" if prediction == "mask" else prediction for prediction in self.requires.predictions
        )
        return replace(self.requires, predictions=predictions)

    def mismatch_fix(self, traits: ModelTraits) -> str:  # noqa: ARG002
        """Return advice for a model that does not fit, as a sentence; empty for the caller's advice."""
        return ""

    def pair(self, model: LanguageModel, verifier: LanguageModel) -> LanguageModel:
        """Combine two models into one, for a decoder that requires the prediction ``verifier``.

        Args:
            model: The model that drafts.
            verifier: A second model with the same tokenizer.
        """
        raise NotImplementedError(f"{type(self).__name__} needs a verifier and must override pair")

    def check(self, sampling: SamplingParams) -> None:  # noqa: B027 - most decoders refuse nothing
        """Refuse sampling options that the decoder does not support.

        Raises:
            ValueError: Naming the option, what was expected and what was got.
        """

    def adapt_to(self, sampling: SamplingParams) -> "Decoder":  # noqa: ARG002
        """Return the decoder with options adapted to a length limit; used for default decoders only."""
        return self

    def refusal(self, prompt: Prompt) -> str | None:  # noqa: ARG002
        """Return why the decoder cannot keep a response's given tokens in place; ``None`` if it can.

        Decoders that neither set ``refuses`` nor override this method refuse all templates. A decoder that keeps given
        tokens creates a canvas of :func:`max_length`, leaves ``is_masked`` of the new state unchanged, and commits
        masked places only. The engine draws no EOS token in a span.
        """
        return self.refuses

    def num_shareable(self, prompt_length: int, num_common: int) -> int:
        """Return how many tokens at the prompt's start may be copied from another prompt's cache.

        A decoder may return more than 0 under three conditions. From the first forward to the last, the prompt's tokens
        are in the cache at indices equal to their positions. Their KV cache entries depend on the tokens before them
        only. :meth:`step` feeds the prompt from ``state.num_shared`` on, in the same number of forwards as without
        sharing. Bidirectional decoders share nothing, because KV cache entries depend on the whole text.

        Args:
            prompt_length: The prompt's number of tokens.
            num_common: Number of tokens at the start that both prompts share.
        """
        return {"nothing": 0, "all": num_common, "all_but_last": min(num_common, prompt_length - 1)}[self.shares]

    def begin(self, prompt: Prompt, sampling: SamplingParams, special_tokens: SpecialTokens) -> RowState:
        """Create a prompt's ``state``; by default with :func:`max_length` places."""
        return self.state(prompt, sampling, special_tokens)

    @abstractmethod
    def step(self, state: RowState) -> Steps[None]:
        """Commit a token or more, or run a scheduled forward (see ``schedule_length``).

        The engine calls it until the response is complete (see ``stop_at_eos``), or ``finished`` is set.
        """


def most_certain(confidences: Sequence[float], count: int | None = None) -> list[int]:
    """Return the ``count`` highest confidences' indices (all by default), best first, ties to the lower index."""
    return sorted(range(len(confidences)), key=lambda i: (-confidences[i], i))[:count]


def above_or_best(
    confidences: Sequence[float], threshold: float, quota: int = 1, *, is_inclusive: bool = False
) -> list[int]:
    """Return, in ascending order, where confidences exceed a threshold; at least the ``quota`` highest.

    With ``is_inclusive``, a confidence that equals the threshold counts, too.
    """
    above = [i for i, value in enumerate(confidences) if value > threshold or (is_inclusive and value == threshold)]
    return above if len(above) >= quota else sorted(most_certain(confidences, quota))
