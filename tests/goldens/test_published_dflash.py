"""DFlash: texts, numbers of forward passes and candidates of every step of transformers' assisted generation."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

import refusion_lit
from refusion_lit.decoding import Autoregressive, SelfSpeculative
from refusion_lit.modeling.block_drafter import BlockDrafter
from refusion_lit.modeling.load import BackboneConfig
from refusion_lit.text_model import TextModel
from support.published import MODELS, reference, select_runs, with_batch_sizes

REFERENCE = reference("dflash_candidates")
SETTINGS = range(len(REFERENCE["settings"]))


@cache
def model(*, fused_body: bool = True, dtype: Any = "float32") -> TextModel:
    source = MODELS[REFERENCE["target_model"]]
    overrides = BackboneConfig(source=str(source), fused_body=fused_body)
    return refusion_lit.load(source, draft=MODELS[REFERENCE["assistant_model"]], overrides=overrides, dtype=dtype)


def cut(tokens: list[int]) -> list[int]:
    """Cut a response behind its first EOS token."""
    end = REFERENCE["eos_token_id"]
    return tokens[: tokens.index(end) + 1] if end in tokens else tokens


@pytest.mark.parametrize(("setting", "batch_size"), with_batch_sizes(SETTINGS))
@pytest.mark.parametrize("fused_body", [True, False])
def test_texts_forwards_and_candidates(setting: int, batch_size: int, fused_body: bool) -> None:
    options = REFERENCE["settings"][setting]
    size = options["block_size"]
    runs = select_runs("dflash_candidates", setting, batch_size)
    rows = model(fused_body=fused_body).generate_ids(
        [run["prompt"] for run in runs], decoder=SelfSpeculative(num_drafts=size - 1),
        max_new_tokens=options["max_new_tokens"], batch_size=batch_size, trace=True,
    )  # fmt: skip
    for run, row in zip(runs, rows, strict=True):
        steps = run["steps"]
        assert row.token_ids == cut(run["output"])
        assert row.num_forwards == run["num_forwards"]
        assert row.num_drafter_forwards == len(steps)
        drafts = [entry.tokens[1 - size :] for entry in row.trace[: len(steps)]]
        assert drafts == [step["candidates"] for step in steps]


def test_the_blocks_of_the_config_are_the_default() -> None:
    assert MODELS[REFERENCE["assistant_model"]].is_dir()
    runs = select_runs("dflash_candidates", 0)
    prompts = [run["prompt"] for run in runs]
    rows = model().generate_ids(prompts, max_new_tokens=40, batch_size=16)
    assert [row.num_forwards for row in rows] == [run["num_forwards"] for run in runs]
    exact = model().generate_ids(prompts, decoder=Autoregressive(), max_new_tokens=40, batch_size=16)
    assert [row.token_ids for row in rows] == [row.token_ids for row in exact]


WITH_LOGITS = [run for run in REFERENCE["runs"] if "candidate_logits" in run["steps"][0]]


@pytest.mark.parametrize("run", WITH_LOGITS, ids=lambda run: f"setting{run['setting']}")
def test_hidden_states_and_logits(run: dict[str, Any]) -> None:
    """The context's states as the model computes them, and the drafter's logits from given states."""
    backbone = model(dtype="float64").backbone
    drafter = backbone.drafter
    assert isinstance(drafter, BlockDrafter)
    text = run["prompt"] + cut(run["output"])
    layers = REFERENCE["target_layer_ids"]
    ids = torch.tensor([text])
    states = backbone.body(ids, attention_mask=torch.ones_like(ids), output_hidden_states=True).hidden_states
    context_states = torch.cat([states[layer + 1] for layer in layers], -1)[0]
    context: list[list[float]] = []
    for step in run["steps"]:
        context += step["context_hidden_states"]
        given = torch.tensor(context, dtype=torch.float64)
        torch.testing.assert_close(context_states[: len(given)], given, atol=2e-5, rtol=1e-4)
        length = REFERENCE["settings"][run["setting"]]["block_size"]
        block = torch.tensor([[step["anchor"], *[REFERENCE["mask_token_id"]] * (length - 1)]])
        hidden = drafter.network(
            noise_embeds=backbone.model.get_input_embeddings()(block),
            context_hidden_states=given[None],
            attention_mask=drafter._masks(
                torch.ones(1, length, len(given) + length, dtype=torch.bool),
                len(given) + torch.arange(length)[None],
                torch.arange(len(given) + length)[None],
            ),
        ).last_hidden_state
        expected = torch.tensor(step["candidate_logits"]).double()
        known = [i for i in range(expected.shape[1]) if i != backbone.special_tokens.mask_token_id]  # a row of ours
        logits = backbone.logits(hidden[0, 1:])
        torch.testing.assert_close(logits[:, known], expected[:, known], atol=1e-4, rtol=1e-4)
