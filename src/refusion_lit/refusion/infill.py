"""Parallel infill for chosen slots' rejected tails: by masks (the paper), or by next-token predictions.

Every chosen slot is a branch: branches share the cached context and do not see each other. In the
reference layout, every branch is a row of the call, padded to a common length, as in the released program. Packed
branches follow one another in a single row, and only tokens that are not in the cache are fed.
"""

from __future__ import annotations

from collections.abc import Sequence

from refusion_lit.engine.requests import Branch, Draw, Forward, Steps
from refusion_lit.refusion.slots import OpenSlot, SlotState


def infill_by_masks(state: SlotState, token_threshold: float, *, packed: bool) -> Steps[None]:
    """Fill the open slots in rounds: masks propose tokens after the accepted prefixes, then a forward verifies them.

    Args:
        state: The prompt's state; its open slots are changed in place.
        token_threshold: Proposals above it are accepted.
        packed: Whether the slots share a row; otherwise every slot has a row.
    """
    draw = Draw(sampling=state.sampling.greedy(), with_probability=False)
    if packed:  # the first slot has seen only the context, so its entries are final
        state.drop_after_end()
        state.open[0].num_cached = state.open[0].num_accepted
    while not all(slot.is_complete for slot in state.open):
        fed = slots_to_feed(state)
        for slot in fed:
            slot.tokens[slot.num_accepted :] = [state.mask_token_id] * (len(slot.places) - slot.num_accepted)
        branches = [slot_branch(state, slot, drawn=range(slot.num_accepted, len(slot.tokens))) for slot in fed]
        readings = yield Forward(phase="infill_propose", branches=tuple(branches), draw=draw, packed=packed)
        for slot, reading in zip(fed, readings, strict=True):
            slot.tokens[slot.num_accepted :] = reading.tokens
            if packed:
                slot.num_cached = slot.num_accepted
        fed = slots_to_feed(state)
        # The first proposal needs no test.
        branches = [slot_branch(state, slot, tested=range(slot.num_accepted + 1, len(slot.tokens))) for slot in fed]
        readings = yield Forward(phase="infill_verify", branches=tuple(branches), draw=draw, packed=packed)
        for slot, reading in zip(fed, readings, strict=True):
            state.accept(slot, reading.scores, token_threshold)
        close_round(state, packed=packed)


def infill_autoregressively(state: SlotState, token_threshold: float) -> Steps[None]:
    """Fill the open slots left to right by next-token predictions, with guesses as in Jacobi decoding.

    The logits at the last accepted token give the next token; the logits at rejected proposals give guesses for
    the rest. Before the first round, the proposals are the plan's drafts. The text may differ from the text of
    :func:`infill_by_masks`.

    Args:
        state: The prompt's state; its open slots are changed in place. Every open slot is a row of the call.
        token_threshold: Proposals above it are accepted.
    """
    draw = Draw(sampling=state.sampling.greedy(), with_probability=False)
    num_trusted = 0
    while not all(slot.is_complete for slot in state.open):
        untested = [range(slot.num_accepted, len(slot.tokens)) for slot in state.open]
        branches = [
            slot_branch(state, slot, drawn=offsets, tested=offsets, shift=1)
            for slot, offsets in zip(state.open, untested, strict=True)
        ]
        readings = yield Forward(phase="infill_autoregressive", branches=tuple(branches), draw=draw)
        for slot, reading in zip(state.open, readings, strict=True):
            before = slot.num_accepted
            state.accept(slot, reading.scores[num_trusted:], token_threshold)
            if not slot.is_complete:
                slot.tokens[slot.num_accepted :] = reading.tokens[slot.num_accepted - before :]
        num_trusted = 1  # from now on, the first proposal is the model's own choice: progress every round
        close_round(state, packed=False)


def slots_to_feed(state: SlotState) -> list[OpenSlot]:
    """Return the open slots with tokens that are not in the cache."""
    return [slot for slot in state.open if slot.num_cached < len(slot.tokens)]


def slot_branch(
    state: SlotState, slot: OpenSlot, *, drawn: Sequence[int] = (), tested: Sequence[int] = (), shift: int = 0
) -> Branch:
    """Return the branch that feeds an open slot's tokens that are not in the cache.

    Args:
        state: The state.
        slot: The slot.
        drawn: Offsets into the slot; a token is drawn for every offset.
        tested: Offsets into the slot; the token's probability is read at the token before.
        shift: 0 to draw a token at its mask, 1 to draw it at the token before.
    """
    cached = slot.num_cached
    start = state.prompt_length + slot.places.start
    return Branch(
        tokens=slot.tokens[cached:],
        positions=range(start + cached, start + len(slot.tokens)),
        visible=((0, state.num_cached), (slot.write_at, slot.write_at + cached)),
        write_at=slot.write_at + cached,
        shift=shift,
        draft_at=[offset - shift - cached for offset in drawn],
        score_at=[(offset - 1 - cached, slot.tokens[offset]) for offset in tested],
    )


def close_round(state: SlotState, *, packed: bool) -> None:
    """Drop the open slots after an EOS, and update how many cache entries are final."""
    state.drop_after_end()
    # In the reference layout, all rows feed the last token of the common prefix again, for its output. Complete slots
    # do not limit the common prefix.
    common = min((slot.num_accepted for slot in state.open if not slot.is_complete), default=1)
    for slot in state.open:
        slot.num_cached = slot.num_accepted if packed else min(common, len(slot.tokens)) - 1
