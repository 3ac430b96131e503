"""Hand-made and random traces."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from refusion_lit.engine.output import TraceRound
from refusion_lit.traces.document import Trace

PROMPT_LENGTH = 3


def entry(
    phase: str,
    drafts: dict[int, int] | None = None,
    accepted: Sequence[int] = (),
    *,
    scores: Sequence[float] = (),
    probabilities: Sequence[float] | None = None,
) -> TraceRound:
    """Make an entry from response indices and tokens; the default probability of a draft is 0.5 + index / 100."""
    drafts = drafts or {}
    return TraceRound(
        phase=phase,
        shape=(1, max(len(drafts), 1)),
        positions=[PROMPT_LENGTH + index for index in drafts],
        tokens=list(drafts.values()),
        probabilities=list(probabilities or [0.5 + index / 100 for index in drafts]),
        scores=list(scores),
        accepted=[PROMPT_LENGTH + index for index in accepted],
    )


def make_trace(
    rounds: Sequence[TraceRound],
    *,
    token_ids: Sequence[int] = (),
    slot_size: int = 1,
    pieces: dict[int, str] | None = None,
    prompt: str = "query",
    response: str = "answer",
) -> Trace:
    return Trace(
        decoder="ReFusion",
        prompt=prompt,
        response=response,
        prompt_length=PROMPT_LENGTH,
        token_ids=tuple(token_ids),
        slot_size=slot_size,
        finish_reason="eos",
        seconds=0.25,
        rounds=tuple(rounds),
        pieces=pieces if pieces is not None else {token: chr(96 + token) for token in range(1, 20)},
    )


def plan_and_verify(pieces: dict[int, str] | None = None) -> Trace:
    """Return a trace with two slots of two tokens: the second is accepted first, a draft of the first is rejected."""
    return make_trace(
        [
            entry("plan", {0: 1, 1: 2, 2: 3, 3: 4}),
            entry("verify", scores=[0.9, 0.8], accepted=[2, 3]),
            entry("plan", {0: 5, 1: 2, 4: 7, 5: 8}),
            entry("verify", scores=[0.7, 0.6], accepted=[0, 1]),
        ],
        token_ids=(5, 2, 3, 4),
        slot_size=2,
        pieces=pieces,
    )


def random_trace(seed: int) -> Trace:
    """Return a valid trace with random drafts and acceptances, which no decoder would make."""
    rng = Random(seed)
    length = rng.randint(1, 12)
    masked = set(range(length))
    final = [rng.randint(1, 19) for _ in range(length)]
    rounds = []
    while masked and len(rounds) < 15:
        drafts = {index: rng.randint(1, 19) for index in range(length) if rng.random() < 0.4}
        accepted = sorted(index for index in masked if rng.random() < 0.25)
        masked -= set(accepted)
        scores = [rng.random() for _ in range(rng.choice([0, 0, 2]))]
        phase = rng.choice(["plan", "verify", "verify+plan"])
        rounds.append(entry(phase, drafts, accepted, scores=scores))
    return make_trace(rounds, token_ids=final[: rng.randint(0, length)], slot_size=rng.randint(1, 4))
