"""SDAR's decoder against its description as a plain loop that recomputes the whole text in every forward."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from refusion_lit.decoding import BlockDiffusion, Generation, decode
from refusion_lit.modeling.formats import FORMATS
from refusion_lit.types import ModelTraits, Prompt, SamplingParams
from support.decoder_cases import prompts
from support.example_counts import examples
from support.fakes import EOS, MASK, PAD, SPECIAL, VOCAB, tiny_backbone, tiny_qwen
from support.slow_decoding import best_allowed, cut

NO_END = (VOCAB + 2,)


@torch.no_grad()
def logits_of(text: list[int], size: int) -> Tensor:
    """Run a text; a token sees its own block and all blocks before it."""
    block = torch.arange(len(text)) // size
    sees, positions = (block[:, None] >= block)[None, None], torch.arange(len(text))[None]
    return tiny_qwen()(torch.tensor([text]), attention_mask=sees, position_ids=positions, use_cache=False).logits[0]


def filtered(row: Tensor, top_k: int | None, top_p: float) -> Tensor:
    """Keep the best tokens; then, of these, as few as hold a probability of top_p."""
    kept = sorted(range(len(row)), key=lambda i: -float(row[i]))[: top_k or len(row)]
    shares = row[kept].softmax(-1).tolist()
    num = next((n for n in range(1, len(kept)) if sum(shares[:n]) >= top_p), len(kept))
    return torch.zeros_like(row).index_copy_(0, torch.tensor(kept[:num]), row[kept[:num]].softmax(-1))


@dataclass
class Reference:
    """``low_confidence_dynamic``, without chance: the token is the most probable one that may be drawn."""

    size: int
    num_steps: int
    threshold: float
    top_k: int | None = None
    top_p: float = 1.0

    def run(self, prompt: tuple[int, ...], length: int, ends: tuple[int, ...]) -> list[int]:
        """Return the response; counts forwards, those that store a block included."""
        text: list[int | None] = [*prompt]
        self.num_forwards = int(len(prompt) >= self.size)  # whole blocks of the prompt
        while True:
            start = len(text) // self.size * self.size
            text += [None] * (start + self.size - len(text))
            for step in range(self.num_steps):
                masked = [place for place in range(start, len(text)) if text[place] is None]
                if not masked:
                    break
                self.one_step(text, masked, step)
            assert None not in text
            self.num_forwards += 1  # stores the block
            response = [token for token in text[len(prompt) :] if token is not None]
            if set(ends) & set(response) or len(response) >= length:
                return cut(response[:length], ends)

    def one_step(self, text: list[int | None], masked: list[int], step: int) -> None:
        logits = logits_of([MASK if token is None else token for token in text], self.size)
        found = []
        for place in masked:
            token = best_allowed(logits[place], (PAD, MASK), VOCAB)
            found.append((float(filtered(logits[place], self.top_k, self.top_p)[token]), place, token))
        quota = self.size // self.num_steps + (step < self.size % self.num_steps)
        found.sort(key=lambda each: (-each[0], each[1]))
        sure = [each for each in found if each[0] > self.threshold]
        for _, place, token in sure if len(sure) >= quota else found[:quota]:
            text[place] = token
        self.num_forwards += 1


def decoded(decoder: BlockDiffusion, prompt: Prompt, ends: tuple[int, ...], sampling: SamplingParams) -> Generation:
    traits = ModelTraits(attention="block_causal", block_size=decoder.block_size, predictions=("mask",))
    [row] = decode(tiny_backbone(traits, replace(SPECIAL, eos_token_ids=ends)), decoder, [prompt], sampling).rows
    return row


@settings(max_examples=examples(54), deadline=None)
@given(
    size=st.integers(1, 6),
    steps=st.integers(1, 6),
    threshold=st.sampled_from([0.0, 0.3, 0.6, 0.85, 1.0]),
    top_k=st.sampled_from([None, 1, 3]),
    top_p=st.sampled_from([1.0, 0.7]),
    found=prompts(max_size=1),
    length=st.integers(1, 20),
    ends=st.sampled_from([(EOS,), NO_END, (EOS, 5, 9)]),
)
def test_greedy_decoding_is_the_slow_reference(
    size: int,
    steps: int,
    threshold: float,
    top_k: int | None,
    top_p: float,
    found: list[Prompt],
    length: int,
    ends: tuple[int, ...],
) -> None:
    steps = min(steps, size)
    reference = Reference(size, steps, threshold, top_k, top_p)
    expected = reference.run(found[0].token_ids, length, ends)
    decoder = BlockDiffusion(block_size=size, num_steps=steps, threshold=threshold, confidence="filtered", fused=False)
    row = decoded(decoder, found[0], ends, SamplingParams(max_new_tokens=length, top_k=top_k, top_p=top_p))
    assert row.token_ids == expected
    if ends == NO_END and (len(found[0].token_ids) + length) % size == 0:
        assert row.num_forwards == reference.num_forwards - 1, "the last block is not stored"


@pytest.mark.parametrize(("threshold", "num_per_block"), [(1.0, 4), (0.0, 1)])
def test_a_block_costs_its_steps_and_one_forward_that_stores_it(threshold: float, num_per_block: int) -> None:
    decoder = BlockDiffusion(block_size=4, num_steps=4, threshold=threshold, confidence="filtered", fused=False)
    prompt = Prompt(token_ids=(3, 4, 5, 6, 7, 8, 9, 10), id="p")
    row = decoded(decoder, prompt, NO_END, SamplingParams(max_new_tokens=20))
    assert row.num_forwards == 1 + 5 * (num_per_block + 1) - 1


def test_the_published_default_is_the_dynamic_rule() -> None:
    traits = FORMATS["sdar"].traits({})
    options = FORMATS["sdar"].default_decoder(traits)["init_args"]
    assert BlockDiffusion(**options) == BlockDiffusion(block_size=4, threshold=0.85, confidence="filtered", fused=False)
    # Without num_steps a step commits at least one token, as with as many steps as tokens.
    prompt, sampling = Prompt(token_ids=(3, 4, 5), id="p"), SamplingParams(max_new_tokens=30)
    rows = [
        decoded(BlockDiffusion(**options, num_steps=steps), prompt, NO_END, sampling).forward_shapes
        for steps in (None, 4)
    ]
    assert rows[0] == rows[1]
