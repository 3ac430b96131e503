"""Lossless self-speculative decoding: a model's masks draft tokens, and its next-token predictions verify them.

Related: Orthrus (arXiv 2605.12825) and gated LoRA for multi-token prediction (arXiv 2507.11851), which draft with a
second view of a frozen model. Deliberate differences: a round may be a single forward, because a forward may have masks
after several possible numbers of accepted drafts. With a temperature, drafts and verification share noise, so that
sampled text stays the same, token for token. Rejection sampling is optional: it accepts more drafts, but preserves only
the distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal

from refusion_lit.engine.branches import FEW_POSITIONS, Acceptance, DraftState, branch_after, text_between, up_to_eos
from refusion_lit.engine.decoder import Decoder, ModelRequirements, RowState
from refusion_lit.engine.requests import Branch, Draw, Forward, MoreDrafts, Reading, Steps
from refusion_lit.families.autoregressive.decoder import Autoregressive
from refusion_lit.types import ModelTraits, Prompt, SamplingParams, SpecialTokens
from refusion_lit.utils.require import require

Layout = Literal["two_forwards", "single_forward"]
"""Where masks stand: in a separate forward, or after every possible number of accepted drafts."""

_NEXT_TOKEN = Autoregressive()

_LEAST_GAIN = 0.01
"""Minimum share of the time per token that drafting must save: acceptance varies within a text."""

_DRAFTER_COST_FACTOR = 0.32
"""Discount on ``forward_cost`` with a drafter: the worst case measured (experiments/lossless/rule.py), so that drafting
never slows the base model."""

_HYBRID_COST_FACTOR = 0.6
"""Discount on ``forward_cost`` for hybrid models, which are trained to draft."""

_NUM_ASSUMED = 8.0
"""Weight of the assumed acceptance rate, in drafts. With 4, bad luck would stop drafting too soon."""

_HALF_LIFE = 32.0
"""Number of tokens after which a draft counts half. If a text is hard to draft, a trial costs a fifth of a forward."""

_ADAPTERS = 0.2
"""Cost of a drafter's adapters, as a share of a forward's fixed cost; fits in experiments/lossless are 0.10 to 0.27."""


@dataclass(kw_only=True)
class SpeculativeState(DraftState):
    """State of self-speculative decoding.

    Attributes:
        acceptance: Acceptance rate of recent drafts.
    """

    acceptance: Acceptance = field(default_factory=lambda: Acceptance(num_assumed=_NUM_ASSUMED, half_life=_HALF_LIFE))


@dataclass(frozen=True, kw_only=True)
class _Masks:
    """A model's masks that draft.

    Attributes:
        token_ids: The masks of the longest group, nearest first.
        shift: Position of a mask's draft minus the mask's position. With 0, as in hybrid models, the first mask stands
            where the exact token does, and drafts nothing.
        cost_factor: Discount on ``forward_cost``.
        adapters: Cost of a drafter's adapters, as a share of a forward's fixed cost.
    """

    token_ids: Sequence[int]
    shift: int
    cost_factor: float
    adapters: float = 0.0


@dataclass(frozen=True, kw_only=True)
class SelfSpeculative(Decoder):
    """Decodes a model's own text in fewer forwards: a forward accepts right drafts and adds a token.

    On a model with a drafter (:class:`~refusion_lit.objectives.GatedDraft` or, for DFlash,
    :class:`~refusion_lit.objectives.BlockDraft`), the text equals the text of :class:`Autoregressive`. On hybrid
    models, with ``slot_size``, the text equals the text of decoding slots left to right: a slot's first token is
    predicted at its mask, other tokens at the token before them.

    A forward feeds the pending token, the drafts after it, and groups of masks. There may be a group for every number
    of drafts that may be accepted; the group drafts the tokens after them. The texts are equal in exact arithmetic. In
    floating point, forwards with different shapes round differently, so texts may differ where two tokens are almost
    equally probable.

    Attributes:
        num_drafts: Maximum number of drafts verified by a forward; ``None``: the drafter's number of masks, or
            ``slot_size``. A block drafter also takes numbers above the number that it was trained with.
        slot_size: Tokens per slot, for hybrid models; ``None`` for models with a drafter.
        layout: What a forward does. ``two_forwards``: forwards draft and verify in turn. ``single_forward``: every
            forward verifies and drafts, with a group of masks for every number of drafts that may be accepted. It
            computes more positions. ``None``: before every forward, :func:`cheapest` chooses by ``forward_cost`` and
            the recent acceptance rate. It chooses no drafts if drafts save no time. The layout changes the number of
            forwards, and with ``coupling: rejection`` also the text. A block drafter allows ``two_forwards`` only.
        forward_cost: A forward's fixed cost, divided by the cost per position: a / b if a forward with n positions
            costs a + b n. ``None``: 32 on CPUs and 256 on accelerators, times a discount (0.32 with a drafter, 0.6 with
            ``slot_size``).
        coupling: Dependence between sampled drafts and verified tokens; without effect at temperature 0.
            ``shared_noise``: both are drawn with the same noise, so that the text is the sequential decoder's, token
            for token. ``rejection``: rejection sampling, which keeps the largest possible number of drafts. The text
            has the same distribution, but depends on the drafts and so on all options.

    >>> import refusion_lit
    >>> model = refusion_lit.load("tests/goldens/models/additions-clean")
    >>> decoder = SelfSpeculative(slot_size=8, layout="two_forwards")
    >>> [answer] = model.generate(["12+34,56+78>"], decoder=decoder, max_new_tokens=32)
    >>> answer.text, answer.num_tokens, answer.num_forwards
    ('12+34=46;56+78=134;', 20, 4)
    """

    state = SpeculativeState
    shares = "all_but_last"
    refuses = "it decodes from left to right and sees no text to the right"

    ranges = {"num_drafts": 0, "slot_size": 1, "forward_cost": "[0, inf)"}
    num_drafts: int | None = None
    slot_size: int | None = None
    layout: Layout | None = None
    forward_cost: float | None = None
    coupling: Literal["shared_noise", "rejection"] = "shared_noise"

    def __post_init__(self) -> None:
        super().__post_init__()
        expected = "shared_noise without a layout, because with rejection the text depends on the layout"
        fix = "set layout to single_forward or two_forwards"
        require(self.coupling == "shared_noise" or self.layout is not None, "coupling", expected, self.coupling, fix)

    def requirements(self) -> ModelRequirements:
        """Require next-token predictions or, with ``slot_size``, the predictions of the hybrid objective."""
        if self.slot_size is None:
            return ModelRequirements(attention="causal", predictions=("next_token",), drafter=self.num_drafts != 0)
        return ModelRequirements(attention="causal", predictions=("mask", "next_token_in_slot"))

    def mismatch_fix(self, traits: ModelTraits) -> str:
        """Return the advice to set ``slot_size``, if the slot size is all that is missing."""
        fits = self.slot_size is None and not replace(self, slot_size=1).requirements().mismatches(traits)
        fix = "Set slot_size to the model's, one of the slot_sizes in its training with the objective Hybrid."
        return fix if fits else super().mismatch_fix(traits)

    def begin(self, prompt: Prompt, sampling: SamplingParams, special_tokens: SpecialTokens) -> RowState:
        """Create a prompt's state; with a block drafter, refuse the layout ``single_forward``."""
        fits = self.layout != "single_forward" or not self._drafts_block(special_tokens)
        expected = "two_forwards with a block drafter, which drafts after verification"
        require(fits, "layout", expected, self.layout, "leave it out")
        return super().begin(prompt, sampling, special_tokens)

    def step(self, state: SpeculativeState) -> Steps[None]:  # type: ignore[override]
        """Run a forward: verify drafts, commit the right drafts and the token after them, draft the next tokens.

        Where drafting does not pay, a step is the same as in :class:`Autoregressive`, at the same cost.
        """
        if self._drafts_block(state.special_tokens):
            return self._block_round(state)
        if self.slot_size is None and not state.drafts and not self._num_masks(state, 0, 0):
            state.acceptance.count(1)
            return _NEXT_TOKEN.step(state)
        return self._round(state)

    def _round(self, state: SpeculativeState) -> Steps[None]:
        """Run a forward that verifies or drafts."""
        start = state.prompt_length
        place = state.num_committed
        drafts = state.drafts[: len(state.tokens) - place - 1]
        tokens = [*text_between(state, state.num_cached, start + place), *drafts]
        anchors = range(len(tokens) - len(drafts) - 1, len(tokens))  # the tokens whose next token is read
        groups = self._groups(state, place, len(drafts), write_at=state.num_cached + len(tokens))
        main = branch_after(
            state.num_cached,
            tokens,
            shift=1,
            draft_at=[anchor for j, anchor in enumerate(anchors) if not self._starts_slot(place + j)],
            proposals=dict(zip(anchors, state.proposals[: len(drafts)], strict=False)),
        )
        draw = Draw(sampling=state.sampling, with_probability=False)
        phase = "+".join(["verify" if drafts else "next_token", *(["draft"] if groups else [])])
        readings = yield Forward(phase=phase, branches=(main, *groups.values()), draw=draw, packed=True)
        read = dict(zip(groups, readings[1:], strict=True))
        exact = self._exact(place, len(drafts), readings[0], read)
        accepted = _commit_drafts(state, drafts, exact)
        state.acceptance.count(accepted + 1, min(accepted + 1, len(drafts)), accepted)
        state.drafts = []
        if groups and not state.finished:
            drafted = yield from self._drafts(groups, read, accepted, replace(draw, proposes=self._rejects(state)))
            state.drafts = drafted.tokens
            state.proposals = drafted.proposals

    def _drafts_block(self, special_tokens: SpecialTokens) -> bool:
        return self.slot_size is None and self.num_drafts != 0 and special_tokens.drafts_block

    def _block_round(self, state: SpeculativeState) -> Steps[None]:
        """Verify a block's drafts in a forward; then let the drafter draft the next block, if there is room for it.

        As in transformers, a block near the length limit is also whole, and all of it is verified.
        """
        cached = state.num_cached
        text = text_between(state, cached, state.prompt_length + state.num_committed)
        tokens = [*text, *state.drafts]
        anchors = range(len(text) - 1, len(tokens))
        proposals = dict(zip(anchors, state.proposals, strict=False))
        main = branch_after(cached, tokens, shift=1, draft_at=anchors, proposals=proposals)
        draw = Draw(sampling=state.sampling, with_probability=False)
        [reading] = yield Forward(phase="verify" if state.drafts else "next_token", branches=(main,), draw=draw)
        _commit_drafts(state, state.drafts, reading.tokens)
        state.drafts, state.proposals = [], []
        if state.finished or state.num_committed + 1 == len(state.tokens):
            return
        length = len(state.special_tokens.draft_token_ids) if self.num_drafts is None else self.num_drafts
        tokens = [state.tokens[state.num_committed - 1], *state.special_tokens.draft_token_ids[:1] * length]
        block = branch_after(state.num_cached, tokens, order=[0] * len(tokens), draft_at=range(1, len(tokens)))
        draw = replace(draw, proposes=self._rejects(state))
        [drafted] = yield Forward(phase="draft", branches=(block,), draw=draw, by_drafter=True)
        state.drafts, state.proposals = drafted.tokens, drafted.proposals

    def _rejects(self, state: SpeculativeState) -> bool:
        return self.coupling == "rejection" and state.sampling.temperature > 0

    def _starts_slot(self, place: int) -> bool:
        return self.slot_size is not None and place % self.slot_size == 0

    def _exact(self, place: int, num_drafts: int, main: Reading, groups: dict[int, Reading]) -> list[int]:
        """Return the sequential decoder's tokens after the anchors; a slot's mask predicts the slot's first token."""
        following = iter(main.tokens)
        places = range(place, place + num_drafts + 1)
        return [groups[j].tokens[0] if self._starts_slot(p) else next(following) for j, p in enumerate(places)]

    def _groups(self, state: SpeculativeState, place: int, num_drafts: int, *, write_at: int) -> dict[int, Branch]:
        """Return the groups of masks that draft the next tokens, keyed by the number of accepted drafts before a group.

        A group sees the accepted drafts before it, and no later drafts.

        Args:
            state: The prompt's state.
            place: Place of the first draft.
            num_drafts: Number of drafts in the forward.
            write_at: Index of the first mask's cache entry.
        """
        masks = self._masks(state)
        groups: dict[int, Branch] = {}
        first = state.prompt_length + place
        for j in range(num_drafts + 1):
            is_needed = self._starts_slot(place + j)
            length = max(self._num_masks(state, num_drafts, j), int(is_needed))
            if length == 0:
                continue
            groups[j] = Branch(
                tokens=masks.token_ids[:length],
                positions=range(first + j, first + j + length),
                visible=((0, first + j),),
                write_at=write_at,
                shift=masks.shift,
                draft_at=(0,) if is_needed else (),
                proposals={0: state.proposals[j]} if is_needed and state.proposals and j < num_drafts else {},
            )
            write_at += length
        if self._rejects(state) or sum(len(branch.tokens) for branch in groups.values()) > FEW_POSITIONS:
            return groups
        return {j: replace(branch, draft_at=range(len(branch.tokens))) for j, branch in groups.items()}

    def _masks(self, state: SpeculativeState) -> _Masks:
        """Return a drafter's masks or, with ``slot_size``, a hybrid model's masks."""
        if self.slot_size is None:
            masks = state.special_tokens.draft_token_ids[: self.num_drafts]
            return _Masks(token_ids=masks, shift=1, cost_factor=_DRAFTER_COST_FACTOR, adapters=_ADAPTERS)
        num_drafts = self.slot_size if self.num_drafts is None else self.num_drafts
        masks = (state.mask_token_id,) * (num_drafts + 1)
        return _Masks(token_ids=masks, shift=0, cost_factor=_HYBRID_COST_FACTOR)

    def _num_masks(self, state: SpeculativeState, num_drafts: int, accepted: int) -> int:
        """Return the number of masks after the first ``accepted`` of a forward's ``num_drafts`` drafts."""
        masks = self._masks(state)
        num_idle = 1 - masks.shift
        wanted = min(len(masks.token_ids) - num_idle, len(state.tokens) - state.num_committed - accepted - 1)
        layout = self.layout
        if layout is None and wanted > 0:
            cost = masks.cost_factor * state.forward_cost if self.forward_cost is None else self.forward_cost
            cost /= state.num_rows  # rows share a forward
            rate = round(state.acceptance.rate, 2)  # few values, since results are cached
            layout, wanted = cheapest(cost, masks.adapters * cost, rate, wanted)
        if wanted <= 0 or (layout == "two_forwards" and num_drafts > 0):
            return 0  # with two_forwards, a forward that verifies does not draft
        return num_idle + wanted

    def _drafts(
        self, groups: dict[int, Branch], read: dict[int, Reading], accepted: int, draw: Draw
    ) -> Steps[Reading]:  # fmt: skip
        """Return the drafts at the masks after the accepted drafts; nothing if there are no such masks."""
        group = groups.get(accepted, Branch(tokens=(), positions=()))
        drafting = range(1 - group.shift, len(group.tokens))
        if not drafting:
            return Reading()
        if len(group.draft_at) == len(group.tokens):
            return Reading(tokens=read[accepted].tokens[drafting.start :])
        wanted = [drafting if j == accepted else () for j in groups]
        readings = yield MoreDrafts(draft_at=((), *wanted), draw=draw)
        return readings[1 + list(groups).index(accepted)]


def _commit_drafts(state: SpeculativeState, drafts: Sequence[int], exact: Sequence[int]) -> int:
    """Commit the accepted drafts and the token after them; return how many drafts are accepted.

    Args:
        state: The prompt's state.
        drafts: Drafts of the tokens after the committed tokens.
        exact: The sequential decoder's tokens at the drafts' places, and the token after them.
    """
    place = state.num_committed
    accepted = next((j for j, draft in enumerate(drafts) if draft != exact[j]), len(drafts))
    final = up_to_eos(state, exact[: min(accepted + 1, len(state.tokens) - place)])
    state.num_cached = state.prompt_length + place + accepted
    state.finished = state.first_eos(final) is not None or place + len(final) == len(state.tokens)
    state.commit(range(place, place + len(final)), final)
    return accepted


@lru_cache(maxsize=1024)
def cheapest(forward_cost: float, adapters: float, acceptance: float, num_masks: int) -> tuple[Layout, int]:
    """Return the layout and number of masks with the lowest cost per token, in positions.

    Assume that every draft is accepted with the same probability a. Then d drafts commit E = a + a^2 + ... + a^d tokens
    in addition to the model's next token. Without drafts, a token costs F + 1 positions, where F is a forward's fixed
    cost. ``two_forwards`` commits E + 2 tokens in two forwards, with d masks in the first and d drafts in the second.
    ``single_forward`` commits E + 1 tokens in a forward, with d drafts, and d masks after all d + 1 acceptances.

    Args:
        forward_cost: F, at least 0.
        adapters: Additional cost of a drafter's adapters in a forward with masks, in positions.
        acceptance: a, in [0, 1].
        num_masks: Maximum of d.

    Returns:
        The layout and d; d is 0 if drafts save less than 1 %.

    >>> cheapest(forward_cost=32, adapters=0, acceptance=0.8, num_masks=8)
    ('two_forwards', 8)
    """
    best: tuple[float, Layout, int] = ((1 - _LEAST_GAIN) * (forward_cost + 1), "two_forwards", 0)
    expected = 0.0
    for d in range(1, num_masks + 1):
        expected += acceptance**d
        two = (2 * (forward_cost + 1 + d) + adapters) / (2 + expected)
        single = (forward_cost + 1 + d + (d + 1) * d + adapters) / (1 + expected)
        best = min(best, (two, "two_forwards", d), (single, "single_forward", d))
    return best[1], best[2]
