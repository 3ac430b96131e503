"""Block diffusion against a slow reference that recomputes the whole text in each round, and its options."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from math import factorial
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from refusion_lit import decoding
from refusion_lit.decoding import Autoregressive, BlockDiffusion, Generation, ModelMismatchError, decode
from refusion_lit.engine.requests import Forward, Reading
from refusion_lit.families.block_diffusion.decoder import SubBlockState
from refusion_lit.learning.batch import IGNORE_INDEX, ResponseBatch
from refusion_lit.modeling.backbone import Backbone
from refusion_lit.modeling.load import BackboneConfig
from refusion_lit.noise import KeyedNoise
from refusion_lit.objectives import BlockMasked
from refusion_lit.types import ModelTraits, Prompt, SamplingParams, SpecialTokens
from support.example_counts import examples

ROOT = Path(__file__).parents[3]
CLEAN = ROOT / "tests" / "goldens" / "models" / "additions-clean"
PAD, EOS, MASK = 0, 1, 2
NEVER_DRAWN = 18
"""An id that no decoder draws. As the only EOS token it makes all responses run to their full length."""


@cache
def backbone() -> Backbone:
    return BackboneConfig(source=str(CLEAN), dtype="float64").build(AutoTokenizer.from_pretrained(CLEAN)).eval()


def model_for(decoder: BlockDiffusion, eos: tuple[int, ...] = (EOS,)) -> Backbone:
    """Return the tiny model with the traits of a model that was trained for a decoder."""
    special = replace(backbone().special_tokens, eos_token_ids=eos)
    if eos == (NEVER_DRAWN,):  # the last id, now beyond the tokenizer
        special = replace(special, vocab_size=NEVER_DRAWN)
    traits = ModelTraits(
        attention="block_causal", block_size=decoder.block_size, predictions=decoder.requirements().predictions
    )
    return Backbone(backbone().model, traits, special)


def make_prompts(lengths: list[int], seed: int = 0) -> list[Prompt]:
    """Return prompts of random ids, among them mask and EOS tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [
        Prompt(token_ids=tuple(torch.randint(0, 18, (length,), generator=generator).tolist()), id=str(i))
        for i, length in enumerate(lengths)
    ]


class Reference:
    """Block diffusion at temperature 0 without a cache: each round computes the whole text.

    Attributes:
        text: Prompt and response; ``None`` for a mask.
        num_rounds: Rounds in which masks were replaced.
        num_stored: Blocks that a decoder with a cache stores.
        masked: Positions of the masks, by round.
        probabilities: Probabilities of the best tokens at the masks, by round.
        accepted: Positions at which tokens were accepted, by round.
    """

    def __init__(self, decoder: BlockDiffusion, model: Backbone, prompt: Prompt, max_new_tokens: int) -> None:
        self.decoder, self.model, self.special = decoder, model, model.special_tokens
        self.text: list[int | None] = list(prompt.token_ids)
        self.num_known, self.max_new_tokens = len(prompt.token_ids), max_new_tokens
        self.num_rounds = 0
        self.num_stored = 0
        self.masked: list[list[int]] = []
        self.probabilities: list[list[float]] = []
        self.accepted: list[list[int]] = []
        self.run()

    @property
    def response(self) -> list[int] | None:
        """The finished response, or None."""
        tokens = []
        for token in self.text[self.num_known : self.num_known + self.max_new_tokens]:
            if token is None:
                return None
            tokens.append(token)
            if token in self.special.eos_token_ids:
                return tokens
        return tokens if len(tokens) == self.max_new_tokens else None

    def predict(self, position: int, length: int) -> tuple[int, float]:
        """Return the most probable allowed token at a position and its probability, given ``length`` tokens of text."""
        ids = [MASK if token is None else token for token in self.text[:length]]
        visible = [
            [key // self.decoder.block_size <= query // self.decoder.block_size for key in range(length)]
            for query in range(length)
        ]
        hidden = self.model.hidden_states(
            torch.tensor([ids]), torch.arange(length)[None], torch.tensor([visible]), None
        )
        logits = self.model.logits(hidden[0, position])
        probability = logits.softmax(-1)
        allowed = [i for i in range(self.special.vocab_size) if i not in self.special.banned_token_ids]
        token = max(allowed, key=lambda i: float(logits[i]))
        return token, float(probability[token])

    def run(self) -> None:
        size = self.decoder.block_size
        span = self.decoder.sub_block_size or size
        start = self.num_known // size * size
        while True:
            self.text += [None] * (start + size - len(self.text))
            if start > 0:
                self.num_stored += 1
                if self.decoder.shifted and self.text[start] is None:
                    self.text[start] = self.predict(start - 1, start)[0]
            for first in range(start, start + size, span):
                self.fill(range(first, first + span), start + size)
            if self.response is not None:
                return
            start += size

    def fill(self, span: range, length: int) -> None:
        """Replace all masks of a block or sub-block."""
        while self.response is None and (masked := [p for p in span if self.text[p] is None]):
            read = {p: self.predict(p - self.decoder.shifted, length) for p in masked}
            best = sorted(masked, key=lambda p: (-read[p][1], p))
            if self.decoder.sampling_rule == "threshold":
                chosen = {best[0], *(p for p in masked if read[p][1] > self.decoder.threshold)}
            else:
                chosen = {best[0]}
            for position in chosen:
                self.text[position] = read[position][0]
            self.num_rounds += 1
            self.masked.append(masked)
            self.probabilities.append([read[p][1] for p in masked])
            self.accepted.append(sorted(chosen))

    @property
    def num_forwards(self) -> int:
        """Expected number of forward passes: storing a block is free if it is fused with a round."""
        if not self.decoder.fused:
            return self.num_rounds + self.num_stored
        if not self.decoder.shifted:
            return self.num_rounds
        size = self.decoder.block_size
        # A shifted block needs its first token before its first round, so the forward pass that stores the block before
        # is no round; but if the prompt gives that token, the first round stores the prompt's whole blocks.
        is_stored_in_a_round = self.num_known % size > 0 and self.num_known > size
        return self.num_rounds + self.num_stored - is_stored_in_a_round


@st.composite
def decoders(draw: st.DrawFn) -> BlockDiffusion:
    size = draw(st.sampled_from([1, 2, 4, 6, 8, 32]))
    return BlockDiffusion(
        block_size=size,
        sampling_rule=draw(st.sampled_from(["threshold", "threshold", "first_hitting"])),
        threshold=draw(st.sampled_from([0.0, 0.15, 0.3, 0.5, 0.9, 1.0])),
        sub_block_size=draw(st.sampled_from([None, *(d for d in range(1, size + 1) if size % d == 0)])),
        shifted=draw(st.booleans()),
        fused=draw(st.booleans()),
    )


@settings(max_examples=examples(48), deadline=None)
@given(
    decoder=decoders(),
    num_known=st.integers(1, 20),
    max_new_tokens=st.integers(1, 20),
    eos=st.sampled_from([(EOS,), (NEVER_DRAWN,), (EOS, 5, 13)]),
    seed=st.integers(0, 99),
)
def test_greedy_decoding_is_the_slow_reference(
    decoder: BlockDiffusion, num_known: int, max_new_tokens: int, eos: tuple[int, ...], seed: int
) -> None:
    model = model_for(decoder, eos)
    [prompt] = make_prompts([num_known], seed)
    with torch.no_grad():
        reference = Reference(decoder, model, prompt, max_new_tokens)
    [row] = decode(model, decoder, [prompt], SamplingParams(max_new_tokens=max_new_tokens, seed=seed), trace=True).rows
    assert row.token_ids == reference.response
    assert row.num_forwards == reference.num_forwards
    rounds = [entry for entry in row.trace if entry.phase == "denoise"]
    assert [entry.positions for entry in rounds] == reference.masked
    assert [entry.accepted for entry in rounds] == reference.accepted
    for entry, probabilities in zip(rounds, reference.probabilities, strict=True):
        assert entry.probabilities == pytest.approx(probabilities, abs=1e-10)  # cached logits are uncached logits


@settings(max_examples=examples(24), deadline=None)
@given(
    decoder=decoders(),
    lengths=st.lists(st.integers(1, 20), min_size=2, max_size=5),
    temperature=st.sampled_from([0.0, 1.0]),
    batch_size=st.integers(2, 4),
    seed=st.integers(0, 99),
)
def test_a_batch_changes_no_response(
    decoder: BlockDiffusion, lengths: list[int], temperature: float, batch_size: int, seed: int
) -> None:
    model, prompts = model_for(decoder, (EOS, 13)), make_prompts(lengths, seed)
    sampling = SamplingParams(max_new_tokens=11, temperature=temperature, top_k=6, seed=seed)
    together = decode(model, decoder, prompts[::-1], sampling, batch_size=batch_size).rows[::-1]
    for prompt, row in zip(prompts, together, strict=True):
        [alone] = decode(model, decoder, [prompt], sampling).rows
        assert row.token_ids == alone.token_ids
        assert row.forward_shapes == alone.forward_shapes
        assert row.finish_reason == ("eos" if row.token_ids[-1] in (EOS, 13) else "length")
        assert len(row.token_ids) <= 11
        assert not {PAD, MASK} & set(row.token_ids)


# No case has a whole shifted block, whose first token the clean block predicts here and the noisy block in training.
@pytest.mark.parametrize(
    ("num_known", "shifted"), [(3, False), (9, False), (16, False), (3, True), (9, True), (14, True)]
)
def test_masks_are_predicted_as_in_training(num_known: int, shifted: bool) -> None:
    """A training sample with the last block masked gives the probabilities of the decoder's first round."""
    num_new = 8 - num_known % 8
    decoder, [prompt] = BlockDiffusion(shifted=shifted), make_prompts([num_known])
    model = model_for(decoder, (NEVER_DRAWN,))
    [row] = decode(model, decoder, [prompt], SamplingParams(max_new_tokens=num_new), trace=True).rows
    first = row.trace[0]

    clean = ResponseBatch(
        input_ids=torch.tensor([[*prompt.token_ids, *row.token_ids]]),
        prompt_lengths=torch.tensor([num_known]),
        response_lengths=torch.tensor([num_new]),
        sample_keys=torch.tensor([1]),
    )
    noise = KeyedNoise.for_samples(clean.sample_keys, seed=0, epoch=0)
    objective = BlockMasked(block_size=8, shifted=shifted)
    corrupted = objective.corrupt(clean, noise, model.special_tokens, mask_ratio=torch.ones(1))
    assert corrupted.is_masked is not None
    assert corrupted.is_masked.sum() == num_new
    with torch.no_grad():
        hidden = model(corrupted.input_ids, corrupted.position_ids, corrupted.visible)
        probabilities = model.logits(hidden[0, corrupted.labels[0] != IGNORE_INDEX]).softmax(-1)
    drafts = torch.tensor(first.tokens)
    assert first.probabilities == pytest.approx(probabilities.gather(-1, drafts[:, None])[:, 0].tolist(), abs=1e-10)


def decode_full(decoder: BlockDiffusion, num_known: int, max_new_tokens: int, **sampling: float) -> Generation:
    """Decode a prompt of ``num_known`` tokens whose response has no EOS token, so that its length is known."""
    params = SamplingParams(max_new_tokens=max_new_tokens, **sampling)  # type: ignore[arg-type]
    model = model_for(decoder, (NEVER_DRAWN,))
    [row] = decode(model, decoder, make_prompts([num_known]), params, trace=True).rows
    assert row.num_tokens == max_new_tokens
    return row


@pytest.mark.parametrize("num_known", [1, 6, 13])
def test_shifted_blocks_of_one_token_are_autoregressive_decoding(num_known: int) -> None:
    decoder = BlockDiffusion(block_size=1, shifted=True)
    row = decode_full(decoder, num_known, 15)
    model = model_for(decoder, (NEVER_DRAWN,))
    model.traits = ModelTraits()
    [sequential] = decode(model, Autoregressive(), make_prompts([num_known]), SamplingParams(max_new_tokens=15)).rows
    assert row.token_ids == sequential.token_ids
    assert row.forward_shapes == sequential.forward_shapes


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_threshold_of_one_gives_one_token_a_round(shifted: bool, temperature: float) -> None:
    decoder = BlockDiffusion(block_size=8, sub_block_size=4, threshold=1.0, shifted=shifted)
    row = decode_full(decoder, 16, 24, temperature=temperature)
    assert row.num_forwards == 24
    assert [len(entry.accepted) for entry in row.trace] == [1] * 24
    # The first token of a shifted block comes from the forward pass that stores the block before.
    phases = ["store" if shifted and i % 8 == 0 else "denoise" for i in range(24)]
    assert [entry.phase for entry in row.trace] == phases
    separate = decode_full(replace(decoder, fused=False), 16, 24, temperature=temperature)
    assert separate.num_forwards == 24 + (0 if shifted else 3)
    if temperature == 0:
        assert separate.token_ids == row.token_ids


@pytest.mark.parametrize("fused", [False, True])
def test_a_threshold_of_zero_gives_a_sub_block_a_round(fused: bool) -> None:
    """3 known and 21 new tokens are 3 blocks of 8, and new tokens in 11 sub-blocks of 2; 2 blocks are stored."""
    decoder = BlockDiffusion(block_size=8, threshold=0.0, fused=fused)
    num_stored = 0 if fused else 2
    assert decode_full(decoder, 3, 21).num_forwards == 3 + num_stored
    assert decode_full(replace(decoder, sub_block_size=2), 3, 21).num_forwards == 11 + num_stored


def test_the_first_token_of_a_shifted_block_is_greedy_at_any_temperature() -> None:
    decoder = BlockDiffusion(block_size=4, shifted=True)
    model, [prompt] = model_for(decoder, (NEVER_DRAWN,)), make_prompts([8])
    firsts, seconds = set(), set()
    for seed in range(12):
        sampling = SamplingParams(max_new_tokens=2, temperature=20.0, seed=seed)
        [row] = decode(model, decoder, [prompt], sampling).rows
        firsts.add(row.token_ids[0])
        seconds.add(row.token_ids[1])
    assert len(firsts) == 1
    assert len(seconds) > 1


def test_first_hitting_takes_a_random_place_with_every_forward_pass() -> None:
    decoder = BlockDiffusion(sampling_rule="first_hitting")
    row = decode_full(decoder, 8, 16, temperature=1.0)
    assert row.num_forwards == 16
    places = [place for entry in row.trace for place in entry.accepted]
    assert sorted(places[:8]) == list(range(8, 16))
    assert sorted(places[8:]) == list(range(16, 24))
    assert places != sorted(places)
    assert row.token_ids == decode_full(decoder, 8, 16, temperature=1.0).token_ids
    assert row.token_ids != decode_full(decoder, 8, 16, temperature=1.0, seed=1).token_ids


def test_first_hitting_at_temperature_zero_takes_the_most_certain_place() -> None:
    row = decode_full(BlockDiffusion(sampling_rule="first_hitting"), 5, 19, seed=3)
    assert row.trace == decode_full(BlockDiffusion(threshold=1.0), 5, 19).trace


def begin_sampled(decoder: BlockDiffusion, prompt_id: str) -> SubBlockState:
    """Begin a sampled response of one block."""
    special = SpecialTokens(mask_token_id=MASK, eos_token_ids=(EOS,), pad_token_id=PAD, vocab_size=9)
    prompt = Prompt(token_ids=(3,) * decoder.block_size, id=prompt_id)
    state = decoder.begin(prompt, SamplingParams(max_new_tokens=decoder.block_size, temperature=1.0), special)
    assert isinstance(state, SubBlockState)
    return state


def run_round(decoder: BlockDiffusion, state: SubBlockState, probabilities: list[float]) -> Forward:
    """Run a step whose model draws the token 4 at every mask, with these probabilities; return its forward pass."""
    steps = decoder.step(state)
    request = next(steps)
    assert isinstance(request, Forward)
    assert len(request.branches[0].draft_at) == len(probabilities)
    state.num_forwards += 1
    with pytest.raises(StopIteration):
        steps.send([Reading(tokens=[4] * len(probabilities), probabilities=probabilities)])
    return request


def test_thresholds_are_strict_ties_go_left_and_each_round_has_its_own_noise() -> None:
    decoder = BlockDiffusion(block_size=4, threshold=0.5)
    state = begin_sampled(decoder, "0")
    first = run_round(decoder, state, [0.25, 0.5, 0.5, 0.125])
    assert state.is_masked == [True, False, True, True]
    second = run_round(decoder, state, [0.75, 0.5, 0.625])
    assert state.is_masked == [False, False, True, False]
    assert state.commit_rounds == [2, 1, 0, 2]
    assert first.draw.round != second.draw.round
    assert first.branches[0].tokens == [3, 3, 3, 3, MASK, MASK, MASK, MASK]
    assert second.branches[0].tokens == [MASK, 4, MASK, MASK]


def run_steps(decoder: BlockDiffusion, prompt_id: str) -> list[list[int]]:
    """Decode a block of a sampled response without a model; return the places that each step committed."""
    state = begin_sampled(decoder, prompt_id)
    committed = []
    while not state.prefix_ends:
        before, steps = list(state.is_masked), decoder.step(state)
        request = next(steps)
        assert isinstance(request, Forward)
        num_drafts = len(request.branches[0].draft_at)
        state.num_forwards += 1
        with pytest.raises(StopIteration):
            steps.send([Reading(tokens=[4] * num_drafts, probabilities=[0.5] * num_drafts)])
        committed.append([i for i, was_masked in enumerate(before) if was_masked and not state.is_masked[i]])
    return committed


def test_first_hitting_places_are_uniform() -> None:
    decoder = BlockDiffusion(block_size=4, sampling_rule="first_hitting")
    num_orders = factorial(4)
    orders = Counter(tuple(place for [place] in run_steps(decoder, str(i))) for i in range(100 * num_orders))
    assert len(orders) == num_orders
    chi_square = sum((count - 100) ** 2 / 100 for count in orders.values())
    assert chi_square < 58.6  # with 23 degrees of freedom, one seed in 17 000 would fail


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 0}, "^block_size: expected an integer of at least 1, got 0"),
        ({"threshold": 1.5}, r"^threshold: expected a number in \[0, 1\], got 1.5"),
        ({"sampling_rule": "best"}, "^sampling_rule: expected one of threshold, .*, got 'best'"),
        ({"num_steps": 0}, "^num_steps: expected an integer of at least 1, got 0"),
        ({"sampling_rule": "entropy_bounded", "num_steps": 4}, "^num_steps: expected null .*, got 4"),
        ({"entropy_bound": -1.0}, "^entropy_bound: expected a number of at least 0.*, got -1.0"),
        ({"sampling_rule": "first_hitting", "num_steps": 4}, "^num_steps: expected null .*, got 4"),
        ({"confidence": "sure"}, "^confidence: expected one of raw, filtered, tempered, got 'sure'"),
        ({"sub_block_size": 3}, "^sub_block_size: expected a divisor of block_size 8, or null, got 3"),
        ({"sub_block_size": 0}, "^sub_block_size: expected an integer of at least 1, got 0"),
        ({"sub_block_size": 16}, "^sub_block_size: expected a divisor of block_size 8, or null, got 16"),
    ],
)
def test_impossible_options_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BlockDiffusion(**options)


@pytest.mark.parametrize(
    ("traits", "reason"),
    [
        (ModelTraits(), "uses block_causal attention, the model was trained with causal"),
        (ModelTraits(attention="block_causal", block_size=4), "blocks have 8 tokens, the model was trained with 4"),
        (
            ModelTraits(attention="block_causal", block_size=8, predictions=("mask_shifted",)),
            "needs the predictions mask,",
        ),
    ],
)
def test_models_trained_otherwise_are_refused(traits: ModelTraits, reason: str) -> None:
    model = Backbone(backbone().model, traits, backbone().special_tokens)
    prompts = make_prompts([5])
    with pytest.raises(ModelMismatchError, match=reason):
        decode(model, BlockDiffusion(), prompts, SamplingParams())
    with pytest.warns(UserWarning, match=reason):
        output = decode(model, BlockDiffusion(), prompts, SamplingParams(max_new_tokens=4), allow_mismatch=True)
    assert len(output.mismatches) == 1


@pytest.mark.parametrize(("name", "shifted"), [("block_diffusion", False), ("block_diffusion_v2", True)])
def test_the_shipped_file_makes_the_decoder(name: str, shifted: bool) -> None:
    values = yaml.safe_load((ROOT / "configs" / "decoder" / f"{name}.yaml").read_text(encoding="utf-8"))
    decoder = getattr(decoding, values["class_path"])(**values["init_args"])
    assert isinstance(decoder, BlockDiffusion)
    assert decoder.shifted is shifted
