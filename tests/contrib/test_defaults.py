"""A model made for an extra is decoded by it, in a process that imports nothing but the package."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from support.forks import run_in_new_process

MODEL = Path(__file__).parents[1] / "goldens" / "models" / "additions-clean"
CARD = {"attention": "causal", "predictions": ["mask_shifted", "next_token"]}
SETS = {"attention": "causal", "predictions": ["isolated_mask"]}
D2F = {"attention": "block_causal", "block_size": 8, "predictions": ["mask"], "prompt_is_block": True}
ENTRIES: list[tuple[dict[str, Any], str]] = [
    (CARD, "CARD(block_size=16, threshold=0.9, max_rounds=8"),
    (CARD | {"decoder": {"class_path": "CARD", "init_args": {"block_size": 4}}}, "CARD(block_size=4, "),
    (SETS, "SetDiffusion(window_size=16, "),
    (SETS | {"decoder": {"class_path": "SetDiffusion", "init_args": {"quota": 2}}}, "SetDiffusion(window_size=16, "),
    (D2F, "D2F(block_size=8, "),
    (
        D2F | {"decoder": {"class_path": "refusion_lit.contrib.D2F", "init_args": {"block_size": 4}}},
        "D2F(block_size=4, ",
    ),
    (SETS | {"decoder": {"class_path": "CARD"}}, "SetDiffusion("),  # CARD does not fit
]
"""Entries ``refusion_lit`` in a model's config, and how the default decoder begins."""


def test_models_made_for_an_extra_are_decoded_by_it(tmp_path: Path) -> None:
    paths = []
    for number, (entry, _) in enumerate(ENTRIES):
        paths.append(tmp_path / str(number))
        shutil.copytree(MODEL, paths[-1])
        config = json.loads((MODEL / "config.json").read_text()) | {"refusion_lit": entry}
        (paths[-1] / "config.json").write_text(json.dumps(config))
    program = f"""
import sys, warnings
warnings.simplefilter("ignore")  # the last decoder does not fit
import refusion_lit
assert "refusion_lit.contrib" not in sys.modules
for path in {[str(path) for path in paths]}:
    print(refusion_lit.load(path).default_decoder)
"""
    decoders = run_in_new_process(program, tmp_path).splitlines()
    for decoder, (_, start) in zip(decoders, ENTRIES, strict=True):
        assert decoder.startswith(start)
