"""Decoders give the texts of the authors' programs on published checkpoints, in as many forwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from refusion_lit.decoding import BlockDiffusion, Decoder, DecodingOutput, FastDLLM, LLaDA, decode
from refusion_lit.types import ModelTraits, Prompt, SamplingParams
from support.attention_masks import order_mask, pattern_order
from support.decoder_cases import LastState
from support.published import published_model, reference, select_runs, with_batch_sizes


def decode_setting(
    name: str, setting: int, decoder: Decoder, sampling: SamplingParams, batch_size: int
) -> tuple[list[dict[str, Any]], DecodingOutput, list[list[int]]]:
    """Decode a setting's prompts; return the reference runs, what came out, and the whole canvases."""
    runs = select_runs(name, setting, batch_size)
    prompts = [Prompt(token_ids=tuple(run["prompt"]), id=str(i)) for i, run in enumerate(runs)]
    watcher, model = LastState(), published_model(reference(name)["model"]).backbone
    output = decode(model, decoder, prompts, sampling, batch_size=batch_size, callbacks=[watcher])
    return runs, output, [watcher.states[i].tokens for i in range(len(runs))]


def check(
    name: str, setting: int, decoder: Decoder, sampling: SamplingParams, batch_size: int
) -> tuple[list[dict[str, Any]], DecodingOutput]:
    """Compare every token of the canvas, those after an end of sequence too, and the number of forwards."""
    runs, output, canvases = decode_setting(name, setting, decoder, sampling, batch_size)
    for run, row, canvas in zip(runs, output.rows, canvases, strict=True):
        assert canvas == run["output"]
        assert row.num_forwards == run["num_forwards"]
        assert row.token_ids == run["output"][: row.num_tokens]
    if batch_size == 1:
        assert output.num_calls == sum(run["num_forwards"] for run in runs)
    return runs, output


@pytest.mark.parametrize(("setting", "batch_size"), with_batch_sizes(range(12)))
def test_llada(setting: int, batch_size: int) -> None:
    options = reference("llada_generate")["settings"][setting]
    decoder = LLaDA(
        steps=options["steps"],
        block_length=options["block_length"],
        guidance_scale=options.get("cfg_scale", 0.0),
        forbid_eos=options.get("logits_eos_inf", False),
        eos_confidence_zero=options.get("confidence_eos_eot_inf", False),
    )
    check("llada_generate", setting, decoder, SamplingParams(max_new_tokens=options["gen_length"]), batch_size)


@pytest.mark.parametrize(("setting", "batch_size"), with_batch_sizes(range(17)))
def test_dream(setting: int, batch_size: int) -> None:
    options = reference("dream_generate")["settings"][setting]
    decoder = LLaDA(steps=options["steps"], order=options["alg"], shifted=True)
    filters = {"top_p": options.get("top_p", 1.0), "top_k": options.get("top_k")}
    sampling = SamplingParams(max_new_tokens=options["gen_length"], **filters)
    check("dream_generate", setting, decoder, sampling, batch_size)


@pytest.mark.parametrize(("setting", "batch_size"), with_batch_sizes(range(16)))
def test_fast_dllm_on_llada(setting: int, batch_size: int) -> None:
    options = reference("fast_dllm_v1_llada")["settings"][setting]
    threshold, factor = options.get("threshold"), options.get("factor")
    decoder = FastDLLM(
        block_length=options["block_length"],
        threshold=threshold,
        factor=factor,
        steps=options["steps"] if threshold is None and factor is None else None,
        cache=options["cache"],
    )
    check("fast_dllm_v1_llada", setting, decoder, SamplingParams(max_new_tokens=options["gen_length"]), batch_size)


@pytest.mark.parametrize(("setting", "batch_size"), with_batch_sizes(range(15)))
def test_fast_dllm_on_dream(setting: int, batch_size: int) -> None:
    options = reference("fast_dllm_v1_dream")["settings"][setting]
    threshold, cache = options.get("threshold"), options["cache"]
    has_quota = cache == "none" or threshold is None
    decoder = FastDLLM(
        block_length=options.get("block_length"),
        threshold=threshold,
        steps=options["steps"] if has_quota else None,
        order="maskgit_plus" if threshold is not None else "entropy",
        cache=cache,
        shifted=True,
    )
    sampling = SamplingParams(max_new_tokens=options["gen_length"])
    runs, output = check("fast_dllm_v1_dream", setting, decoder, sampling, batch_size)
    for run, row in zip(runs, output.rows, strict=True):
        if "committed_per_step" in run:
            assert row.round_ratios == [count for count in run["committed_per_step"] if count]


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("setting", range(10))
def test_fast_dllm_v2(setting: int, batch_size: int) -> None:
    options = reference("fast_dllm_v2_generate")["settings"][setting]
    decoder = BlockDiffusion(
        block_size=options["block_size"],
        sub_block_size=options["small_block_size"],
        threshold=options["threshold"],
        sub_block_cache=options.get("use_block_cache", False),
        shifted=True,
        fused=False,
    )
    runs = select_runs("fast_dllm_v2_generate", setting)
    if batch_size > 1:  # a batch repeats one prompt
        runs = runs[:1]
    for run in runs:
        sampling = SamplingParams(max_new_tokens=len(run["output"]))
        prompts = [Prompt(token_ids=tuple(run["prompt"]), id=str(i)) for i in range(batch_size)]
        model = published_model("fast-dllm-v2-tiny").backbone
        output = decode(model, decoder, prompts, sampling, batch_size=batch_size)
        for row in output.rows:
            assert row.token_ids == run["output"]
            assert row.num_forwards == run["num_forwards"]


def nucleus(probabilities: Tensor, share: float) -> Tensor:
    """BD3-LM's nucleus, which leaves out the token that crosses the share; ours keeps it."""
    ordered, index = probabilities.sort(descending=True)
    kept = ordered.cumsum(0) <= share
    kept[0] = True
    nucleus = torch.zeros_like(probabilities).scatter(0, index, ordered * kept)
    return nucleus / nucleus.sum()


@pytest.mark.parametrize("setting", range(6))
def test_bd3lm_gives_the_samplers_probabilities(setting: int) -> None:
    """A sampler's text cannot be compared without its random numbers, but what each token was drawn from can."""
    golden = reference("bd3lm_sample")
    size, mask = golden["block_size"], golden["mask_token_id"]
    share = golden["settings"][setting]["nucleus_p"]
    traits = ModelTraits(attention="block_causal", block_size=size, predictions=("mask",))
    backbone = published_model("bd3lm-tiny", "float64").backbone
    canvases, steps = [], []
    for run in select_runs("bd3lm_sample", setting):
        canvas = [golden["bos_token_id"]] + [mask] * (golden["length"] - 1)
        for step in run["steps"]:
            canvases.append([*canvas])
            steps.append(step)
            for place, token in zip(step["places"], step["tokens"], strict=True):
                canvas[place] = token
    ids, positions = torch.tensor(canvases), torch.arange(golden["length"])[None]
    visible = order_mask(pattern_order(traits, positions), torch.tensor([golden["length"]])).expand(len(ids), -1, -1)
    with torch.no_grad():
        logits = backbone.logits(backbone.hidden_states(ids, positions.expand_as(ids), visible))
    logits[..., mask] = -torch.inf
    for row, step in zip(logits, steps, strict=True):
        for place, token, expected in zip(step["places"], step["tokens"], step["probabilities"], strict=True):
            actual = nucleus(row[place].softmax(-1), share)[token]
            assert float(actual) == pytest.approx(expected, abs=2e-4)  # the program computed in float32
