"""IntrospectiveStrided, CausalBlockDiffusion and LinearSpeculation; tests/goldens compares them with programs."""

from __future__ import annotations

import json
import math
import random
import shutil
from collections import defaultdict
from dataclasses import replace
from itertools import product
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch

import refusion_lit
from refusion_lit.decoding import (
    Autoregressive,
    CausalBlockDiffusion,
    Decoder,
    Forward,
    IntrospectiveStrided,
    LinearSpeculation,
    Reading,
    decode,
)
from refusion_lit.engine.requests import Branch, Proposal
from refusion_lit.types import ModelTraits, Prompt, SamplingParams
from support.decoder_cases import traits_for
from support.fakes import EOS, SPECIAL, VOCAB, HashModel
from support.published import MODELS

PROMPTS = [Prompt(token_ids=ids, id=str(i)) for i, ids in enumerate([(3, 4, 5), (6,), (3, 4, 5, 7, 8)])]
EXACT = [IntrospectiveStrided(stride=1), IntrospectiveStrided(stride=4), LinearSpeculation(block_size=1),
         LinearSpeculation(block_size=5), LinearSpeculation(block_size=4, threshold=0.5),
         CausalBlockDiffusion(block_size=1)]  # fmt: skip


def texts(decoder: Decoder, traits: ModelTraits, seed: int, sampling: SamplingParams) -> list[list[int]]:
    model = HashModel(seed, traits=traits)
    return [row.token_ids for row in decode(model, decoder, PROMPTS, sampling, batch_size=2).rows]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("decoder", EXACT, ids=repr)
def test_the_text_equals_the_text_of_sequential_decoding(decoder: Decoder, temperature: float) -> None:
    traits = traits_for(decoder)
    for seed in range(4):
        sampling = SamplingParams(max_new_tokens=17, temperature=temperature, seed=seed)
        assert texts(decoder, traits, seed, sampling) == texts(Autoregressive(), traits, seed, sampling)


Text = tuple[int, ...]
WORDS: tuple[int, ...] = (EOS, 3, 4)
"""The vocabulary of the following test, which enumerates all texts."""


def next_token_probabilities(context: Text) -> dict[int, float]:
    """Return a distribution over ``WORDS`` that depends on every token of the context."""
    weights = [random.Random(repr((context, word))).uniform(0.05, 1) ** 3 for word in WORDS]
    return {word: weight / sum(weights) for word, weight in zip(WORDS, weights, strict=True)}


def possible_draws(context: Text, proposal: Proposal | None) -> list[tuple[Proposal, float]]:
    """Return all tokens that may be drawn after a context, and their probabilities.

    Args:
        context: The tokens before.
        proposal: A drafted token, which rejection sampling keeps with probability min(1, p / q).
    """
    p = next_token_probabilities(context)
    draws: dict[int, float] = dict(p)
    if proposal is not None:
        q = dict(zip(WORDS, proposal.probabilities.tolist(), strict=True))
        kept = min(1.0, p[proposal.token] / q[proposal.token])
        rest = {word: max(p[word] - q[word], 0.0) for word in WORDS}
        draws = {word: (1 - kept) * rest[word] / (sum(rest.values()) or 1) for word in WORDS}
        draws[proposal.token] += kept
    distribution = torch.tensor([*p.values()], dtype=torch.float64)
    return [(Proposal(word, distribution), share) for word, share in draws.items() if share > 0]


def decode_with(decoder: Decoder, sampling: SamplingParams, answers: list[Reading]) -> tuple[Text, list[Any]]:
    """Decode with given readings of the first forward passes.

    Returns:
        The text, and an empty list; or an empty text and, for each place that the next forward pass reads, all tokens
        that may be drawn there.
    """
    state, following = decoder.begin(PROMPTS[0], sampling, SPECIAL), iter(answers)
    branch = Branch(tokens=(), positions=())
    while not state.prefix_ends:
        steps = decoder.step(state)
        request = next(steps, None)
        while request is not None:
            if isinstance(request, Forward):
                [branch] = request.branches
            else:
                branch = replace(branch, draft_at=request.draft_at[0], proposals={})
            cached = [*PROMPTS[0].token_ids, *state.tokens][: branch.positions[0]]
            if (answer := next(following, None)) is None:
                return (), [
                    possible_draws((*cached, *branch.tokens[: offset + 1]), branch.proposals.get(offset))
                    for offset in branch.draft_at
                ]
            try:
                request = steps.send([answer])
            except StopIteration:
                request = None
    return tuple(state.final_prefix()), []


@pytest.mark.parametrize("stride", [2, 3])
def test_rejection_sampling_gives_every_text_its_probability(stride: int) -> None:
    """All draws are enumerated, so that the probabilities of texts are exact."""
    decoder = IntrospectiveStrided(stride=stride, coupling="rejection")
    sampling = SamplingParams(max_new_tokens=5, temperature=1.0)

    # Decode with every sequence of draws; a sequence that ends too early is extended by every possible draw.
    probabilities: dict[Text, float] = defaultdict(float)
    waiting: list[tuple[list[Reading], float]] = [([], 1.0)]
    while waiting:
        answers, probability = waiting.pop()
        text, draws = decode_with(decoder, sampling, answers)
        if not draws:
            probabilities[text] += probability
            continue
        for drawn in product(*draws):
            proposals = [proposal for proposal, _ in drawn]
            reading = Reading(tokens=[proposal.token for proposal in proposals], proposals=proposals)
            probability_of_draws = math.prod(probability for _, probability in drawn)
            waiting.append(([*answers, reading], probability * probability_of_draws))

    # Sequential decoding, token by token.
    expected: dict[Text, float] = {(): 1.0}
    for _ in range(sampling.max_new_tokens):
        longer: dict[Text, float] = {}
        for text, probability in expected.items():
            if EOS in text:
                longer[text] = probability
                continue
            for word, next_probability in next_token_probabilities((*PROMPTS[0].token_ids, *text)).items():
                longer[*text, word] = probability * next_probability
        expected = longer
    assert dict(probabilities) == pytest.approx(expected, abs=1e-12)


def test_rejection_sampling_keeps_all_drafts_of_equal_distributions(monkeypatch: pytest.MonkeyPatch) -> None:
    """If drafts come from the model's own distribution, sampling needs as few forward passes as greedy decoding."""
    same = torch.linspace(0, 3, VOCAB).index_fill(0, torch.tensor([EOS]), -60.0)
    monkeypatch.setattr(HashModel, "logits", lambda _, hidden: same.expand(*hidden.shape[:-1], -1).clone())
    decoder = IntrospectiveStrided(stride=4, coupling="rejection")
    model = HashModel(traits=traits_for(decoder))
    drawn, greedy = (
        decode(model, decoder, PROMPTS, SamplingParams(max_new_tokens=25, temperature=temperature))
        for temperature in (1.0, 0.0)
    )
    num_forwards = 2 + ceil((25 - 2) / 4)  # the prompt, a forward pass that adds two tokens, and full strides
    for output in (drawn, greedy):
        assert [row.num_forwards for row in output.rows] == [num_forwards] * 3
    assert [row.token_ids for row in drawn.rows] != [row.token_ids for row in greedy.rows]


def test_a_drawn_drafts_confidence_is_its_probability_after_the_filters() -> None:
    """The only token that top-k keeps has probability 1, which meets every threshold."""
    model = refusion_lit.load(MODELS["nld-tiny"])
    one_forward, thorough = (
        model.generate(
            ["12+34,56+78>"],
            decoder=LinearSpeculation(block_size=5, threshold=threshold),
            sampling=SamplingParams(max_new_tokens=17, temperature=0.7, top_k=1),
        )[0]
        for threshold in (0.0, 1.0)
    )
    assert one_forward.text == thorough.text
    assert one_forward.num_forwards == thorough.num_forwards


def test_the_adapter_for_drafts_is_left_out_with_a_warning(tmp_path: Path) -> None:
    """The text is the same without the adapter: linear self-speculation accepts what the model itself would write."""
    path = tmp_path / "nemotron"
    shutil.copytree(MODELS["nld-tiny"], path)
    (path / "linear_spec_lora").mkdir()
    (path / "linear_spec_lora" / "adapter_config.json").write_text("{}")
    with pytest.warns(UserWarning, match="linear_spec_lora"):
        refusion_lit.load(path)


@pytest.mark.parametrize("num_tokens", [1, 2, 3])
def test_short_responses(num_tokens: int) -> None:
    sampling = SamplingParams(max_new_tokens=num_tokens)
    for decoder in EXACT:
        traits = traits_for(decoder)
        assert texts(decoder, traits, 1, sampling) == texts(Autoregressive(), traits, 1, sampling)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("size", [1, 3, 4, 8, 32])
def test_block_diffusion_writes_the_end_of_thinking_at_its_place(size: int, causal: bool) -> None:
    decoder = CausalBlockDiffusion(
        block_size=size, threshold=None, causal_context=causal, max_thinking_tokens=6, end_think_token_id=9
    )
    for text in texts(decoder, traits_for(decoder), 2, SamplingParams(max_new_tokens=20)):
        whole_blocks = text[: 6 // size * size]
        assert 9 in whole_blocks or EOS in text[:6] or text[6] == 9


def test_linear_speculation_ends_the_thinking_with_the_round_that_exceeds_it() -> None:
    decoder = LinearSpeculation(block_size=4, max_thinking_tokens=6, end_think_token_id=9)
    for text in texts(decoder, traits_for(decoder), 3, SamplingParams(max_new_tokens=20)):
        assert EOS in text or 9 in text[: 6 + 4]


@pytest.mark.parametrize("cls", [CausalBlockDiffusion, LinearSpeculation])
@pytest.mark.parametrize("options", [{"max_thinking_tokens": 3}, {"end_think_token_id": 3}])
def test_a_thinking_budget_needs_both_options(cls: type[Any], options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="end_think_token_id"):
        cls(**options)


def test_a_mask_does_not_end_the_thinking() -> None:
    decoder = LinearSpeculation(max_thinking_tokens=3, end_think_token_id=2)
    with pytest.raises(ValueError, match="end_think_token_id"):
        texts(decoder, traits_for(decoder), 0, SamplingParams(max_new_tokens=8))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [  # a published checkpoint, changes of its config, and what the message names
        ("nld-tiny", {"dlm_paradigm": "autoregressive"}, "dlm_paradigm"),
        ("nld-tiny", {"mlp_bias": True}, "mlp_bias"),
        ("nld-tiny", {"rope_parameters": {"rope_type": "yarn"}}, "llama_4_scaling_beta"),
        ("nld-tiny", {"rope_parameters": "yarn"}, "llama_4_scaling_beta"),
        ("nld-tiny", {"num_attention_heads": 5}, "num_attention_heads"),
        ("nld-tiny", {"intermediate_size": 128}, "shape"),
        ("nld-tiny", {"num_hidden_layers": 4}, "encoder.layers.3"),
        ("idlm-tiny", {"block_size": "three"}, "block_size"),
        ("idlm-tiny", {"num_key_value_heads": 3}, "num_attention_heads"),
    ],
)
def test_a_wrong_config_is_refused_in_one_line(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    source = tmp_path / name
    shutil.copytree(MODELS[name], source)
    values = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**values, **changes}))
    with pytest.raises(ValueError, match=message) as refused:
        refusion_lit.load(source)
    assert "\n" not in str(refused.value)


def test_the_name_of_the_folder_tells_idlm_from_sdar(tmp_path: Path) -> None:
    """Their configs are alike, so only a folder named like I-DLM's checkpoints gets I-DLM's decoder."""
    for name, decoder in {"I-DLM-8B": "IntrospectiveStrided", "midlm": "BlockDiffusion"}.items():
        shutil.copytree(MODELS["idlm-tiny"], tmp_path / name)
        assert type(refusion_lit.load(tmp_path / name).default_decoder).__name__ == decoder
