"""Self-speculative decoding writes what sequential decoding writes, in fewer forwards."""

from __future__ import annotations

import json
import random
import time
from dataclasses import replace
from pathlib import Path
from types import GeneratorType
from typing import Any, cast

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

import refusion_lit
from refusion_lit.decoding import (
    Autoregressive,
    Decoder,
    DecodingOutput,
    Forward,
    IntrospectiveStrided,
    SelfSpeculative,
    decode,
)
from refusion_lit.families.speculative.decoder import _ADAPTERS, _DRAFTER_COST_FACTOR, SpeculativeState, cheapest
from refusion_lit.modeling.drafter import DraftMasks
from refusion_lit.modeling.interface import LanguageModel
from refusion_lit.types import ModelTraits, Prompt, SamplingParams
from support.decoder_cases import LastState, prompts, temperatures, traits_for
from support.example_counts import examples
from support.fakes import (
    DRAFTS,
    EOS,
    HYBRID,
    MASK,
    SPECIAL,
    VOCAB,
    HashModel,
    OracleModel,
    oracle_text,
    tiny_backbone,
)
from support.scripted import decode_letters
from support.slow_decoding import best_allowed

NEXT = ModelTraits(predictions=("next_token",))
MASKED = ModelTraits(attention="bidirectional", predictions=("mask",))
REPOSITORY = Path(__file__).parents[3]
UNABLE = replace(SPECIAL, draft_token_ids=())
LAYOUTS = (None, "single_forward", "two_forwards")
STOPPED: dict[str, Any] = {
    "ends": frozenset(), "bias": -8.0, "options": {"num_drafts": 4, "forward_cost": 200}, "size": 2, "length": 17,
    "drawn_prompts": [Prompt(token_ids=(3, 4, 5), id="0"), Prompt(token_ids=(6,), id="1")], "temperature": 0.0,
}  # fmt: skip


def texts(output: DecodingOutput) -> list[tuple[list[int], str]]:
    return [(row.token_ids, row.finish_reason) for row in output.rows]


@st.composite
def options(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "num_drafts": draw(st.none() | st.integers(0, 6)),
        "layout": draw(st.sampled_from(LAYOUTS)),
        "forward_cost": draw(st.sampled_from([0, 8, 200])),
    }


@st.composite
def stops(draw: st.DrawFn) -> dict[str, Any]:
    strings = st.text(decode_letters(list(range(VOCAB))), min_size=1, max_size=2)
    return {"stop": tuple(draw(st.lists(strings, max_size=2)))}


@settings(max_examples=examples(54), deadline=None)
@given(
    seed=st.integers(0, 9999), ends=st.frozensets(st.integers(1, 30), max_size=3), bias=st.sampled_from([0.0, -8.0]),
    drawn_prompts=prompts(), options=options(), size=st.integers(1, 4), length=st.integers(1, 17),
    temperature=temperatures(), stops=stops(),
)  # fmt: skip
@example(stops={"stop": ("e", "g")}, seed=45, **STOPPED)  # the end falls among tokens of one forward
def test_the_text_is_that_of_autoregressive_decoding(
    seed: int,
    ends: frozenset[int],
    bias: float,
    drawn_prompts: list[Prompt],
    options: dict[str, Any],
    size: int,
    length: int,
    temperature: float,
    stops: dict[str, Any],
) -> None:
    def model() -> HashModel:
        return HashModel(seed, ends=ends, end_bias=bias, traits=NEXT)

    sampling = SamplingParams(max_new_tokens=length, temperature=temperature, top_p=0.9, seed=seed, **stops)
    expected = decode(model(), Autoregressive(), drawn_prompts, sampling, detokenize=decode_letters)
    output = decode(
        model(), SelfSpeculative(**options), drawn_prompts, sampling, batch_size=size, detokenize=decode_letters
    )
    assert texts(output) == texts(expected)
    assert all(row.num_forwards <= row.num_tokens for row in output.rows), "every forward commits a token"


def slot_by_slot(model: LanguageModel, prompt: tuple[int, ...], slot_size: int, length: int) -> list[int]:
    """Decode slots left to right without a cache: a slot's first token at its mask, the others at the one before."""
    tokens: list[int] = []
    special = model.special_tokens
    while len(tokens) < length:
        starts = len(tokens) % slot_size == 0
        row = [*prompt, *tokens, *([MASK] if starts else [])]
        mask = torch.ones(1, len(row), len(row), dtype=torch.bool).tril()
        hidden = model.hidden_states(torch.tensor([row]), torch.arange(len(row))[None], mask)
        logits = model.logits(hidden[0, -1:])[0]
        tokens.append(best_allowed(logits, special.banned_token_ids, special.vocab_size))
        if tokens[-1] in special.eos_token_ids:
            break
    return tokens


@settings(max_examples=examples(60), deadline=None)
@given(
    seed=st.integers(0, 9999), ends=st.frozensets(st.integers(1, 30), max_size=3), drawn_prompts=prompts(max_size=3),
    slot_size=st.integers(1, 5), options=options(), length=st.integers(1, 17), size=st.integers(1, 3),
)  # fmt: skip
def test_on_hybrid_models_the_text_is_that_of_slots_left_to_right(
    seed: int,
    ends: frozenset[int],
    drawn_prompts: list[Prompt],
    slot_size: int,
    options: dict[str, Any],
    length: int,
    size: int,
) -> None:
    decoder = SelfSpeculative(slot_size=slot_size, **options)
    model, slow = (HashModel(seed, ends=ends, end_bias=-8.0) for _ in range(2))
    rows = decode(model, decoder, drawn_prompts, SamplingParams(max_new_tokens=length), batch_size=size).rows
    for prompt, row in zip(drawn_prompts, rows, strict=True):
        assert row.token_ids == slot_by_slot(slow, prompt.token_ids, slot_size, length)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_real_model_with_a_drafter_writes_its_own_text(layout: Any, temperature: float) -> None:
    model = tiny_backbone(NEXT)
    requests = [Prompt(token_ids=tuple(range(3, 3 + n)), id=str(n)) for n in (1, 4, 7, 2, 9)]
    sampling = SamplingParams(max_new_tokens=40, temperature=temperature)
    expected = decode(model, Autoregressive(), requests, sampling)
    for size in (1, 3):
        output = decode(model, SelfSpeculative(layout=layout), requests, sampling, batch_size=size)
        assert texts(output) == texts(expected)


def test_adapters_are_made_when_the_first_draft_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    model, made = tiny_backbone(NEXT), []
    make = DraftMasks.layers.func
    monkeypatch.setattr(DraftMasks, "layers", property(lambda masks: made.append(masks) or make(masks)))
    requests, sampling = [Prompt(token_ids=(3, 4), id="0")], SamplingParams(max_new_tokens=4)
    decode(model, Autoregressive(), requests, sampling)
    assert not made, "they take as long as a forward pass"
    decode(model, SelfSpeculative(layout="two_forwards"), requests, sampling)
    assert made


def test_a_real_hybrid_model_is_decoded_slot_by_slot() -> None:
    model, prompt = tiny_backbone(HYBRID), (3, 4, 5)
    expected = slot_by_slot(model, prompt, 4, 23)
    requests = [Prompt(token_ids=prompt, id="0")]
    [row] = decode(model, SelfSpeculative(slot_size=4), requests, SamplingParams(max_new_tokens=23)).rows
    assert row.token_ids == expected


def forwards(layout: str | None, length: int, *, right_from: int) -> tuple[int, int]:
    """Return forwards and positions of a decode whose drafts are all right from a position on, and all wrong before."""
    text = oracle_text(None)
    model = OracleModel(text, traits=NEXT)
    known = model.logits
    wrong = OracleModel(lambda place: 3 + (text(place) - 2) % 11, traits=NEXT)
    model.hidden_states = lambda ids, places, mask, cache=None: torch.stack(  # type: ignore[method-assign]
        [places + 1, (torch.isin(ids, torch.tensor(DRAFTS)) & (places < right_from)).long()], -1
    )
    model.logits = (
        lambda hidden: torch.where(  # type: ignore[method-assign]
            hidden[:, 1:] == 1, wrong.logits(hidden * torch.tensor([1, 0])), known(hidden * torch.tensor([1, 0]))
        )
    )
    decoder = SelfSpeculative(layout=layout, forward_cost=32)  # type: ignore[arg-type]
    [row] = decode(model, decoder, [Prompt(token_ids=(5, 6), id="0")], SamplingParams(max_new_tokens=length)).rows
    assert row.token_ids == [text(2 + i) for i in range(length)]
    return row.num_forwards, row.num_positions


def test_forwards_follow_from_arithmetic() -> None:
    num_masks, length = len(DRAFTS), 31
    # The first forward commits one token and drafts; each later one commits all drafts and one token more.
    assert forwards("single_forward", length, right_from=0)[0] == 1 + -(-(length - 1) // (num_masks + 1))
    # Draft and verify in turn: one token, then the drafts and one more.
    assert forwards("two_forwards", length, right_from=0)[0] == -(-length // (num_masks + 2)) * 2 - (length % 6 == 1)
    assert forwards("single_forward", length, right_from=999)[0] == length
    assert forwards("two_forwards", length, right_from=999)[0] == length
    assert forwards("two_forwards", length, right_from=999)[1] < forwards("single_forward", length, right_from=999)[1]


def test_masks_stand_where_they_pay() -> None:
    requests, sampling = [Prompt(token_ids=(5, 6, 7), id="0")], SamplingParams(max_new_tokens=60)
    counts = {}
    for cost in (0.0, 10_000.0):
        model = HashModel(5, end_bias=-60.0, traits=NEXT)
        [row] = decode(model, SelfSpeculative(forward_cost=cost), requests, sampling).rows
        counts[cost] = (row.num_forwards, row.num_positions)
    assert counts[10_000][0] <= counts[0][0]
    assert counts[10_000][1] > counts[0][1]


def test_a_model_without_masks_is_refused() -> None:
    requests = [Prompt(token_ids=(5,), id="0")]
    with pytest.raises(ValueError, match=r"^decoder: expected a model with a drafter, .*--draft"):
        decode(HashModel(traits=NEXT, special=UNABLE), SelfSpeculative(), requests, SamplingParams())
    with pytest.raises(ValueError, match=r"^decoder: expected a model with a drafter, .*slot_size"):
        decode(HashModel(traits=ModelTraits(), special=UNABLE), SelfSpeculative(), requests, SamplingParams())
    sequential = SelfSpeculative(num_drafts=0)
    decode(HashModel(traits=NEXT, special=UNABLE), sequential, requests, SamplingParams(max_new_tokens=3))


def test_a_hybrid_model_without_slot_size_is_refused_with_the_option_to_set() -> None:
    requests = [Prompt(token_ids=(5,), id="0")]
    with pytest.raises(ValueError, match=r"next_token, .*slot_size") as refused:
        decode(HashModel(traits=HYBRID, special=UNABLE), SelfSpeculative(), requests, SamplingParams())
    assert "allow_mismatch" not in str(refused.value)
    set_as_told = SelfSpeculative(slot_size=4)
    decode(HashModel(traits=HYBRID, special=UNABLE), set_as_told, requests, SamplingParams(max_new_tokens=3))
    for decoder, traits in ((SelfSpeculative(), MASKED), (set_as_told, NEXT)):  # no slot_size makes these fit
        with pytest.raises(ValueError, match="allow_mismatch"):
            decode(HashModel(traits=traits, special=UNABLE), decoder, requests, SamplingParams())


@pytest.mark.parametrize(
    "decoder",
    [
        SelfSpeculative(layout="single_forward"),
        SelfSpeculative(layout="single_forward", coupling="rejection"),
        SelfSpeculative(layout="two_forwards", coupling="rejection"),
        SelfSpeculative(layout="single_forward", coupling="rejection", slot_size=2),
        SelfSpeculative(layout="two_forwards", coupling="rejection", slot_size=3),
        IntrospectiveStrided(stride=3, coupling="rejection"),
    ],
    ids=repr,
)
def test_sampled_tokens_follow_the_models_distribution(decoder: Decoder) -> None:
    slot_size = getattr(decoder, "slot_size", None)
    # With a vocabulary of few tokens and three places, all outcomes can be counted.
    number = 1000
    model = HashModel(11, end_bias=-60.0, traits=traits_for(decoder))
    requests = [Prompt(token_ids=(5, 6), id=str(i)) for i in range(number)]
    sampling = SamplingParams(max_new_tokens=3, temperature=8.0, top_k=3)
    # Looking for common beginnings would take most of the time.
    rows = decode(model, decoder, requests, sampling, batch_size=400, share_prefixes=False).rows
    counts: dict[tuple[int, ...], int] = {}
    for row in rows:
        counts[tuple(row.token_ids)] = counts.get(tuple(row.token_ids), 0) + 1
    statistic, degrees, expected = 0.0, -1, outcomes(model, (5, 6), sampling, slot_size)
    for text, probability in expected.items():
        statistic += (counts.get(text, 0) - number * probability) ** 2 / (number * probability)
        degrees += 1
    assert set(counts) <= set(expected)
    assert statistic < degrees + 4 * (2 * degrees) ** 0.5 + 6, "beyond four standard deviations"


def outcomes(
    model: HashModel, prompt: tuple[int, ...], sampling: SamplingParams, slot_size: int | None
) -> dict[tuple[int, ...], float]:
    """Return the probability of every text, in plain Python; a slot's first token is read at its mask."""
    texts = {(): 1.0}
    for place in range(sampling.max_new_tokens):
        longer: dict[tuple[int, ...], float] = {}
        for text, probability in texts.items():
            if text and text[-1] == EOS:
                longer[text] = longer.get(text, 0) + probability
                continue
            row = [*prompt, *text, *([MASK] if slot_size is not None and place % slot_size == 0 else [])]
            mask = torch.ones(1, len(row), len(row), dtype=torch.bool).tril()
            hidden = model.hidden_states(torch.tensor([row]), torch.arange(len(row))[None], mask)
            logits = model.logits(hidden[0, -1:])[0]
            logits[[0, MASK]] = -torch.inf
            kept = logits[: model.special_tokens.vocab_size].topk(sampling.top_k or 99)
            shares = (kept.values / sampling.temperature).softmax(-1)
            for token, share in zip(kept.indices.tolist(), shares.tolist(), strict=True):
                longer[(*text, token)] = longer.get((*text, token), 0) + probability * share
        texts = longer
    return texts


def test_rejection_sampling_keeps_more_drafts_than_shared_noise_in_fewer_forwards() -> None:
    requests = [Prompt(token_ids=(5, 6), id=str(i)) for i in range(200)]
    sampling = SamplingParams(max_new_tokens=12, temperature=8.0)
    shares, num_forwards = [], []
    for coupling in ("shared_noise", "rejection"):
        watcher, model = LastState(), HashModel(11, end_bias=-60.0, traits=NEXT)
        decoder = SelfSpeculative(layout="two_forwards", coupling=coupling)  # type: ignore[arg-type]
        rows = decode(model, decoder, requests, sampling, callbacks=[watcher], batch_size=100).rows
        states = [state for state in watcher.states.values() if isinstance(state, SpeculativeState)]
        shares.append(sum(s.acceptance.num_accepted for s in states) / sum(s.acceptance.num_tested for s in states))
        num_forwards.append(sum(row.num_forwards for row in rows))
    assert shares[0] + 0.03 < shares[1]
    assert num_forwards[1] < num_forwards[0]


@pytest.mark.parametrize("slot_size", [None, 3])
@pytest.mark.parametrize("layout", ["single_forward", "two_forwards"])
def test_rejection_sampling_keeps_every_draft_that_is_as_probable_as_its_token(
    monkeypatch: pytest.MonkeyPatch, layout: Any, slot_size: int | None
) -> None:
    same = torch.linspace(0, 3, VOCAB).index_fill(0, torch.tensor([EOS]), -60.0)
    monkeypatch.setattr(HashModel, "logits", lambda _, hidden: same.expand(*hidden.shape[:-1], -1).clone())
    watcher, model = LastState(), HashModel(traits=NEXT if slot_size is None else HYBRID)
    requests = [Prompt(token_ids=(5, 6), id=str(i)) for i in range(8)]
    decoder = SelfSpeculative(layout=layout, slot_size=slot_size, coupling="rejection")
    decode(model, decoder, requests, SamplingParams(max_new_tokens=24, temperature=1.0), callbacks=[watcher])
    for state in cast("list[SpeculativeState]", list(watcher.states.values())):
        assert state.acceptance.num_accepted == state.acceptance.num_tested > 0


def test_greedy_text_is_the_same_with_both_couplings() -> None:
    requests = [Prompt(token_ids=(5, 6, token), id=str(token)) for token in range(3, 9)]
    sampling, counted = SamplingParams(max_new_tokens=20), []
    for coupling in ("shared_noise", "rejection"):
        decoder = SelfSpeculative(layout="single_forward", coupling=coupling)  # type: ignore[arg-type]
        rows = decode(HashModel(3, end_bias=-60.0, traits=NEXT), decoder, requests, sampling).rows
        counted.append([(row.token_ids, row.num_forwards) for row in rows])
    assert counted[0] == counted[1]


def test_rejection_sampling_needs_a_named_layout() -> None:
    with pytest.raises(ValueError, match=r"^coupling: expected shared_noise .*set layout"):
        SelfSpeculative(coupling="rejection")
    SelfSpeculative(coupling="rejection", layout="two_forwards")


def time_per_token(cost: float, acceptance: float, num_drafts: int, layout: str) -> float:
    """Return the mean cost of a token, in positions, over all numbers of accepted drafts."""
    spent = num_tokens = 0.0
    for accepted in range(num_drafts + 1):
        probability = acceptance**accepted * (1 - acceptance if accepted < num_drafts else 1)
        if layout == "two_forwards":
            spent += probability * (2 * (cost + 1 + num_drafts) if num_drafts else cost + 1)
            num_tokens += probability * (2 + accepted if num_drafts else 1)
        else:
            spent += probability * (cost + 1 + num_drafts + (num_drafts + 1) * num_drafts)
            num_tokens += probability * (1 + accepted)
    return spent / num_tokens


@pytest.mark.parametrize("cost", [0.0, 2.0, 32.0, 256.0])
@pytest.mark.parametrize("acceptance", [0.1, 0.5, 0.9])
def test_the_layout_is_the_one_that_takes_least_time(cost: float, acceptance: float) -> None:
    chosen = cheapest(cost, 0.0, acceptance, 5)
    costs = {
        (layout, d): time_per_token(cost, acceptance, d, layout)
        for layout in ("two_forwards", "single_forward")
        for d in range(6)
    }
    layout, num_drafts = chosen
    least = min(costs.values())
    if least > 0.995 * costs["two_forwards", 0]:
        assert num_drafts == 0, "drafts save less than 1 %"
    elif least < 0.98 * costs["two_forwards", 0]:
        assert costs[layout, num_drafts] <= 1.02 * least


@pytest.mark.parametrize("size", [1, 2, 3, 4, 16])
def test_rows_that_share_a_forwards_cost_make_no_drafts_by_default(size: int) -> None:
    prompts = [Prompt(token_ids=(5, 6, 7), id=str(number)) for number in range(size)]
    counts = []
    for decoder in (Autoregressive(), SelfSpeculative()):
        model = HashModel(5, end_bias=-60.0, traits=NEXT)
        output = decode(model, decoder, prompts, SamplingParams(max_new_tokens=120), batch_size=size)
        counts.append((output.num_calls, output.num_positions))
    exact, drafted = counts
    assert (exact == drafted) == (size > 1)


@pytest.mark.parametrize("size", range(1, 7))
def test_a_hybrid_model_drafts_in_batches_of_up_to_five(size: int) -> None:
    """It has no adapters whose cost a drafter's forwards would carry."""
    model = refusion_lit.load(REPOSITORY / "tests" / "goldens" / "models" / "additions-clean")
    queries = [f"{number}+{number + 11},{number + 2}+{number + 40}>" for number in range(12, 12 + size)]
    rows = model.generate(queries, decoder=SelfSpeculative(slot_size=8), max_new_tokens=32, batch_size=size)
    drafted = [row.num_forwards < row.num_tokens for row in rows]
    assert drafted == [size <= 5] * size


def test_accepted_drafts_keep_a_row_drafting_in_a_larger_batch() -> None:
    model, sampling = HashModel(5, traits=NEXT), SamplingParams(max_new_tokens=20)
    decoder, drafts = SelfSpeculative(), []
    for num_accepted in (0, 5):
        state = decoder.begin(Prompt(token_ids=(5, 6, 7), id="0"), sampling, model.special_tokens)
        state.acceptance.count(6, num_accepted, num_accepted)
        state.num_rows = 3
        request = next(decoder.step(state))
        assert isinstance(request, Forward)
        drafts.append("draft" in request.phase)
    assert drafts == [False, True]


def test_steps_without_drafts_are_those_of_autoregressive() -> None:
    """No code of the drafts runs for them, so they cost what ``Autoregressive`` costs."""
    model, sampling = HashModel(5, traits=NEXT), SamplingParams(max_new_tokens=20)
    state = SelfSpeculative().begin(Prompt(token_ids=(5, 6, 7), id="0"), sampling, model.special_tokens)
    for num_rows, is_plain in [(1, False), (16, True)]:
        state.num_rows = num_rows
        steps = cast("GeneratorType[Any, Any, Any]", SelfSpeculative().step(state))
        assert (steps.gi_code is Autoregressive.step.__code__) == is_plain


def test_drafts_that_are_always_wrong_cost_little() -> None:
    length, cost = 400, 32
    num_forwards, num_positions = forwards(None, length, right_from=999)
    assert num_forwards == length
    assert num_forwards * cost + num_positions < 1.03 * length * (cost + 1)


def test_drafting_is_tried_again_after_wrong_drafts() -> None:
    # 100 tokens one by one; then, within one half-life, rounds of two forwards for seven tokens.
    num_forwards, _ = forwards(None, 400, right_from=102)
    assert num_forwards < 100 + 32 + 300 * 2 / (len(DRAFTS) + 2) + 6


@pytest.mark.parametrize("name", ["default_epyc", "default_slow"])
def test_the_cost_that_the_rule_relies_on_is_there(name: str) -> None:
    """On all machines a forward with masks costs no more than the rule counts, over one without."""
    record = json.loads((REPOSITORY / "experiments" / "lossless" / f"{name}.json").read_text(encoding="utf-8"))
    counted = _DRAFTER_COST_FACTOR * tiny_backbone(NEXT).forward_cost

    def over_one_without(fixed: float, adapters: float) -> float:
        return (fixed * (1 + adapters) + 1 + len(DRAFTS)) / (fixed + 1)

    for measured in record["types"].values():
        cost = measured["forward_cost"]
        assert counted < 1.1 * cost["positions"], "fits on one machine differ by a tenth"
        assert over_one_without(counted, _ADAPTERS) > over_one_without(cost["positions"], cost.get("adapters", 0))


def test_a_busy_machine_changes_neither_text_nor_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = []
    for seed in range(2):
        rng, now = random.Random(seed), [0.0]

        def tick(rng: random.Random = rng, now: list[float] = now) -> float:
            now[0] += rng.expovariate(1.0)
            return now[0]

        for name in ("perf_counter", "monotonic", "process_time", "time"):
            monkeypatch.setattr(time, name, tick)
        model = HashModel(5, end_bias=-60.0, traits=NEXT)
        prompts = [Prompt(token_ids=(5, 6, number), id=str(number)) for number in range(3)]
        output = decode(model, SelfSpeculative(), prompts, SamplingParams(max_new_tokens=60), batch_size=2)
        outcomes.append([(row.token_ids, row.forward_shapes) for row in output.rows])
        assert output.seconds > 0
    assert outcomes[0] == outcomes[1]


def test_masks_are_read_together_where_they_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    num_passes, logits = 0, HashModel.logits

    def count_pass(*args: Any) -> Tensor:
        nonlocal num_passes
        num_passes += 1
        return logits(*args)

    monkeypatch.setattr(HashModel, "logits", count_pass)
    model, sampling = HashModel(5, end_bias=-60.0, traits=NEXT), SamplingParams(max_new_tokens=20)
    prompts = [Prompt(token_ids=(5, 6, 7), id="0")]
    output = decode(model, SelfSpeculative(layout="two_forwards"), prompts, sampling)
    assert num_passes == output.num_calls
