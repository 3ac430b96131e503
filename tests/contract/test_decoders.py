"""What every decoder promises. The tests find all concrete decoders by themselves.

``NUM_FORWARDS`` maps decoders to functions that count the expected forward passes; a decoder may lack an entry.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable
from dataclasses import FrozenInstanceError, dataclass, replace
from itertools import product
from math import ceil, exp, log
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import refusion_lit.decoding
from refusion_lit.contrib import APD, CARD, D2F, SetDiffusion
from refusion_lit.decoding import (
    Autoregressive,
    BlockDiffusion,
    CausalBlockDiffusion,
    Decoder,
    DecodingOutput,
    FastDLLM,
    FirstHitting,
    IntrospectiveStrided,
    LinearSpeculation,
    LLaDA,
    RecomputeKV,
    ReFusion,
    TokenEditing,
    UniformDiffusion,
    WeDLM,
    decode,
)
from refusion_lit.families.llada.decoder import step_quota
from refusion_lit.types import Prompt, SamplingParams
from support.decoder_cases import (
    DECODERS,
    LastState,
    check_output,
    hash_models,
    prompts,
    setups,
    temperatures,
    traits_for,
    weighs_rows,
)
from support.example_counts import examples
from support.fakes import NUM_EXTRA_ROWS, VOCAB, FakeModel, HashModel, OracleModel, oracle_text, tiny_backbone
from support.scripted import decode_letters

each_decoder = pytest.mark.parametrize("cls", DECODERS, ids=lambda cls: cls.__name__)


@each_decoder
@settings(max_examples=examples(23), deadline=None)
@given(data=st.data(), make=hash_models(), drawn_prompts=prompts(), temperature=temperatures())
def test_output_is_text_within_the_budget(
    cls: type[Decoder],
    data: st.DataObject,
    make: Callable[[Decoder], HashModel],
    drawn_prompts: list[Prompt],
    temperature: float,
) -> None:
    decoder, sampling = data.draw(setups(cls))
    sampling = replace(sampling, temperature=temperature, top_p=0.9)
    model, watcher = make(decoder), LastState()
    size = data.draw(st.integers(1, 4))
    output = decode(model, decoder, drawn_prompts, sampling, batch_size=size, callbacks=[watcher])
    check_output(model, drawn_prompts, sampling, output, watcher)
    forwards = [row.num_forwards for row in output.rows]
    assert max(forwards) <= output.num_calls <= sum(forwards), "a call runs forward passes of several rows at once"
    if size == 1:
        assert output.num_calls == sum(forwards)
        shapes = [shape for row in output.rows for shape in row.forward_shapes]
        assert shapes == [tuple(call.input_ids.shape) for call in model.calls]
    check_call_shapes(model, output)


def check_call_shapes(model: FakeModel, output: DecodingOutput) -> None:
    """Compare the shapes that the engine counted with the inputs that the fake model recorded."""
    num_calls = num_forwards = num_positions = num_logits = sum_of_lengths = 0
    for (sequences, positions, logits), (calls, length) in output.call_shapes.counts.items():
        if positions:  # an entry without positions computes further logits of an earlier call
            num_calls += calls
            num_forwards += sequences * calls
        num_positions += positions * calls
        num_logits += logits * calls
        sum_of_lengths += length
    assert num_calls == output.num_calls == len(model.calls)
    assert num_forwards == sum(row.num_forwards for row in output.rows)
    assert num_positions == sum(row.num_positions for row in output.rows) - output.num_shared
    assert num_logits == model.num_logit_rows
    assert sum_of_lengths == sum(call.mask.shape[-1] for call in model.calls)


@each_decoder
@settings(max_examples=examples(12), deadline=None)
@given(data=st.data(), make=hash_models(["plain"]), drawn_prompts=prompts(max_size=1))
def test_the_prompt_is_fed_as_it_is(
    cls: type[Decoder], data: st.DataObject, make: Callable[[Decoder], HashModel], drawn_prompts: list[Prompt]
) -> None:
    decoder, sampling = data.draw(setups(cls))
    model, [prompt] = make(decoder), drawn_prompts
    decode(model, decoder, drawn_prompts, sampling)
    prompt_pairs = set(enumerate(prompt.token_ids))
    fed_pairs: set[tuple[int, int]] = set()
    for call in model.calls:
        fed_in_prompt = {(position, token) for position, token in call.fed if position < len(prompt.token_ids)}
        if len(call.input_ids) == 1:
            assert fed_in_prompt <= prompt_pairs
        fed_pairs |= fed_in_prompt
    assert prompt_pairs <= fed_pairs
    # Only guidance feeds other tokens at the prompt's positions: masks, in a second row.
    assert {token for _, token in fed_pairs - prompt_pairs} <= {model.special_tokens.mask_token_id}


@each_decoder
@settings(max_examples=examples(20), deadline=None)
@given(
    data=st.data(),
    make=hash_models(),
    drawn_prompts=prompts(),
    temperature=temperatures(),
    size=st.integers(2, 4),
    seed=st.integers(0, 99),
)
def test_a_batch_changes_no_row_and_temperature_zero_ignores_the_seed(
    cls: type[Decoder],
    data: st.DataObject,
    make: Callable[[Decoder], HashModel],
    drawn_prompts: list[Prompt],
    temperature: float,
    size: int,
    seed: int,
) -> None:
    decoder, sampling = data.draw(setups(cls))
    sampling = replace(sampling, temperature=temperature)
    order = data.draw(st.permutations(range(len(drawn_prompts))))
    rows = decode(make(decoder), decoder, [drawn_prompts[i] for i in order], sampling, batch_size=size).rows
    if temperature == 0 and not has_random_order(decoder):
        sampling = replace(sampling, seed=seed)
    for i, row in zip(order, rows, strict=True):
        [alone] = decode(make(decoder), decoder, [drawn_prompts[i]], sampling).rows  # in a batch of its own
        assert row.token_ids == alone.token_ids
        if not weighs_rows(decoder):
            assert row.forward_shapes == alone.forward_shapes
            assert row.num_positions == alone.num_positions


@each_decoder
@settings(max_examples=examples(6), deadline=None)
@given(data=st.data(), drawn_prompts=prompts(max_size=4), temperature=temperatures(), size=st.integers(2, 4))
def test_a_batch_changes_no_row_of_a_transformer(
    cls: type[Decoder], data: st.DataObject, drawn_prompts: list[Prompt], temperature: float, size: int
) -> None:
    decoder, sampling = data.draw(setups(cls))
    sampling = replace(sampling, temperature=temperature)
    model = tiny_backbone(traits_for(decoder))
    rows = decode(model, decoder, drawn_prompts, sampling, batch_size=size).rows
    number = data.draw(st.integers(0, len(rows) - 1))
    [alone] = decode(model, decoder, [drawn_prompts[number]], sampling).rows
    assert rows[number].token_ids == alone.token_ids
    assert weighs_rows(decoder) or rows[number].forward_shapes == alone.forward_shapes


def has_random_order(decoder: Decoder) -> bool:
    """Return whether an option makes the order of unmasking random, at temperature 0 too."""
    if isinstance(decoder, ReFusion):
        return decoder.selection == "random"
    if isinstance(decoder, FirstHitting):
        return True
    return isinstance(decoder, LLaDA) and decoder.order in ("random", "origin")


@each_decoder
def test_the_seed_alone_decides_what_is_drawn(cls: type[Decoder]) -> None:
    decoder = cls()
    drawn_prompts = [Prompt(token_ids=(3, 4), id=f"p{i}") for i in range(2)]

    def sample_texts(seed: int) -> list[list[int]]:
        model = HashModel(1, traits=traits_for(decoder))
        # The temperature makes all tokens nearly equally probable, so two seeds hardly give the same texts.
        sampling = SamplingParams(max_new_tokens=16, temperature=20.0, seed=seed)
        return [row.token_ids for row in decode(model, decoder, drawn_prompts, sampling).rows]

    first, second = sample_texts(4)
    assert [first, second] == sample_texts(4)
    assert [first, second] != sample_texts(5)
    assert first != second, "equal prompts of different ids differ"


@each_decoder
@settings(max_examples=examples(16), deadline=None)
@given(
    data=st.data(),
    drawn_prompts=prompts(max_size=4),
    end=st.none() | st.integers(0, 30),
    certainty=st.sampled_from([0.2, 0.6, 0.97]),
    agreement=st.sampled_from([0.2, 0.6, 0.97]),
    size=st.integers(1, 4),
)
def test_an_oracles_text_is_exact_and_costs_what_arithmetic_says(
    cls: type[Decoder],
    data: st.DataObject,
    drawn_prompts: list[Prompt],
    end: int | None,
    certainty: float,
    agreement: float,
    size: int,
) -> None:
    decoder, sampling = data.draw(setups(cls))
    if isinstance(decoder, CausalBlockDiffusion | LinearSpeculation):
        decoder = replace(decoder, max_thinking_tokens=None, end_think_token_id=None)  # which would write another text
        # The oracle would take the mask's id at the end of a prompt for a mask.
        drawn_prompts = [replace(prompt, token_ids=(*prompt.token_ids, 3)) for prompt in drawn_prompts]
    text = oracle_text(end)
    # Tokens further left are a little more certain, so that no two tokens tie and rounding decides nothing.
    model = OracleModel(
        text,
        certainty=lambda place: certainty - 1e-6 * place,
        agreement=lambda _: agreement,
        traits=traits_for(decoder),
    )
    forbids_ends = isinstance(decoder, LLaDA) and decoder.forbid_eos
    rows = decode(model, decoder, drawn_prompts, sampling, batch_size=size).rows
    for prompt, row in zip(drawn_prompts, rows, strict=True):
        start = len(prompt.token_ids)
        stop = start + sampling.max_new_tokens
        end_in_response = None if end is None or end < start else end - start
        if end_in_response is not None and end_in_response < sampling.max_new_tokens:
            if forbids_ends:
                continue
            stop = start + end_in_response + 1
        assert row.token_ids == [text(place) for place in range(start, stop)]
        case = Case(start, sampling.max_new_tokens, stop - start, end_in_response, certainty, agreement)
        expected = num_forwards(decoder, case)
        assert expected is None or row.num_forwards == expected


@each_decoder
@settings(max_examples=examples(20), deadline=None)
@given(
    data=st.data(),
    make=hash_models(),
    drawn_prompts=prompts(max_size=3),
    temperature=temperatures(),
    size=st.integers(1, 3),
)
def test_stops_are_decided_token_by_token_in_text_order(
    cls: type[Decoder],
    data: st.DataObject,
    make: Callable[[Decoder], HashModel],
    drawn_prompts: list[Prompt],
    temperature: float,
    size: int,
) -> None:
    decoder, sampling = data.draw(setups(cls))
    sampling = replace(sampling, temperature=temperature)
    # ``decode_letters`` writes "d", "e" and "f" for the tokens 3, 4 and 5.
    stop = tuple(data.draw(st.lists(st.text("def", min_size=1, max_size=2), max_size=2)))
    stopping = replace(sampling, stop=stop)
    unstopped_rows = decode(make(decoder), decoder, drawn_prompts, sampling).rows
    rows = decode(make(decoder), decoder, drawn_prompts, stopping, batch_size=size, detokenize=decode_letters).rows
    for unstopped, row in zip(unstopped_rows, rows, strict=True):
        expected = stop_slowly(unstopped.token_ids, stopping)
        assert row.token_ids == (unstopped.token_ids if expected is None else expected)
        assert (row.finish_reason == "stop") == (expected is not None)
        assert weighs_rows(decoder) or row.num_forwards <= unstopped.num_forwards


def stop_slowly(tokens: list[int], sampling: SamplingParams) -> list[int] | None:
    """Return a text up to the first token that completes a stop string; ``None`` without a stop string."""
    for length in range(1, len(tokens) + 1):
        if any(string in decode_letters(tokens[:length]) for string in sampling.stop):
            return tokens[:length]
    return None


@each_decoder
def test_a_response_of_hundreds_of_tokens_is_exact(cls: type[Decoder]) -> None:
    decoder = LLaDA(steps=16) if cls is LLaDA else cls()
    text = oracle_text(None)
    model, prompt = OracleModel(text, traits=traits_for(decoder)), Prompt(token_ids=(3, 4), id="p")
    [row] = decode(model, decoder, [prompt], SamplingParams(max_new_tokens=192)).rows
    assert row.token_ids == [text(position) for position in range(2, 2 + 192)]


# Expected numbers of forward passes, computed by arithmetic.


@dataclass(frozen=True)
class Case:
    """A response of an oracle.

    Attributes:
        start: Length of the prompt.
        budget: Maximum number of new tokens.
        length: Length of the response.
        end: Index of the EOS token in the response, which may lie beyond the budget; ``None`` without an EOS token.
        certainty: Probability of each token where a mask predicts it.
        agreement: Probability of each token where a clean token predicts it.
    """

    start: int
    budget: int
    length: int
    end: int | None
    certainty: float
    agreement: float


def num_forwards(decoder: Decoder, case: Case) -> int | None:
    """Return the expected number of forward passes; ``None`` if neither the decoder nor a base class has a formula."""
    for cls in type(decoder).__mro__:
        if cls in NUM_FORWARDS:
            return NUM_FORWARDS[cls](decoder, case)
    return None


def refusion_forwards(decoder: ReFusion, case: Case) -> int | None:
    if decoder.infill == "bonus" and decoder.fused:
        return None  # the cost of a forward pass decides when a plan is fused
    if decoder.selection == "random":
        return None  # how much is decoded after an end depends on the order
    size = decoder.slot_size
    num_slots = ceil(case.budget / size)
    per_block = ceil(num_slots / (decoder.num_serial_blocks or min(2, num_slots)))
    certainty = case.certainty**size if decoder.slot_confidence == "product" else case.certainty
    if decoder.selection in ("top_k", "sequential"):
        at_once = decoder.k or 1
    else:  # all slots are equally sure: all of a block exceed the threshold, or none, and then a single slot is chosen
        at_once = per_block if certainty > decoder.slot_threshold else 1
    # Blocks are decoded whole, except that slots after an EOS token are dropped, even if it lies beyond the budget.
    num_slots = ceil(ceil(case.length / size) / per_block) * per_block
    end = case.end if case.end is not None and case.end < num_slots * size else None
    if end is not None:
        num_slots = end // size + 1
    num, slot, is_planned = 0, 0, False
    while slot < num_slots:
        num_chosen = min(at_once, per_block - slot % per_block)
        infill = infill_forwards(decoder, case, None if end is None else end - slot * size)
        if decoder.infill == "bonus":  # an oracle's drafts are its own choice, so all are accepted
            needs_no_verification = size == 1 or end == slot * size  # first tokens are accepted as drafted
            infill = -1 if needs_no_verification else 0
        num += 1 + infill  # the verification
        num += not is_planned  # the plan, unless the forward pass before has made it
        slot += num_chosen
        is_planned = decoder.fused and (infill == 0 or isinstance(decoder, RecomputeKV))
    return num


def infill_forwards(decoder: ReFusion, case: Case, end: int | None) -> int:
    """Return the number of forwards that fill the chosen slots; ``end`` is the place of an EOS in them, if any."""
    size = decoder.slot_size
    if size == 1 or case.agreement > decoder.token_threshold or end == 0:
        return 0  # accepted by the verification: all tokens, or a first one that ends
    # Each round accepts one more token of each slot, up to the end in the first slot. The first token is accepted
    # already, but the first forward pass of autoregressive infill only proposes. A round of masks drafts and verifies.
    num_tokens = end + 1 if end is not None and end < size else size
    num = num_tokens if decoder.infill == "autoregressive" else 2 * (num_tokens - 1)
    return num + isinstance(decoder, RecomputeKV)  # which feeds the filled slots again


def block_forwards(decoder: BlockDiffusion, case: Case) -> int | None:
    if decoder.sampling_rule != "threshold" or decoder.shifted or not decoder.fused or decoder.num_steps:
        return None
    size = decoder.sub_block_size or decoder.block_size
    if case.certainty > decoder.threshold:
        return (case.start + case.length - 1) // size - case.start // size + 1
    return case.length  # one token a forward


def llada_forwards(decoder: LLaDA, case: Case) -> int | None:
    return None if decoder.stop_at_eos else decoder.steps or case.budget


def fast_dllm_forwards(decoder: FastDLLM, case: Case) -> int | None:
    if decoder.threshold is None or decoder.stop_at_eos or decoder.steps is not None:
        return None
    num, block_length = 0, decoder.block_length or case.budget
    for first in range(0, case.budget, block_length):
        size = min(block_length, case.budget - first)
        # A shifted model with a cache unmasks the first token of a block in a forward pass of its own.
        num_if_sure = 2 if decoder.shifted and decoder.cache != "none" else 1
        num += min(size, num_if_sure) if case.certainty >= decoder.threshold else size
    return num


def wedlm_forwards(decoder: WeDLM, case: Case) -> int:
    """Count forward passes where all masks are nearly equally sure, so that blocks and penalties alone decide."""
    others = VOCAB + NUM_EXTRA_ROWS - 1
    rest = (1 - case.certainty) / others  # the probability of every other token
    if decoder.selection == "confidence":
        log_odds = log(case.certainty / rest) / decoder.confidence_temperature
        probability = 1 / (1 + others * exp(-log_odds))
        is_sure = decoder.confidence_threshold is not None and probability >= decoder.confidence_threshold
        return ceil(case.length / decoder.window_size) if is_sure else case.length
    entropy = -case.certainty * log(case.certainty) - others * rest * log(rest)
    values = [entropy + decoder.position_penalty * k for k in range(decoder.window_size)]
    num_per_forward = max(1, sum(value < (decoder.entropy_threshold or 0) for value in values))
    return ceil(case.length / num_per_forward)


def card_forwards(decoder: CARD, case: Case) -> int:
    """Count forward passes by block: one if the model is sure enough, else rounds up to the end of the text."""
    num = 0
    for start in range(0, case.length, decoder.block_size):
        if case.certainty > decoder.threshold:
            num += 1
            continue
        num_filled = 0
        for quota in card_rounds(decoder, min(decoder.block_size, case.budget - start)):
            num, num_filled = num + 1, num_filled + quota
            if start + num_filled >= case.length:
                break
    return num


def card_rounds(decoder: CARD, size: int) -> list[int]:
    """Return how many masks of a block each forward pass fills if no mask is sure enough."""
    rounds: list[int] = []
    while sum(rounds) < size:
        quota = 1 if decoder.num_steps is None else step_quota(size, decoder.num_steps, len(rounds))
        rounds.append(size if len(rounds) + 1 == decoder.max_rounds else max(quota, 1))
    return rounds


def strided_forwards(decoder: IntrospectiveStrided, case: Case) -> int:
    """Count the prompt, a forward pass that adds two tokens, and full strides: all drafts of an oracle are right."""
    return 2 + ceil(max(case.length - 2, 0) / decoder.stride)


def d2f_forwards(decoder: D2F, case: Case) -> int:
    """Simulate which tokens of each open block are known, counted from the left, after each forward pass.

    A sure model fills all open blocks at once; an unsure model adds one token to each activated block.
    """
    size, num, num_open = decoder.block_size, 0, 1
    known = [0] * (1 + (case.budget - 1) // size)

    def is_known(place: int) -> bool:
        block, offset = divmod(place, size)
        return block < len(known) and known[block] > offset

    while not all(is_known(place) for place in range(case.length)):
        num_incomplete = num_open - next((i for i in range(num_open) if known[i] < size), num_open)
        is_due = num > 0 and known[num_open - 1] / size >= decoder.add_threshold and num_open < len(known)
        has_ended = case.end is not None and is_known(case.end)
        num_open += is_due and not has_ended and num_incomplete < (decoder.num_open_blocks or len(known) + 1)
        known_in_previous = [size, *known]  # the prompt precedes the first block
        for i in range(num_open):
            if case.certainty > decoder.threshold:
                known[i] = size
            elif known_in_previous[i] / size >= decoder.activate_threshold:
                known[i] = min(known[i] + 1, size)
        num += 1
    return num


def editing_forwards(decoder: TokenEditing, case: Case) -> int | None:
    """Count forward passes of whole blocks, which fill all masks at once if sure enough, else a quota.

    A last forward pass finds nothing to edit.
    """
    if decoder.stop_in_block or not decoder.stop_at_eos:
        return None  # depends on where the EOS token is written
    size, num, first = decoder.block_size, 0, case.start
    while first < case.start + case.length:
        num_masks = num_left = size - first % size
        num_fills = 0
        while num_left > 0:
            share = 0 if decoder.num_steps is None else step_quota(size, decoder.num_steps, num_fills)
            is_sure = case.certainty > decoder.mask_threshold
            num_left -= num_left if is_sure else max(share, decoder.min_num_filled)
            num_fills += 1
        num += num_fills + (num_fills != decoder.num_steps and decoder.max_post_steps > 0)
        first += num_masks
    return num


def set_forwards(decoder: SetDiffusion, case: Case) -> int:
    """Count forwards that commit the whole window if sure enough, else the quota, from the left."""
    is_sure = decoder.threshold is not None and case.certainty > decoder.threshold
    return ceil(case.length / (decoder.window_size if is_sure else min(decoder.quota, decoder.window_size)))


def uniform_forwards(decoder: UniformDiffusion, case: Case) -> int | None:
    """Count a forward for the text and all steps of each canvas, if no canvas is ever confident."""
    if decoder.confidence_threshold > 0:
        return None
    return ceil(case.length / decoder.canvas_length) * (1 + decoder.num_steps)


def apd_forwards(decoder: APD, case: Case) -> int:
    """Count two forwards for each window, whose drafts are all right; one for a window of one mask."""
    starts = range(0, case.length, decoder.max_lookahead or case.budget)
    return sum(1 if case.budget - start == 1 or decoder.max_lookahead == 1 else 2 for start in starts)


def causal_block_forwards(decoder: CausalBlockDiffusion, case: Case) -> int:
    """Count, for each block, the forward before it and those that fill its masks, all at once if sure enough."""
    threshold = decoder.threshold
    is_sure = threshold is not None and case.certainty >= threshold
    num = 0
    for place in range(0, case.length, decoder.block_size):
        num_masks = min(decoder.block_size, case.length - place) - decoder.causal_context
        num += 1 + (min(num_masks, 1) if is_sure else num_masks)
    return num


def linear_forwards(decoder: LinearSpeculation, case: Case) -> int:
    """Count the prompt, and rounds whose drafts all hold."""
    num_masks = decoder.block_size - 1
    num_drafting = min(num_masks, 1) if case.certainty >= decoder.threshold else num_masks
    return 1 + ceil((case.length - 1) / decoder.block_size) * (num_drafting + 1)


NUM_FORWARDS: dict[type[Decoder], Callable[[Any, Case], int | None]] = {
    Autoregressive: lambda _, case: case.length,
    ReFusion: refusion_forwards,
    BlockDiffusion: block_forwards,
    LLaDA: llada_forwards,
    FastDLLM: fast_dllm_forwards,
    WeDLM: wedlm_forwards,
    CARD: card_forwards,
    CausalBlockDiffusion: causal_block_forwards,
    LinearSpeculation: linear_forwards,
    IntrospectiveStrided: strided_forwards,
    D2F: d2f_forwards,
    APD: apd_forwards,
    SetDiffusion: set_forwards,
    TokenEditing: editing_forwards,
    UniformDiffusion: uniform_forwards,
}

# Options as values.


@each_decoder
@settings(max_examples=examples(12), deadline=None)
@given(data=st.data())
def test_options_are_values(cls: type[Decoder], data: st.DataObject) -> None:
    decoder, _ = data.draw(setups(cls))
    options = {field.name: getattr(decoder, field.name) for field in dataclasses.fields(decoder)}
    assert cls(**options) == decoder == replace(decoder)
    assert hash(cls(**options)) == hash(decoder)
    for name in options:
        with pytest.raises(FrozenInstanceError):
            setattr(decoder, name, options[name])


@each_decoder
def test_options_are_named_and_documented(cls: type[Decoder]) -> None:
    signature = inspect.signature(cls)
    assert all(parameter.kind is parameter.KEYWORD_ONLY for parameter in signature.parameters.values())
    assert all(parameter.default is not parameter.empty for parameter in signature.parameters.values())
    documented = "".join(base.__doc__ or "" for base in cls.__mro__)
    undocumented = [name for name in signature.parameters if f"{name}:" not in documented]
    assert not undocumented, f"document them under Attributes of {cls.__name__}'s docstring"
    needs = cls().requirements()
    assert needs.predictions
    with pytest.raises(FrozenInstanceError):
        needs.drafter = True  # type: ignore[misc]


@each_decoder
def test_options_of_another_kind_are_refused_by_name(cls: type[Decoder]) -> None:
    numbers = [field.name for field in dataclasses.fields(cls) if re.search(r"int|float", str(field.type))]
    for name, value in product(numbers, ("a", [1], True)):
        with pytest.raises(ValueError, match=f"^{name}: expected .*, got .*; .*\\.$"):
            cls(**{name: value})


def test_all_decoders_are_exported() -> None:
    exported = {getattr(refusion_lit.decoding, name) for name in refusion_lit.decoding.__all__}
    extras = {cls for cls in DECODERS if "contrib" in cls.__module__}
    assert set(DECODERS) - extras <= exported
    assert not extras & exported
    assert all(getattr(refusion_lit.decoding, cls.__name__) is cls for cls in extras), "plugins resolve by name"
