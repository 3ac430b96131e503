"""LLaDA, Dream and Fast-dLLM as plain loops from their descriptions, at temperature 0 and for one prompt.

The loops call transformers directly: no engine, no batches. Frozen keys and values lie in transformers' own cache.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, DynamicCache

from refusion_lit.decoding import Decoder, Generation, decode
from refusion_lit.engine.requests import Reading
from refusion_lit.modeling.backbone import Backbone
from refusion_lit.modeling.load import BackboneConfig
from refusion_lit.types import Prompt, SamplingParams
from support.slow_decoding import best_allowed

PAD, EOS, MASK, VOCAB = 0, 1, 2, 19
GOLDENS = Path(__file__).parent.parent / "goldens"
REFERENCE: dict[str, Any] = json.loads((GOLDENS / "llada_decode.json").read_text())
PROMPTS = [tuple(run["prompt"]) for run in REFERENCE["runs"] if run["setting"] == 0][:4]

Frozen = list[tuple[Tensor, Tensor]]
"""Keys and values of each layer, [1, head, token, dim]."""


@cache
def model(dtype: str = "float64") -> Backbone:
    directory = str(GOLDENS / "models" / "additions-bidirectional")
    config = BackboneConfig(source=directory, attention="bidirectional", dtype=dtype)
    return config.build(AutoTokenizer.from_pretrained(directory)).eval()


def unmask(decoder: Decoder, reading: Reading, prompt_id: str = "0") -> list[int]:
    """Return the places that a decoder unmasks in its first step, if the model's answer is the reading.

    The canvas is as long as the reading, which has a token for every place.
    """
    sampling = SamplingParams(max_new_tokens=len(reading.tokens))
    state = decoder.begin(Prompt(token_ids=(3,), id=prompt_id), sampling, model().special_tokens)
    steps = decoder.step(state)
    next(steps)
    with suppress(StopIteration):
        steps.send([reading])
    return state.committed


def run(
    decoder: Decoder,
    length: int,
    prompts: list[tuple[int, ...]] = PROMPTS,
    batch_size: int = 1,
    *,
    trace: bool = False,
    **sampling: Any,
) -> list[Generation]:
    """Decode with the package's decoder."""
    named = [Prompt(token_ids=prompt, id=str(i)) for i, prompt in enumerate(prompts)]
    params = SamplingParams(max_new_tokens=length, **sampling)
    return decode(model(), decoder, named, params, batch_size=batch_size, trace=trace).rows


@torch.no_grad()
def forward(tokens: Sequence[int], first: int = 0, frozen: Frozen | None = None) -> tuple[Tensor, Frozen]:
    """Run tokens from position ``first`` on. Every token sees all tokens and all frozen keys.

    Returns:
        Logits [token, vocab], and keys and values of each layer: first the frozen states, then the tokens' states.
    """
    past = DynamicCache()
    num_frozen = 0 if frozen is None else frozen[0][0].shape[2]
    for layer, (keys, values) in enumerate(frozen or []):
        past.update(keys, values, layer)
    mask = torch.zeros(1, 1, len(tokens), num_frozen + len(tokens), dtype=torch.float64)
    output = model().model(
        torch.tensor([tokens]),
        attention_mask=mask,
        position_ids=first + torch.arange(len(tokens))[None],
        past_key_values=past,
        use_cache=True,
    )
    return output.logits[0], [(layer.keys, layer.values) for layer in past.layers]


def without(frozen: Frozen, first: int, stop: int) -> Frozen:
    """Return the keys and values of all positions except a range."""

    def crop(states: Tensor) -> Tensor:
        return torch.cat((states[:, :, :first], states[:, :, stop:]), 2)

    return [(crop(keys), crop(values)) for keys, values in frozen]


def make_input(prompt: Sequence[int], canvas: Sequence[int | None]) -> list[int]:
    return [*prompt, *[MASK if token is None else token for token in canvas]]


def draw(row: Tensor) -> int:
    """Return the most probable token that may be produced."""
    return best_allowed(row, (PAD, MASK), VOCAB)


def check_finished(canvas: Sequence[int | None]) -> list[int]:
    tokens = [token for token in canvas if token is not None]
    assert len(tokens) == len(canvas)
    return tokens


def llada(
    prompt: tuple[int, ...],
    length: int,
    steps: int,
    block: int,
    *,
    shift: int = 0,
    guidance: float = 0.0,
    eos: str = "",
    kernel: int | None = None,
) -> list[int]:
    """Decode as LLaDA's ``generate`` with low-confidence remasking.

    Args:
        prompt: The prompt.
        length: Number of new tokens.
        steps: Number of forward passes.
        block: Number of tokens in a block.
        shift: 1 if a token's logits predict the next position.
        guidance: Scale of classifier-free guidance.
        eos: "forbid" if EOS tokens are not produced, "zero" if their confidence is 0.
        kernel: Size of convolutional decoding's window: the confidence is multiplied by tanh of the number of known
            tokens in the window.
    """
    canvas: list[int | None] = [None] * length
    per_block = steps // (length // block)
    for start in range(0, length, block):
        for step in range(per_block):
            values, _ = forward(make_input(prompt, canvas))
            if guidance:
                unconditional, _ = forward(make_input([MASK] * len(prompt), canvas))
                values = unconditional + (guidance + 1) * (values - unconditional)
            if eos == "forbid":
                values[:, EOS] = -math.inf
            best = []
            for place in range(start, start + block):
                if canvas[place] is None:
                    row = values[len(prompt) + place - shift]
                    token = draw(row)
                    if eos == "zero":
                        row[EOS] = -math.inf
                    certainty = float(row.softmax(-1)[token])
                    if kernel is not None:
                        position, half = len(prompt) + place, kernel // 2
                        is_known = [True] * len(prompt) + [token is not None for token in canvas]
                        num_known = sum(is_known[max(position - half, 0) : position + half + 1])
                        certainty *= math.tanh(num_known)
                    best.append((-certainty, place, token))
            # A block's tokens are shared out over its steps; the first steps get the remainder.
            quota = block // per_block + (1 if step < block % per_block else 0)
            for _, place, token in sorted(best)[:quota]:
                canvas[place] = token
    return check_finished(canvas)


def dream(prompt: tuple[int, ...], length: int, steps: int, order: str, eps: float = 1e-3) -> list[int]:
    """Decode as Dream's ``diffusion_generate`` without chance. Forbidden tokens have probability 0.

    Args:
        prompt: The prompt.
        length: Number of new tokens.
        steps: Number of forward passes.
        order: How sure a place is: "maskgit_plus" (its probability), "topk_margin" or "entropy".
        eps: The time after the last step; the first step is at time 1.
    """
    canvas: list[int | None] = [None] * length
    times = torch.linspace(1, eps, steps + 1, dtype=torch.float64).tolist()
    for step, (time, after) in enumerate(pairwise(times)):
        values, _ = forward(make_input(prompt, canvas))
        values = torch.cat((values[:1], values[:-1]))  # a token's logits predict the next position
        values[:, [PAD, MASK]] = -math.inf
        values[:, VOCAB:] = -math.inf
        best = []
        for place in range(length):
            if canvas[place] is None:
                probabilities = values[len(prompt) + place].softmax(-1)
                top = probabilities.sort(descending=True)
                scores = {
                    "maskgit_plus": top.values[0],
                    "topk_margin": top.values[0] - top.values[1],
                    "entropy": (probabilities * (probabilities + 1e-10).log()).sum(),
                }
                best.append((-float(scores[order]), place, int(top.indices[0])))
        # Masks are a share ``time`` of the canvas before the step and ``after`` behind it.
        count = int(len(best) * (1 - after / time)) if step < steps - 1 else len(best)
        for _, place, token in sorted(best)[:count]:
            canvas[place] = token
    return check_finished(canvas)


Rule = Callable[[list[float], int, int], int]
"""Number of places to unmask, given the descending confidences, the block's size and the round in the block."""


def fast_dllm(
    prompt: tuple[int, ...], length: int, block: int, rule: Rule, *, kept: str = "none", shift: int = 0
) -> tuple[list[int], list[int]]:
    """Decode with Fast-dLLM.

    Args:
        prompt: The prompt.
        length: Number of new tokens.
        block: Number of tokens in a block.
        rule: How many of the surest masks a forward pass unmasks.
        kept: The cache: "none", "prefix" or "dual".
        shift: 1 if a token's logits predict the next position.

    Returns:
        The canvas, and the number of tokens of every forward pass.
    """
    canvas: list[int | None] = [None] * length
    lengths: list[int] = []
    for start in range(0, length, block):
        places = range(start, min(start + block, length))
        text = make_input(prompt, canvas)
        first, last = len(prompt) + places.start, len(prompt) + places.stop
        whole = range(len(text))
        values, stored = forward(text)
        fed = whole  # the positions of the last forward pass
        for num_rounds in itertools.count():
            lengths.append(len(fed))
            masked = [place for place in places if canvas[place] is None]
            rows = {place: values[len(prompt) + place - shift - fed.start] for place in masked}
            tokens = {place: draw(row) for place, row in rows.items()}
            if shift and kept != "none" and num_rounds == 0:
                # The token before the block, which predicts the block's first token, is not fed again.
                unmasked = [start]
            else:
                confidences = {place: float(rows[place].softmax(-1)[tokens[place]]) for place in masked}
                surest = sorted(masked, key=lambda place: -confidences[place])
                unmasked = surest[: rule([confidences[place] for place in surest], len(places), num_rounds)]
            for place in unmasked:
                canvas[place] = tokens[place]
            if None not in canvas[places.start : places.stop]:
                break
            fed = {"none": whole, "prefix": range(first, len(text)), "dual": range(first, last)}[kept]
            text = make_input(prompt, canvas)
            frozen = without(stored, fed.start, fed.stop)
            values, _ = forward(text[fed.start : fed.stop], fed.start, frozen)
    return check_finished(canvas), lengths


def by_threshold(threshold: float) -> Rule:
    """Unmask all places whose confidence reaches the threshold, at least one."""
    return lambda confidences, _size, _round: max(1, sum(c >= threshold for c in confidences))


def by_factor(factor: float) -> Rule:
    """Unmask the largest n with (j + 1)(1 - c_j) <= factor for all j from 2 to n; c_j are confidences, descending."""

    def count(confidences: list[float], _size: int, _round: int) -> int:
        ok = [j == 1 or (j + 1) * (1 - c) <= factor for j, c in enumerate(confidences, 1)]
        return ok.index(False) if False in ok else len(ok)

    return count


def by_quota(steps_per_block: int, alone: int = 0) -> Rule:
    """Unmask LLaDA's quota: a block's tokens shared out over its steps, larger shares first.

    ``alone`` is 1 if the first forward pass of a block unmasks only the block's first token, outside the quota.
    """

    def count(_confidences: list[float], size: int, num_rounds: int) -> int:
        steps = min(steps_per_block, size) - alone
        return (size - alone) // steps + (1 if num_rounds - alone < (size - alone) % steps else 0)

    return count
