from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes import EOS, MASK, SPECIAL, VOCAB, HashModel, OracleModel, oracle_text, tiny_backbone
from reference_refusion import SlowReFusion
from refusion_lit.decoding import RecomputeKV, ReFusion, decode
from refusion_lit.decoding.decoders.refusion import ReFusionState
from refusion_lit.decoding.requests import Forward, MoreDrafts, Reading, Request
from refusion_lit.types import ForwardCost, Prompt, SamplingParams

THRESHOLDS = st.sampled_from([0.0, 0.1, 0.3, 0.6, 0.9, 1.0])


def prompt_of(token_ids: Sequence[int], name: str = "0") -> Prompt:
    return Prompt(token_ids=tuple(token_ids), id=name)


@st.composite
def decoders(draw: st.DrawFn, num_new_tokens: int) -> ReFusion:
    size = draw(st.sampled_from([1, 2, 3, 4, 8]))
    selection = draw(st.sampled_from(["threshold", "threshold", "top_k", "capped", "sequential"]))
    return draw(st.sampled_from([ReFusion, RecomputeKV]))(
        slot_size=size,
        num_serial_blocks=draw(st.integers(1, -(-num_new_tokens // size))),
        slot_threshold=draw(THRESHOLDS),
        token_threshold=draw(THRESHOLDS),
        certainty=draw(st.sampled_from(["first", "first", "mean", "min", "product"])),
        selection=selection,
        k=None if selection == "threshold" else draw(st.integers(1, 4)),
        infill=draw(st.sampled_from(["mask", "mask", "autoregressive"])),
        fused=False,
        infill_layout="reference",
    )


@settings(max_examples=90, deadline=None)
@given(data=st.data(), seed=st.integers(0, 9999), num_new_tokens=st.integers(1, 30))
def test_greedy_decoding_is_the_slow_reference(data: st.DataObject, seed: int, num_new_tokens: int) -> None:
    decoder = data.draw(decoders(num_new_tokens))
    prompt = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=8))
    model = HashModel(
        seed,
        flavour=data.draw(st.sampled_from(["plain", "plain", "ties"])),
        ends=data.draw(st.frozensets(st.integers(len(prompt), len(prompt) + num_new_tokens), max_size=2)),
        end_bias=data.draw(st.sampled_from([-30.0, -4.0, 0.0, 6.0])),
    )
    reference = SlowReFusion(model, decoder, tuple(prompt), num_new_tokens).run()
    [row] = decode(model, decoder, [prompt_of(prompt)], SamplingParams(max_new_tokens=num_new_tokens)).rows
    assert row.token_ids == reference.response
    assert row.forward_shapes == reference.shapes


@settings(max_examples=20, deadline=None)
@given(data=st.data(), num_new_tokens=st.integers(1, 20))
def test_a_transformers_cache_gives_what_the_slow_reference_recomputes(
    data: st.DataObject, num_new_tokens: int
) -> None:
    decoder = data.draw(decoders(num_new_tokens))
    prompt = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6))
    model = tiny_backbone()
    with torch.no_grad():
        reference = SlowReFusion(model, decoder, tuple(prompt), num_new_tokens).run()
    [row] = decode(model, decoder, [prompt_of(prompt)], SamplingParams(max_new_tokens=num_new_tokens)).rows
    assert row.token_ids == reference.response
    assert row.forward_shapes == reference.shapes
    for layout in ("packed", "single_forward"):
        ahead = replace(decoder, fused=True, infill_layout=layout)
        [row] = decode(model, ahead, [prompt_of(prompt)], SamplingParams(max_new_tokens=num_new_tokens)).rows
        assert row.token_ids == reference.response


def test_the_fakes_lead_to_all_paths() -> None:
    num_open, differing = 0, 0
    for seed in range(120):
        model = HashModel(seed, ends=frozenset({9 + seed % 12}), end_bias=-4.0)
        options = {"slot_size": 4, "num_serial_blocks": 1, "slot_threshold": 0.3, "token_threshold": 0.6}
        texts = []
        for decoder in (ReFusion(**options), RecomputeKV(**options)):
            reference = SlowReFusion(model, decoder, (3, 4, 5), 24).run()
            num_open += reference.num_infills_with_open_slots_before_their_end
            texts.append(reference.response)
        differing += texts[0] != texts[1]
    assert num_open > 10
    assert differing > 10


def test_an_end_in_an_infill_costs_no_text_before_it() -> None:
    # Slots 1 and 3 are certain, but no draft passes; slot 1 holds the end, slots 0 and 2 are still open.
    sure = {3 + 4, 3 + 12}
    model = OracleModel(
        oracle_text(3 + 6), certainty=lambda place: 0.97 if place in sure else 0.5, agreement=lambda _: 0.5
    )
    decoder = ReFusion(fused=False, infill_layout="reference", slot_size=4, num_serial_blocks=1)
    [row] = decode(model, decoder, [prompt_of([5, MASK, EOS])], SamplingParams(max_new_tokens=16), trace=True).rows
    assert row.token_ids == [oracle_text(9)(place) for place in range(3, 10)]
    together = [(1, 3 + 16), (1, 8), (2, 4), (2, 4), (2, 3), (2, 3)]
    alone = [(1, 4), (1, 4), (1, 4), (1, 4), (1, 3), (1, 3), (1, 2), (1, 2)]
    assert row.forward_shapes == together + alone
    assert row.trace[5].accepted == [7, 8, 9]
    assert row.trace[-1].accepted == [3, 4, 5, 6]
    assert row.finish_reason == "eos"


@pytest.mark.parametrize("num_blocks", [1, 2, 3])
def test_nothing_after_an_end_in_a_verification_is_decoded(num_blocks: int) -> None:
    model = OracleModel(oracle_text(2 + 5))
    decoder = ReFusion(fused=False, slot_size=4, num_serial_blocks=num_blocks)
    [row] = decode(model, decoder, [prompt_of([5, 6])], SamplingParams(max_new_tokens=24)).rows
    assert row.token_ids == [oracle_text(7)(place) for place in range(2, 8)]
    length = 24 // num_blocks
    if length == 4:
        assert row.forward_shapes == [(1, 6), (1, 4), (1, 4), (1, 4)]
    else:
        assert row.forward_shapes == [(1, 2 + length), (1, length)]


def test_places_beyond_the_budget_cost_no_blocks_of_their_own() -> None:
    # 9 tokens fill one of 2 slots in the second block of 3: the third is not needed, nor one slot of the second.
    model = OracleModel(oracle_text(None))
    decoder = ReFusion(fused=False, slot_size=4, num_serial_blocks=3)
    [row] = decode(model, decoder, [prompt_of([5])], SamplingParams(max_new_tokens=9)).rows
    assert row.num_tokens == 9
    assert row.forward_shapes == [(1, 5), (1, 4), (1, 4), (1, 4), (1, 4), (1, 4)]
    decoder = ReFusion(fused=False, slot_size=4, num_serial_blocks=2)
    [row] = decode(model, decoder, [prompt_of([5])], SamplingParams(max_new_tokens=11)).rows
    assert row.num_tokens == 11
    assert row.forward_shapes == [(1, 9), (1, 8), (1, 8), (1, 8)]


@pytest.mark.parametrize("certainty", ["first", "mean", "min", "product"])
def test_the_head_is_computed_where_it_is_read(certainty: Any) -> None:
    sure = {4 * slot for slot in (1, 2, 4)}
    model = OracleModel(oracle_text(None), certainty=lambda place: 0.97 if place - 2 in sure else 0.5)
    decoder = ReFusion(slot_size=4, num_serial_blocks=1, slot_threshold=0.6, certainty=certainty, fused=False)
    decode(model, decoder, [prompt_of([5, 6])], SamplingParams(max_new_tokens=24), trace=True)
    rounds = {"first": [(6, 3), (3, 1), (2, 1), (1, 1)]}.get(certainty)
    if certainty == "mean":  # (0.97 + 3 * 0.5) / 4 is just above 0.6: the same choice, all places read
        rounds = [(6, 3), (3, 1), (2, 1), (1, 1)]
    if rounds is None:  # none is certain: one slot a round, the whole slot's certainty counts
        rounds = [(left, 1) for left in range(6, 0, -1)]
    reads = 0
    for num_slots, num_chosen in rounds:
        reads += num_slots + num_chosen * 3 if certainty == "first" else num_slots * 4
        reads += num_chosen * 3
    assert model.num_logit_rows == reads
    assert len(model.calls) == 2 * len(rounds)


class Driven:
    """Answers a decoder's requests by hand."""

    def __init__(self, decoder: ReFusion, max_new_tokens: int, sampling: SamplingParams | None = None) -> None:
        params = sampling or SamplingParams(max_new_tokens=max_new_tokens)
        self.decoder = decoder = replace(decoder, fused=False, infill_layout="reference")
        self.state: ReFusionState = decoder.begin(prompt_of([7, 8]), params, SPECIAL)
        self.requests: list[Request] = []
        self.start()

    def start(self) -> None:
        self.steps = self.decoder.step(self.state)
        self.take(next(self.steps))

    def take(self, request: Request) -> None:
        self.requests.append(request)
        self.state.num_forwards += isinstance(request, Forward)

    @property
    def forward(self) -> Forward:
        request = self.requests[-1]
        assert isinstance(request, Forward)
        return request

    def send(self, *readings: Reading) -> None:
        try:
            self.take(self.steps.send(list(readings)))
        except StopIteration:
            if not self.state.finished:
                self.start()

    def plan(self, probabilities: list[float], token: int = 5) -> list[int]:
        """Answer a plan and the further drafts; return the verified slots."""
        assert self.forward.phase == "plan"
        self.send(Reading(tokens=[token] * len(probabilities), probabilities=probabilities))
        if isinstance(self.requests[-1], MoreDrafts):
            [at] = self.requests[-1].draft_at
            self.send(Reading(tokens=[token] * len(at), probabilities=[0.0] * len(at)))
        assert self.forward.phase == "verify"
        size = self.decoder.slot_size
        positions = list(self.forward.branches[0].positions)
        assert all(position % size == 2 % size for position in positions[::size])
        return [(position - 2) // size for position in positions[::size]]

    def verify(self, scores: list[float]) -> None:
        assert self.forward.phase == "verify"
        assert len(self.forward.branches[0].score_at) == len(scores)
        self.send(Reading(scores=scores))


@pytest.mark.parametrize(
    ("options", "probabilities", "chosen"),
    [
        ({"slot_threshold": 0.5}, [0.5, 0.75, 0.25, 0.625], [1, 3]),  # strictly above
        ({"slot_threshold": 0.5}, [0.25, 0.5, 0.5, 0.125], [1]),  # none: the best, the earlier of two
        ({"slot_threshold": 0.0}, [0.25, 0.5, 0.5, 0.125], [0, 1, 2, 3]),
        ({"slot_threshold": 1.0}, [1.0, 1.0, 1.0, 1.0], [0]),
        ({"selection": "top_k", "k": 2}, [0.25, 0.5, 0.5, 0.125], [1, 2]),
        ({"selection": "top_k", "k": 2}, [0.5, 0.25, 0.75, 0.5], [0, 2]),
        ({"selection": "top_k", "k": 9}, [0.5, 0.25, 0.75, 0.5], [0, 1, 2, 3]),
        ({"selection": "capped", "k": 2, "slot_threshold": 0.25}, [0.5, 0.25, 0.75, 0.625], [2, 3]),
        ({"selection": "capped", "k": 2, "slot_threshold": 0.7}, [0.5, 0.25, 0.75, 0.625], [2]),
        ({"selection": "capped", "k": 2, "slot_threshold": 0.8}, [0.5, 0.25, 0.75, 0.625], [2]),
        ({"selection": "sequential"}, [0.5, 0.25, 0.75, 0.625], [0]),
        ({"selection": "sequential", "k": 3}, [0.5, 0.25, 0.75, 0.625], [0, 1, 2]),
        ({"selection": "random", "k": 4}, [0.5, 0.25, 0.75, 0.625], [0, 1, 2, 3]),
    ],
)
def test_slots_are_chosen(options: dict[str, Any], probabilities: list[float], chosen: list[int]) -> None:
    decoder = ReFusion(slot_size=2, num_serial_blocks=1, **options)
    driven = Driven(decoder, 8)
    assert driven.plan(probabilities) == chosen


def test_a_random_order_depends_on_seed_and_prompt_alone() -> None:
    model = HashModel(0, ends=frozenset(), end_bias=-99.0)
    decoder = ReFusion(slot_size=2, num_serial_blocks=1, selection="random", token_threshold=1.0)

    def orders(seed: int, size: int) -> list[list[int]]:
        found = [prompt_of((3, 4, 5), str(i)) for i in range(12)]
        sampling = SamplingParams(max_new_tokens=8, seed=seed)
        rows = decode(model, decoder, found, sampling, max_batch_size=size, trace=True).rows
        return [[(p - 3) // 2 for record in row.trace for p in record.accepted if p % 2 == 1] for row in rows]

    first = orders(0, 12)
    assert all(sorted(order) == [0, 1, 2, 3] for order in first)
    assert len({tuple(order) for order in first}) > 4, "prompts have orders of their own"
    assert orders(0, 5) == first
    assert orders(1, 12) != first


@pytest.mark.parametrize(
    ("certainty", "values", "chosen"),
    [
        ("mean", [0.75, 0.25, 0.5, 0.5, 0.75, 0.5], [2]),
        ("min", [0.875, 0.25, 0.5, 0.5, 0.75, 0.375], [1]),
        ("product", [0.875, 0.25, 0.5, 0.5, 0.75, 0.5], [2]),
        ("product", [0.5, 0.5, 1.0, 0.25, 0.25, 1.0], [0]),
    ],
)
def test_a_slots_certainty_may_come_from_all_its_tokens(certainty: Any, values: list[float], chosen: list[int]) -> None:
    driven = Driven(ReFusion(slot_size=2, num_serial_blocks=1, slot_threshold=1.0, certainty=certainty), 6)
    assert driven.plan(values) == chosen
    assert [type(request) for request in driven.requests] == [Forward, Forward]


@pytest.mark.parametrize(
    ("scores", "open_slots"),
    [
        ([0.75, 0.75, 0.75], []),
        ([0.75, 0.75, 0.5], [2]),  # strictly above
        ([0.75, 0.5, 0.75], [1, 2]),
    ],
)
def test_whole_slots_of_the_common_prefix_are_accepted(scores: list[float], open_slots: list[int]) -> None:
    driven = Driven(ReFusion(slot_size=2, num_serial_blocks=1, slot_threshold=0.0, token_threshold=0.5), 6)
    assert driven.plan([0.5, 0.5, 0.5]) == [0, 1, 2]
    driven.verify(scores)
    masked = driven.state.is_masked
    assert masked == [slot in open_slots for slot in range(3) for _ in range(2)]
    assert driven.state.finished == (not open_slots)
    if open_slots:  # planned again, after the prompt and what was accepted
        assert driven.forward.phase == "plan"
        assert list(driven.forward.branches[0].tokens) == [MASK] * (2 * len(open_slots))
        assert driven.forward.branches[0].visible == ((0, 2 + 6 - 2 * len(open_slots)),)


def test_slots_that_fail_at_once_are_filled_in_parallel() -> None:
    driven = Driven(ReFusion(slot_size=2, num_serial_blocks=1, slot_threshold=0.0, token_threshold=0.5), 4)
    driven.plan([0.5, 0.5])
    driven.verify([0.5, 0.75])
    assert driven.forward.phase == "infill_propose"
    assert [list(branch.tokens) for branch in driven.forward.branches] == [[5, MASK], [5, 5]]
    assert [branch.visible for branch in driven.forward.branches] == [((0, 2), (2, 2)), ((0, 2), (4, 4))]


def test_only_plans_are_sampled_each_with_its_own_noise() -> None:
    sampling = SamplingParams(max_new_tokens=4, temperature=1.5, top_p=0.9, seed=3)
    driven = Driven(ReFusion(slot_size=2, num_serial_blocks=1, token_threshold=0.9), 4, sampling)
    for _ in range(2):
        driven.plan([0.25] * (len(driven.forward.branches[0].draft_at)))
        driven.verify([0.5])
        while driven.state.finished is False and driven.forward.phase.startswith("infill"):
            branch = driven.forward.branches[0]
            driven.send(Reading(tokens=[6] * len(branch.draft_at), scores=[0.5] * len(branch.score_at)))
    draws = [(request.phase if isinstance(request, Forward) else "more", request.draw) for request in driven.requests]
    assert {draw.sampling.temperature for phase, draw in draws if phase.startswith("infill")} == {0.0}
    planned = [draw for phase, draw in draws if phase == "plan"]
    assert [draw.sampling for draw in planned] == [sampling, sampling]
    assert len({draw.round for draw in planned}) == 2
    # Same forward, same noise; the probabilities after a slot's first token are not read.
    assert [draw for phase, draw in draws if phase == "more"] == [replace(d, with_probability=False) for d in planned]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slot_size": 0}, "^slot_size: expected an integer of at least 1, got 0"),
        ({"num_serial_blocks": 0}, "^num_serial_blocks: expected an integer of at least 1, got 0"),
        ({"slot_threshold": 1.5}, r"^slot_threshold: expected a probability in \[0, 1\], got 1.5"),
        ({"token_threshold": -0.1}, r"^token_threshold: expected a probability in \[0, 1\], got -0.1"),
        ({"token_threshold": float("nan")}, "^token_threshold: expected a probability"),
        ({"certainty": "median"}, "^certainty: expected one of first, mean, min, product, got 'median'"),
        ({"selection": "best"}, "^selection: expected one of threshold, top_k, capped, sequential, random, got 'best'"),
        ({"infill": "none"}, "^infill: expected one of mask, autoregressive, got 'none'"),
        ({"selection": "top_k"}, "^k: expected an integer of at least 1 .*, got None"),
        ({"selection": "capped", "k": 0}, "^k: expected an integer of at least 1 .*, got 0"),
        ({"k": 3}, "^k: expected null, got 3"),
    ],
)
@pytest.mark.parametrize("decoder", [ReFusion, RecomputeKV])
def test_impossible_options_are_refused(decoder: type[ReFusion], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decoder(**options)


def test_a_default_adapts_to_short_texts() -> None:
    zarya = ReFusion(slot_size=16, num_serial_blocks=4)
    numbers = {length: zarya.fitted(SamplingParams(max_new_tokens=length)).num_serial_blocks for length in (1, 17, 200)}  # type: ignore[attr-defined]
    assert numbers == {1: 1, 17: 2, 200: 4}
    assert ReFusion().fitted(SamplingParams(max_new_tokens=1)) == ReFusion()


def test_more_serial_blocks_than_slots_are_refused() -> None:
    sampling = SamplingParams(max_new_tokens=9)
    ReFusion(slot_size=4, num_serial_blocks=3).check(sampling)
    message = r"^num_serial_blocks: expected at most 3 \(9 new tokens in slots of 4\), got 4"
    with pytest.raises(ValueError, match=message):
        decode(HashModel(), ReFusion(slot_size=4, num_serial_blocks=4), [prompt_of([5])], sampling)


@settings(max_examples=72, deadline=None)
@given(
    data=st.data(),
    seed=st.integers(0, 9999),
    num_new_tokens=st.integers(1, 40),
    temperature=st.sampled_from([0.0, 0.0, 1.0]),
)
def test_planning_ahead_changes_no_token(
    data: st.DataObject, seed: int, num_new_tokens: int, temperature: float
) -> None:
    decoder = data.draw(decoders(num_new_tokens))
    prompt = prompt_of(data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=8)))
    first = len(prompt.token_ids)
    ends = data.draw(st.frozensets(st.integers(first, first + num_new_tokens), max_size=2))
    bias = data.draw(st.sampled_from([-30.0, -4.0, 0.0, 6.0]))
    sampling = SamplingParams(max_new_tokens=num_new_tokens, temperature=temperature)
    rows = [
        decode(HashModel(seed, ends=ends, end_bias=bias), each, [prompt], sampling, trace=True).rows[0]
        for each in (decoder, replace(decoder, fused=True))
    ]
    assert rows[0].token_ids == rows[1].token_ids
    phases = [[entry.phase for entry in row.trace] for row in rows]
    num_plans = phases[0].count("plan")
    # One plan a round with or without: those that came from elsewhere are the forwards saved.
    assert len(phases[0]) - len(phases[1]) == num_plans - phases[1].count("plan") >= 0
    assert [phase.removesuffix("+plan") for phase in phases[1] if phase != "plan"] == [
        phase for phase in phases[0] if phase != "plan"
    ]
    # A plan is saved after every verification that accepted its last draft, and every recomputation.
    accepted = [set(entry.accepted) for entry in rows[0].trace]
    saved = 0
    for i, entry in enumerate(rows[0].trace[:-1]):
        if entry.phase == "recompute" or (entry.phase == "verify" and accepted[i]):
            saved += phases[0][i + 1] == "plan" and (
                entry.phase == "recompute" or accepts_all(rows[0].token_ids, entry.accepted, entry.shape, first)
            )
    assert phases[0].count("plan") - phases[1].count("plan") >= saved


def accepts_all(text: list[int], accepted: list[int], shape: tuple[int, int], first: int) -> bool:
    return len(accepted) == shape[1] and not any(
        text[place - first] == EOS for place in accepted if place - first < len(text)
    )


@pytest.mark.parametrize("cls", [ReFusion, RecomputeKV])
def test_with_all_drafts_accepted_a_round_is_one_forward(cls: type[ReFusion]) -> None:
    model = OracleModel(oracle_text(None))
    decoder = cls(slot_size=4, num_serial_blocks=2, selection="top_k", k=2)
    [row] = decode(model, decoder, [prompt_of([5, 6])], SamplingParams(max_new_tokens=32), trace=True).rows
    assert [(entry.phase, entry.shape) for entry in row.trace] == [
        ("plan", (1, 2 + 16)),
        ("verify+plan", (1, 8 + 8)),
        ("verify+plan", (1, 8 + 16)),  # the next serial block
        ("verify+plan", (1, 8 + 8)),
        ("verify", (1, 8)),
    ]
    assert row.token_ids == [oracle_text(None)(place) for place in range(2, 34)]


def test_an_end_among_the_drafts_plans_only_what_stands_before_it() -> None:
    # Slots 2 and 3 are certain, 2 holds the end: the next plan sees no draft after it and holds slots 0 and 1.
    sure = {2 + 8, 2 + 12}
    model = OracleModel(oracle_text(2 + 9), certainty=lambda place: 0.97 if place in sure else 0.5)
    decoder = ReFusion(slot_size=4, num_serial_blocks=1)
    [row] = decode(model, decoder, [prompt_of([5, 6])], SamplingParams(max_new_tokens=24), trace=True).rows
    assert [(entry.phase, entry.shape) for entry in row.trace] == [
        ("plan", (1, 2 + 24)),
        ("verify+plan", (1, 8 + 8)),
        ("verify+plan", (1, 4 + 4)),
        ("verify", (1, 4)),
    ]
    assert row.token_ids == [oracle_text(11)(place) for place in range(2, 12)]
    seen = model.calls[1].mask[0, 8:]
    assert not seen[:, 2 + 2 : 2 + 8].any(), "masks see nothing after the end"
    assert seen[:, : 2 + 2].all()


def test_an_infill_that_recomputes_plans_with_it() -> None:
    model = OracleModel(oracle_text(None), certainty=lambda place: 0.9 - 0.01 * place, agreement=lambda _: 0.5)
    decoder = RecomputeKV(slot_size=2, num_serial_blocks=1, token_threshold=0.6)
    [row] = decode(model, decoder, [prompt_of([5])], SamplingParams(max_new_tokens=4), trace=True).rows
    phases = ["plan", "verify+plan", "infill_propose", "infill_verify", "recompute+plan"]
    phases += ["verify", "infill_propose", "infill_verify", "recompute"]
    assert [entry.phase for entry in row.trace] == phases


@settings(max_examples=72, deadline=None)
@given(
    data=st.data(), seed=st.integers(0, 9999), num_new_tokens=st.integers(1, 40), fused=st.booleans(),
    temperature=st.sampled_from([0.0, 0.0, 1.0]), cost=st.integers(0, 20),
)  # fmt: skip
def test_the_layout_of_infills_changes_no_token(
    data: st.DataObject, seed: int, num_new_tokens: int, fused: bool, temperature: float, cost: int
) -> None:
    decoder = replace(data.draw(decoders(num_new_tokens)), fused=fused, forward_cost=cost)
    prompt = prompt_of(data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=8)))
    first = len(prompt.token_ids)
    ends = data.draw(st.frozensets(st.integers(first, first + num_new_tokens), max_size=2))
    bias = data.draw(st.sampled_from([-30.0, -4.0, 0.0, 6.0]))
    sampling = SamplingParams(max_new_tokens=num_new_tokens, temperature=temperature)
    rows = {
        layout: decode(
            HashModel(seed, ends=ends, end_bias=bias), replace(decoder, infill_layout=layout), [prompt], sampling
        ).rows[0]
        for layout in ("reference", "packed", "auto", "single_forward")
    }
    assert len({tuple(row.token_ids) for row in rows.values()}) == 1
    reference, packed, auto, single = rows.values()
    assert reference.num_forwards == packed.num_forwards >= auto.num_forwards >= single.num_forwards
    assert reference.num_positions >= packed.num_positions


def test_an_infill_costs_what_arithmetic_says() -> None:
    # Two slots of four fail at every proposal: three rounds, which accept one token of each.
    model = OracleModel(oracle_text(None), agreement=lambda _: 0.5)
    shapes = {
        "reference": [(2, 4), (2, 4), (2, 3), (2, 3), (2, 2), (2, 2)],
        "packed": [(1, 3 + 4), (1, 6), (1, 4), (1, 4), (1, 2), (1, 2)],
        "auto": [(1, 3 + 4), (1, 6), (1, 4), (1, 4 + 2), (1, 2)],
        "single_forward": [(1, 3 + 4), (1, 6 + 6), (1, 4 + 2), (1, 2)],
    }
    for layout, expected in shapes.items():
        decoder = ReFusion(slot_size=4, num_serial_blocks=1, infill_layout=layout, forward_cost=2)
        [row] = decode(model, decoder, [prompt_of([5])], SamplingParams(max_new_tokens=8)).rows
        assert row.forward_shapes == [(1, 1 + 8), (1, 8), *expected]
        assert row.token_ids == [oracle_text(None)(place) for place in range(1, 9)]


def costly(seed: int, fixed: float) -> HashModel:
    """Return a fake that says what its forwards cost."""
    model = HashModel(seed)
    model.forward_cost = lambda num_rows: ForwardCost(fixed)  # type: ignore[method-assign]
    return model


@pytest.mark.parametrize("cls", [ReFusion, RecomputeKV])
def test_plans_are_made_ahead_where_the_model_says_that_it_pays(cls: type[ReFusion]) -> None:
    # The model's own cost decides, for the decoder was given none.
    differing = 0
    for seed in range(30):
        prompt, sampling = prompt_of([3, 4, seed % 5]), SamplingParams(max_new_tokens=24)
        options: dict[str, Any] = {"slot_size": 2, "slot_threshold": 0.3, "token_threshold": 0.2}
        free, dear = (decode(costly(seed, cost), cls(**options), [prompt], sampling).rows[0] for cost in (0, 1e9))
        fused, plain = (
            decode(HashModel(seed), cls(**options, fused=way, infill_layout=layout), [prompt], sampling).rows[0]
            for way, layout in ((True, "single_forward"), (False, "packed"))
        )
        assert free.token_ids == dear.token_ids == fused.token_ids == plain.token_ids
        assert dear.forward_shapes == fused.forward_shapes
        if cls is ReFusion:
            assert free.forward_shapes == plain.forward_shapes
        differing += dear.num_forwards < free.num_forwards
    assert differing > 5


def test_plans_are_made_ahead_as_often_as_drafts_have_passed() -> None:
    # Slots of two, one chosen a round; the second token of a slot passes in the first four slots alone.
    model = OracleModel(oracle_text(None), certainty=lambda _: 0.5, agreement=lambda place: 0.9 if place < 9 else 0.1)
    decoder = ReFusion(slot_size=2, num_serial_blocks=16, token_threshold=0.5, forward_cost=2)
    [row] = decode(model, decoder, [prompt_of([5])], SamplingParams(max_new_tokens=32), trace=True).rows
    # The masks of a slot cost 2, its plan 2 + 2: ahead if more than half of the drafts pass, one of two at first. The
    # first one is not; four passed and three failed ones are (5 of 9), not four and four.
    verified = [step.phase for step in row.trace if step.phase.startswith("verify")]
    assert verified == ["verify", *["verify+plan"] * 7, *["verify"] * 8]


def test_an_unknown_way_to_plan_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^fused: expected one of True, False, auto, got 'always'"):
        ReFusion(fused="always")  # type: ignore[arg-type]


def test_a_serial_block_beyond_the_budget_is_never_fed() -> None:
    # Five slots in four serial blocks of two: the fourth would begin after the last wanted slot.
    model = OracleModel(oracle_text(None))
    prompt = Prompt(token_ids=(3, 4), id="p")
    [row] = decode(model, ReFusion(slot_size=2, num_serial_blocks=4), [prompt], SamplingParams(max_new_tokens=10)).rows
    assert row.num_tokens == 10
    assert max(place for call in model.calls for place, _ in call.fed) == 2 + 12 - 1


@pytest.mark.parametrize("num_new_tokens", [1, 8, 9, 128])
def test_the_default_number_of_blocks_adapts_where_a_given_one_is_refused(num_new_tokens: int) -> None:
    sampling = SamplingParams(max_new_tokens=num_new_tokens)
    ReFusion(slot_size=8).check(sampling)
    num_slots = -(-num_new_tokens // 8)
    with pytest.raises(ValueError, match=f"num_serial_blocks: expected at most {num_slots} "):
        ReFusion(slot_size=8, num_serial_blocks=num_slots + 1).check(sampling)
