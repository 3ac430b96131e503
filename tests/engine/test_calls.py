"""A call of the model for several prompts: what it computes, what decoders read of it, and how tokens are drawn."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from refusion_lit.decoding import Autoregressive, RowState
from refusion_lit.engine import sampler as sampler_module
from refusion_lit.engine.engine import Engine
from refusion_lit.engine.requests import (
    Branch,
    Compaction,
    Draw,
    Forward,
    MoreDrafts,
    Reading,
    Request,
    Statistic,
    Steps,
)
from refusion_lit.engine.sequence import PromptSequence
from refusion_lit.types import Prompt, SamplingParams
from support.example_counts import examples
from support.fakes import MASK, PAD, SPECIAL, VOCAB, HashModel

GREEDY = Draw(sampling=SamplingParams())


class SingleCalls(Engine):
    """An engine that answers requests of decoders without running a decoder."""

    def __init__(self, model: Any, num_rows: int) -> None:
        super().__init__(model, Autoregressive(), num_rows)
        self.flying: dict[int, PromptSequence] = {}
        self.answers: dict[int, list[Reading]] = {}

    def serve(self, requests: list[tuple[int, str, Request]]) -> list[list[Reading]]:
        """Answer a request of each prompt in one step of the engine.

        Args:
            requests: For each prompt its row of the cache, its id, and the request.

        Returns:
            For each prompt the readings of its branches.
        """
        for row, prompt_id, request in requests:
            prompt = Prompt(token_ids=(3,), id=prompt_id)
            state = RowState(prompt, SamplingParams(max_new_tokens=1), SPECIAL)
            sequence = self.flying.setdefault(row, PromptSequence(row, prompt, state.sampling, cache_row=row))
            sequence.begin(state, self._send(row, request))
        self.running = [self.flying[row] for row, _, _ in requests]
        for group in self._schedule():
            self._postprocess(group, self._run(group))
        return [self.answers[row] for row, _, _ in requests]

    def _send(self, row: int, request: Request) -> Steps[None]:
        self.answers[row] = yield request


@st.composite
def branches(draw: st.DrawFn) -> Branch:
    tokens = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=7))
    places = st.integers(0, len(tokens) - 1)
    return Branch(
        tokens=tokens,
        positions=draw(st.permutations(range(len(tokens)))),
        order=draw(
            st.none() | st.lists(st.integers(0, 3), min_size=len(tokens), max_size=len(tokens)).map(sorted)
        ),
        draft_at=draw(st.lists(places, max_size=4)),
        score_at=draw(st.lists(st.tuples(places, st.integers(0, VOCAB - 1)), max_size=4)),
    )  # fmt: skip


def compute_logits(model: HashModel, branch: Branch) -> Tensor:
    """Return the logits of a branch without other branches, with its attention mask written out."""
    length = len(branch.tokens)
    order = branch.order or range(length)
    mask = torch.tensor([[[order[key] <= order[query] for key in range(length)] for query in range(length)]])
    hidden = model.hidden_states(torch.tensor([branch.tokens]), torch.tensor([branch.positions]), mask)
    return model.logits(hidden[0])


def check(reading: Reading, branch: Branch, logits: Tensor) -> None:
    """Compare a greedy reading with logits."""
    allowed = [token for token in range(VOCAB) if token not in (MASK, PAD)]
    tokens = [max(allowed, key=lambda token: float(logits[offset, token])) for offset in branch.draft_at]
    assert reading.tokens == tokens
    softmax = logits.softmax(-1)
    expected = [float(softmax[offset, token]) for offset, token in zip(branch.draft_at, tokens, strict=True)]
    assert reading.probabilities == pytest.approx(expected, abs=1e-14)
    assert reading.scores == pytest.approx([float(softmax[o, t]) for o, t in branch.score_at], abs=1e-14)


@settings(max_examples=examples(48), deadline=None)
@given(groups=st.lists(st.lists(branches(), min_size=1, max_size=3), min_size=1, max_size=4), chunk=st.integers(1, 40))
def test_branches_of_all_lengths_share_a_call_and_are_read_as_if_alone(groups: list[list[Branch]], chunk: int) -> None:
    model = HashModel(1)
    executor = SingleCalls(model, len(groups))
    requests = [
        (row, str(row), Forward(phase="", branches=tuple(group), draw=GREEDY, cached=False))
        for row, group in enumerate(groups)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler_module, "_MAX_LOGITS", chunk)
        readings = executor.serve(requests)
    longest = max(len(branch.tokens) for group in groups for branch in group)
    assert executor.output.num_calls == 1
    assert executor.output.num_positions == longest * sum(map(len, groups))
    for group, read in zip(groups, readings, strict=True):
        for branch, reading in zip(group, read, strict=True):
            check(reading, branch, compute_logits(HashModel(1), branch))
    further = [
        (row, str(row), MoreDrafts(draft_at=tuple(range(len(branch.tokens)) for branch in group), draw=GREEDY))
        for row, group in enumerate(groups)
    ]
    for group, read in zip(groups, executor.serve(further), strict=True):
        for branch, reading in zip(group, read, strict=True):
            everywhere = Branch(
                tokens=branch.tokens, positions=branch.positions, order=branch.order, draft_at=range(len(branch.tokens))
            )
            check(reading, everywhere, compute_logits(HashModel(1), branch))
    assert executor.output.num_calls == 1, "further drafts need no call"


def test_cached_and_uncached_forwards_are_two_calls() -> None:
    model = HashModel(2)
    executor = SingleCalls(model, 3)
    branch = [Branch(tokens=[3 + i, 4], positions=[0, 1], draft_at=[1]) for i in range(3)]
    forwards = [
        (row, str(row), Forward(phase="", branches=(branch[row],), draw=GREEDY, cached=row != 1)) for row in range(3)
    ]
    readings = executor.serve(forwards)
    assert executor.output.num_calls == 2
    for row in range(3):
        check(readings[row][0], branch[row], compute_logits(HashModel(2), branch[row]))


def test_a_cached_context_is_shared_kept_and_read() -> None:
    model = HashModel(3)
    executor = SingleCalls(model, 2)
    context = Branch(tokens=[3, 4, 5, 6], positions=[0, 1, 2, 3])
    executor.serve([(1, "a", Forward(phase="", branches=(context,), draw=GREEDY))])
    left = Branch(tokens=[7, 8], positions=[4, 5], visible=((0, 4),), write_at=4, draft_at=[1])
    right = Branch(tokens=[9, 10], positions=[6, 7], visible=((0, 4),), write_at=6, draft_at=[1])
    readings = executor.serve([(1, "a", Forward(phase="", branches=(left, right), draw=GREEDY))])
    for branch, reading in zip((left, right), readings[0], strict=True):
        alone = Branch(
            tokens=[3, 4, 5, 6, *branch.tokens], positions=[0, 1, 2, 3, *branch.positions], draft_at=[5]
        )  # fmt: skip
        check(reading, alone, compute_logits(HashModel(3), alone))
    last = Branch(tokens=[11], positions=[8], visible=((0, 3),), write_at=3, draft_at=[0])
    forward = Forward(phase="", branches=(last,), draw=GREEDY, keep=Compaction(1, [2, 7]))
    [[reading]] = executor.serve([(1, "a", forward)])
    # The kept entry 7 was computed with the whole context and its branch in sight. The reference lays all of them out
    # and hides from the last token what was not kept.
    ids, places = [3, 4, 5, 6, 9, 10, 11], [0, 1, 2, 3, 6, 7, 8]
    mask = torch.ones(7, 7, dtype=torch.bool).tril()
    mask[6, [1, 3, 4]] = False
    reference = HashModel(3)
    hidden = reference.hidden_states(torch.tensor([ids]), torch.tensor([places]), mask[None])
    check(reading, last, reference.logits(hidden[0, 6:]))


class GivenLogits(HashModel):
    """A model with a table (token, vocabulary) of logits: the logits depend on the input token only."""

    def __init__(self, table: Any) -> None:
        super().__init__()
        self.table = torch.as_tensor(table)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.table[hidden[:, 0]]

    def hidden_states(self, input_ids: Tensor, position_ids: Tensor, attention_mask: Tensor, cache=None) -> Tensor:
        return torch.stack([input_ids, position_ids], -1)


def read(table: Any, draw: Draw, tokens: list[int], unconditional: list[int] | None = None, score: int = 5) -> Reading:
    """Return the reading of a branch on a model with given logits.

    Args:
        table: The logits of each token.
        draw: How tokens are drawn.
        tokens: The branch's tokens, all of which are read.
        unconditional: Tokens of a second branch, whose logits are used for guidance.
        score: A token to score at the first place.
    """
    places = range(len(tokens))
    branch_list = [Branch(tokens=tokens, positions=places, draft_at=places, score_at=[(0, score)])]
    if unconditional is not None:
        branch_list.append(Branch(tokens=unconditional, positions=places))
    executor = SingleCalls(GivenLogits(table), 1)
    return executor.serve([(0, "0", Forward(phase="", branches=tuple(branch_list), draw=draw, cached=False))])[0][0]


def make_random_table(rows: int = VOCAB, seed: int = 0) -> Tensor:
    """Return random logits (token, vocabulary)."""
    return torch.randn(VOCAB, rows, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3


@pytest.mark.parametrize("weight", [0.0, 0.5, 4.0])
def test_guidance_weighs_two_branches(weight: float) -> None:
    table = make_random_table()
    draw = Draw(sampling=SamplingParams(), guidance=weight)
    reading = read(table, draw, [3, 4], [6, 7])
    for offset in range(2):
        conditional, unconditional = table[3 + offset], table[6 + offset]
        logits = unconditional + (weight + 1) * (conditional - unconditional)
        softmax = logits.softmax(-1)
        allowed = logits.clone()
        allowed[[PAD, MASK]] = -math.inf
        assert reading.tokens[offset] == int(allowed.argmax())
        assert reading.probabilities[offset] == pytest.approx(float(softmax[reading.tokens[offset]]))
        if offset == 0:
            assert reading.scores == pytest.approx([float(softmax[5])])


def test_an_unknown_statistic_is_no_statistic() -> None:
    with pytest.raises(ValueError, match=r"^statistic: expected one of margin, .*, got 'variance'"):
        read(make_random_table(), Draw(sampling=SamplingParams(), statistic="variance"), [3])  # type: ignore[arg-type]


def test_guided_prompts_of_one_call_read_their_own_branches() -> None:
    table, draw = make_random_table(), Draw(sampling=SamplingParams(), guidance=1.5)

    def guided_forward(tokens: list[int], others: list[int]) -> Forward:
        places = range(len(tokens))
        scored = tuple((offset, 5 + offset) for offset in places)
        first = Branch(tokens=tokens, positions=places, draft_at=places, score_at=scored)
        return Forward(phase="", branches=(first, Branch(tokens=others, positions=places)), draw=draw, cached=False)

    forwards = [
        guided_forward([3, 4, 5], [6, 7, 8]),
        guided_forward([9, 8], [4, 3]),
        guided_forward([10, 11, 12], [3, 9, 5]),
    ]
    together = SingleCalls(GivenLogits(table), 3).serve([(i, str(i), f) for i, f in enumerate(forwards)])
    for number, forward in enumerate(forwards):
        [[alone, _]] = SingleCalls(GivenLogits(table), 1).serve([(0, str(number), forward)])
        assert together[number][0] == alone


def test_forbidden_tokens_are_not_drawn_or_have_confidence_zero() -> None:
    """``forbidden`` tokens are not drawn. ``confidence_forbidden`` tokens are drawn with confidence 0."""
    table = make_random_table()
    best = max((token for token in range(VOCAB) if token not in (PAD, MASK)), key=lambda token: float(table[3, token]))
    plain = read(table, GREEDY, [3])
    assert plain.tokens == [best]
    assert plain.probabilities == pytest.approx([float(table[3].softmax(-1)[best])])
    without = read(table, Draw(sampling=SamplingParams(), forbidden=(best,)), [3])
    assert without.tokens != [best]
    assert without.probabilities == pytest.approx([float(table[3].softmax(-1)[without.tokens[0]])])
    unsure = read(table, Draw(sampling=SamplingParams(), confidence_forbidden=(best,)), [3], score=without.tokens[0])
    assert unsure.tokens == [best]
    assert unsure.probabilities == [0.0]
    rest = table[3].clone()
    rest[best] = -math.inf
    assert unsure.scores == pytest.approx([float(rest.softmax(-1)[without.tokens[0]])])


@pytest.mark.parametrize(("confidence", "temperature"), [("tempered", 0.7), ("filtered", 1.0)])
def test_statistics_describe_the_distribution_that_confidence_names(confidence: str, temperature: float) -> None:
    table = make_random_table()
    draw = Draw(sampling=SamplingParams(temperature=0.7, top_k=4), confidence=confidence)  # type: ignore[arg-type]
    readings = {name: read(table, replace(draw, statistic=name), [3, 4, 5]) for name in get_args(Statistic)}
    reading = readings["margin"]
    for offset, token in enumerate(reading.tokens):
        logits = table[3 + offset].clone() / temperature
        logits[[PAD, MASK]] = -math.inf
        top_four = logits.topk(4)
        assert token in top_four.indices
        probability = top_four.values.softmax(-1)
        values = {name: reading.statistic[offset] for name, reading in readings.items()}
        assert values["margin"] == pytest.approx(float(probability[0] - probability[1]), abs=1e-8)
        assert values["negative_entropy"] == pytest.approx(float((probability * probability.log()).sum()), abs=1e-8)
        assert values["probability"] == pytest.approx(float(probability[top_four.indices == token]), abs=1e-8)
        whole = table[3 + offset].softmax(-1)
        assert reading.probabilities[offset] == pytest.approx(float(whole[token]))
        entropy = -float((whole * whole.log()).sum())  # of all ids, unlike the other statistics
        assert values["entropy"] == pytest.approx(entropy, abs=1e-8)


def test_low_precision_logits_give_float32_probabilities() -> None:
    table = torch.zeros(VOCAB, VOCAB, dtype=torch.bfloat16)
    table[:, 5] = 2.0
    [probability] = read(table, GREEDY, [3]).probabilities
    assert probability == pytest.approx(math.e**2 / (math.e**2 + VOCAB - 1), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("temperature", [0.0, 1e-3, 1.0])
@pytest.mark.parametrize("guidance", [None, 3.0])
def test_broken_logits_give_an_allowed_token_and_a_probability(
    dtype: torch.dtype, temperature: float, guidance: float | None
) -> None:
    """The tokens 3 to 9 have logits with numbers that no softmax can use. The head has two rows without a token."""
    nan, inf = math.nan, math.inf
    table = torch.zeros(VOCAB, VOCAB + 2, dtype=dtype)
    table[3] = nan
    table[4] = -inf
    table[5] = inf
    table[6, 7:9] = inf  # two tokens are infinitely more probable than the others
    table[7, [PAD, MASK, VOCAB, VOCAB + 1]] = inf  # only ids that may not be drawn are
    table[8, 5:] = nan
    table[9, :9] = -inf  # tokens below 9 are impossible
    draw = Draw(sampling=SamplingParams(temperature=temperature, top_p=0.9), guidance=guidance)
    reading = read(table, draw, [3, 4, 5, 6, 7, 8, 9], None if guidance is None else [9, 8, 3, 4, 5, 6, 7])
    assert not {PAD, MASK, VOCAB, VOCAB + 1} & set(reading.tokens)
    assert all(0 <= probability <= 1 for probability in [*reading.probabilities, *reading.scores])
    if guidance is None:
        assert reading.tokens[3] in (7, 8)
        assert reading.probabilities[3] == pytest.approx(0.5)
        assert reading.probabilities[4] == 0
        assert reading.tokens[6] >= 9
    if temperature == 0 and guidance is None:
        assert reading.tokens[:3] == [1, 1, 1]  # all tokens tie, and 1 is the first that may be drawn
        assert reading.tokens[3] == 7


def test_rows_that_draw_differently_share_a_call() -> None:
    branch = Branch(tokens=[3, 4, 5, 6], positions=[0, 1, 2, 3], draft_at=range(4), score_at=[(1, 4)])
    greedy = SingleCalls(HashModel(4), 1).serve([(0, "", Forward(phase="", branches=(branch,), draw=GREEDY))])[0][0]
    draws = [
        GREEDY,
        Draw(sampling=SamplingParams(temperature=9.0, seed=1), round=3),
        Draw(sampling=SamplingParams(), forbidden=tuple(greedy.tokens[1:])),
    ]
    executor = SingleCalls(HashModel(4), 3)
    forwards = [(i, f"p{i}", Forward(phase="", branches=(branch,), draw=draws[i])) for i in range(3)]
    together = executor.serve(forwards)
    assert executor.output.num_calls == 1
    for i, request in enumerate(forwards):
        assert SingleCalls(HashModel(4), 3).serve([request])[0] == together[i]
    assert len({tuple(reading[0].tokens) for reading in together}) == 3
    assert len({tuple(reading[0].scores) for reading in together}) == 1


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({}, True),
        ({"round": 4}, False),
        ({"sampling": SamplingParams(temperature=3.0, seed=2)}, False),
        ({"sampling": SamplingParams(temperature=3.0, seed=1, max_new_tokens=7)}, True),
    ],
)
def test_noise_is_a_function_of_seed_prompt_round_and_position(change: dict[str, Any], same: bool) -> None:
    def tokens(prompt_id: str = "p", first: int = 0, shift: int = 0, **options: Any) -> list[int]:
        values = {"sampling": SamplingParams(temperature=3.0, seed=1), "round": 3, **options}
        branch = Branch(tokens=[3] * 12, positions=range(first, first + 12), draft_at=range(12), shift=shift)
        forward = Forward(phase="", branches=(branch,), draw=Draw(**values), cached=False)
        return SingleCalls(GivenLogits(torch.zeros(VOCAB, VOCAB)), 1).serve([(0, prompt_id, forward)])[0][0].tokens

    assert (tokens(**change) == tokens()) == same
    assert tokens(prompt_id="q") != tokens()
    assert tokens(first=1)[:-1] == tokens()[1:], "noise belongs to positions"
    assert tokens(shift=1)[:-1] == tokens()[1:], "noise belongs to the positions that are predicted"
