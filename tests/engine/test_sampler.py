"""The sampler, which reads the logits of all requests of a call: results against a slow sampler, and its cost."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from refusion_lit.decoding import Autoregressive, ReFusion, decode
from refusion_lit.engine import sampler as sampler_module
from refusion_lit.engine.requests import Branch, Draw, Proposal, SamplingJob
from refusion_lit.engine.sampler import Sampler
from refusion_lit.modeling.kv_cache import KVCache
from refusion_lit.types import ModelTraits, Prompt, SamplingParams, SpecialTokens
from support.fakes import EOS, MASK, PAD, VOCAB, FakeModel, OracleModel, oracle_text

GREEDY = Draw(sampling=SamplingParams())
SILENT = Draw(sampling=SamplingParams(), with_probability=False)


class TableModel(FakeModel):
    """The logits of hidden state ``i`` are row ``i`` of a table."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table = table
        self.rows: list[list[int]] = []

    def hidden_states(self, *_: Any) -> Tensor:
        raise AssertionError("only the head is read")

    def logits(self, hidden: Tensor) -> Tensor:
        self.rows.append(hidden[:, 0].tolist())
        return self.table[hidden[:, 0]]

    def make_cache(self, num_rows: int) -> KVCache:
        return KVCache(0, num_rows)  # no layers: it keeps no state


def make_job(draw: Draw, index: Any, scored: Any = (), proposals: Any = None, prompt_id: str = "") -> SamplingJob:
    """Return a read of drafts, and of pairs of index and token."""
    branch = Branch(tokens=[3] * 12, positions=range(12), draft_at=index, score_at=scored, proposals=proposals or {})
    return SamplingJob(draw, branch, 0, Prompt(token_ids=(3,), id=prompt_id), canvas=())


def read_slowly(row: list[float], forbidden: tuple[int, ...], given: int | None) -> tuple[int, float]:
    """Return the token that is drawn, or the given one, and its probability, in plain Python."""
    highest = torch.finfo(torch.float64).max
    finite = [-highest if math.isnan(value) else min(max(value, -highest), highest) for value in row]
    allowed = [token for token in range(VOCAB) if token not in (MASK, PAD, *forbidden)]
    token = max(allowed, key=lambda token: (finite[token], -token)) if given is None else given
    weights = [math.exp(max(value - max(finite), -1e4)) for value in finite]
    return token, weights[token] / sum(weights)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 9999),
    broken=st.sampled_from([0.0, 0.02, 0.5]),
    chunk=st.integers(1, 60),
    all_probabilities=st.booleans(),
)
def test_what_is_read_is_what_a_slow_one_reads(seed: int, broken: float, chunk: int, all_probabilities: bool) -> None:
    chance = random.Random(seed)
    table = [[chance.gauss(0, 3) for _ in range(VOCAB + 2)] for _ in range(12)]
    for row in table:
        if chance.random() < broken:
            for token in chance.sample(range(VOCAB + 2), chance.randint(1, VOCAB + 2)):
                row[token] = chance.choice([math.nan, math.inf, -math.inf])
    draws = [GREEDY, SILENT, Draw(sampling=SamplingParams(), forbidden=(EOS, 5)),
             Draw(sampling=SamplingParams(), statistic="margin")]  # fmt: skip
    jobs = []
    for _ in range(chance.randint(1, 8)):
        index = [chance.randrange(12) for _ in range(chance.randint(0, 4))]
        scored = [(chance.randrange(12), chance.randrange(VOCAB)) for _ in range(chance.randint(0, 3))]
        jobs.append(make_job(chance.choice(draws), index, scored))
    model = TableModel(torch.tensor(table, dtype=torch.float64))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler_module, "_MAX_LOGITS", chunk * 4)
        patch.setattr(sampler_module, "_MAX_SOFTMAX", chunk)
        Sampler(model, all_probabilities=all_probabilities).sample(torch.arange(12)[:, None], jobs)
    for job in jobs:
        drawn = [read_slowly(table[i], job.draw.forbidden, None) for i in job.branch.draft_at]
        scored = [read_slowly(table[i], job.draw.forbidden, token)[1] for i, token in job.branch.score_at]
        assert job.reading.scores == pytest.approx(scored, abs=1e-12)
        assert job.reading.tokens == [token for token, _ in drawn]
        is_read = job.draw.with_probability or all_probabilities
        probabilities = [probability for _, probability in drawn] if is_read else []
        assert job.reading.probabilities == pytest.approx(probabilities, abs=1e-12)
        assert len(job.reading.statistic) == (len(job.branch.draft_at) if job.draw.statistic else 0)


def test_greedy_reads_share_one_pass_of_the_head() -> None:
    model = TableModel(torch.randn(8, VOCAB, generator=torch.Generator().manual_seed(0)))
    jobs = [make_job(GREEDY, [0, 1], [(2, 3), (3, 4)]), make_job(SILENT, [4, 5], [(6, 3), (7, 4)])]
    Sampler(model).sample(torch.arange(8)[:, None], jobs)
    assert sorted(model.rows[0]) == list(range(8))
    assert len(model.rows) == 1


def num_softmax_rows(monkeypatch: pytest.MonkeyPatch, decoder: Any, **options: Any) -> tuple[int, Any]:
    """Decode and count the rows whose probabilities are computed."""
    sizes: list[int] = []
    softmax = Tensor.softmax

    def count(self: Tensor, dim: int) -> Tensor:
        sizes.append(len(self))
        return softmax(self, dim)

    monkeypatch.setattr(Tensor, "softmax", count)
    model = OracleModel(oracle_text(None), traits=ModelTraits())  # unknown training
    prompts = [Prompt(token_ids=(5, 6), id="0")]
    output = decode(model, decoder, prompts, SamplingParams(max_new_tokens=8), **options)
    monkeypatch.setattr(Tensor, "softmax", softmax)
    return sum(sizes), output.rows[0]


def test_probabilities_are_computed_where_they_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = ReFusion(slot_size=4, num_serial_blocks=1, fused=False)
    silent, row = num_softmax_rows(monkeypatch, decoder)
    assert silent == 2 + 6, "the slots' first tokens, and all but the first are tested"
    traced, traced_row = num_softmax_rows(monkeypatch, decoder, trace=True)
    assert traced == silent + 6
    assert traced_row.token_ids == row.token_ids
    assert all(len(entry.probabilities) == len(entry.tokens) for entry in traced_row.trace)
    assert num_softmax_rows(monkeypatch, Autoregressive())[0] == 0


@pytest.mark.parametrize("draw", [GREEDY, SILENT])
def test_a_forbidden_id_is_not_drawn_though_nothing_else_has_a_chance(draw: Draw) -> None:
    model = TableModel(torch.full((1, VOCAB), -torch.inf).index_fill_(1, torch.tensor([0]), 1.0))
    # Id 0, which argmax falls back to, is one that other draws may have.
    model.special_tokens = SpecialTokens(
        mask_token_id=VOCAB - 1, eos_token_ids=(EOS,), pad_token_id=EOS, vocab_size=VOCAB
    )
    read = make_job(replace(draw, forbidden=(0,)), [0])
    Sampler(model).sample(torch.zeros(1, 1, dtype=torch.long), [read])
    assert read.reading.tokens == [1]


@settings(max_examples=40)
@given(seed=st.integers(0, 9999), chunk=st.integers(1, 60), proposes=st.booleans())
def test_reads_with_and_without_proposals_get_together_what_each_gets_alone(
    seed: int, chunk: int, proposes: bool
) -> None:
    generator, chance = torch.Generator().manual_seed(seed), random.Random(seed)
    model = TableModel(3 * torch.randn(9, VOCAB, generator=generator, dtype=torch.float64))
    draw = Draw(sampling=SamplingParams(temperature=2.0, top_k=5), proposes=proposes)

    def read(number: int) -> SamplingJob:
        chosen = random.Random(seed + number)
        size = chosen.randint(1, 4)
        shares = torch.rand(size, VOCAB, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
        proposals = [Proposal(chosen.randrange(VOCAB), row) if chosen.random() < 0.7 else None
                     for row in shares / shares.sum(-1, keepdim=True)]  # fmt: skip
        index = chosen.sample(range(9), size)
        given_at = {i: proposal for i, proposal in zip(index, proposals, strict=True) if proposal is not None}
        return make_job(draw, index, proposals=given_at if number % 3 else None, prompt_id=str(number))

    hidden, numbers = torch.arange(9)[:, None], range(chance.randint(2, 6))
    together, alone = ([read(number) for number in numbers] for _ in range(2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler_module, "_MAX_LOGITS", chunk * VOCAB)
        patch.setattr(sampler_module, "_MAX_SOFTMAX", chunk * 3)
        Sampler(model).sample(hidden, together)
    for job in alone:
        Sampler(model).sample(hidden, [job])
    for job, expected_job in zip(together, alone, strict=True):
        reading, expected_reading = job.reading, expected_job.reading
        assert reading.tokens == expected_reading.tokens
        assert [proposal.token for proposal in reading.proposals] == (reading.tokens if proposes else [])
        pairs = zip(reading.proposals, expected_reading.proposals, strict=True)
        for row, (proposal, expected_proposal) in zip(job.branch.draft_at, pairs, strict=False):
            assert torch.equal(proposal.probabilities, expected_proposal.probabilities)
            allowed = model.table[row].index_fill(0, torch.tensor([MASK, PAD]), -math.inf)
            expected = (allowed.topk(5).values / 2.0).softmax(-1)
            assert torch.allclose(proposal.probabilities.topk(5).values, expected)
