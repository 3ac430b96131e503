"""Model cards from a run's files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from refusion_lit.reports.model_card import model_card
from refusion_lit.types import ModelTraits


def _run(directory: Path, source: str | None = None) -> Path:
    config = {
        "seed_everything": 7,
        "model": {"backbone": {"source": source}, "objective": {"class_path": "a.b.Masked", "init_args": {"eps": 0.1}}},
        "data": {"task": {"class_path": "a.Files", "init_args": {"train": "x|y"}}, "batch_size": 4},
        "trainer": {"max_steps": 10},
    }
    directory.mkdir()
    (directory / "config.yaml").write_text(yaml.safe_dump(config))
    environment = {"python": "3.11", "packages": {"torch": "2"}, "hardware": {"num_cpus": 2, "machine": "m"}}
    (directory / "environment.json").write_text(json.dumps(environment))
    return directory


def test_the_front_matter_names_the_base_model(tmp_path: Path) -> None:
    card = model_card("out", ModelTraits(), _run(tmp_path / "run", "Qwen/Qwen3-0.6B"))
    front = yaml.safe_load(card.split("---")[1])
    assert front["base_model"] == "Qwen/Qwen3-0.6B"
    assert front["library_name"] == "refusion-lit"
    assert "| objective | Masked(eps=0.1) |" in card
    assert "| task | Files(train=x\\|y) |" in card  # a bar would end the cell
    assert "| seed | 7 |" in card


@pytest.mark.parametrize(
    ("traits", "decoder"),
    [
        (ModelTraits(predictions=("mask", "next_token_in_slot")), "ReFusion()"),
        (ModelTraits(predictions=("next_token",)), "Autoregressive()"),
        (ModelTraits(attention="bidirectional", predictions=("mask",)), "LLaDA()"),
        (ModelTraits(attention="block_causal", block_size=4, predictions=("mask",)), "BlockDiffusion(block_size=4)"),
    ],
)
def test_the_example_uses_a_decoder_that_fits(traits: ModelTraits, decoder: str) -> None:
    card = model_card("out", traits, None)
    assert f"decoder={decoder}" in card
    assert "## Training" not in card


def test_a_directory_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"results\.json cannot be read"):
        model_card("out", ModelTraits(), None, [tmp_path])
    (tmp_path / "results.json").write_text("[1]")
    with pytest.raises(ValueError, match="expected a mapping"):
        model_card("out", ModelTraits(), None, [tmp_path])
