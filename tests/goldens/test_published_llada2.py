"""Decoders give the texts of the programs of LLaDA2.0, LLaDA2.1 and diffusers, in as many forwards."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

import refusion_lit
from refusion_lit.decoding import BlockDiffusion, Decoder, Generation, TokenEditing, decode
from refusion_lit.modeling.backbone import Backbone
from refusion_lit.modeling.load import BackboneConfig
from refusion_lit.types import Prompt, SamplingParams
from support.published import MODELS, reference, select_runs, with_batch_sizes


@cache
def model(name: str, block_size: int) -> Backbone:
    """Load a checkpoint for blocks of another size than the format's."""
    blocks = BackboneConfig(source="x", attention="block_causal", block_size=block_size)
    return refusion_lit.load(MODELS[name], overrides=blocks).backbone


def decode_setting(
    name: str, setting: int, decoder: Decoder, batch_size: int
) -> list[tuple[dict[str, Any], Generation]]:
    """Decode the prompts of a setting; check the texts."""
    golden = reference(name)
    options = golden["settings"][setting]
    runs = select_runs(name, setting, batch_size)
    prompts = [Prompt(token_ids=tuple(run["prompt"]), id=str(i)) for i, run in enumerate(runs)]
    sampling = SamplingParams(max_new_tokens=options["gen_length"])
    backbone = model(golden["model"], options["block_length"])
    rows = decode(backbone, decoder, prompts, sampling, batch_size=batch_size).rows
    assert len(rows) == len(runs)
    assert [list(row.token_ids) for row in rows] == [run["output"] for run in runs]
    return list(zip(runs, rows, strict=True))


def forwards_until_final(run: dict[str, Any]) -> int:
    """Return after how many forwards of a program that never edits the text up to EOS was complete."""
    length = len(run["output"])
    changed = [number for number, changes in enumerate(run["changes_per_forward"], 1) for place, _ in changes
               if place < length]  # fmt: skip
    return max(changed)


@pytest.mark.parametrize(("setting", "batch_size"), with_batch_sizes(range(10)))
def test_llada2(setting: int, batch_size: int) -> None:
    """The program goes on in the last block if EOS was written before other tokens on its left; ours stops."""
    options = reference("llada2_generate")["settings"][setting]
    decoder = BlockDiffusion(
        block_size=options["block_length"],
        num_steps=min(options["steps"], options["gen_length"] // options.get("minimal_topk", 1)),
        threshold=options["threshold"],
    )
    for run, row in decode_setting("llada2_generate", setting, decoder, batch_size):
        assert row.num_forwards == forwards_until_final(run) <= run["num_forwards"]


def test_llada2_stops_earlier_in_few_runs() -> None:
    runs = reference("llada2_generate")["runs"]
    assert sum(forwards_until_final(run) == run["num_forwards"] for run in runs) == 39


@pytest.mark.parametrize(
    ("name", "setting", "batch_size"),
    with_batch_sizes([*(("llada21_generate", i) for i in range(10)), *(("llada21_editing", i) for i in range(6))]),
)
def test_llada21(name: str, setting: int, batch_size: int) -> None:
    options = reference(name)["settings"][setting]
    decoder = TokenEditing(
        block_size=options["block_length"],
        mask_threshold=options["threshold"],
        edit_threshold=options["editing_threshold"],
        max_post_steps=options["max_post_steps"],
        min_num_filled=options.get("num_to_transfer", 1),
        stop_at_eos=options["eos_early_stop"],
    )
    for run, row in decode_setting(name, setting, decoder, batch_size):
        assert row.num_forwards == run["num_forwards"]


def forwards_in_later_blocks(run: dict[str, Any], block_size: int) -> int:
    """Return how many of a run's last forwards only wrote blocks after that of the first EOS."""
    length = len(run["prompt"])
    end = ((length + len(run["output"]) - 1) // block_size + 1) * block_size - length
    later = [bool(changes) and min(changes)[0] >= end for changes in run["changes_per_forward"]]
    return next((i for i, is_later in enumerate(reversed(later)) if not is_later), len(later))


@pytest.mark.parametrize(("setting", "batch_size"), with_batch_sizes(range(7)))
def test_diffusers(setting: int, batch_size: int) -> None:
    """The pipeline makes a further block if EOS was written before other tokens on its left; ours stops."""
    options = reference("llada2_diffusers")["settings"][setting]
    stops = options["eos_early_stop"]
    decoder = TokenEditing(
        block_size=options["block_length"],
        mask_threshold=options["threshold"],
        edit_threshold=options["editing_threshold"] or 1.0,
        max_post_steps=options.get("max_post_steps", 16) + 1,
        num_steps=min(options["num_inference_steps"], options["gen_length"] // options.get("minimal_topk", 1)),
        stop_at_eos=stops,
        stop_in_block=stops,
    )
    for run, row in decode_setting("llada2_diffusers", setting, decoder, batch_size):
        num_extra = forwards_in_later_blocks(run, options["block_length"]) if stops else 0
        assert row.num_forwards == run["num_forwards"] - num_extra
