"""The metadata in a checkpoint: it loads as data only, and damaged entries are named."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest
import torch

from refusion_lit.checkpoints.metadata import METADATA_KEY, CheckpointMetadata
from refusion_lit.modeling.config import read_traits
from refusion_lit.modeling.lora import Adapters, LoraOptions
from refusion_lit.types import ModelTraits

ADAPTERS = Adapters(
    options=LoraOptions(rank=3, alpha=5.0, dropout=0.1, target_modules=["q_proj"]),
    base="organisation/model",
    revision="abc",
    config_overrides={"sliding_window": None},
    new_token_ids=(7, 9),
)


def metadata(adapters: Adapters | None) -> CheckpointMetadata:
    return CheckpointMetadata(
        architecture={"model_type": "qwen3", "vocab_size": 10, "dtype": "bfloat16"},
        traits=ModelTraits(attention="block_causal", block_size=4, predictions=("mask",)),
        tokenizer_files={"tokenizer.json": "{}"},
        prompt_template="{query}>",
        adapters=adapters,
    )


@pytest.mark.parametrize("adapters", [None, ADAPTERS])
def test_metadata_survives_a_checkpoint_that_loads_as_data(tmp_path: Any, adapters: Adapters | None) -> None:
    torch.save({METADATA_KEY: metadata(adapters).to_checkpoint()}, tmp_path / "x.ckpt")
    again = CheckpointMetadata.from_checkpoint(torch.load(tmp_path / "x.ckpt", weights_only=True), "x.ckpt")
    assert again == metadata(adapters)
    config = again.backbone_config()
    assert {"model_type": "qwen3", "vocab_size": 10}.items() <= config.config.items()
    assert read_traits(config.config["refusion_lit"], None) == again.traits
    assert config.lora == (None if adapters is None else adapters.options)


def test_a_checkpoint_of_before_adapters_were_stored_has_none() -> None:
    stored = metadata(None).to_checkpoint()
    del stored["adapters"]
    assert CheckpointMetadata.from_checkpoint({METADATA_KEY: stored}, "x.ckpt") == metadata(None)


@pytest.mark.parametrize(
    "adapters",
    [3, "", "[]", "{}", '"x"', json.dumps(asdict(ADAPTERS) | {"options": {"rank": 0}}),
     json.dumps(asdict(ADAPTERS) | {"options": {"size": 1}}), json.dumps(asdict(ADAPTERS) | {"new_token_ids": 4}),
     json.dumps(asdict(ADAPTERS) | {"config_overrides": 4})],
)  # fmt: skip
def test_damaged_adapters_are_named_with_their_file(adapters: Any) -> None:
    stored = {METADATA_KEY: metadata(None).to_checkpoint() | {"adapters": adapters}}
    with pytest.raises(ValueError, match=r"^ckpt_path: .*metadata in x\.ckpt"):
        CheckpointMetadata.from_checkpoint(stored, "x.ckpt")
