"""The rules of ``ReFusion``, with a model's answers given by hand: which slots are chosen and accepted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from refusion_lit.decoding import RecomputeKV, ReFusion, decode
from refusion_lit.engine.branches import FEW_POSITIONS
from refusion_lit.engine.requests import Forward, MoreDrafts, Reading, Request
from refusion_lit.refusion import bonus
from refusion_lit.refusion.slots import OpenSlot, SlotState
from refusion_lit.types import SamplingParams
from support.fakes import HYBRID, MASK, SPECIAL, HashModel
from support.refusion_cases import make_prompt


class Driven:
    """Answers a decoder's requests by hand."""

    def __init__(self, decoder: ReFusion, max_new_tokens: int, sampling: SamplingParams | None = None) -> None:
        params = sampling or SamplingParams(max_new_tokens=max_new_tokens)
        self.decoder = decoder = replace(decoder, fused=False, infill_layout="reference")
        self.state: SlotState = decoder.begin(make_prompt([7, 8]), params, SPECIAL)
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
        prompt_list = [make_prompt((3, 4, 5), str(i)) for i in range(12)]
        sampling = SamplingParams(max_new_tokens=8, seed=seed)
        rows = decode(model, decoder, prompt_list, sampling, batch_size=size, trace=True).rows
        # A prompt has three tokens, and a slot two: slots begin at odd positions.
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
    driven = Driven(ReFusion(slot_size=2, num_serial_blocks=1, slot_threshold=1.0, slot_confidence=certainty), 6)
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
    assert masked == [slot in open_slots for slot in range(3) for _ in range(2)]  # two tokens a slot
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
    # The first slot's second draft fails, at 0.5; the second slot's passes. Both see the prompt and nothing else.
    assert [list(branch.tokens) for branch in driven.forward.branches] == [[5, MASK], [5, 5]]
    assert [branch.visible for branch in driven.forward.branches] == [((0, 2), (2, 2)), ((0, 2), (4, 4))]


def test_only_plans_are_sampled_each_with_its_own_noise() -> None:
    sampling = SamplingParams(max_new_tokens=4, temperature=1.5, top_p=0.9, seed=3)
    driven = Driven(ReFusion(slot_size=2, num_serial_blocks=1, token_threshold=0.9), 4, sampling)
    for _ in range(2):
        driven.plan([0.25] * (len(driven.forward.branches[0].draft_at)))
        driven.verify([0.5])
        while not driven.state.finished and driven.forward.phase.startswith("infill"):
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
        ({"slot_threshold": 1.5}, r"^slot_threshold: expected a number in \[0, 1\], got 1.5"),
        ({"token_threshold": -0.1}, r"^token_threshold: expected a number in \[0, 1\], got -0.1"),
        ({"token_threshold": float("nan")}, "^token_threshold: expected a number in"),
        ({"slot_confidence": "median"}, "^slot_confidence: expected one of first, mean, min, product, got 'median'"),
        ({"selection": "best"}, "^selection: expected one of threshold, top_k, sequential, random, got 'best'"),
        ({"infill": "none"}, "^infill: expected one of mask, autoregressive, bonus, got 'none'"),
        ({"selection": "top_k"}, "^k: expected an integer of at least 1 .*, got None"),
        ({"selection": "top_k", "k": 0}, "^k: expected an integer of at least 1 .*, got 0"),
        ({"k": 3}, "^k: expected null, got 3"),
    ],
)
@pytest.mark.parametrize("decoder", [ReFusion, RecomputeKV])
def test_impossible_options_are_refused(decoder: type[ReFusion], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decoder(**options)


def test_a_default_adapts_to_short_texts() -> None:
    zarya = ReFusion(slot_size=16, num_serial_blocks=4)
    for length, num_blocks in {1: 1, 17: 2, 200: 4}.items():  # one slot, two, and more than there are blocks
        adapted = zarya.adapt_to(SamplingParams(max_new_tokens=length))
        assert isinstance(adapted, ReFusion)
        assert adapted.num_serial_blocks == num_blocks
    assert ReFusion().adapt_to(SamplingParams(max_new_tokens=1)) == ReFusion()


def test_more_serial_blocks_than_slots_are_refused() -> None:
    sampling = SamplingParams(max_new_tokens=9)
    ReFusion(slot_size=4, num_serial_blocks=3).check(sampling)
    message = r"^num_serial_blocks: expected at most 3 \(9 new tokens in slots of 4\), got 4"
    with pytest.raises(ValueError, match=message):
        decode(HashModel(), ReFusion(slot_size=4, num_serial_blocks=4), [make_prompt([5])], sampling)


def test_an_unknown_way_to_plan_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^fused: expected one of True, False, got 'always'"):
        ReFusion(fused="always")  # type: ignore[arg-type]


@pytest.mark.parametrize("num_new_tokens", [1, 8, 9, 128])
def test_the_default_number_of_blocks_adapts_where_a_given_one_is_refused(num_new_tokens: int) -> None:
    sampling = SamplingParams(max_new_tokens=num_new_tokens)
    ReFusion(slot_size=8).check(sampling)
    num_slots = -(-num_new_tokens // 8)
    with pytest.raises(ValueError, match=f"num_serial_blocks: expected at most {num_slots} "):
        ReFusion(slot_size=8, num_serial_blocks=num_slots + 1).check(sampling)


def test_reading_masks_at_once_or_later_gives_the_same_bonus_infill(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where many masks follow the drafts, only those of the acceptance that came true are read, in a second request."""
    decoder = ReFusion(slot_size=8, num_serial_blocks=1, slot_threshold=0.5, token_threshold=0.5, infill="bonus")
    results = []
    num_second_requests = []
    for few in (0, FEW_POSITIONS, 10_000):  # masks are never few, few as usual, always few
        more = mock.Mock(wraps=MoreDrafts)
        monkeypatch.setattr(bonus, "MoreDrafts", more)
        monkeypatch.setattr(bonus, "FEW_POSITIONS", few)
        rows = []
        for seed in range(4):
            model = HashModel(seed, traits=HYBRID)
            model.forward_cost = 4096.0
            rows += decode(model, decoder, [make_prompt([7, 8, 9])], SamplingParams(max_new_tokens=32)).rows
        results.append([(row.token_ids, row.num_forwards) for row in rows])
        num_second_requests.append(more.call_count)
    assert results[0] == results[1] == results[2]
    assert num_second_requests[0] > 0
    assert num_second_requests[2] == 0


def test_a_rejected_draft_leaves_the_models_own_choices_as_guesses() -> None:
    state = ReFusion(infill="bonus").begin(make_prompt([7, 8]), SamplingParams(max_new_tokens=16), SPECIAL)
    assert isinstance(state, bonus.BonusState)
    slot = OpenSlot(0, places=state.slots[0], write_at=2, tokens=[3, 4, 5, 6, 7])
    # After 3, 4 and 5 the model chooses 4, 5 and 12: two drafts are right, and 12 replaces the third.
    assert bonus._accept_drafts(state, slot, Reading(tokens=[4, 5, 12, 11, 10])) == 2
    assert slot.tokens[: slot.num_accepted] == [3, 4, 5, 12]
    assert slot.num_cached == 3
    assert slot.number in state.guessed
    assert slot.tokens[slot.num_accepted :] == [11, 10], "what the model says after its rejected drafts"
