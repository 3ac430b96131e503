"""Model cards generated from the files of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from refusion_lit.reports.model_card import model_card
from refusion_lit.types import ModelTraits
from reports.samples import predictions, write_run

CONFIG = {
    "seed_everything": 7,
    "model": {
        "backbone": {"source": "Qwen/Qwen3-0.6B"},
        "objective": {"class_path": "a.b.Masked", "init_args": {"eps": 0.1}},
    },
    "data": {"task": {"class_path": "a.Files", "init_args": {"train": "x|y"}}, "batch_size": 4},
    "trainer": {"max_steps": 10},
    "tokenizer": "long" * 1000,
}
ENVIRONMENT = {"python": "3.11", "packages": {"torch": "2"}, "hardware": {"num_cpus": 2, "machine": "m"}}


def test_a_card_has_the_base_model_the_config_and_the_environment(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    (tmp_path / "environment.json").write_text(json.dumps(ENVIRONMENT))
    card = model_card("out", ModelTraits(), tmp_path)
    front = yaml.safe_load(card.split("---")[1])
    assert front["base_model"] == "Qwen/Qwen3-0.6B"
    assert front["library_name"] == "refusion-lit"
    assert "| objective | Masked(eps=0.1) |" in card
    assert "| task | Files(train=x\\|y) |" in card  # an unescaped bar would end the cell
    assert "| seed | 7 |" in card
    assert "| packages | torch 2 |" in card
    assert "tokenizer: longlong" in card
    assert len(card) < 3000


def test_a_card_has_the_results_of_tests(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {"a": predictions([1.0]), "b": predictions([0.5])}, mismatches={"b": ["why"]})
    card = model_card("out", ModelTraits(), None, [run])
    assert "| `a` | 1.000 | 5.00 | 123 |" in card
    assert r"| `b` \* | 0.500 |" in card
    assert r"\* the model was not trained for this decoder" in card
    assert "Batch size 3; max_new_tokens 8." in card


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


def test_damaged_and_missing_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"results\.json: cannot be read"):
        model_card("out", ModelTraits(), None, [tmp_path])
    (tmp_path / "results.json").write_text("[1]")
    with pytest.raises(ValueError, match="expected the results of `refusion-lit test`"):
        model_card("out", ModelTraits(), None, [tmp_path])
    for content, message in (("[1]", "expected a mapping, got list"), ("a: [", r"config\.yaml: cannot be read")):
        (tmp_path / "config.yaml").write_text(content)
        with pytest.raises(ValueError, match=message):
            model_card("out", ModelTraits(), tmp_path)
