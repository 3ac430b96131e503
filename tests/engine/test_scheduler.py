"""The scheduler: prompts that begin alike share cached keys and values, and a bound on the cache limits concurrency."""

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
def share_short_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Share prefixes from three tokens on, because the prompts of these tests are short."""
    monkeypatch.setattr(scheduler, "MIN_SHARED", 3)


@st.composite
def prompts_with_shared_prefixes(draw: st.DrawFn) -> list[Prompt]:
    """Draw two to seven prompts that begin with one of at most two texts."""
    ids = st.integers(0, VOCAB - 1)
    beginnings = draw(st.lists(st.lists(ids, min_size=3, max_size=20), min_size=1, max_size=2))
    ends = draw(st.lists(st.tuples(st.sampled_from(beginnings), st.lists(ids, max_size=5)), min_size=2, max_size=7))
    return [Prompt(token_ids=(*start, *end), id=f"p{i}") for i, (start, end) in enumerate(ends)]


@pytest.mark.parametrize("cls", DECODERS)
@settings(max_examples=examples(6), deadline=None)
@given(data=st.data())
def test_sharing_a_prefix_changes_no_text_and_no_count(cls: type[Decoder], data: st.DataObject) -> None:
    decoder, sampling = data.draw(setups(cls))
    sampling = SamplingParams(max_new_tokens=sampling.max_new_tokens, temperature=data.draw(temperatures()))
    make_model, prompts = data.draw(hash_models()), data.draw(prompts_with_shared_prefixes())
    batch_size = data.draw(st.integers(1, 4))

    shared = decode(make_model(decoder), decoder, prompts, sampling, batch_size=batch_size)
    unshared = decode(make_model(decoder), decoder, prompts, sampling, batch_size=batch_size, share_prefixes=False)

    for shared_row, unshared_row in zip(shared.rows, unshared.rows, strict=True):
        assert shared_row.token_ids == unshared_row.token_ids
        assert shared_row.num_forwards == unshared_row.num_forwards
        assert shared_row.num_positions == unshared_row.num_positions
        assert shared_row.forward_shapes == unshared_row.forward_shapes
    assert unshared.num_shared == 0
    if batch_size == 1:
        assert shared.num_positions + shared.num_shared == unshared.num_positions
    if decoder.requirements().attention == "bidirectional":
        assert shared.num_shared == 0


def texts(output: DecodingOutput) -> list[list[int]]:
    return [row.token_ids for row in output.rows]


def make_prompt_list(prompts: list[list[int]]) -> list[Prompt]:
    """Return prompts with these token ids; a prompt's id is its index."""
    return [Prompt(token_ids=tuple(ids), id=str(i)) for i, ids in enumerate(prompts)]


def decode_ids(decoder: Decoder, prompts: list[list[int]], batch_size: int, **options: Any) -> DecodingOutput:
    """Decode four tokens for each prompt with a hash model."""
    model = HashModel(3, traits=traits_for(decoder))
    return decode(model, decoder, make_prompt_list(prompts), NEXT, batch_size=batch_size, **options)


PREFIX = [3 + i * i % 7 for i in range(20)]
"""The 20 tokens with which the prompts of the following tests begin."""


@pytest.mark.parametrize(
    ("decoder", "num_shareable"),
    [
        pytest.param(Autoregressive(), 20, id="Autoregressive"),
        pytest.param(ReFusion(), 20, id="ReFusion"),
        pytest.param(CARD(), 20, id="CARD"),
        pytest.param(WeDLM(), 20, id="WeDLM"),
        pytest.param(SlotSearch(slot_size=2), 20, id="SlotSearch"),
        pytest.param(BlockDiffusion(block_size=8), 16, id="BlockDiffusion-whole-blocks-only"),
        pytest.param(LLaDA(), 0, id="LLaDA-has-no-cache"),
    ],
)
@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_the_shared_prefix_is_computed_once(decoder: Decoder, num_shareable: int, batch_size: int) -> None:
    prompts = [[*PREFIX, i, i + 1, 3, 3, 3] for i in range(5)]
    assert decode_ids(decoder, prompts, batch_size).num_shared == 4 * num_shareable
    assert decode_ids(decoder, prompts, batch_size, share_prefixes=False).num_shared == 0


def test_of_two_equal_prompts_the_second_computes_its_last_token() -> None:
    """The output of the last token predicts the first new token, so the last token cannot come from the cache."""
    output = decode_ids(Autoregressive(), [PREFIX, PREFIX], 2)
    assert output.num_shared == len(PREFIX) - 1
    assert texts(output)[0] == texts(output)[1]


def make_waiting(*prompts: list[int]) -> list[PromptSequence]:
    """Return sequences of prompts that wait to be decoded."""
    return [PromptSequence(i, prompt, NEXT) for i, prompt in enumerate(make_prompt_list([*prompts]))]


def test_a_prompt_waits_until_its_prefix_is_cached_and_other_prompts_overtake_it() -> None:
    waiting = make_waiting([*PREFIX, 3], [*PREFIX, 4], [9] * 20, [8, 8], [*PREFIX, 5])
    cached: dict[int, tuple[int, ...]] = {}

    # Prompts 1 and 4 begin like prompt 0, whose prefix is not cached yet.
    first = list(admit(waiting, [], cached, 4, Autoregressive()))
    assert [(sequence.index, num_shared) for sequence, num_shared, _ in first] == [(0, 0), (2, 0), (3, 0)]
    in_flight = [sequence for sequence, _, _ in first]
    assert list(admit(waiting, in_flight, cached, 4, Autoregressive())) == []

    # All three are cached and prompt 2 is done: there is room for prompts 1 and 4, which copy the prefix.
    cached |= {sequence.cache_row: sequence.prompt.token_ids for sequence in in_flight}
    del in_flight[1]
    second = list(admit(waiting, in_flight, cached, 4, Autoregressive()))
    assert [(sequence.index, num_shared) for sequence, num_shared, _ in second] == [(1, 20), (4, 20)]
    in_flight += [sequence for sequence, _, _ in second]
    assert {source_row for _, _, source_row in second} <= {in_flight[0].cache_row, in_flight[2].cache_row}
    assert len({sequence.cache_row for sequence in in_flight}) == 4
    assert not waiting


def test_a_prompt_that_ends_without_a_forward_blocks_no_other() -> None:
    waiting = make_waiting(PREFIX, PREFIX)
    cached: dict[int, tuple[int, ...]] = {}
    for _ in range(2):
        [(_, num_shared, _)] = admit(waiting, [], cached, 2, Autoregressive())
        assert num_shared == 0


def test_with_one_cache_row_the_next_prompt_reuses_the_prefix_in_place() -> None:
    """The row that the next prompt gets is the row that holds the prefix, so nothing has to be copied."""
    waiting = make_waiting(*([*PREFIX, i] for i in range(3)))
    cached: dict[int, tuple[int, ...]] = {}
    for i in range(3):
        [(sequence, num_shared, source_row)] = admit(waiting, [], cached, 1, Autoregressive())
        assert sequence.cache_row == 0
        assert (source_row, num_shared) == ((-1, 0) if i == 0 else (0, 20))
        cached[0] = sequence.prompt.token_ids


@given(st.lists(st.integers(0, 1), max_size=9), st.lists(st.integers(0, 1), max_size=9))
def test_the_longest_common_prefix_is_shared(new_end: list[int], cached_end: list[int]) -> None:
    num_common = 0
    for new_token, cached_token in zip(new_end, cached_end, strict=False):
        if new_token != cached_token:
            break
        num_common += 1
    waiting, cached = make_waiting([5, 6, 7, *new_end]), {0: (5, 6, 7, *cached_end)}
    [(_, num_shared, _)] = admit(waiting, [], cached, 1, ReFusion())
    assert num_shared == 3 + num_common


@pytest.mark.parametrize("decoder", [Autoregressive(), ReFusion(slot_size=4)])
def test_a_real_model_shares_keys_and_values(decoder: Decoder) -> None:
    model = tiny_backbone(HYBRID if isinstance(decoder, ReFusion) else traits_for(decoder))
    prompts = [Prompt(token_ids=(*PREFIX, 3 + i, 4), id=str(i)) for i in range(5)]
    sampling = SamplingParams(max_new_tokens=24)
    shared = decode(model, decoder, prompts, sampling, batch_size=3)
    alone = decode(model, decoder, prompts, sampling, share_prefixes=False)
    assert shared.num_shared == 4 * len(PREFIX)
    assert texts(shared) == texts(alone)


@pytest.mark.parametrize("bound", [24, 30, 60, 200, 10_000])
def test_a_bound_on_the_cache_changes_concurrency_and_no_token(bound: int) -> None:
    lengths = [3, 20, 5, 9, 1, 17, 4]
    prompts = make_prompt_list([[3 + (i * n) % 7 for i in range(n)] for n in lengths])
    decoder = Autoregressive()
    cache_sizes: list[int] = []

    class CacheRecorder(HashModel):
        """Records the number of cache entries of every call."""

        def hidden_states(self, *args: Any, **options: Any) -> Any:
            hidden = super().hidden_states(*args, **options)
            cache = args[3]
            cache_sizes.append(cache.num_rows * cache.num_keys)
            return hidden

    model = CacheRecorder(3, traits=traits_for(decoder))
    bounded = decode(model, decoder, prompts, NEXT, batch_size=4, max_cache_tokens=bound)
    unbounded = decode(HashModel(3, traits=traits_for(decoder)), decoder, prompts, NEXT)

    assert max(cache_sizes) <= bound
    assert texts(bounded) == texts(unbounded)
    assert [row.id for row in bounded.rows] == [prompt.id for prompt in prompts]


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


class InterruptedModel(HashModel):
    """Raises KeyboardInterrupt when ``calls_left`` reaches zero."""

    calls_left = 1000

    def hidden_states(self, *args: Any, **options: Any) -> Any:
        self.calls_left -= 1
        if self.calls_left == 0:
            raise KeyboardInterrupt
        return super().hidden_states(*args, **options)


@pytest.mark.parametrize("decoder", [Autoregressive(), ReFusion(slot_size=4), LLaDA()])
def test_turns_of_a_conversation_compute_only_what_is_new(decoder: Decoder) -> None:
    model, kept = InterruptedModel(3, traits=traits_for(decoder)), KeptCache()
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
    prompt, shared = [Prompt(token_ids=tuple(PREFIX), id="p")], []
    modes = [torch.inference_mode, torch.no_grad, partial(torch.autocast, "cpu", torch.bfloat16)]
    for mode in modes:
        with mode():
            shared.append(decode(model, decoder, prompt, NEXT, kept=kept).num_shared > 0)
    assert shared == [False, True, False]  # a step decodes in inference mode in any case


def test_another_decoder_or_number_of_rows_gets_a_cache_of_its_own() -> None:
    model, kept = HashModel(3), KeptCache()
    prompts = [Prompt(token_ids=tuple(PREFIX), id=str(i)) for i in range(2)]
    # The calls in order: decoder, number of prompts, and the number of tokens that the kept cache saves.
    for decoder, num_prompts, num_shared in [
        (ReFusion(slot_size=4), 1, 0),
        (ReFusion(slot_size=4), 1, 20),
        (ReFusion(slot_size=2), 1, 0),  # another option
        (RecomputeKV(slot_size=2), 1, 0),  # another decoder
        (ReFusion(slot_size=2), 1, 0),
        (ReFusion(slot_size=2), 2, 20),  # a new cache of two rows; the second prompt shares with the first
    ]:
        output = decode(model, decoder, prompts[:num_prompts], NEXT, batch_size=2, kept=kept)
        assert output.num_shared == num_shared
