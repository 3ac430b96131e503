from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decoder_cases import traits_for
from fakes import EOS, HYBRID, MASK, SPECIAL, HashModel, OracleModel, oracle_text
from refusion_lit.data.tokenizers import CharacterTokenizer
from refusion_lit.decoding import (
    D2F,
    Autoregressive,
    BlockDiffusion,
    Decoder,
    Generation,
    GenerationCallback,
    ModelMismatchError,
    ModelRequirements,
    ReFusion,
    RowState,
    SlotSearch,
    TokenEditing,
    WeDLM,
    decode,
)
from refusion_lit.decoding.base import Steps
from refusion_lit.decoding.requests import Branch, Draw, Forward
from refusion_lit.modeling.loading import BackboneConfig
from refusion_lit.tasks import Additions
from refusion_lit.types import ModelTraits, Prompt, SamplingParams, SpecialTokens

ORDER = ModelTraits(predictions=("next_token",))


def prompts_of(*lengths: int) -> list[Prompt]:
    return [Prompt(token_ids=tuple(3 + i % 5 for i in range(length)), id=f"p{n}") for n, length in enumerate(lengths)]


def letters(token_ids: Sequence[int]) -> str:
    return "".join(chr(ord("a") + token) for token in token_ids)


@dataclass(frozen=True, kw_only=True)
class Scripted(Decoder):
    """Commits given places step by step, with a forward each; what it draws is the oracle's text.

    Attributes:
        script: Places to commit in each step; then it says that it is finished.
        schedule_length: Bound of its schedule, which each step that commits nothing advances by ``advance``.
        advance: See above.
    """

    requires: ClassVar[ModelRequirements] = ModelRequirements(attention="causal", predictions=("mask",))

    script: tuple[tuple[int, ...], ...]
    schedule_length: int = 0
    advance: int = 1

    def begin(self, prompt: Prompt, sampling: SamplingParams, special_tokens: SpecialTokens) -> RowState:
        length = sampling.max_new_tokens
        return RowState(
            prompt=prompt,
            sampling=sampling,
            special_tokens=special_tokens,
            tokens=[MASK] * length,
            is_masked=[True] * length,
            schedule_length=self.schedule_length,
        )

    def step(self, state: RowState) -> Steps:
        places = self.script[state.num_forwards]
        start = state.prompt_length
        branch = Branch(
            tokens=[*state.prompt.token_ids, *[MASK] * len(state.tokens)],
            positions=range(start + len(state.tokens)),
            draft_at=[start + place for place in places],
        )
        readings = yield Forward(
            phase=f"step {state.num_forwards}", branches=(branch,), draw=Draw(sampling=state.sampling), cached=False
        )
        state.commit(places, readings[0].tokens)
        if not places:
            state.schedule_step += self.advance
        state.finished = state.num_forwards == len(self.script)


def one(decoder: Decoder, max_new_tokens: int, end: int | None = None, **options: object) -> Generation:
    model = OracleModel(oracle_text(end))
    [row] = decode(model, decoder, prompts_of(2), SamplingParams(max_new_tokens=max_new_tokens), **options).rows
    return row


def test_text_ends_at_its_first_end_or_at_the_budget() -> None:
    everything = Scripted(script=((0, 1, 2, 3, 4),))
    row = one(everything, 5, end=4)
    assert row.token_ids == [oracle_text(4)(place) for place in (2, 3, 4)]
    assert row.finish_reason == "eos"
    assert row.num_tokens == 3
    row = one(everything, 5)
    assert (row.num_tokens, row.finish_reason) == (5, "length")


@pytest.mark.parametrize(("script", "num_left"), [(((0, 1), (3,)), 2), (((1, 2, 3, 4),), 0), (((0, 3, 4),), 1)])
def test_unfinished_work_is_reported(script: tuple[tuple[int, ...], ...], num_left: int) -> None:
    with pytest.warns(UserWarning, match="p0: Scripted left masked places"):
        row = one(Scripted(script=script), 5)
    assert row.finish_reason == "unfinished"
    assert row.num_tokens == num_left


def test_masks_after_an_end_are_no_unfinished_work() -> None:
    assert one(Scripted(script=((0, 1, 2),)), 9, end=4).finish_reason == "eos"


def test_a_step_without_progress_is_an_error() -> None:
    message = r"^decoder: expected Scripted.step to commit a token, .* got neither \(1 of 0\); commit a token"
    with pytest.raises(ValueError, match=message):
        one(Scripted(script=((), (0,))), 1)
    with pytest.raises(ValueError, match=r"\(0 of 9\)"):
        one(Scripted(script=((), (0,)), schedule_length=9, advance=0), 1)


def test_a_schedule_may_commit_nothing_within_its_bound() -> None:
    script = ((), (0,), (), (1,))
    assert one(Scripted(script=script, schedule_length=2), 2).num_forwards == 4
    with pytest.raises(ValueError, match=r"\(2 of 1\)"):
        one(Scripted(script=script, schedule_length=1), 2)


def test_committing_a_place_twice_is_an_error() -> None:
    with pytest.raises(AssertionError, match="canvas place 1 committed twice"):
        one(Scripted(script=((0, 1), (1,))), 2)


@settings(max_examples=24, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=9),
    max_batch_size=st.integers(1, 11),
    seed=st.integers(0, 99),
)
def test_finished_rows_make_room_and_calls_are_counted(lengths: list[int], max_batch_size: int, seed: int) -> None:
    model = HashModel(seed, traits=ORDER)
    prompts = prompts_of(*lengths)
    output = decode(model, Autoregressive(), prompts, SamplingParams(max_new_tokens=12), max_batch_size=max_batch_size)
    assert [row.id for row in output.rows] == [prompt.id for prompt in prompts]
    # Every call takes one token of each running prompt, and a new prompt in where one has finished.
    running: list[int] = []
    waiting = [row.num_forwards for row in output.rows]
    num_calls = 0
    while running or waiting:
        while waiting and len(running) < max_batch_size:
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
    output = decode(HashModel(), ReFusion(), [], SamplingParams(), max_batch_size=4)
    assert (output.rows, output.num_calls, output.num_positions) == ([], 0, 0)


@pytest.mark.parametrize("max_batch_size", [1, 3])
def test_text_is_cut_after_the_first_stop_string(max_batch_size: int) -> None:
    model = OracleModel(oracle_text(None), traits=ORDER)
    sampling = SamplingParams(max_new_tokens=12)
    full = decode(model, Autoregressive(), prompts_of(2, 3, 4, 5), sampling).rows
    stop = letters(full[1].token_ids)[3:5]
    rows = decode(
        OracleModel(oracle_text(None), traits=ORDER), Autoregressive(), prompts_of(2, 3, 4, 5),
        replace(sampling, stop=("never", stop)), max_batch_size=max_batch_size, detokenize=letters,
    ).rows  # fmt: skip
    num_stopped = 0
    for row, unstopped in zip(rows, full, strict=True):
        text = letters(unstopped.token_ids)
        end = text.find(stop) + 2 if stop in text else 12
        assert row.token_ids == unstopped.token_ids[:end]
        assert row.finish_reason == ("stop" if stop in text else "length")
        assert row.num_forwards == end, "nothing is computed after a stop string"
        num_stopped += stop in text
    assert num_stopped >= 1


def test_a_stop_string_counts_only_in_the_final_left_part() -> None:
    target = oracle_text(None)
    text = letters([target(2 + i) for i in range(6)])
    decoder = Scripted(script=((4, 5), (0,), (2, 3), (1,)))
    sampling = SamplingParams(max_new_tokens=6, stop=(text[4:6],))
    [row] = decode(OracleModel(target), decoder, prompts_of(2), sampling, detokenize=letters).rows
    assert (row.num_tokens, row.num_forwards, row.finish_reason) == (6, 4, "stop")
    early = replace(sampling, stop=(text[0], text[4:6]))
    [row] = decode(OracleModel(target), decoder, prompts_of(2), early, detokenize=letters).rows
    assert (row.num_tokens, row.num_forwards, row.finish_reason) == (1, 2, "stop")


def entropy_of(tokens: Sequence[int]) -> float:
    shares = [tokens.count(token) / len(tokens) for token in set(tokens)]
    return -sum(share * math.log(share) for share in shares)


@pytest.mark.parametrize("max_batch_size", [1, 3])
@pytest.mark.parametrize(("least", "window"), [(1.0, 6), (0.5, 4), (0.2, 8), (2.0, 8)])
def test_a_response_ends_before_the_tokens_that_repeat_themselves(
    least: float, window: int, max_batch_size: int
) -> None:
    """From position 12 on the text says 5 5 6 5 5 6 5 5 5 5 5 ..."""
    target = oracle_text(None)
    model = OracleModel(lambda place: target(place) if place < 12 else 6 if place in (14, 17) else 5, traits=ORDER)
    sampling = SamplingParams(max_new_tokens=40)
    rows = decode(
        model, Autoregressive(), prompts_of(2, 3, 4), replace(sampling, min_entropy=least, entropy_window=window),
        max_batch_size=max_batch_size,
    ).rows  # fmt: skip
    for row, whole in zip(rows, decode(model, Autoregressive(), prompts_of(2, 3, 4), sampling).rows, strict=True):
        lengths = range(window + 1, 41)
        found = next(n for n in lengths if entropy_of(whole.token_ids[n - window : n]) < least)
        assert row.token_ids == whole.token_ids[: found - window]
        assert (row.num_forwards, row.finish_reason) == (found, "stop")


def test_an_entropy_that_no_text_reaches_ends_nothing_and_an_impossible_one_is_refused() -> None:
    model, sampling = OracleModel(lambda _: 5, traits=ORDER), SamplingParams(max_new_tokens=40, min_entropy=0.1)
    [row] = decode(model, Autoregressive(), prompts_of(2), sampling).rows
    assert (row.num_tokens, row.finish_reason) == (40, "length"), "it never has more than 256 tokens"
    with pytest.raises(ValueError, match=r"^min_entropy: expected a number above 0 and at most 5\.55"):
        SamplingParams(min_entropy=6.0)
    with pytest.raises(ValueError, match=r"^entropy_window: "):
        SamplingParams(entropy_window=1)


def test_a_place_is_committed_once_with_a_token_of_its_own() -> None:
    state = Scripted(script=()).begin(prompts_of(2)[0], SamplingParams(max_new_tokens=4), SPECIAL)
    with pytest.raises(ValueError, match="longer"):
        state.commit([0, 1], [5, 6, 7])
    with pytest.raises(AssertionError, match="committed twice"):
        state.commit([0], [5])
    state.commit([2], [5])
    assert (state.is_masked, state.num_committed, state.final_prefix()) == ([False, False, False, True], 3, [5, 6, 5])


def test_a_stop_string_may_end_a_traced_row_whose_drafts_are_not_all_read() -> None:
    target = oracle_text(None)
    decoder = ReFusion(slot_size=4, num_serial_blocks=1, selection="top_k", k=1)
    sampling = SamplingParams(max_new_tokens=12, stop=(letters([target(2)]),))
    model = OracleModel(target, certainty=lambda place: 0.97 - place / 1000)  # the first slot comes first
    [row] = decode(model, decoder, prompts_of(2), sampling, detokenize=letters, trace=True).rows
    assert (row.token_ids, row.finish_reason) == ([target(2)], "stop")
    assert [entry.phase for entry in row.trace] == ["plan", "verify+plan"]
    assert row.trace[1].accepted == [2, 3, 4, 5]


class Recorder(GenerationCallback):
    def __init__(self) -> None:
        self.prefixes: dict[int, list[list[int]]] = {}
        self.finished: dict[int, Generation] = {}

    def on_commit(self, index: int, state: RowState) -> None:
        assert index not in self.finished
        self.prefixes.setdefault(index, []).append(state.final_prefix())

    def on_finished(self, index: int, output: Generation) -> None:
        assert index not in self.finished
        self.finished[index] = output


@pytest.mark.parametrize("max_batch_size", [1, 2, 5])
def test_accepted_tokens_are_streamed(max_batch_size: int) -> None:
    recorder = Recorder()
    model = HashModel(7, end_bias=-6.0)
    decoder = ReFusion(slot_size=3, num_serial_blocks=2, slot_threshold=0.4, token_threshold=0.4)
    output = decode(
        model, decoder, prompts_of(2, 7, 4), SamplingParams(max_new_tokens=24), max_batch_size=max_batch_size,
        callbacks=[recorder],
    )  # fmt: skip
    assert recorder.finished == dict(enumerate(output.rows))
    for index, row in enumerate(output.rows):
        prefixes = recorder.prefixes[index]
        assert all(later[: len(earlier)] == earlier for earlier, later in pairwise(prefixes)), "final is final"
        assert prefixes[-1] == row.token_ids
        assert len(prefixes) == len(row.round_ratios)


def test_a_trace_tells_each_forward() -> None:
    row = one(Scripted(script=((3, 1), (), (0, 2)), schedule_length=1), 4, trace=True)
    assert [entry.phase for entry in row.trace] == ["step 0", "step 1", "step 2"]
    assert [entry.shape for entry in row.trace] == row.forward_shapes == [(1, 6)] * 3
    assert [entry.positions for entry in row.trace] == [[5, 3], [], [2, 4]]
    assert [entry.tokens for entry in row.trace] == [[oracle_text(None)(p) for p in at] for at in ([5, 3], [], [2, 4])]
    assert [entry.accepted for entry in row.trace] == [[3, 5], [], [2, 4]]
    assert row.trace[0].probabilities == pytest.approx([0.97, 0.97])
    assert row.round_ratios == [2.0, 1.0]
    assert one(Scripted(script=((0, 1),)), 2).trace == []


def test_a_trace_holds_drafts_that_were_read_later_and_scores() -> None:
    model = OracleModel(oracle_text(None), agreement=lambda place: 0.97 if place < 5 else 0.5)
    decoder = ReFusion(slot_size=3, num_serial_blocks=1)
    [row] = decode(model, decoder, prompts_of(1), SamplingParams(max_new_tokens=6), trace=True).rows
    plan, verify = row.trace[:2]
    assert (plan.phase, verify.phase) == ("plan", "verify")
    assert plan.positions == [1, 4, 2, 3, 5, 6]
    assert plan.tokens == [oracle_text(None)(place) for place in plan.positions]
    assert verify.scores == pytest.approx([0.97, 0.97, 0.5, 0.5])
    assert plan.accepted == []
    assert verify.accepted == [1, 2, 3]
    accepted = [place for entry in row.trace for place in entry.accepted]
    assert sorted(accepted) == list(range(1, 7))


def test_models_without_a_mask_token_are_refused_where_one_is_fed() -> None:
    special = replace(SPECIAL, mask_token_id=None)
    with pytest.raises(ModelMismatchError, match="ReFusion needs a mask token"):
        decode(HashModel(special=special), ReFusion(), prompts_of(2), SamplingParams(), allow_mismatch=True)
    decode(HashModel(special=special, traits=ORDER), Autoregressive(), prompts_of(2), SamplingParams(max_new_tokens=3))


@pytest.mark.parametrize(
    ("traits", "reason"),
    [
        (
            ModelTraits(attention="bidirectional", predictions=("mask",)),
            "causal attention, .* trained with bidirectional",
        ),
        (ModelTraits(predictions=("next_token",)), "needs the predictions mask, .* trained for next_token"),
        (ModelTraits(predictions=("mask",)), "needs the predictions next_token_in_slot, .* trained for mask"),
        (ModelTraits(predictions=()), "trained for none"),
    ],
)
def test_models_trained_otherwise_are_refused_or_marked(traits: ModelTraits, reason: str) -> None:
    arguments = ReFusion(), prompts_of(2), SamplingParams(max_new_tokens=16)
    with pytest.raises(ModelMismatchError, match=f"ReFusion does not fit this model: .*{reason}.*allow_mismatch"):
        decode(HashModel(traits=traits), *arguments)
    with pytest.warns(UserWarning, match=reason):
        output = decode(HashModel(traits=traits), *arguments, allow_mismatch=True)
    assert len(output.mismatches) >= 1
    assert output.rows[0].num_tokens > 0


@pytest.mark.parametrize("traits", [HYBRID, ModelTraits(predictions=("mask", "next_token")), ModelTraits()])
def test_fitting_and_unknown_models_are_taken(traits: ModelTraits) -> None:
    assert decode(HashModel(traits=traits), ReFusion(), prompts_of(2), SamplingParams()).mismatches == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda: (prompts_of(1), SamplingParams(), {"max_batch_size": 0}), "^max_batch_size: .* at least 1, got 0"),
        (lambda: (prompts_of(1, 0), SamplingParams(), {}), "^prompt p1: expected at least one token"),
        (
            lambda: (prompts_of(1), SamplingParams(stop=("x",)), {}),
            "^stop: expected a tokenizer for stop strings",
        ),
    ],
)
def test_impossible_calls_are_refused(arguments: Callable[[], tuple], message: str) -> None:
    prompts, sampling, options = arguments()
    with pytest.raises(ValueError, match=message):
        decode(HashModel(), ReFusion(), prompts, sampling, **options)


def test_the_final_left_part() -> None:
    state = Scripted(script=()).begin(prompts_of(1)[0], SamplingParams(max_new_tokens=5), SPECIAL)
    state.tokens += [MASK, MASK]  # a canvas longer than the budget
    state.is_masked += [True, True]
    state.commit_rounds += [0, 0]
    assert state.final_prefix() == []
    assert not state.prefix_ends
    state.commit([1, 2], [5, EOS])
    assert state.final_prefix() == []
    state.commit([0], [MASK])  # an id says nothing about what is final
    assert state.final_prefix() == [MASK, 5, EOS]
    assert state.prefix_ends
    assert state.num_committed == 3
    state.tokens[2] = 6
    assert not state.prefix_ends
    state.commit([3, 4], [7, 8])
    assert state.prefix_ends
    assert len(state.final_prefix()) == 5
    state.commit([5], [9])
    assert len(state.final_prefix()) == 5
    assert state.num_committed == 6


@settings(max_examples=24, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=9),
    max_batch_size=st.integers(1, 11),
    budget=st.integers(1, 60),
    seed=st.integers(0, 99),
    causal=st.booleans(),
)
def test_a_budget_bounds_calls_and_changes_no_token(
    lengths: list[int], max_batch_size: int, budget: int, seed: int, causal: bool
) -> None:
    decoder = Autoregressive() if causal else ReFusion(slot_size=3, slot_threshold=0.3, token_threshold=0.5)
    prompts, sampling = prompts_of(*lengths), SamplingParams(max_new_tokens=12)

    def run(**options: int) -> tuple[HashModel, list[Generation]]:
        model = HashModel(seed, traits=ORDER if causal else HYBRID)
        return model, decode(model, decoder, prompts, sampling, **options).rows

    model, rows = run(max_batch_size=max_batch_size, max_tokens_per_forward=budget)
    _, alone = run()
    assert [(row.token_ids, row.forward_shapes) for row in rows] == [
        (row.token_ids, row.forward_shapes) for row in alone
    ]
    singles = {shape for row in alone for shape in row.forward_shapes}
    for call in model.calls:
        shape = tuple(call.input_ids.shape)
        assert call.input_ids.numel() <= budget or shape in singles


def test_nobody_starves_within_a_budget() -> None:
    # Two tokens a call, three prompts of one token each: they take turns.
    model = HashModel(3, traits=ORDER, end_bias=-60.0)
    watcher: list[int] = []

    class Watch(GenerationCallback):
        def on_commit(self, index: int, state: RowState) -> None:
            watcher.append(index)

    sampling = SamplingParams(max_new_tokens=6)
    options = {"max_batch_size": 3, "max_tokens_per_forward": 2, "callbacks": [Watch()]}
    output = decode(model, Autoregressive(), prompts_of(1, 1, 1), sampling, **options)
    assert output.num_calls == 9
    for stop in range(2, 19, 2):
        counts = [watcher[:stop].count(index) for index in range(3)]
        assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize(("budget", "num_calls"), [(1, 18), (2, 9), (3, 6), (4, 6), (1000, 6)])
def test_calls_are_as_large_as_a_budget_lets_them(budget: int, num_calls: int) -> None:
    model = HashModel(3, traits=ORDER, end_bias=-60.0)
    options = {"max_batch_size": 3, "max_tokens_per_forward": budget}
    output = decode(model, Autoregressive(), prompts_of(1, 1, 1), SamplingParams(max_new_tokens=6), **options)
    assert output.num_calls == num_calls


def test_an_impossible_budget_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^max_tokens_per_forward: expected .*, got 0"):
        decode(HashModel(traits=ORDER), Autoregressive(), prompts_of(1), SamplingParams(), max_tokens_per_forward=0)


@pytest.mark.parametrize("decoder", [BlockDiffusion(block_size=16), D2F(), ReFusion(), SlotSearch(), TokenEditing(),
                                     WeDLM()], ids=lambda decoder: type(decoder).__name__)  # fmt: skip
def test_nothing_is_fed_beyond_learnt_positions(decoder: Decoder) -> None:
    options = {"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 1, "n_positions": 24}
    tokenizer = CharacterTokenizer().build(Additions())
    model = BackboneConfig(config=options).build(tokenizer, seed=0).eval()
    model.traits = traits_for(decoder)
    [short, long] = prompts_of(2, 13)
    sampling = SamplingParams(max_new_tokens=5)
    with pytest.raises(ValueError, match=r"prompt p\d: expected whole blocks, slots or windows in 24 positions"):
        decode(model, decoder, [short, long], replace(sampling, max_new_tokens=11))
    small = {"block_size": 4, "slot_size": 4, "window_size": 4}
    fields = {name: value for name, value in small.items() if hasattr(decoder, name)}
    decoder = replace(decoder, **fields)
    model.traits = traits_for(decoder)
    [row] = decode(model, decoder, [long], sampling).rows
    assert row.finish_reason in ("eos", "length")
