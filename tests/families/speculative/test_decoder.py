"""Self-speculative decoding writes what sequential decoding writes, in fewer forwards."""

from __future__ import annotations

import json
import random
import time
from dataclasses import replace
from itertools import accumulate, count
from math import ceil
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
    PAD,
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
WITHOUT_DRAFTER = replace(SPECIAL, draft_token_ids=())
"""Special tokens of a model without a drafter."""
LAYOUTS = (None, "single_forward", "two_forwards")
# A case in which the two prompts stop within the tokens of a forward pass.
STOPPED: dict[str, Any] = {
    "ends": frozenset(), "bias": -8.0, "options": {"num_drafts": 4, "forward_cost": 200}, "size": 2, "length": 17,
    "drawn_prompts": [Prompt(token_ids=(3, 4, 5), id="0"), Prompt(token_ids=(6,), id="1")], "temperature": 0.0,
}  # fmt: skip


def list_texts(output: DecodingOutput) -> list[tuple[list[int], str]]:
    """Return token ids and finish reason of each prompt."""
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
    assert list_texts(output) == list_texts(expected)
    assert all(row.num_forwards <= row.num_tokens for row in output.rows), "every forward commits a token"


def slot_by_slot(model: LanguageModel, prompt: tuple[int, ...], slot_size: int, length: int) -> list[int]:
    """Decode slots from left to right without a cache.

    The first token of a slot is predicted by a mask at its position, other tokens by the token before.
    """
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
        assert list_texts(output) == list_texts(expected)


def test_adapters_are_made_when_the_first_draft_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_backbone(NEXT)
    made: list[DraftMasks] = []
    make = DraftMasks.layers.func

    def record(masks: DraftMasks) -> Any:
        made.append(masks)
        return make(masks)

    monkeypatch.setattr(DraftMasks, "layers", property(record))
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


class OracleWithWrongDrafts(OracleModel):
    """Predicts the oracle's text, but masks draft wrong tokens before the position ``right_from``."""

    def __init__(self, right_from: int) -> None:
        text = oracle_text(None)
        super().__init__(text, traits=NEXT)
        self.right_from = right_from
        # The next of the eleven ordinary tokens 3 to 13, in a circle, is never the right token.
        self.wrong = OracleModel(lambda place: 3 + (text(place) - 2) % 11, traits=NEXT)

    def hidden_states(self, input_ids: Tensor, position_ids: Tensor, attention_mask: Any, cache: Any = None) -> Tensor:
        is_wrong = torch.isin(input_ids, torch.tensor(DRAFTS)) & (position_ids < self.right_from)
        return torch.stack([position_ids + 1, is_wrong.long()], -1)

    def logits(self, hidden: Tensor) -> Tensor:
        is_wrong = hidden[:, 1:] == 1
        # The second number of an oracle's state says whether a mask drafts; here all tokens predict like clean tokens.
        from_clean_tokens = hidden * torch.tensor([1, 0])
        return torch.where(is_wrong, self.wrong.logits(from_clean_tokens), super().logits(from_clean_tokens))


def count_forwards(layout: str | None, length: int, *, right_from: int) -> tuple[int, int]:
    """Decode an oracle's text; return the numbers of forward passes and of positions.

    Args:
        layout: The decoder's layout.
        length: Number of tokens.
        right_from: Position from which all drafts are right; before, all drafts are wrong.
    """
    model, text = OracleWithWrongDrafts(right_from), oracle_text(None)
    decoder = SelfSpeculative(layout=layout, forward_cost=32)  # type: ignore[arg-type]
    [row] = decode(model, decoder, [Prompt(token_ids=(5, 6), id="0")], SamplingParams(max_new_tokens=length)).rows
    assert row.token_ids == [text(2 + i) for i in range(length)]
    return row.num_forwards, row.num_positions


NEVER = 999
"""A position after all texts, for drafts that are always wrong."""


def test_numbers_of_forward_passes_follow_from_arithmetic() -> None:
    num_masks, length = len(DRAFTS), 31

    # All drafts are right. With a single forward pass, the first commits a token and drafts; every later forward pass
    # commits all drafts and one more token.
    num_forwards, _ = count_forwards("single_forward", length, right_from=0)
    assert num_forwards == 1 + ceil((length - 1) / (num_masks + 1))
    # With two, a forward pass that drafts commits a token, and a forward pass that verifies commits the drafts and one
    # more token; a last token after a whole round needs no verification.
    num_forwards, _ = count_forwards("two_forwards", length, right_from=0)
    assert num_forwards == 2 * ceil(length / (num_masks + 2)) - (length % (num_masks + 2) == 1)

    # All drafts are wrong: a token per forward pass.
    single_forwards, single_positions = count_forwards("single_forward", length, right_from=NEVER)
    two_forwards, two_positions = count_forwards("two_forwards", length, right_from=NEVER)
    assert single_forwards == two_forwards == length
    assert two_positions < single_positions


def test_the_more_a_forward_pass_costs_the_more_masks_it_carries() -> None:
    """The user's ``forward_cost`` is the cost of a forward pass in positions."""
    requests, sampling = [Prompt(token_ids=(5, 6, 7), id="0")], SamplingParams(max_new_tokens=60)
    model = HashModel(5, end_bias=-60.0, traits=NEXT)
    [cheap], [expensive] = (
        decode(model, SelfSpeculative(forward_cost=cost), requests, sampling).rows for cost in (0.0, 10_000.0)
    )
    assert expensive.num_forwards <= cheap.num_forwards
    assert expensive.num_positions > cheap.num_positions


def test_a_model_without_draft_masks_is_refused() -> None:
    requests = [Prompt(token_ids=(5,), id="0")]
    with pytest.raises(ValueError, match=r"^decoder: expected a model with a drafter, .*--draft"):
        decode(HashModel(traits=NEXT, special=WITHOUT_DRAFTER), SelfSpeculative(), requests, SamplingParams())
    with pytest.raises(ValueError, match=r"^decoder: expected a model with a drafter, .*slot_size"):
        decode(HashModel(traits=ModelTraits(), special=WITHOUT_DRAFTER), SelfSpeculative(), requests, SamplingParams())
    sequential = SelfSpeculative(num_drafts=0)
    decode(HashModel(traits=NEXT, special=WITHOUT_DRAFTER), sequential, requests, SamplingParams(max_new_tokens=3))


def test_a_hybrid_model_without_slot_size_is_refused_with_the_option_to_set() -> None:
    requests = [Prompt(token_ids=(5,), id="0")]
    with pytest.raises(ValueError, match=r"next_token, .*slot_size") as refused:
        decode(HashModel(traits=HYBRID, special=WITHOUT_DRAFTER), SelfSpeculative(), requests, SamplingParams())
    assert "allow_mismatch" not in str(refused.value)
    fixed = SelfSpeculative(slot_size=4)
    decode(HashModel(traits=HYBRID, special=WITHOUT_DRAFTER), fixed, requests, SamplingParams(max_new_tokens=3))
    for decoder, traits in ((SelfSpeculative(), MASKED), (fixed, NEXT)):  # no slot_size makes these models fit
        with pytest.raises(ValueError, match="allow_mismatch"):
            decode(HashModel(traits=traits, special=WITHOUT_DRAFTER), decoder, requests, SamplingParams())


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
    expected = outcomes(model, (5, 6), sampling, slot_size)
    assert set(counts) <= set(expected)
    # Pearson's statistic has this mean and standard deviation; 6 more, because it is skewed to the right.
    statistic = sum((counts.get(text, 0) - number * p) ** 2 / (number * p) for text, p in expected.items())
    mean = len(expected) - 1
    standard_deviation = (2 * mean) ** 0.5
    assert statistic < mean + 4 * standard_deviation + 6


def outcomes(
    model: HashModel, prompt: tuple[int, ...], sampling: SamplingParams, slot_size: int | None
) -> dict[tuple[int, ...], float]:
    """Return the probability of every text, in plain Python.

    Args:
        model: The model.
        prompt: The prompt.
        sampling: Sampling options.
        slot_size: If given, the first token of each slot is predicted by a mask at its position.
    """
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
            logits[[PAD, MASK]] = -torch.inf
            top = logits[: model.special_tokens.vocab_size].topk(sampling.top_k or VOCAB)
            shares = (top.values / sampling.temperature).softmax(-1)
            for token, share in zip(top.indices.tolist(), shares.tolist(), strict=True):
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
def test_rejection_sampling_keeps_all_drafts_of_equal_distributions(
    monkeypatch: pytest.MonkeyPatch, layout: Any, slot_size: int | None
) -> None:
    """All logits of the model are replaced by the same row, without EOS."""
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
    sampling, results = SamplingParams(max_new_tokens=20), []
    for coupling in ("shared_noise", "rejection"):
        decoder = SelfSpeculative(layout="single_forward", coupling=coupling)  # type: ignore[arg-type]
        rows = decode(HashModel(3, end_bias=-60.0, traits=NEXT), decoder, requests, sampling).rows
        results.append([(row.token_ids, row.num_forwards) for row in rows])
    assert results[0] == results[1]


def test_rejection_sampling_needs_a_named_layout() -> None:
    with pytest.raises(ValueError, match=r"^coupling: expected shared_noise .*set layout"):
        SelfSpeculative(coupling="rejection")
    SelfSpeculative(coupling="rejection", layout="two_forwards")


def time_per_token(cost: float, acceptance: float, num_drafts: int, layout: str) -> float:
    """Return the mean cost of a token, in positions.

    Args:
        cost: Cost of a forward pass without its positions.
        acceptance: Probability that a draft is accepted, if the drafts before it are.
        num_drafts: Number of drafts.
        layout: The decoder's layout.
    """
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
    layout, num_drafts = cheapest(cost, 0.0, acceptance, 5)
    costs = {
        (name, number): time_per_token(cost, acceptance, number, name)
        for name in ("two_forwards", "single_forward")
        for number in range(6)
    }
    least, without_drafts = min(costs.values()), costs["two_forwards", 0]
    if least > 0.995 * without_drafts:
        assert num_drafts == 0, "drafts save less than 1 %, the least for which the decoder drafts"
    elif least < 0.98 * without_drafts:
        assert costs[layout, num_drafts] <= 1.02 * least


@pytest.mark.parametrize("size", [1, 2, 3, 4, 16])
def test_prompts_in_a_batch_make_no_drafts_by_default(size: int) -> None:
    """Prompts in a batch share the cost of a forward pass, so saving forward passes pays less."""
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
    """A hybrid model drafts without adapters, so its drafts are cheaper than a drafter's."""
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


def test_steps_without_drafts_run_the_code_of_autoregressive() -> None:
    """With the code of ``Autoregressive``, the steps cost no more than its steps."""
    model, sampling = HashModel(5, traits=NEXT), SamplingParams(max_new_tokens=20)
    state = SelfSpeculative().begin(Prompt(token_ids=(5, 6, 7), id="0"), sampling, model.special_tokens)
    for num_rows, is_plain in [(1, False), (16, True)]:
        state.num_rows = num_rows
        steps = cast("GeneratorType[Any, Any, Any]", SelfSpeculative().step(state))
        assert (steps.gi_code is Autoregressive.step.__code__) == is_plain


def test_drafts_that_are_always_wrong_cost_little() -> None:
    length, cost = 400, 32
    num_forwards, num_positions = count_forwards(None, length, right_from=NEVER)
    assert num_forwards == length
    assert num_forwards * cost + num_positions < 1.03 * length * (cost + 1)


def test_drafting_is_tried_again_after_wrong_drafts() -> None:
    """The drafts of the last 300 of 400 tokens are right."""
    num_forwards, _ = count_forwards(None, 400, right_from=2 + 100)
    one_by_one = 100 + 32  # the acceptance rate has a half-life of 32 tokens
    in_rounds = 300 * 2 / (len(DRAFTS) + 2)  # two forward passes commit all drafts and two more tokens
    assert num_forwards < one_by_one + in_rounds + 6  # six more, to try drafts in between


@pytest.mark.parametrize("name", ["default_epyc", "default_slow"])
def test_forward_passes_with_masks_cost_at_most_what_the_rule_counts(name: str) -> None:
    """The rule that places masks counts a cost relative to a forward pass without masks; two machines measured it."""
    record = json.loads((REPOSITORY / "experiments" / "lossless" / f"{name}.json").read_text(encoding="utf-8"))
    counted = _DRAFTER_COST_FACTOR * tiny_backbone(NEXT).forward_cost

    def relative_cost(fixed: float, adapters: float) -> float:
        return (fixed * (1 + adapters) + 1 + len(DRAFTS)) / (fixed + 1)

    for measured in record["types"].values():
        cost = measured["forward_cost"]
        assert counted < 1.1 * cost["positions"], "fits on one machine differ by a tenth"
        assert relative_cost(counted, _ADAPTERS) > relative_cost(cost["positions"], cost.get("adapters", 0))


def test_a_busy_machine_changes_neither_text_nor_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two decodes, in each of which every look at a clock finds another random time."""
    outcomes = []
    for seed in range(2):
        rng = random.Random(seed)
        times = accumulate(rng.expovariate(1.0) for _ in count())
        for name in ("perf_counter", "monotonic", "process_time", "time"):
            monkeypatch.setattr(time, name, times.__next__)
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
