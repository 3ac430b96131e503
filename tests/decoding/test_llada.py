"""LLaDA gives the reference outputs and keeps the invariants of its specification; Dream's orders keep theirs."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from refusion_lit.decoding import FastDLLM, LLaDA, RowOutput, decode
from refusion_lit.modeling.backbone import Backbone
from refusion_lit.modeling.loading import BackboneConfig
from refusion_lit.types import Prompt, SamplingParams

GOLDENS = Path(__file__).parents[1] / "goldens"
REFERENCE: dict[str, Any] = json.loads((GOLDENS / "llada_decode.json").read_text())
PROMPTS = [tuple(run["prompt"]) for run in REFERENCE["runs"] if run["setting"] == 0][:4]


@cache
def model(dtype: str = "float64") -> Backbone:
    directory = str(GOLDENS / "models" / "additions-bidirectional")
    config = BackboneConfig(source=directory, attention="bidirectional", dtype=dtype)
    return config.build(AutoTokenizer.from_pretrained(directory)).eval()


def run(
    decoder: LLaDA | FastDLLM,
    length: int,
    prompts: list[tuple[int, ...]] = PROMPTS,
    batch_size: int = 1,
    **sampling: Any,
) -> list[RowOutput]:
    named = [Prompt(token_ids=prompt, id=str(i)) for i, prompt in enumerate(prompts)]
    params = SamplingParams(max_new_tokens=length, **sampling)
    return decode(model(), decoder, named, params, max_batch_size=batch_size).rows


def logits(tokens: list[int]) -> torch.Tensor:
    """Logits of one sequence under full attention, straight from transformers."""
    ids = torch.tensor([tokens])
    mask = torch.zeros(1, 1, len(tokens), len(tokens), dtype=torch.float64)
    with torch.no_grad():
        values = model().model(ids, attention_mask=mask, position_ids=torch.arange(len(tokens))[None]).logits[0]
    allowed = values.clone()
    allowed[:, [0, 2]] = -math.inf
    allowed[:, 19:] = -math.inf
    return torch.stack((values, allowed))


def plain_llada(prompt: tuple[int, ...], length: int, steps: int, block: int, shift: int = 0) -> list[int]:
    """The specification's loop, written as plainly as it reads."""
    canvas: list[int | None] = [None] * length
    per_block = steps // (length // block)
    for start in range(0, length, block):
        count = block
        for step in range(per_block):
            values, allowed = logits([*prompt, *[2 if c is None else c for c in canvas]])
            best = []
            for place in range(start, start + block):
                if canvas[place] is None:
                    row = len(prompt) + place - shift
                    token = int(allowed[row].argmax())
                    best.append((-float(values[row].softmax(-1)[token]), place, token))
            quota = count // per_block + (1 if step < count % per_block else 0)
            for _, place, token in sorted(best)[:quota]:
                canvas[place] = token
    return [c for c in canvas if c is not None]


def cut(tokens: list[int]) -> list[int]:
    return tokens[: tokens.index(1) + 1] if 1 in tokens else tokens


@pytest.mark.parametrize("batch_size", [1, 5])
@pytest.mark.parametrize("setting", range(5))
def test_text_and_forwards_are_the_reference_ones(setting: int, batch_size: int) -> None:
    options = dict(REFERENCE["settings"][setting])
    length = options.pop("gen_length")
    decoder = LLaDA(
        steps=options["steps"],
        block_length=options["block_length"],
        guidance_scale=options.get("cfg_scale", 0.0),
    )
    runs = [r for r in REFERENCE["runs"] if r["setting"] == setting]
    prompts = [Prompt(token_ids=tuple(r["prompt"]), id=str(i)) for i, r in enumerate(runs)]
    sampling = SamplingParams(max_new_tokens=length)
    output = decode(model("float32"), decoder, prompts, sampling, max_batch_size=batch_size)
    for reference, row in zip(runs, output.rows, strict=True):
        assert row.token_ids == cut(reference["output"])
        assert row.num_forwards == reference["num_forwards"]
        assert row.forward_shapes[0][0] == (2 if "cfg_scale" in options else 1)


@pytest.mark.parametrize(("length", "steps", "block"), [(12, 12, 12), (12, 4, 6), (12, 9, 4), (8, 16, 8)])
@pytest.mark.parametrize("shift", [0, 1])
def test_a_plain_loop_gives_the_same(length: int, steps: int, block: int, shift: int) -> None:
    decoder = LLaDA(steps=steps, block_length=block, shifted=bool(shift))
    for prompt, row in zip(PROMPTS, run(decoder, length), strict=True):
        assert row.token_ids == cut(plain_llada(prompt, length, steps, block, shift))
        assert row.num_forwards == steps


def test_a_prompt_may_contain_the_mask_id() -> None:
    prompt = (3, 2, 4, 2)
    (row,) = run(LLaDA(steps=6), 6, [prompt])
    assert row.token_ids == cut(plain_llada(prompt, 6, 6, 6))


@pytest.mark.parametrize("order", ["low_confidence", "random", "origin", "maskgit_plus", "topk_margin", "entropy"])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_rows_do_not_depend_on_the_batch(order: str, temperature: float) -> None:
    decoder = LLaDA(steps=8, order=order)
    alone = run(decoder, 16, temperature=temperature, seed=3)
    together = run(decoder, 16, temperature=temperature, seed=3, batch_size=4)
    assert [r.token_ids for r in alone] == [r.token_ids for r in together]
    assert {r.num_forwards for r in alone} == {8}
    assert {r.finish_reason for r in alone} <= {"eos", "length"}


def test_entropy_and_margin_follow_their_definitions() -> None:
    """With one step fewer than tokens, only the two surest places are shared out; follow the first step by hand."""
    prompt = PROMPTS[0]
    values, allowed = logits([*prompt, *[2] * 4])
    probabilities = allowed[len(prompt) :].softmax(-1)
    top = probabilities.topk(2).values
    scores = {
        "maskgit_plus": top[:, 0],
        "topk_margin": top[:, 0] - top[:, 1],
        "entropy": (probabilities * (probabilities + 1e-10).log()).sum(-1),
    }
    del values
    for order, score in scores.items():
        decoder = LLaDA(steps=2, order=order, eps=1e-3)
        output = decode(
            model(), decoder, [Prompt(token_ids=prompt, id="0")], SamplingParams(max_new_tokens=4), trace=True
        )
        first = output.rows[0].trace[0].accepted
        assert len(first) == int(4 * (1 - (1 + 1e-3) / 2))  # 1 - s/t with s half way to eps
        assert first == [len(prompt) + int(score.argmax())]


def test_origin_uncovers_linearly_in_time() -> None:
    decoder = LLaDA(steps=10, order="origin")
    prompts = [Prompt(token_ids=PROMPTS[0], id=str(i)) for i in range(40)]
    rows = decode(model(), decoder, prompts, SamplingParams(max_new_tokens=20), max_batch_size=40, trace=True).rows
    for step in (2, 5, 8):
        done = sum(len(r.accepted) for row in rows for r in row.trace[:step]) / (40 * 20)
        assert done == pytest.approx(step / 10, abs=0.06)
    assert all(sum(len(r.accepted) for r in row.trace) == 20 for row in rows)


def test_options_about_the_end_of_sequence() -> None:
    (full,) = run(LLaDA(block_length=16), 64, PROMPTS[:1])
    assert full.finish_reason == "eos"
    (stopped,) = run(LLaDA(block_length=16, stop_at_eos=True), 64, PROMPTS[:1])
    assert stopped.token_ids == full.token_ids
    assert stopped.num_forwards < full.num_forwards == 64
    (forbidden,) = run(LLaDA(steps=16, forbid_eos=True), 64, PROMPTS[:1])
    assert 1 not in forbidden.token_ids
    assert len(forbidden.token_ids) == 64


def test_an_end_of_sequence_without_confidence_comes_last() -> None:
    prompts = [Prompt(token_ids=PROMPTS[0], id="0")]
    decoder, sampling = LLaDA(eos_confidence_zero=True), SamplingParams(max_new_tokens=64)
    rounds = decode(model(), decoder, prompts, sampling, trace=True).rows[0].trace
    for entry in rounds:
        drawn = dict(zip(entry.positions, entry.tokens, strict=True))
        certainty = dict(zip(entry.positions, entry.probabilities, strict=True))
        assert all(certainty[p] == 0.0 for p, token in drawn.items() if token == 1)
        (accepted,) = entry.accepted
        assert certainty[accepted] == max(certainty.values())


def test_no_guidance_is_weight_zero() -> None:
    # l_u + (0 + 1)(l_c - l_u) is l_c up to rounding; a tiny weight must give the same text from two branches.
    plain, guided = run(LLaDA(steps=8), 16), run(LLaDA(steps=8, guidance_scale=1e-9), 16)
    assert [r.token_ids for r in plain] == [r.token_ids for r in guided]
    assert guided[0].forward_shapes[0] == (2, len(PROMPTS[0]) + 16)


@pytest.mark.parametrize(
    ("options", "length", "message"),
    [
        ({"block_length": 7}, 16, "block_length: expected a divisor of max_new_tokens"),
        ({"block_length": 4, "steps": 6}, 16, "steps: expected a multiple of the 4 blocks"),
        ({"steps": 0}, 16, "steps: expected"),
        ({"order": "entropy", "block_length": 4}, 16, "block_length: expected null with order 'entropy'"),
        ({"order_temperature": 0.5}, 16, "order_temperature: expected 0"),
        ({"guidance_scale": -1.0}, 16, "guidance_scale"),
        ({"eps": 1.0}, 16, "eps"),
    ],
)
def test_impossible_options(options: dict[str, Any], length: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(LLaDA(**options), length)
