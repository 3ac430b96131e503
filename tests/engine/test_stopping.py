"""Where a response ends: stop strings, and the final prefix that they are searched in."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from refusion_lit.decoding import (
    Autoregressive,
    Decoder,
    Draw,
    Forward,
    ModelRequirements,
    ReFusion,
    RowState,
    Steps,
    decode,
)
from refusion_lit.engine.branches import text_branch
from refusion_lit.types import SamplingParams
from support.fakes import EOS, MASK, SPECIAL, OracleModel, oracle_text
from support.scripted import NEXT_TOKEN, Scripted, decode_letters, decode_one_prompt, make_prompts


@pytest.mark.parametrize("batch_size", [1, 3])
def test_text_is_cut_after_the_first_stop_string(batch_size: int) -> None:
    model = OracleModel(oracle_text(None), traits=NEXT_TOKEN)
    sampling = SamplingParams(max_new_tokens=12)
    full = decode(model, Autoregressive(), make_prompts(2, 3, 4, 5), sampling).rows
    stop = decode_letters(full[1].token_ids)[3:5]
    rows = decode(
        OracleModel(oracle_text(None), traits=NEXT_TOKEN), Autoregressive(), make_prompts(2, 3, 4, 5),
        replace(sampling, stop=("never", stop)), batch_size=batch_size, detokenize=decode_letters,
    ).rows  # fmt: skip
    num_stopped = 0
    for row, unstopped in zip(rows, full, strict=True):
        text = decode_letters(unstopped.token_ids)
        end = text.find(stop) + 2 if stop in text else 12
        assert row.token_ids == unstopped.token_ids[:end]
        assert row.finish_reason == ("stop" if stop in text else "length")
        assert row.num_forwards == end, "nothing is computed after a stop string"
        num_stopped += stop in text
    assert num_stopped >= 1


def test_a_stop_string_counts_only_if_all_tokens_before_it_are_committed() -> None:
    """The decoder commits places out of order: 4 and 5, then 0, then 2 and 3, then 1."""
    target = oracle_text(None)
    text = decode_letters([target(2 + i) for i in range(6)])
    decoder = Scripted(script=((4, 5), (0,), (2, 3), (1,)))
    sampling = SamplingParams(max_new_tokens=6, stop=(text[4:6],))
    [row] = decode(OracleModel(target), decoder, make_prompts(2), sampling, detokenize=decode_letters).rows
    assert (row.num_tokens, row.num_forwards, row.finish_reason) == (6, 4, "stop")
    early = replace(sampling, stop=(text[0], text[4:6]))
    [row] = decode(OracleModel(target), decoder, make_prompts(2), early, detokenize=decode_letters).rows
    assert (row.num_tokens, row.num_forwards, row.finish_reason) == (1, 2, "stop")


def test_a_template_without_holes_ends_at_stop_strings_too() -> None:
    decoder = ReFusion(slot_size=2, num_serial_blocks=1)
    sampling = SamplingParams(max_new_tokens=2, stop=(decode_letters([6, 7]),))
    results = []
    for given in ((5, 6, 7, 8, EOS), (5, 6, 7, None, EOS)):
        prompt = replace(make_prompts(2)[0], given=given)
        [row] = decode(OracleModel(lambda _: 8), decoder, [prompt], sampling, detokenize=decode_letters).rows
        results.append((row.token_ids, row.text, row.finish_reason))
    assert results[0] == results[1] == ([5, 6, 7], decode_letters([5]), "stop")


def test_a_trace_works_if_a_stop_string_ends_a_text_before_all_drafts_are_read() -> None:
    target = oracle_text(None)
    decoder = ReFusion(slot_size=4, num_serial_blocks=1, selection="top_k", k=1)
    sampling = SamplingParams(max_new_tokens=12, stop=(decode_letters([target(2)]),))
    model = OracleModel(target, certainty=lambda place: 0.97 - place / 1000)  # the first slot comes first
    [row] = decode(model, decoder, make_prompts(2), sampling, detokenize=decode_letters, trace=True).rows
    assert (row.token_ids, row.finish_reason) == ([target(2)], "stop")
    assert [entry.phase for entry in row.trace] == ["plan", "verify+plan"]
    assert row.trace[1].accepted == [2, 3, 4, 5]


def begin_with_long_canvas() -> RowState:
    """Return the state of a response of at most five tokens, whose canvas has seven places."""
    state = Scripted(script=()).begin(make_prompts(1)[0], SamplingParams(max_new_tokens=5), SPECIAL)
    state.tokens += [MASK, MASK]
    state.is_masked += [True, True]
    state.commit_rounds += [0, 0]
    return state


def test_the_final_prefix_ends_at_the_first_eos_token() -> None:
    """``final_prefix`` is the text up to the first masked place or the end: the tokens that can be streamed."""
    state = begin_with_long_canvas()
    assert state.final_prefix() == []
    assert not state.prefix_ends
    state.commit([1, 2], [5, EOS])
    assert state.final_prefix() == []
    state.commit([0], [4])
    assert state.final_prefix() == [4, 5, EOS]
    assert state.prefix_ends
    assert state.num_committed == 3


def test_the_final_prefix_is_at_most_as_long_as_the_budget() -> None:
    state = begin_with_long_canvas()
    state.commit([0, 1, 2], [4, 5, 6])
    assert not state.prefix_ends
    state.commit([3, 4], [7, 8])
    assert state.prefix_ends
    assert len(state.final_prefix()) == 5
    state.commit([5], [9])
    assert len(state.final_prefix()) == 5
    assert state.num_committed == 6


@dataclass(frozen=True, kw_only=True)
class OneByOne(Decoder):
    """A decoder as a newcomer writes it: it commits the next token and does not look for the end of the text."""

    requires = ModelRequirements(attention="causal", predictions=("mask",))

    stop_at_eos: bool = True

    def step(self, state: RowState) -> Steps[None]:
        place = state.num_committed
        end = state.prompt_length + place
        [reading] = yield Forward(
            phase="next", branches=(text_branch(state, 0, end + 1, [end]),), draw=Draw(sampling=state.sampling),
            cached=False,
        )  # fmt: skip
        state.commit([place], reading.tokens)
        state.finished = not self.stop_at_eos and not any(state.is_masked)


@pytest.mark.parametrize(("end", "num_tokens"), [(4, 3), (None, 32)])
def test_the_engine_ends_a_response_by_itself_unless_a_decoder_asks_to_go_on(end: int | None, num_tokens: int) -> None:
    ended, whole = decode_one_prompt(OneByOne(), 32, end), decode_one_prompt(OneByOne(stop_at_eos=False), 32, end)
    assert (ended.num_forwards, whole.num_forwards) == (num_tokens, 32)
    assert ended.token_ids == whole.token_ids == [oracle_text(end)(place) for place in range(2, 2 + num_tokens)]
