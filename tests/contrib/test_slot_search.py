"""SlotSearch against slow searches that feed the whole text for every token, and against ReFusion without a search."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import permutations
from math import fsum, log, sqrt

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from refusion_lit.contrib import SlotSearch
from refusion_lit.contrib.slot_search import EXPLORATION, IMMEDIATE_WEIGHT, PRIOR_TEMPERATURE
from refusion_lit.decoding import ReFusion, decode
from refusion_lit.modeling.interface import LanguageModel
from refusion_lit.types import Prompt, SamplingParams
from support.decoder_cases import prompts
from support.example_counts import examples
from support.fakes import EOS, MASK, HashModel, tiny_backbone
from support.slow_decoding import best_allowed, cut


@dataclass
class SlowText:
    """A response whose slots are decoded in an order, with a forward pass over all known tokens for every token.

    Given tokens follow the prompt, and decoded slots follow in their order.

    Attributes:
        model: The model.
        prompt: The prompt; its template may give tokens of the response.
        slots: The places of every slot.
        remaining: Slots that may be decoded next.
        next_slots: Slots that may be decoded once none remains: the holes of a template come before the slots after it.
        order: The decoded slots, in their order.
        tokens: The tokens of the decoded slots.
        probabilities: Probabilities of all decoded tokens.
        slot_probabilities: Probabilities of the tokens of the last slot.
    """

    model: LanguageModel
    prompt: Prompt
    slots: list[list[int]]
    remaining: tuple[int, ...]
    next_slots: tuple[int, ...] = ()
    order: tuple[int, ...] = ()
    tokens: dict[int, tuple[int, ...]] = field(default_factory=dict)
    probabilities: tuple[float, ...] = ()
    slot_probabilities: tuple[float, ...] = ()

    def read(self, row: list[int], positions: list[int], places: list[int]) -> list[tuple[int, float]]:
        """Feed a row; return the most probable allowed tokens at some of its places, and their probabilities."""
        causal = torch.ones(1, len(row), len(row), dtype=torch.bool).tril()
        hidden = self.model.hidden_states(torch.tensor([row]), torch.tensor([positions]), causal)[0]
        logits = self.model.logits(hidden)[places].double()
        special = self.model.special_tokens
        banned = list(special.banned_token_ids)
        if self.slots[self.remaining[0]][0] < len(self.prompt.given):  # nothing ends in a hole
            banned += special.eos_token_ids
        chosen = [best_allowed(row, banned, special.vocab_size) for row in logits]
        return [(token, float(row.softmax(-1)[token])) for token, row in zip(chosen, logits, strict=True)]

    def positions(self, slot: int) -> list[int]:
        """Return the positions of a slot's places in the text."""
        return [len(self.prompt.token_ids) + place for place in self.slots[slot]]

    @property
    def context(self) -> tuple[list[int], list[int]]:
        """The known tokens and their positions."""
        row, positions = list(self.prompt.token_ids), list(range(len(self.prompt.token_ids)))
        for place, token in enumerate(self.prompt.given):
            if token is not None:
                row.append(token)
                positions.append(len(self.prompt.token_ids) + place)
        for slot in self.order:
            row += self.tokens[slot]
            positions += self.positions(slot)[: len(self.tokens[slot])]
        return row, positions

    @cached_property
    def plan(self) -> dict[int, tuple[int, float]]:
        """The first token of every remaining slot, and its probability."""
        row, positions = self.context
        firsts = []
        for slot in self.remaining:
            firsts.append(len(row))
            row += [MASK] * len(self.slots[slot])
            positions += self.positions(slot)
        return dict(zip(self.remaining, self.read(row, positions, firsts), strict=True))

    def after(self, slot: int) -> SlowText:
        """Return the text with one more decoded slot. After an EOS token, later slots are dropped."""
        token, probability = self.plan[slot]
        tokens, slot_probabilities = [token], [probability]
        while len(tokens) < len(self.slots[slot]) and EOS not in tokens:
            row, positions = self.context
            row, positions = row + tokens, positions + self.positions(slot)[: len(tokens)]
            [(token, probability)] = self.read(row, positions, [len(row) - 1])
            tokens, slot_probabilities = [*tokens, token], [*slot_probabilities, probability]
        remaining = tuple(other for other in self.remaining if other != slot and (EOS not in tokens or other < slot))
        return replace(
            self, remaining=remaining, order=(*self.order, slot), tokens={**self.tokens, slot: tuple(tokens)},
            probabilities=(*self.probabilities, *slot_probabilities), slot_probabilities=tuple(slot_probabilities),
        )  # fmt: skip

    @property
    def score(self) -> float:
        return fsum(log(p) for p in self.probabilities) / len(self.probabilities)

    @property
    def confidence(self) -> float:
        return fsum(self.slot_probabilities) / len(self.slot_probabilities)

    def response(self, length: int) -> list[int]:
        known = {place: token for place, token in enumerate(self.prompt.given) if token is not None}
        for slot, tokens in self.tokens.items():
            known.update(zip(self.slots[slot], tokens, strict=False))
        text: list[int] = []
        while len(text) in known and len(text) < length + self.prompt.num_given:
            text.append(known[len(text)])
        return cut(text, [EOS])


class SlowTree:
    """Monte-Carlo tree search over orders, with visits and values in tables by order."""

    def __init__(self, decoder: SlotSearch) -> None:
        self.decoder = decoder
        self.texts: dict[tuple[int, ...], SlowText] = {}
        self.planned: set[tuple[int, ...]] = set()
        self.num_forwards = 0

    def child(self, text: SlowText, slot: int) -> SlowText:
        """Return a text with one more slot; count the forward passes of its further tokens once."""
        if (*text.order, slot) not in self.texts:
            child = self.texts[*text.order, slot] = text.after(slot)
            self.num_forwards += len(child.slot_probabilities) - 1
        return self.texts[*text.order, slot]

    def plan(self, text: SlowText) -> dict[int, tuple[int, float]]:
        """Return a text's plan; count its forward pass once."""
        if text.order not in self.planned:
            self.num_forwards += 1
            self.planned.add(text.order)
        return text.plan

    def select(self, text: SlowText, visits: dict, values: dict) -> int:
        """Return the candidate with the highest upper bound: its value, plus a bonus for few visits."""
        plan, options = self.plan(text), self.decoder
        best = sorted(text.remaining, key=lambda slot: (-plan[slot][1], slot))[: options.max_candidates]
        candidates = sorted({*best, text.remaining[0]})
        weights = {slot: plan[slot][1] ** (1 / PRIOR_TEMPERATURE) for slot in candidates}
        total = sum(visits.get((*text.order, slot), 0) for slot in text.remaining)

        def upper_bound(slot: int) -> tuple[float, float, int]:
            key = (*text.order, slot)
            base = key if visits.get(key) else text.order
            value = values[base] / visits[base] if visits.get(base) else 0.0
            prior = weights[slot] / sum(weights.values())
            bonus = EXPLORATION * prior * sqrt(max(1, total)) / (1 + visits.get(key, 0))
            return value + bonus, weights[slot], -slot

        return max(candidates, key=upper_bound)

    def move(self, root: SlowText) -> SlowText:
        """Search from a text, and return the text with the slot that was visited most."""
        options, visits, values = self.decoder, {}, {}
        self.texts.clear()  # each move searches from scratch
        self.planned &= {root.order}
        for _ in range(options.num_simulations):
            path = [root]
            while len(path) == 1 or (visits.get(path[-1].order) and path[-1].remaining):
                path.append(self.child(path[-1], self.select(path[-1], visits, values)))
            value, ahead, last = path[-1].confidence, [], path[-1]
            while last.remaining and len(ahead) < options.horizon - 1:
                plan = self.plan(last)
                last = self.child(last, min(last.remaining, key=lambda slot: (-plan[slot][1], slot)))
                ahead.append(last.confidence)
            if ahead:
                value = IMMEDIATE_WEIGHT * value + (1 - IMMEDIATE_WEIGHT) * sum(ahead) / len(ahead)
            for text in path:
                visits[text.order] = visits.get(text.order, 0) + 1
                values[text.order] = values.get(text.order, 0.0) + value
        moves = [self.texts[*root.order, slot] for slot in root.remaining if visits.get((*root.order, slot))]
        return max(
            moves, key=lambda text: (visits[text.order], values[text.order] / visits[text.order], -text.order[-1])
        )


def slow_root(model: LanguageModel, prompt: Prompt, size: int, length: int) -> SlowText:
    """Return a text without decoded slots: the holes of the template are cut into slots, and so is the rest."""
    slots: list[list[int]] = []
    for place, token in enumerate(prompt.given):
        if token is None and slots and slots[-1][-1] == place - 1 and len(slots[-1]) < size:
            slots[-1].append(place)
        elif token is None:
            slots.append([place])
    in_template, start = tuple(range(len(slots))), len(prompt.given)
    slots += [list(range(first, first + size)) for first in range(start, length + prompt.num_given, size)]
    after_template = tuple(range(len(in_template), len(slots)))
    if not in_template:
        return SlowText(model, prompt, slots, after_template)
    return SlowText(model, prompt, slots, in_template, after_template)


@settings(max_examples=examples(24), deadline=None)
@given(
    seed=st.integers(0, 9999), ends=st.frozensets(st.integers(1, 20), max_size=2), batch=prompts(max_size=2),
    size=st.integers(1, 4), length=st.integers(1, 12), num_simulations=st.integers(1, 9),
    horizon=st.integers(1, 3), max_candidates=st.integers(1, 4),
    known=st.just(()) | st.lists(st.none() | st.integers(3, 8), max_size=7).map(lambda tokens: (*tokens, 4)),
)  # fmt: skip
def test_tree_search_is_that_of_a_slow_search(
    seed: int,
    ends: frozenset[int],
    batch: list[Prompt],
    size: int,
    length: int,
    num_simulations: int,
    horizon: int,
    max_candidates: int,
    known: tuple[int | None, ...],
) -> None:
    batch, length = [replace(prompt, given=known) for prompt in batch], max(length, known.count(None))
    decoder = SlotSearch(
        slot_size=size, num_simulations=num_simulations, horizon=horizon, max_candidates=max_candidates
    )
    model, slow = (HashModel(seed, ends=ends, end_bias=-4.0) for _ in range(2))
    rows = decode(model, decoder, batch, SamplingParams(max_new_tokens=length), batch_size=2).rows
    for prompt, row in zip(batch, rows, strict=True):
        tree, text = SlowTree(decoder), slow_root(slow, prompt, size, length)
        while text.remaining or text.next_slots:
            text = tree.move(text) if text.remaining else replace(text, remaining=text.next_slots, next_slots=())
        assert (row.token_ids, row.num_forwards) == (text.response(length), tree.num_forwards)


@settings(max_examples=examples(20), deadline=None)
@given(
    seed=st.integers(0, 9999), ends=st.frozensets(st.integers(1, 20), max_size=2), batch=prompts(max_size=2),
    size=st.integers(1, 3), num_slots=st.integers(1, 4),
)  # fmt: skip
def test_a_wide_beam_finds_the_best_of_all_orders(
    seed: int, ends: frozenset[int], batch: list[Prompt], size: int, num_slots: int
) -> None:
    model, slow = (HashModel(seed, ends=ends, end_bias=-4.0) for _ in range(2))
    decoder = SlotSearch(slot_size=size, selection="beam", beam_size=24, max_candidates=4)
    sampling = SamplingParams(max_new_tokens=size * num_slots)
    for prompt, row in zip(batch, decode(model, decoder, batch, sampling, batch_size=2).rows, strict=True):
        complete = set()
        for order in permutations(range(num_slots)):
            text = slow_root(slow, prompt, size, size * num_slots)
            for slot in order:
                text = text.after(slot) if slot in text.remaining else text
            complete.add((round(text.score, 9), tuple(text.response(size * num_slots))))
        best_score = max(score for score, _ in complete)
        assert tuple(row.token_ids) in {response for score, response in complete if score == best_score}


def test_a_beam_keeps_orders_of_different_slots_first() -> None:
    model = HashModel(5, ends=frozenset(), end_bias=-99.0)
    prompt, sampling = Prompt(token_ids=(5, 6, 7), id="0"), SamplingParams(max_new_tokens=6)
    narrow = decode(model, SlotSearch(slot_size=2, selection="beam", beam_size=1), [prompt], sampling).rows[0]
    text = slow_root(HashModel(5, ends=frozenset(), end_bias=-99.0), prompt, 2, 6)
    while text.remaining:  # a beam of one keeps the best of all next slots
        text = max((text.after(slot) for slot in text.remaining), key=lambda t: t.score)
    assert narrow.token_ids == text.response(6)
    # A forward to plan and one for the second tokens of all candidates, for each of three slots.
    assert (narrow.num_forwards, narrow.num_tokens) == (6, 6)


@pytest.mark.parametrize("num_serial_blocks", [1, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_one_simulation_is_the_order_of_certainty(num_serial_blocks: int, temperature: float) -> None:
    model = tiny_backbone()
    batch = [Prompt(token_ids=tuple(range(3, 3 + n)), id=str(n)) for n in (1, 4, 7)]
    sampling = SamplingParams(max_new_tokens=24, temperature=temperature, seed=3)
    sizes = {"slot_size": 4, "num_serial_blocks": num_serial_blocks}
    search = SlotSearch(**sizes, num_simulations=1, horizon=1)
    plain = ReFusion(**sizes, selection="top_k", k=1, token_threshold=1.0, infill="autoregressive")
    rows, expected = (decode(model, decoder, batch, sampling, batch_size=2).rows for decoder in (search, plain))
    assert [row.token_ids for row in rows] == [row.token_ids for row in expected]
    # A plan and three further tokens for each slot.
    assert {row.num_forwards for row in rows if row.finish_reason == "length"} == {6 * 4}


@pytest.mark.parametrize(
    ("options", "length", "match"),
    [
        ({"num_simulations": 0}, 8, "num_simulations: expected .* 1"),
        ({"horizon": 0}, 8, "horizon"),
        ({"num_serial_blocks": 3}, 8, "num_serial_blocks: expected at most 1"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, float], length: int, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        SlotSearch(**options).check(SamplingParams(max_new_tokens=length))  # type: ignore[arg-type]
