"""DiffusionGemma's logits, and every step of transformers' ``generate`` with its random draws in place of ours."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import groupby
from typing import Any

import pytest
import torch

import refusion_lit
from refusion_lit.decoding import Branch, Draw, Forward, Generation, decode
from refusion_lit.engine.batch import Batch
from refusion_lit.modeling.backbone import Backbone
from refusion_lit.types import Prompt, SamplingParams
from support.published import MODELS, reference, select_runs
from support.replayed_canvas import DRAWS, Replayed, recorded_draws

GOLDEN = reference("diffusion_gemma_steps")
LOGITS = reference("diffusion_gemma_logits")


@cache
def model(dtype: str = "float32") -> Backbone:
    return refusion_lit.load(MODELS["diffusion-gemma-tiny"], dtype=dtype).backbone


def decode_setting(
    setting: int, batch_size: int, max_new_tokens: int, dtype: str = "float32"
) -> list[tuple[dict[str, Any], Generation]]:
    """Decode the runs of a setting with their draws."""
    options = GOLDEN["settings"][setting]
    runs = select_runs("diffusion_gemma_steps", setting, batch_size)
    names = ("t_min", "t_max", "entropy_bound", "stability_threshold", "confidence_threshold")
    decoder = Replayed(
        canvas_length=GOLDEN["canvas_length"],
        num_steps=options["max_denoising_steps"],
        **{name: options[name] for name in names},
    )
    DRAWS.update({str(i): recorded_draws(run) for i, run in enumerate(runs)})
    prompts = [Prompt(token_ids=tuple(run["prompt"]), id=str(i)) for i, run in enumerate(runs)]
    backbone = model(dtype)
    special, ends = backbone.special_tokens, options["eos_token_id"]
    backbone.special_tokens = replace(special, eos_token_ids=tuple(ends) if isinstance(ends, list) else (ends,))
    try:
        rows = decode(
            backbone, decoder, prompts, SamplingParams(max_new_tokens=max_new_tokens), batch_size=batch_size
        ).rows
    finally:
        backbone.special_tokens = special
    return list(zip(runs, rows, strict=True))


def text(run: dict[str, Any], setting: int) -> list[int]:
    """Return the response of a run up to its first EOS."""
    ends = GOLDEN["settings"][setting]["eos_token_id"]
    tokens = run["sequences"][len(run["prompt"]) :]
    ends = ends if isinstance(ends, list) else [ends]
    stop = next((i + 1 for i, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[:stop]


@pytest.mark.parametrize(
    ("setting", "batch_size", "dtype"),
    [*((setting, 16, "float32") for setting in range(8)), *((setting, 1, "float64") for setting in range(0, 8, 3))],
)
def test_every_step_is_transformers(setting: int, batch_size: int, dtype: str) -> None:
    length = GOLDEN["canvas_length"]
    budget = -(-GOLDEN["settings"][setting]["max_new_tokens"] // length) * length  # whole canvases, as in transformers
    pairs = decode_setting(setting, batch_size, budget, dtype)
    for i, (run, row) in enumerate(pairs):
        steps = DRAWS[str(i)].steps
        assert len(steps) == len(run["steps"]) == run["num_forwards"]
        for step, golden in zip(steps, run["steps"], strict=True):
            assert step.canvas_before == golden["canvas_before"]
            assert step.temperature == pytest.approx(golden["temperature"], abs=1e-6)
            assert step.entropy == pytest.approx(golden["entropy"], abs=1e-3)
            assert step.accepted == golden["accepted"]
            assert step.draft == golden["argmax_canvas"]
        assert row.token_ids == text(run, setting)
        assert row.num_forwards == run["num_forwards"] + run["num_encoder_forwards"]


@pytest.mark.parametrize("setting", range(8))
def test_a_smaller_budget_cuts_the_text(setting: int) -> None:
    for run, row in decode_setting(setting, 2, 11):
        assert row.token_ids == text(run, setting)[:11]
        canvases = groupby(run["steps"], key=lambda step: step["canvas_number"])
        assert row.num_forwards == 1 + len(list(next(canvases)[1]))


def test_the_checkpoint_names_its_settings() -> None:
    decoder = refusion_lit.load(MODELS["diffusion-gemma-tiny"]).default_decoder
    assert (decoder.canvas_length, decoder.num_steps, decoder.num_noise_ids) == (16, 48, 32)
    assert (decoder.t_min, decoder.t_max, decoder.entropy_bound) == (0.4, 0.8, 0.1)
    assert (decoder.stability_threshold, decoder.confidence_threshold) == (1, 0.005)


def logits(backbone: Backbone, case: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the logits of encoder and decoder for a golden case."""
    ids, canvas = case["inputs"], case["canvas"]
    num = len(ids)
    cache = backbone.make_cache(1)
    draw = Draw(sampling=SamplingParams())
    text_branch = Branch(tokens=ids, positions=range(num))
    branch = Branch(
        tokens=canvas,
        positions=range(num, num + len(canvas)),
        order=[0] * len(canvas),
        visible=((0, num),),
        write_at=num,
    )
    run, head = backbone.canvas_runner(), backbone.head_runner()
    with torch.no_grad():
        batch = Batch([Forward(phase="", branches=(text_branch,), draw=draw)], [0], backbone.device, cache)
        encoded = backbone.hidden_states(batch.ids, batch.positions, batch.visibility, cache)
        batch = Batch([Forward(phase="", branches=(branch,), draw=draw, canvas=True)], [0], backbone.device, cache)
        inputs = batch.ids, batch.positions, batch.visibility, cache
        first = torch.tensor(case["self_conditioning_logits"], dtype=backbone.head.weight.dtype)
        signal = backbone.soft_embeddings(first.softmax(-1))
        assert signal is not None
        states = {
            "encoder_logits": encoded,
            "decoder_logits": run(*inputs, signal=None),
            "decoder_logits_self_conditioned": run(*inputs, signal=signal[None]),
        }
        return {name: head(hidden)[0] for name, hidden in states.items()}


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-5), ("float32", 1e-4)])
@pytest.mark.parametrize("number", range(5))
def test_logits(number: int, dtype: str, tolerance: float) -> None:
    """Contexts shorter and longer than the sliding window."""
    case = LOGITS["cases"][number]
    for name, computed in logits(model(dtype), case).items():
        golden = torch.tensor(case[name], dtype=computed.dtype)
        torch.testing.assert_close(computed, golden, rtol=0, atol=tolerance)
