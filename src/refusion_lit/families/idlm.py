"""I-DLM (arXiv 2604.11035): a causal model's masks draft the next tokens, and the next forward verifies them.

The decoder ``IntrospectiveStrided``, the objective ``Introspective``, and the format of the published checkpoints: a
Qwen3 in SDAR's layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from refusion_lit.engine.branches import DraftState, branch_after, text_branch, up_to_eos
from refusion_lit.engine.decoder import Decoder, ModelRequirements
from refusion_lit.engine.requests import Draw, Forward, MoreDrafts, Steps
from refusion_lit.families.block_diffusion.objective import three_part_ranges
from refusion_lit.learning.batch import IGNORE_INDEX, CorruptedBatch, LossOutput, ResponseBatch
from refusion_lit.learning.objective import Head, MaskRatio, Objective, mask_probability, required_mask_id
from refusion_lit.learning.text_order import shift_left
from refusion_lit.modeling.formats import CheckpointFormat, register
from refusion_lit.noise import KeyedNoise
from refusion_lit.types import ModelTraits, SpecialTokens
from refusion_lit.utils.require import require_at_least


@dataclass(frozen=True, kw_only=True)
class _IDLMFormat(CheckpointFormat):
    def library_options(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Convert a config. ``block_size``, the number of masks per block in training, gives the decoder's stride."""
        options = super().library_options(values)
        if values.get("block_size") is not None:
            require_at_least("backbone.source: block_size", values["block_size"], 1)
            options["refusion_lit"]["decoder"]["init_args"] = {"stride": values["block_size"] + 1}
        return options


register(
    _IDLMFormat(
        name="idlm",
        family="I-DLM 8B and 32B",
        model_type="sdar",
        source_pattern=r"(?<![a-z])i-?dlm",
        base="qwen3",
        attention="causal",
        predictions=("mask_shifted", "next_token"),
        mask_tokens=("<|MASK|>", "<|mask|>"),
        end_tokens=("<|im_end|>",),
        slow_tokenizer="Qwen2Tokenizer",
        decoder="IntrospectiveStrided",
    )
)


@dataclass(frozen=True, kw_only=True)
class IntrospectiveStrided(Decoder):
    """Verifies drafts and makes the next drafts in a single forward; writes the text of :class:`Autoregressive`.

    A forward feeds the last token, ``stride`` - 1 drafts and ``stride`` - 1 masks, with causal attention. A draft is
    accepted if the position before it predicts the same token. If all drafts are accepted, the forward adds the drafts
    and the token after them, and its masks are the next drafts. Otherwise, the forward adds the drafts before the first
    wrong draft, and the right token in its place. Its masks followed wrong text and are useless: the next forward
    verifies nothing, adds a token and makes new drafts.

    Source: introspective strided decoding, ``IDLMBlockN`` of I-DLM (arXiv 2604.11035). As there, a separate forward
    reads the prompt, and its token is written together with the next token. Deliberate differences: masks and drafts
    beyond ``max_new_tokens`` are not fed. Above temperature 0, drafts are drawn, so that sampled text follows the
    model's distribution; the program drafts the most probable tokens.

    Attributes:
        stride: Maximum number of tokens added by a forward, N (``gen_block_size``), at least 1. For a checkpoint
            trained with b masks per block, N is b + 1.
        num_verified: Number of drafts verified by a forward. Other drafts are accepted unverified, so the text is no
            longer exact. ``None``: all (1 is ``verify_num_specs``, 0 is ``use_spec_verify`` false).
        coupling: Dependence between sampled drafts and verified tokens, as in :class:`SelfSpeculative`; without effect
            at temperature 0. ``shared_noise``: sampled text equals the text of :class:`Autoregressive`, token by token.
            ``rejection``: rejection sampling; the text has the same distribution.

    >>> import refusion_lit
    >>> model = refusion_lit.load("tests/goldens/published_2026/models/idlm-tiny")
    >>> [answer] = model.generate(["12+34,56+78>"], decoder=IntrospectiveStrided(stride=4), max_new_tokens=32)
    >>> answer.text, answer.num_tokens, answer.num_forwards
    ('12+34=46;56+78=135;', 20, 10)
    """

    requires = ModelRequirements(attention="causal", predictions=("mask_shifted", "next_token"))
    shares = "all_but_last"
    refuses = "it decodes from left to right, and sees no text on the right of a token"

    state = DraftState
    ranges = {"stride": 1, "num_verified": 0}
    stride: int = 4
    num_verified: int | None = None
    coupling: Literal["shared_noise", "rejection"] = "shared_noise"

    def step(self, state: DraftState) -> Steps[None]:  # type: ignore[override]
        """Read the prompt in the first step; then run a forward that verifies and drafts."""
        draw = Draw(sampling=state.sampling, with_probability=False)
        rejects = self.coupling == "rejection" and state.sampling.temperature > 0
        first: list[int] = []
        if not state.committed:
            prompt = text_branch(state, state.num_cached, state.prompt_length, [state.prompt_length], shift=1)
            [reading] = yield Forward(phase="prefill", branches=(prompt,), draw=draw)
            state.num_cached = state.prompt_length
            first = reading.tokens
        place = state.num_committed + len(first)  # of the token after the last one
        room = len(state.tokens) - place
        drafts = state.drafts[:room]
        fed = drafts[: max(room - 1, 0)]  # nothing follows a draft at the last place
        num_masks = max(min(self.stride - 1, room - len(fed) - 1), 0)
        last = first or [state.tokens[place - 1]]
        tokens = [*last, *fed, *[state.mask_token_id] * num_masks]
        branch = branch_after(
            state.num_cached,
            tokens,
            shift=1,
            draft_at=range(len(fed) + 1 if rejects else len(tokens)),
            proposals=dict(enumerate(state.proposals[: len(drafts)][: self.num_verified])),
        )
        phase = "verify+draft" if drafts else "next_token+draft"
        [reading] = yield Forward(phase=phase, branches=(branch,), draw=draw)
        exact = reading.tokens[: len(fed) + 1]
        num_verified = len(drafts) if self.num_verified is None else self.num_verified
        wrong = next((j for j, draft in enumerate(drafts[:num_verified]) if draft != exact[j]), None)
        added = [*drafts, *exact[len(drafts) :]] if wrong is None else [*drafts[:wrong], exact[wrong]]
        state.num_cached += len(added)  # all but the last token, which is fed next
        written = up_to_eos(state, [*first, *added])[: room + len(first)]
        place = state.num_committed
        state.commit(range(place, place + len(written)), written)
        state.drafts = reading.tokens[len(fed) + 1 :] if wrong is None else []
        if rejects and wrong is None and num_masks and not state.prefix_ends:
            masks = range(len(tokens) - num_masks, len(tokens))
            [reading] = yield MoreDrafts(draft_at=(masks,), draw=replace(draw, proposes=True))
            state.drafts, state.proposals = reading.tokens, reading.proposals


@dataclass(frozen=True, kw_only=True)
class Introspective(Objective):
    """Predicts the next token at every mask of a fully masked response, and at every token of the clean text.

    I-DLM (arXiv 2604.11035): a forward over ``[noisy; clean]`` with repeated position ids. In the noisy half, all
    response tokens are masks. Attention is causal: a noisy token sees its block up to itself and the clean tokens of
    earlier blocks; a clean token sees the clean text up to itself. Blocks are counted from position 0, prompt included.

    Terms: ``noisy`` and ``clean``, the cross-entropy of the next response token in either half, both divided by the
    batch's number of response tokens. The loss is noisy + ``clean_weight`` * clean or, with ``auto_balance``, noisy +
    (noisy / clean) * clean. No gradient flows through the ratio, so both terms weigh the same.

    Attributes:
        block_size: Masks per block, at least 1; a decoder's ``stride`` is larger by 1.
        clean_weight: Coefficient of the term ``clean``, at least 0; without effect with ``auto_balance``.
        auto_balance: Weigh the clean term by the ratio of the terms in every micro-batch.
        noisy_targets: Tokens that the noisy half predicts. ``masks``: tokens after a mask. The response's first token
            is then no target, but the denominator counts it (the authors' trainer). ``response``: all response tokens;
            the prompt's last token predicts the first (NeMo AutoModel).

    >>> from refusion_lit.learning.batch import ResponseBatch
    >>> from refusion_lit.noise import KeyedNoise
    >>> from refusion_lit.types import SpecialTokens
    >>> special = SpecialTokens(mask_token_id=2, eos_token_ids=(1,), pad_token_id=0, vocab_size=19)
    >>> batch = ResponseBatch.from_pairs([([5], [6, 7, 8])])
    >>> corrupted = Introspective().corrupt(batch, KeyedNoise(batch.sample_keys), special)
    >>> corrupted.input_ids, corrupted.labels
    (tensor([[5, 2, 2, 2, 5, 6, 7, 8]]), tensor([[-100,    7,    8, -100,    6,    7,    8, -100]]))
    """

    trained = ModelTraits(attention="causal", predictions=("mask_shifted", "next_token"))

    ranges = {"block_size": 1, "clean_weight": 0.0}
    block_size: int = 3
    clean_weight: float = 0.2
    auto_balance: bool = False
    noisy_targets: Literal["masks", "response"] = "masks"

    @property
    def terms(self) -> Mapping[str, float]:
        """The terms of both halves. A balanced loss has twice the noisy term's value."""
        return {"noisy": 2.0, "clean": 0.0} if self.auto_balance else {"noisy": 1.0, "clean": self.clean_weight}

    def corrupt(
        self, batch: ResponseBatch, noise: KeyedNoise, special_tokens: SpecialTokens, *, mask_ratio: MaskRatio = None
    ) -> CorruptedBatch:
        """Mask the responses and append the clean text; with ``mask_ratio``, mask tokens with that probability."""
        num_tokens = batch.input_ids.shape[1]
        is_masked = batch.in_response
        if mask_ratio is not None:
            probability = mask_probability(noise, 0.0, mask_ratio)[:, None]
            is_masked = is_masked & (noise.uniform("token_mask", num_tokens) < probability)
        noisy = batch.input_ids.masked_fill(is_masked, required_mask_id(self, special_tokens))
        following = shift_left(batch.input_ids.where(batch.in_response, IGNORE_INDEX), IGNORE_INDEX)
        noisy_labels = following if self.noisy_targets == "response" else following.where(is_masked, IGNORE_INDEX)
        labels = torch.cat((noisy_labels, following), 1)
        num_targets = (following != IGNORE_INDEX).sum().float()
        return CorruptedBatch(
            input_ids=torch.cat((noisy, batch.input_ids), 1),
            position_ids=batch.positions.repeat(2).expand_as(labels),
            labels=labels,
            weights=(labels != IGNORE_INDEX).float(),
            terms=F.pad(torch.zeros_like(following), (0, num_tokens), value=1),
            counts=torch.stack((num_targets, num_targets)),
            visible=three_part_ranges(num_tokens, self.block_size, batch.ends, causal=True),
            is_masked=F.pad(is_masked, (0, num_tokens)),
            is_real=torch.cat((batch.is_real, batch.is_real), 1),
        )

    def loss(self, hidden: Float[Tensor, "batch token hidden"], head: Head, corrupted: CorruptedBatch) -> LossOutput:
        """Compute the loss; see :meth:`Objective.loss`. ``auto_balance`` takes this micro-batch's ratio."""
        output = super().loss(hidden, head, corrupted)
        if not self.auto_balance:
            return output
        noisy, clean = output.sums.tolist()
        return replace(output, terms={"noisy": 1.0, "clean": noisy / clean if clean else 0.0})
