"""The engine's loop: rows, calls, callbacks and traces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refusion_lit.decoding import (
    Autoregressive,
    Branch,
    Decoder,
    Draw,
    Forward,
    Generation,
    GenerationCallback,
    ModelRequirements,
    MoreDrafts,
    ReFusion,
    RowState,
    Steps,
    decode,
)
from refusion_lit.types import Prompt, SamplingParams, SpecialTokens
from support.example_counts import examples
from support.fakes import MASK, SPECIAL, HashModel, OracleModel, oracle_text
from support.scripted import NEXT_TOKEN, Scripted, decode_one_prompt, make_prompts

NOT_COMMITTED = r"^decoder: .*\[.*\] at \[.*expected ids below \d+"


def test_text_ends_at_its_first_end_or_at_the_budget() -> None:
    everything = Scripted(script=((0, 1, 2, 3, 4),))
    row = decode_one_prompt(everything, 5, end=4)
    assert row.token_ids == [oracle_text(4)(place) for place in (2, 3, 4)]
    assert row.finish_reason == "eos"
    assert row.num_tokens == 3
    row = decode_one_prompt(everything, 5)
    assert (row.num_tokens, row.finish_reason) == (5, "length")


@pytest.mark.parametrize(
    ("script", "num_tokens"),
    [
        pytest.param(((0, 1), (3,)), 2, id="place 2 stays masked"),
        pytest.param(((1, 2, 3, 4),), 0, id="place 0 stays masked"),
        pytest.param(((0, 3, 4),), 1, id="places 1 and 2 stay masked"),
    ],
)
def test_a_decoder_that_leaves_masks_is_reported_and_its_text_ends_before_them(
    script: tuple[tuple[int, ...], ...], num_tokens: int
) -> None:
    with pytest.warns(UserWarning, match="p0: Scripted left masks"):
        row = decode_one_prompt(Scripted(script=script), 5)
    assert row.finish_reason == "unfinished"
    assert row.num_tokens == num_tokens


def test_masks_after_an_eos_token_are_no_unfinished_work() -> None:
    assert decode_one_prompt(Scripted(script=((0, 1, 2),)), 9, end=4).finish_reason == "eos"


class Idle(Scripted):
    """Runs no forward and commits nothing."""

    def step(self, state: RowState) -> Steps:
        yield from ()


def test_a_step_without_progress_is_an_error() -> None:
    message = r"^decoder: expected Scripted.step .* 0 forwards \(schedule_length\), got 1"
    with pytest.raises(ValueError, match=message):
        decode_one_prompt(Scripted(script=((), (0,))), 1)
    with pytest.raises(ValueError, match=r"^decoder: expected Idle.step .* 9 forwards .*, got 0"):
        decode_one_prompt(Idle(script=(), schedule_length=9), 1)


def test_a_schedule_may_commit_nothing_within_its_bound() -> None:
    script = ((), (0,), (), (1,))
    assert decode_one_prompt(Scripted(script=script, schedule_length=3), 2).num_forwards == 4
    with pytest.raises(ValueError, match=r"up to 2 forwards \(schedule_length\), got 3"):
        decode_one_prompt(Scripted(script=script, schedule_length=2), 2)


@pytest.mark.parametrize(
    ("place", "token"),
    [
        pytest.param(0, MASK, id="mask"),
        pytest.param(-1, 5, id="place before the canvas"),
        pytest.param(4, 5, id="place after the canvas"),
        pytest.param(0, -3, id="negative id"),
        pytest.param(0, 99_999, id="id beyond the vocabulary"),
    ],
)
def test_masks_and_unknown_ids_are_not_committed_nor_places_outside_the_canvas(place: int, token: int) -> None:
    (prompt,) = make_prompts(1)
    state = RowState(prompt, SamplingParams(max_new_tokens=4), SPECIAL)
    with pytest.raises(ValueError, match=NOT_COMMITTED):
        state.commit([place], [token])


def test_committing_a_place_twice_is_an_error() -> None:
    with pytest.raises(ValueError, match=NOT_COMMITTED):
        decode_one_prompt(Scripted(script=((0, 1), (1,))), 3)
    (prompt,) = make_prompts(1)
    state = RowState(prompt, SamplingParams(max_new_tokens=4), SPECIAL)
    for places, tokens in [
        ([0, 0], [5, 5]),  # a place twice
        ([0, 1], [5]),  # fewer tokens than places
        ([0, 0, 1], [5, 6]),  # both
    ]:
        with pytest.raises(ValueError, match=NOT_COMMITTED):
            state.commit(places, tokens)
    assert not state.committed


@dataclass(frozen=True, kw_only=True)
class Faulty(Decoder):
    """A decoder with a mistake.

    Attributes:
        request: Makes what ``step`` yields from a correct branch over two tokens.
        has_state: Whether ``begin`` returns a state, as it must.
    """

    requires = ModelRequirements(attention="causal", predictions=("mask",))

    request: Callable[[Branch], object] = lambda branch: branch
    has_state: bool = True

    def begin(self, prompt: Prompt, sampling: SamplingParams, special_tokens: SpecialTokens) -> Any:
        return RowState(prompt, sampling, special_tokens) if self.has_state else None

    def step(self, state: RowState) -> Steps[None]:
        yield self.request(Branch(tokens=state.prompt.token_ids, positions=range(2), draft_at=[1]))  # type: ignore[misc]


def _forward(**changes: Any) -> Callable[[Branch], Forward]:
    """Return a function that makes a forward pass of a branch with changed fields."""
    draw = Draw(sampling=SamplingParams())
    return lambda branch: Forward(phase="next", branches=(replace(branch, **changes),), draw=draw, cached=False)


@pytest.mark.parametrize(
    ("decoder", "message"),
    [
        pytest.param(
            Faulty(request=_forward(draft_at=[2])),
            r"^decoder: .* got 2 tokens at .* and offsets \[2\]",
            id="draft beyond the branch",
        ),
        pytest.param(
            Faulty(request=_forward(draft_at=[-1])),
            r"got 2 tokens at .* and offsets \[-1\]",
            id="draft before the branch",
        ),
        pytest.param(
            Faulty(request=_forward(score_at=[(2, 5)])),
            r"got 2 tokens at .* and offsets \[1, 2\]",
            id="score beyond the branch",
        ),
        pytest.param(
            Faulty(request=_forward(positions=range(3))), r"got 2 tokens at range\(0, 3\)", id="too many positions"
        ),
        pytest.param(
            Faulty(request=_forward(positions=range(-1, 1))), r"got 2 tokens at range\(-1, 1\)", id="negative position"
        ),
        pytest.param(Faulty(request=lambda _: None), r"^decoder: expected .*Forward.*, got None", id="no request"),
        pytest.param(Faulty(), r"^decoder: expected .*Forward.*, got Branch", id="a branch instead of a request"),
        pytest.param(
            Faulty(request=lambda _: MoreDrafts(draft_at=([0],), draw=Draw(sampling=SamplingParams()))),
            r"^decoder: expected .*MoreDrafts.*, got MoreDrafts\(draft_at=\(\[0\],\)",
            id="more drafts before any forward pass",
        ),
        pytest.param(Faulty(has_state=False), r"^Faulty.begin: expected a RowState, got None", id="no state"),
    ],
)
def test_mistakes_in_a_users_decoder_are_named(decoder: Decoder, message: str) -> None:
    """Without the check, an offset beyond a branch would read the hidden states of the next prompt."""
    model, sampling = OracleModel(oracle_text(None)), SamplingParams(max_new_tokens=3)
    with pytest.raises(ValueError, match=message):
        decode(model, decoder, make_prompts(2, 2), sampling, batch_size=2)


@settings(max_examples=examples(24), deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=9),
    batch_size=st.integers(1, 11),
    seed=st.integers(0, 99),
)
def test_finished_rows_make_room_and_calls_are_counted(lengths: list[int], batch_size: int, seed: int) -> None:
    model = HashModel(seed, traits=NEXT_TOKEN)
    prompts = make_prompts(*lengths)
    output = decode(model, Autoregressive(), prompts, SamplingParams(max_new_tokens=12), batch_size=batch_size)
    assert [row.id for row in output.rows] == [prompt.id for prompt in prompts]
    # Replay the queue: every call computes one token of each running prompt, and a waiting prompt takes the place of
    # a finished prompt.
    running: list[int] = []
    waiting = [row.num_forwards for row in output.rows]
    num_calls = 0
    while running or waiting:
        while waiting and len(running) < batch_size:
            running.append(waiting.pop(0))
        assert len(model.calls[num_calls].input_ids) == len(running)
        num_calls += 1
        running = [left - 1 for left in running if left > 1]
    assert output.num_calls == len(model.calls) == num_calls
    assert output.num_positions == sum(call.input_ids.numel() for call in model.calls)
    assert sum(row.num_positions for row in output.rows) == sum(int(call.is_real.sum()) for call in model.calls)
    for prompt, row in zip(prompts, output.rows, strict=True):
        assert row.num_forwards == row.num_tokens == len(row.forward_shapes)
        assert row.forward_shapes == [(1, len(prompt.token_ids)), *[(1, 1)] * (row.num_tokens - 1)]
        assert row.num_positions == sum(length for _, length in row.forward_shapes)
        assert 0 <= row.seconds <= output.seconds


def test_no_prompts_cost_nothing() -> None:
    output = decode(HashModel(), ReFusion(), [], SamplingParams(), batch_size=4)
    assert (output.rows, output.num_calls, output.num_positions) == ([], 0, 0)


def test_places_are_committed_in_any_order() -> None:
    state = Scripted(script=()).begin(make_prompts(2)[0], SamplingParams(max_new_tokens=4), SPECIAL)
    state.commit([1, 0], [6, 5])
    state.commit([2], [5])
    assert (state.is_masked, state.num_committed, state.final_prefix()) == ([False, False, False, True], 3, [5, 6, 5])


class Recorder(GenerationCallback):
    """Records what callbacks are given: the final prefix of each prompt after every commit, and the finished text."""

    def __init__(self) -> None:
        self.prefixes: dict[int, list[list[int]]] = {}
        self.finished: dict[int, Generation] = {}

    def on_commit(self, index: int, state: RowState) -> None:
        assert index not in self.finished
        self.prefixes.setdefault(index, []).append(state.final_prefix())

    def on_finished(self, index: int, output: Generation) -> None:
        assert index not in self.finished
        self.finished[index] = output


@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_accepted_tokens_are_streamed(batch_size: int) -> None:
    recorder = Recorder()
    model = HashModel(7, end_bias=-6.0)
    decoder = ReFusion(slot_size=3, num_serial_blocks=2, slot_threshold=0.4, token_threshold=0.4)
    output = decode(
        model, decoder, make_prompts(2, 7, 4), SamplingParams(max_new_tokens=24), batch_size=batch_size,
        callbacks=[recorder],
    )  # fmt: skip
    assert recorder.finished == dict(enumerate(output.rows))
    for index, row in enumerate(output.rows):
        prefixes = recorder.prefixes[index]
        assert all(later[: len(earlier)] == earlier for earlier, later in pairwise(prefixes)), "final is final"
        assert prefixes[-1] == row.token_ids
        assert len(prefixes) == len(row.round_ratios)


def test_a_trace_has_an_entry_for_each_forward_pass() -> None:
    row = decode_one_prompt(Scripted(script=((3, 1), (), (0, 2)), schedule_length=2), 4, trace=True)
    assert [entry.phase for entry in row.trace] == ["step 0", "step 1", "step 2"]
    assert [entry.shape for entry in row.trace] == row.forward_shapes == [(1, 6)] * 3
    assert [entry.positions for entry in row.trace] == [[5, 3], [], [2, 4]]
    text = oracle_text(None)
    assert [entry.tokens for entry in row.trace] == [[text(5), text(3)], [], [text(2), text(4)]]
    assert [entry.accepted for entry in row.trace] == [[3, 5], [], [2, 4]]
    assert row.trace[0].probabilities == pytest.approx([0.97, 0.97])
    assert row.round_ratios == [2.0, 1.0]
    assert decode_one_prompt(Scripted(script=((0, 1),)), 2).trace == []


def test_a_trace_holds_drafts_that_were_read_later_and_scores() -> None:
    model = OracleModel(oracle_text(None), agreement=lambda place: 0.97 if place < 5 else 0.5)
    decoder = ReFusion(slot_size=3, num_serial_blocks=1)
    [row] = decode(model, decoder, make_prompts(1), SamplingParams(max_new_tokens=6), trace=True).rows
    plan, verify = row.trace[:2]
    assert (plan.phase, verify.phase) == ("plan", "verify")
    assert plan.positions == [1, 4, 2, 3, 5, 6]
    assert plan.tokens == [oracle_text(None)(place) for place in plan.positions]
    assert verify.scores == pytest.approx([0.97, 0.97, 0.5, 0.5])
    assert plan.accepted == []
    assert verify.accepted == [1, 2, 3]
    accepted = [place for entry in row.trace for place in entry.accepted]
    assert sorted(accepted) == list(range(1, 7))
