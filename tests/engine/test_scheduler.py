from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from refusion_lit.contrib import CARD, SlotSearch
from refusion_lit.decoding import (
    Autoregressive,
    BlockDiffusion,
    Decoder,
    DecodingOutput,
    LLaDA,
    RecomputeKV,
    ReFusion,
    WeDLM,
    decode,
)
from refusion_lit.engine import scheduler
from refusion_lit.engine.kept_cache import KeptCache
from refusion_lit.engine.scheduler import admit
from refusion_lit.engine.sequence import PromptSequence
from refusion_lit.types import Prompt, SamplingParams
from support.decoder_cases import DECODERS, hash_models, setups, temperatures, traits_for
from support.example_counts import examples
from support.fakes import HYBRID, VOCAB, HashModel, tiny_backbone

NEXT = SamplingParams(max_new_tokens=4)


@pytest.fixture(autouse=True)
def few_tokens_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "MIN_SHARED", 3)


@st.composite
def prompts_with_a_beginning(draw: st.DrawFn) -> list[Prompt]:
    ids = st.integers(0, VOCAB - 1)
    beginnings = draw(st.lists(st.lists(ids, min_size=3, max_size=20), min_size=1, max_size=2))
    ends = draw(st.lists(st.tuples(st.sampled_from(beginnings), st.lists(ids, max_size=5)), min_size=2, max_size=7))
    return [Prompt(token_ids=(*start, *end), id=f"p{i}") for i, (start, end) in enumerate(ends)]


@pytest.mark.parametrize("cls", DECODERS)
@settings(max_examples=examples(6), deadline=None)
@given(data=st.data())
def test_a_prompt_that_shares_is_decoded_as_alone(cls: type[Decoder], data: st.DataObject) -> None:
    decoder, sampling = data.draw(setups(cls))
    sampling = SamplingParams(max_new_tokens=sampling.max_new_tokens, temperature=data.draw(temperatures()))
    make, prompts = data.draw(hash_models()), data.draw(prompts_with_a_beginning())
    size = data.draw(st.integers(1, 4))
    shared = decode(make(decoder), decoder, prompts, sampling, batch_size=size)
    alone = decode(make(decoder), decoder, prompts, sampling, batch_size=size, share_prefixes=False)
    for one, other in zip(shared.rows, alone.rows, strict=True):
        assert one.token_ids == other.token_ids
        assert one.num_forwards == other.num_forwards
        assert one.num_positions == other.num_positions
        assert one.forward_shapes == other.forward_shapes
    assert alone.num_shared == 0
    if size == 1:
        assert shared.num_positions + shared.num_shared == alone.num_positions
    if decoder.requirements().attention == "bidirectional":
        assert shared.num_shared == 0


def texts(output: DecodingOutput) -> list[list[int]]:
    return [row.token_ids for row in output.rows]


def run(decoder: Decoder, prompts: list[list[int]], size: int, **options: Any) -> DecodingOutput:
    prompt_list = [Prompt(token_ids=tuple(ids), id=str(i)) for i, ids in enumerate(prompts)]
    return decode(HashModel(3, traits=traits_for(decoder)), decoder, prompt_list, NEXT, batch_size=size, **options)


COMMON = [3 + i * i % 7 for i in range(20)]


@pytest.mark.parametrize(
    ("decoder", "num_parts"),
    [
        (Autoregressive(), 20),
        (ReFusion(), 20),
        (CARD(), 20),
        (WeDLM(), 20),
        (SlotSearch(slot_size=2), 20),
        (BlockDiffusion(block_size=8), 16),
        (LLaDA(), 0),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 8])
def test_the_common_part_is_computed_once(decoder: Decoder, num_parts: int, size: int) -> None:
    prompts = [[*COMMON, i, i + 1, 3, 3, 3] for i in range(5)]
    assert run(decoder, prompts, size).num_shared == 4 * num_parts
    assert run(decoder, prompts, size, share_prefixes=False).num_shared == 0


def test_the_same_prompt_twice_still_reads_its_last_token() -> None:
    output = run(Autoregressive(), [COMMON, COMMON], 2)
    assert output.num_shared == len(COMMON) - 1
    assert texts(output)[0] == texts(output)[1]


def make_waiting(*prompts: list[int]) -> list[PromptSequence]:
    return [PromptSequence(i, Prompt(token_ids=tuple(ids), id=str(i)), NEXT) for i, ids in enumerate(prompts)]


def test_a_prompt_waits_for_one_in_flight_and_others_overtake_it() -> None:
    waiting = make_waiting([*COMMON, 3], [*COMMON, 4], [9] * 20, [8, 8], [*COMMON, 5])
    cached: dict[int, tuple[int, ...]] = {}
    first = list(admit(waiting, [], cached, 4, Autoregressive()))
    assert [(one.index, num_shared) for one, num_shared, _ in first] == [(0, 0), (2, 0), (3, 0)]
    rows = [one for one, _, _ in first]
    assert list(admit(waiting, rows, cached, 4, Autoregressive())) == []
    cached |= {one.cache_row: one.prompt.token_ids for one in rows}
    del rows[1]
    second = list(admit(waiting, rows, cached, 4, Autoregressive()))
    assert [(one.index, num_shared) for one, num_shared, _ in second] == [(1, 20), (4, 20)]
    rows += [one for one, _, _ in second]
    assert {source for _, _, source in second} <= {rows[0].cache_row, rows[2].cache_row}
    assert len({one.cache_row for one in rows}) == 4
    assert not waiting


def test_a_prompt_that_ends_without_a_forward_blocks_no_other() -> None:
    waiting = make_waiting(COMMON, COMMON)
    cached: dict[int, tuple[int, ...]] = {}
    for _ in range(2):
        [(_, num_shared, _)] = admit(waiting, [], cached, 2, Autoregressive())
        assert num_shared == 0


def test_prompts_that_follow_each_other_in_a_row_copy_nothing() -> None:
    waiting = make_waiting(*([*COMMON, i] for i in range(3)))
    cached: dict[int, tuple[int, ...]] = {}
    for i in range(3):
        [(one, num_shared, source)] = admit(waiting, [], cached, 1, Autoregressive())
        assert (one.cache_row, source, num_shared) == ((0, 0, 20) if i else (0, -1, 0))
        cached[0] = one.prompt.token_ids


@given(st.lists(st.integers(0, 1), max_size=9), st.lists(st.integers(0, 1), max_size=9))
def test_common_beginnings_are_found(first: list[int], second: list[int]) -> None:
    num_common = max(n for n in range(1 + min(len(first), len(second))) if first[:n] == second[:n])
    [(_, num_shared, _)] = admit(make_waiting([5, 6, 7, *first]), [], {0: (5, 6, 7, *second)}, 1, ReFusion())
    assert num_shared == 3 + num_common


@pytest.mark.parametrize("decoder", [Autoregressive(), ReFusion(slot_size=4)])
def test_a_real_model_shares_keys_and_values(decoder: Decoder) -> None:
    model = tiny_backbone(HYBRID if isinstance(decoder, ReFusion) else traits_for(decoder))
    prompts = [Prompt(token_ids=(*COMMON, 3 + i, 4), id=str(i)) for i in range(5)]
    sampling = SamplingParams(max_new_tokens=24)
    shared = decode(model, decoder, prompts, sampling, batch_size=3)
    alone = decode(model, decoder, prompts, sampling, share_prefixes=False)
    assert shared.num_shared == 4 * len(COMMON)
    assert texts(shared) == texts(alone)


@pytest.mark.parametrize("bound", [24, 30, 60, 200, 10_000])
def test_a_bound_on_the_cache_changes_concurrency_and_no_token(bound: int) -> None:
    lengths = [3, 20, 5, 9, 1, 17, 4]
    prompts = [[3 + (i * n) % 7 for i in range(n)] for n in lengths]
    rows: list[tuple[int, int]] = []

    class Recorded(HashModel):
        def hidden_states(self, *args: Any, **options: Any) -> Any:
            hidden = super().hidden_states(*args, **options)
            rows.append((args[3].num_rows, args[3].num_keys))
            return hidden

    prompt_list = [Prompt(token_ids=tuple(ids), id=str(i)) for i, ids in enumerate(prompts)]
    bounded = decode(
        Recorded(3, traits=traits_for(Autoregressive())),
        Autoregressive(),
        prompt_list,
        NEXT,
        batch_size=4,
        max_cache_tokens=bound,
    )
    assert all(num_rows * num_keys <= bound for num_rows, num_keys in rows)
    assert texts(bounded) == texts(
        decode(HashModel(3, traits=traits_for(Autoregressive())), Autoregressive(), prompt_list, NEXT)
    )
    assert [row.id for row in bounded.rows] == [prompt.id for prompt in prompt_list]


def test_a_bound_below_the_longest_prompt_is_refused_before_work_starts() -> None:
    model = HashModel(3, traits=traits_for(Autoregressive()))
    prompt_list = [Prompt(token_ids=(3,) * n, id=f"p{n}") for n in (2, 9)]
    message = r"^max_cache_tokens: expected at least 13 \(prompt p9 .*, got 12"
    with pytest.raises(ValueError, match=message):
        decode(model, Autoregressive(), prompt_list, NEXT, max_cache_tokens=12)
    assert model.calls == []


def test_of_prompts_with_the_same_id_the_longest_one_is_checked() -> None:
    model = HashModel(3, traits=traits_for(Autoregressive()))
    prompt_list = [Prompt(token_ids=(3,) * length, id="p") for length in (9, 2)]
    with pytest.raises(ValueError, match=r"^max_cache_tokens: expected at least 13 "):
        decode(model, Autoregressive(), prompt_list, NEXT, max_cache_tokens=12)
    assert model.calls == []


def test_running_out_of_memory_names_the_options_to_lower() -> None:
    class Full(HashModel):
        def hidden_states(self, *_: Any, **__: Any) -> Any:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    prompts = [Prompt(token_ids=(3, 4), id="a")]
    message = r"^batch_size: expected .*, got 1 and no memory .*max_cache_tokens"
    with pytest.raises(ValueError, match=message):
        decode(Full(3, traits=traits_for(Autoregressive())), Autoregressive(), prompts, NEXT, batch_size=7)


class Interrupting(HashModel):
    """Is interrupted at its last call."""

    calls_left = 1000

    def hidden_states(self, *args: Any, **options: Any) -> Any:
        self.calls_left -= 1
        if self.calls_left == 0:
            raise KeyboardInterrupt
        return super().hidden_states(*args, **options)


@pytest.mark.parametrize("decoder", [Autoregressive(), ReFusion(slot_size=4), LLaDA()])
def test_turns_of_a_conversation_compute_only_what_is_new(decoder: Decoder) -> None:
    model, kept = Interrupting(3, traits=traits_for(decoder)), KeptCache()
    text = [3 + i % 5 for i in range(12)]
    num_shared, lengths = [], []
    for turn in range(4):
        prompt = [Prompt(token_ids=tuple(text), id=str(turn))]
        if turn == 2:  # an interrupted turn leaves nothing that could be wrong
            model.calls_left = 1
            with pytest.raises(KeyboardInterrupt):
                decode(model, decoder, prompt, NEXT, kept=kept)
            model.calls_left = 1000
        output = decode(model, decoder, prompt, NEXT, kept=kept)
        alone = decode(HashModel(3, traits=traits_for(decoder)), decoder, prompt, NEXT)
        assert texts(output) == texts(alone)
        num_shared.append(output.num_shared)
        lengths.append(len(text))
        text += [*output.rows[0].token_ids, 7, 8]
    # Turn 2 starts from scratch, the others reuse the prompt of the turn before.
    assert num_shared == ([0] * 4 if isinstance(decoder, LLaDA) else [0, lengths[0], 0, lengths[2]])


def test_autocast_gets_a_cache_of_its_own_and_other_modes_do_not() -> None:
    model, kept, decoder = tiny_backbone(traits_for(Autoregressive())), KeptCache(), Autoregressive()
    prompt, shared = [Prompt(token_ids=tuple(COMMON), id="p")], []
    modes = [torch.inference_mode, torch.no_grad, partial(torch.autocast, "cpu", torch.bfloat16)]
    for mode in modes:
        with mode():
            shared.append(decode(model, decoder, prompt, NEXT, kept=kept).num_shared > 0)
    assert shared == [False, True, False]  # a step decodes in inference mode in any case


def test_another_decoder_or_number_of_rows_gets_a_cache_of_its_own() -> None:
    model, kept = HashModel(3), KeptCache()
    prompts = [Prompt(token_ids=tuple(COMMON), id=str(i)) for i in range(2)]
    for decoder, number, expected in [
        (ReFusion(slot_size=4), 1, 0), (ReFusion(slot_size=4), 1, 20), (ReFusion(slot_size=2), 1, 0),
        (RecomputeKV(slot_size=2), 1, 0), (ReFusion(slot_size=2), 1, 0), (ReFusion(slot_size=2), 2, 20),
    ]:  # fmt: skip
        output = decode(model, decoder, prompts[:number], NEXT, batch_size=2, kept=kept)
        assert output.num_shared == expected
