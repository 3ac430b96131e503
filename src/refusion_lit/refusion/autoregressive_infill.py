"""Autoregressive infill of slots: one forward per round verifies proposals and gives those of the next round."""

from __future__ import annotations

from refusion_lit.engine.requests import Draw, Forward, Steps
from refusion_lit.refusion.infill import SlotInfill


def infill_autoregressively(infill: SlotInfill, token_threshold: float, round_number: int) -> Steps[None]:
    """Fill slots left to right by next-token predictions, with guesses as in Jacobi decoding.

    The logits at the last accepted token give the next token; those at the rejected proposals after it give guesses for
    the rest. Before the first round the proposals are the plan's drafts. This is a decoder of its own, not a faster
    form of :func:`~refusion_lit.refusion.infill.infill_by_masks`.

    Args:
        infill: Changed in place; not packed.
        token_threshold: Proposals above it are accepted.
        round_number: Number of the first draw, for its noise key (draws are greedy).
    """
    draw = Draw(sampling=infill.state.sampling.greedy(), round=round_number, with_probability=False)
    is_first = True
    while not infill.is_done:
        branches = []
        for slot in infill.slots:
            cached = slot.num_cached
            untested = range(0) if slot.is_complete else range(slot.num_accepted, len(slot.tokens))
            offsets = [offset - cached - 1 for offset in untested]
            scores = [(offset, slot.tokens[cached + 1 + offset]) for offset in offsets]
            branches.append(infill.branch(slot, slot.tokens[cached:], draft_at=offsets, score_at=scores, shift=1))
        readings = yield Forward(phase="infill_autoregressive", branches=tuple(branches), draw=draw)
        for slot, reading in zip(infill.slots, readings, strict=True):
            if slot.is_complete:
                continue
            before = slot.num_accepted
            while slot.num_accepted < len(slot.tokens):
                score = reading.scores[slot.num_accepted - before]
                # After the first round, the first proposal is the model's own choice: progress every round.
                own_choice = not is_first and slot.num_accepted == before
                if not (own_choice or score > token_threshold):
                    break
                slot.num_accepted += 1
            slot.tokens[slot.num_accepted :] = reading.tokens[slot.num_accepted - before :]
        is_first = False
        infill.close_round()
