"""Nemotron-Labs-Diffusion (arXiv 2607.05722): causal text, then a block of masks that see one another.

The decoders ``CausalBlockDiffusion`` and ``LinearSpeculation``, the objective ``CausalBlockMasked``, and the format of
the published checkpoints: a Ministral 3 under other names. ``Autoregressive`` is the third mode.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch.nn import functional as F

from refusion_lit.engine.branches import branch_after, list_masked, text_between, text_branch, up_to_eos
from refusion_lit.engine.decoder import Decoder, ModelRequirements, RowState, above_or_best, max_length
from refusion_lit.engine.requests import Draw, Forward, Steps
from refusion_lit.families.autoregressive.decoder import Autoregressive
from refusion_lit.families.block_diffusion.objective import three_part_ranges
from refusion_lit.learning.batch import IGNORE_INDEX, CorruptedBatch, ResponseBatch
from refusion_lit.learning.objective import MaskRatio, Objective, mask_probability, required_mask_id
from refusion_lit.learning.text_order import shift_left
from refusion_lit.modeling.formats import CheckpointFormat, register
from refusion_lit.noise import KeyedNoise
from refusion_lit.types import ModelTraits, Prompt, SamplingParams, SpecialTokens
from refusion_lit.utils.require import is_number, require, require_at_least

_EPS = 1e-3
"""Smallest mask probability in training, as in the authors' program."""

_ROPE = ("llama_4_scaling_beta", "original_max_position_embeddings")
"""Rotary options that scale queries."""

_NEXT_TOKEN = Autoregressive()


@dataclass(frozen=True, kw_only=True)
class _NemotronFormat(CheckpointFormat):
    def library_options(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Convert a config; the default decoder uses the training's ``block_size``.

        Published configs name no padding token. Ministral 3 would take 11, the published EOS token, whose embedding
        would then not learn.
        """
        options = super().library_options({"pad_token_id": None, **values})
        for entry in ("rope_parameters", "rope_scaling"):
            rope = values.get(entry)
            for name in _ROPE if rope is not None else ():
                value = rope.get(name) if isinstance(rope, Mapping) else None
                option = f"backbone.source: {entry}.{name}"
                require(is_number(value, Real), option, "a number", value, "fetch config.json again")
        require_at_least("backbone.source: mask_token_id", values.get("mask_token_id"), 0)
        if "block_size" in values:
            require_at_least("backbone.source: block_size", values["block_size"], 1)
            options["refusion_lit"]["decoder"]["init_args"]["block_size"] = values["block_size"]
        return options


register(
    _NemotronFormat(
        name="nemotron_labs_diffusion",
        family="Nemotron-Labs-Diffusion 3B, 8B and 14B",
        model_type="nemotron_labs_diffusion",
        base="ministral3",
        required={
            "attention_bias": (False,),
            "dlm_paradigm": ("bidirectional", "block_diff"),
            "mlp_bias": (False,),
        },
        dropped=(
            "ar_loss_weight", "attn_implementation", "block_size", "dlm_loss_weight", "dp_varying_mask_ratio",
            "use_cache",
        ),
        weight_names=(("model", "encoder"), ("lm_head", "diffusion_head")),
        attention="causal",
        predictions=("block_mask", "next_token"),
        mask_tokens=("<mask>", "[MASK]", "<|mask|>"),
        decoder="CausalBlockDiffusion",
        decoder_options={"threshold": 0.9},
    )
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _BlockOfMasks(Decoder):
    """Base of decoders that feed blocks of masks after causal text.

    Attributes:
        block_size: Tokens per block, at least 1 (``block_length``).
        max_thinking_tokens: Length at which ``end_think_token_id`` is written, unless the response has it already;
            ``None``: no limit. Constrained responses have no limit.
        end_think_token_id: The token that ends the thinking; set together with ``max_thinking_tokens``.
    """

    requires = ModelRequirements(attention="causal", predictions=("block_mask", "next_token"))
    shares = "all_but_last"
    refuses = "the first token of a block is predicted from the text on its left"

    ranges = {"block_size": 1, "max_thinking_tokens": 0, "end_think_token_id": 0}
    block_size: int = 32
    max_thinking_tokens: int | None = None
    end_think_token_id: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        is_paired = (self.max_thinking_tokens is None) == (self.end_think_token_id is None)
        expected = "a value if and only if max_thinking_tokens has one"
        require(is_paired, "end_think_token_id", expected, self.end_think_token_id, "set both or neither")

    def begin(self, prompt: Prompt, sampling: SamplingParams, special_tokens: SpecialTokens) -> RowState:
        """Create the canvas, after a check of the token that ends the thinking."""
        token = self.end_think_token_id
        allowed = token is None or (token < special_tokens.vocab_size and token not in special_tokens.banned_token_ids)
        expected = f"an id below {special_tokens.vocab_size} that is neither mask nor padding"
        require(allowed, "end_think_token_id", expected, token, "take the id from the tokenizer")
        return super().begin(prompt, sampling, special_tokens)

    def _exceeds_thinking(self, state: RowState, tokens: Sequence[int], num_tokens: int) -> bool:
        """Return whether ``num_tokens`` exceeds the thinking budget and ``tokens`` do not end the thinking.

        A constraint, such as a JSON schema, leaves no room for thinking.
        """
        limit = self.max_thinking_tokens if state.prompt.constraint is None else None
        return limit is not None and num_tokens > limit and self.end_think_token_id not in tokens


@dataclass(frozen=True, kw_only=True)
class CausalBlockDiffusion(_BlockOfMasks):
    """Fills blocks of masks after causal text; the text predicts the first token of the next block.

    Blocks are counted from the start of the response. A forward feeds the block after the cached text, with
    bidirectional attention. It fills masks whose token has at least ``threshold`` probability, or else the most
    probable mask. A full block is fed once more, with causal attention, to fill the cache and to predict the next
    block's first token.

    Source: ``generate`` of Nemotron-Labs-Diffusion (arXiv 2607.05722). Deliberate differences: the last block is not
    fed once more, which saves a forward; a block that begins with EOS is not denoised, which saves another forward;
    responses have any length, not only whole blocks.

    With ``block_size: 1``, the decoder is :class:`Autoregressive` with a thinking budget.

    Attributes:
        threshold: Fill every mask whose token has at least this probability, in [0, 1]; ``None``: a mask per forward.
        causal_context: ``False``: the prompt and full blocks see all of themselves and predict nothing. A block's first
            token is then a mask like the others.

    >>> import refusion_lit
    >>> model = refusion_lit.load("tests/goldens/published_2026/models/nld-tiny")
    >>> decoder = CausalBlockDiffusion(block_size=8, threshold=0.5)
    >>> [answer] = model.generate(["1+2>"], decoder=decoder, max_new_tokens=32)
    >>> answer.text, answer.num_tokens, answer.num_forwards
    ('11+22=1;', 9, 6)
    """

    ranges = {"threshold": "[0, 1]"}
    threshold: float | None = 0.9
    causal_context: bool = True

    def num_shareable(self, prompt_length: int, num_common: int) -> int:
        """Return how many common tokens to share, without the prompt's last token; 0 without ``causal_context``."""
        return super().num_shareable(prompt_length, num_common) if self.causal_context else 0

    def begin(self, prompt: Prompt, sampling: SamplingParams, special_tokens: SpecialTokens) -> RowState:
        """Create a canvas of whole blocks."""
        super().begin(prompt, sampling, special_tokens)
        length = max_length(prompt, sampling, special_tokens)
        return self.state(prompt, sampling, special_tokens, -(-length // self.block_size) * self.block_size)

    def step(self, state: RowState) -> Steps[None]:
        """Cache a complete block and begin another block, or fill masks of the current block."""
        place = state.is_masked.index(True) // self.block_size * self.block_size
        start = state.prompt_length + place
        if state.num_cached < start:
            num_committed = state.num_committed
            yield from self._begin_block(state, place)
            if state.num_committed > num_committed:
                return  # perhaps an EOS token, or the whole block
        block = text_between(state, start, start + self.block_size)
        mask_offsets = [position - start for position in list_masked(state, start, start + self.block_size)]
        draw = Draw(sampling=state.sampling, round=state.num_forwards)
        branch = branch_after(start, block, order=[0] * len(block), draft_at=mask_offsets)
        [reading] = yield Forward(phase="denoise", branches=(branch,), draw=draw)
        threshold = math.inf if self.threshold is None else self.threshold
        chosen = above_or_best(reading.probabilities, threshold, is_inclusive=True)
        state.commit([place + mask_offsets[i] for i in chosen], [reading.tokens[i] for i in chosen])

    def _begin_block(self, state: RowState, place: int) -> Steps[None]:
        """Cache the text before a block; commit the block's first token and, when due, the end of the thinking."""
        start = state.prompt_length + place
        causal = self.causal_context
        order = None if causal else [0] * (start - state.num_cached)
        branch = text_branch(state, state.num_cached, start, [start] if causal else [], order=order, shift=1)
        draw = Draw(sampling=state.sampling, with_probability=False)
        [reading] = yield Forward(phase="store" if place else "prefill", branches=(branch,), draw=draw)
        state.num_cached = start
        tokens = {place: reading.tokens[0]} if causal else {}
        if self._exceeds_thinking(state, state.tokens[:place], place + self.block_size):
            assert self.max_thinking_tokens is not None
            assert self.end_think_token_id is not None
            tokens[max(place, self.max_thinking_tokens)] = self.end_think_token_id
        state.commit([*tokens], [*tokens.values()])


@dataclass(frozen=True, kw_only=True)
class LinearSpeculation(_BlockOfMasks):
    """Drafts a block with bidirectional attention and verifies it causally; writes the text of :class:`Autoregressive`.

    A round feeds the last token and ``block_size`` - 1 masks, which see one another. The filled block is fed again with
    causal attention. Drafts that equal the model's next tokens are accepted, and the model's token after them is added.
    With a temperature, drafts and verification share noise, so that sampled text equals the sequential decoder's text.

    Source: ``linear_spec_generate`` of Nemotron-Labs-Diffusion (arXiv 2607.05722). Deliberate differences: the response
    has at most ``max_new_tokens``, and the token that ends the thinking is written once. A thinking budget makes the
    text depend on the drafts.

    Attributes:
        threshold: 0: draft in a single forward. Above 0: draft in several forwards, until no mask is left. A forward
            keeps drafts with at least this probability (after temperature, top-k and top-p), or else the most probable
            draft.

    >>> import refusion_lit
    >>> model = refusion_lit.load("tests/goldens/published_2026/models/nld-tiny")
    >>> [answer] = model.generate(["12+34,56+78>"], decoder=LinearSpeculation(block_size=8), max_new_tokens=32)
    >>> answer.text, answer.num_tokens, answer.num_forwards
    ('12+34=121;21+33=41;', 20, 15)
    """

    ranges = {"threshold": "[0, 1]"}
    threshold: float = 0.0

    def step(self, state: RowState) -> Steps[None]:
        """Read the prompt, or draft and verify a block."""
        return self._round(state) if state.committed else _NEXT_TOKEN.step(state)

    def _round(self, state: RowState) -> Steps[None]:
        """Draft a block, verify it, and commit the accepted drafts and the model's token after them."""
        place = state.num_committed
        start = state.num_cached = state.prompt_length + place - 1
        block = [state.tokens[place - 1], *[state.mask_token_id] * (self.block_size - 1)]
        mask_offsets = [*range(1, self.block_size)]
        needs_confidence = self.threshold > 0
        # As in the program, a drawn draft's confidence is its probability after the temperature.
        statistic = "probability" if needs_confidence and state.sampling.temperature > 0 else None
        while mask_offsets:
            # Without a round, noise depends on the position alone, so the verification draws with the same noise.
            draw = Draw(sampling=state.sampling, statistic=statistic, with_probability=needs_confidence)
            branch = branch_after(start, block, order=[0] * len(block), draft_at=mask_offsets)
            [reading] = yield Forward(phase="draft", branches=(branch,), draw=draw)
            indices = range(len(mask_offsets))
            confidences = reading.statistic or reading.probabilities
            chosen = above_or_best(confidences, self.threshold, is_inclusive=True) if needs_confidence else indices
            for i in chosen:
                block[mask_offsets[i]] = reading.tokens[i]
            mask_offsets = [mask_offsets[i] for i in indices if i not in chosen]
        branch = branch_after(start, block, shift=1, draft_at=range(len(block)))
        draw = Draw(sampling=state.sampling, with_probability=False)
        [reading] = yield Forward(phase="verify", branches=(branch,), draw=draw)
        drafts = [*block[1:], None]  # None equals no token and so ends the accepted drafts
        num_accepted = next(i for i, draft in enumerate(drafts) if draft != reading.tokens[i])
        tokens = [*up_to_eos(state, reading.tokens[: num_accepted + 1])]
        text = [*state.tokens[:place], *tokens]
        if state.first_eos(tokens) is None and self._exceeds_thinking(state, text, len(text)):
            assert self.end_think_token_id is not None
            tokens[-1] = self.end_think_token_id
        tokens = tokens[: len(state.tokens) - place]
        state.commit(range(place, place + len(tokens)), tokens)


@dataclass(frozen=True, kw_only=True)
class CausalBlockMasked(Objective):
    """Predicts a block's masks from the whole block and causal text, and the clean text's next token.

    Nemotron-Labs-Diffusion (arXiv 2607.05722): a forward over ``[noisy; clean]`` with repeated position ids. A sample
    draws t, and its response tokens are masked with probability p = 0.999 t + 0.001. A noisy token sees all of its
    noisy block, and the clean tokens of earlier blocks; a clean token sees the clean text up to itself. Blocks are
    counted from position 0, prompt included.

    Terms: ``mdm``, cross-entropy / p summed over masks, and ``ar``, the next response token's cross-entropy summed over
    the clean half. Both are divided by the batch's number of masks and response tokens. The loss is ``mdm_weight`` *
    mdm + ar. Deliberate differences: the program's denominator counts a single row's tokens, and the program scales the
    clean half's queries as if they came after the noisy half.

    Attributes:
        block_size: Tokens per block, at least 1.
        mdm_weight: The masked term's weight (``dlm_loss_weight``), at least 0.

    >>> import torch
    >>> from refusion_lit.learning.batch import ResponseBatch
    >>> from refusion_lit.noise import KeyedNoise
    >>> from refusion_lit.types import SpecialTokens
    >>> special = SpecialTokens(mask_token_id=2, eos_token_ids=(1,), pad_token_id=0, vocab_size=19)
    >>> batch = ResponseBatch.from_pairs([([5], [6, 7, 8])])
    >>> noise = KeyedNoise(batch.sample_keys)
    >>> corrupted = CausalBlockMasked(block_size=2).corrupt(batch, noise, special, mask_ratio=torch.ones(1))
    >>> corrupted.input_ids, corrupted.labels
    (tensor([[5, 2, 2, 2, 5, 6, 7, 8]]), tensor([[-100,    6,    7,    8,    6,    7,    8, -100]]))
    """

    trained = ModelTraits(attention="causal", predictions=("block_mask", "next_token"))

    ranges = {"block_size": 1, "mdm_weight": 0.0}
    block_size: int = 32
    mdm_weight: float = 0.3

    @property
    def terms(self) -> Mapping[str, float]:
        """The masked and the next-token term."""
        return {"mdm": self.mdm_weight, "ar": 1.0}

    def corrupt(
        self, batch: ResponseBatch, noise: KeyedNoise, special_tokens: SpecialTokens, *, mask_ratio: MaskRatio = None
    ) -> CorruptedBatch:
        """Mask response tokens independently and append the clean text; see :meth:`Objective.corrupt`."""
        num_tokens = batch.input_ids.shape[1]
        probability = mask_probability(noise, _EPS, mask_ratio)[:, None]
        is_masked = batch.in_response & (noise.uniform("token_mask", num_tokens) < probability)
        next_ids = shift_left(batch.input_ids.where(batch.in_response, IGNORE_INDEX), IGNORE_INDEX)
        labels = torch.cat((batch.input_ids.where(is_masked, IGNORE_INDEX), next_ids), 1)
        weights = torch.cat(((1 / probability).where(is_masked, 0.0), (next_ids != IGNORE_INDEX).double()), 1)
        count = (is_masked.sum() + batch.response_lengths.sum()).float()
        noisy = batch.input_ids.masked_fill(is_masked, required_mask_id(self, special_tokens))
        return CorruptedBatch(
            input_ids=torch.cat((noisy, batch.input_ids), 1),
            position_ids=batch.positions.repeat(2).expand_as(labels),
            labels=labels,
            weights=weights.float(),
            terms=F.pad(torch.zeros_like(next_ids), (0, num_tokens), value=1),
            counts=torch.stack((count, count)),
            visible=three_part_ranges(num_tokens, self.block_size, batch.ends, causal="clean"),
            is_masked=F.pad(is_masked, (0, num_tokens)),
            is_real=torch.cat((batch.is_real, batch.is_real), 1),
        )
