"""Nemotron-Labs-Diffusion: texts, forward passes, logits and losses of the authors' functions, written out anew."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import refusion_lit
from refusion_lit.decoding import Autoregressive, CausalBlockDiffusion, Decoder, LinearSpeculation, decode
from refusion_lit.learning.batch import ResponseBatch
from refusion_lit.noise import KeyedNoise
from refusion_lit.objectives import CausalBlockMasked
from refusion_lit.types import Prompt, SamplingParams
from support.published import MODELS, published_model, reference, select_runs, with_batch_sizes

EOS = 18
GOLDEN = reference("nld_generate")


def make_decoder(options: dict[str, Any]) -> Decoder:
    """Return the decoder of a setting; next-token decoding with a thinking budget is block diffusion in blocks of 1."""
    budget = {name: options[name] for name in ("max_thinking_tokens", "end_think_token_id") if name in options}
    if options["mode"] == "ar":
        return CausalBlockDiffusion(block_size=1, **budget) if budget else Autoregressive()
    size, threshold = options["block_length"], options["threshold"]
    if options["mode"] == "linear_spec":
        return LinearSpeculation(block_size=size, threshold=threshold, **budget)
    causal = options["causal_context"]
    return CausalBlockDiffusion(block_size=size, threshold=threshold, causal_context=causal, **budget)


def expected_forwards(options: dict[str, Any], run: dict[str, Any]) -> int:
    """Return our number: we do not feed the last block once more, and do not denoise a block that begins with EOS."""
    if options["mode"] != "diffusion":
        return run["num_forwards"]
    size, output = options["block_length"], run["output"]
    begins_with_eos = options["causal_context"] and size > 1 and output[-1] == EOS and len(output) % size == 1
    return run["num_forwards"] - 1 - begins_with_eos


@pytest.mark.parametrize(("setting", "batch_size"), with_batch_sizes(range(len(GOLDEN["settings"]))))
def test_texts_and_forwards(setting: int, batch_size: int) -> None:
    options = GOLDEN["settings"][setting]
    runs = select_runs("nld_generate", setting, batch_size)
    prompts = [Prompt(token_ids=tuple(run["prompt"]), id=str(i)) for i, run in enumerate(runs)]
    sampling = SamplingParams(max_new_tokens=options["max_new_tokens"])
    model = published_model("nld-tiny").backbone
    rows = decode(model, make_decoder(options), prompts, sampling, batch_size=batch_size).rows
    assert [row.token_ids for row in rows] == [run["output"] for run in runs]
    assert [row.num_forwards for row in rows] == [expected_forwards(options, run) for run in runs]


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-5), ("float32", 1e-4)])
def test_logits(dtype: str, tolerance: float) -> None:
    golden = reference("nld_logits")
    backbone = published_model("nld-tiny", dtype).backbone
    for fed, expected in zip(golden["inputs"], golden["logits"], strict=True):
        prefix = fed.get("prefix_input_ids", [])
        ids = torch.tensor([[*prefix, *fed["input_ids"]]])
        length = ids.shape[1]
        first = fed.get("first_position", 0)
        visible = torch.ones(1, length, length).tril().bool()
        if fed["kind"].startswith("diffusion"):
            visible[:, len(prefix) :] = True
        with torch.no_grad():
            hidden = backbone.hidden_states(ids, torch.arange(first, first + length)[None], visible)
            logits = backbone.logits(hidden)[0, len(prefix) :]
        torch.testing.assert_close(logits.double(), torch.tensor(expected).double(), atol=tolerance, rtol=0)


def test_rotations() -> None:
    golden = reference("nld_logits")
    rotary: Any = published_model("nld-tiny", "float64").backbone.body.rotary_emb
    assert rotary.inv_freq.tolist() == golden["inv_freq"]
    assert rotary.attention_scaling == golden["attention_scaling"]


class DrawnNoise(KeyedNoise):
    """Noise that masks the tokens that the program masked."""

    def __init__(self, t: Any, uniform: Any) -> None:
        self._streams = {"mask_ratio": torch.tensor(t).double()[:, None], "token_mask": torch.tensor(uniform).double()}

    def uniform(self, stream: str, size: int) -> torch.Tensor:
        return self._streams[stream][:, :size]


@pytest.mark.parametrize("index", range(4))
def test_losses(index: int) -> None:
    case = reference("nld_loss")["batches"][index]
    backbone = published_model("nld-tiny", "float64").backbone
    ids = torch.tensor(case["clean_input_ids"])
    num_rows, length = ids.shape
    batch = ResponseBatch(
        input_ids=ids, sample_keys=torch.arange(num_rows), prompt_lengths=torch.zeros(num_rows, dtype=torch.long),
        response_lengths=torch.full((num_rows,), length),
    )  # fmt: skip
    assert case["ar_loss_weight"] == 1.0
    objective = CausalBlockMasked(block_size=case["block_size"], mdm_weight=case["dlm_loss_weight"])
    corrupted = objective.corrupt(batch, DrawnNoise(case["t"], case["uniform"]), backbone.special_tokens)
    assert torch.equal(corrupted.input_ids[:, :length], torch.tensor(case["noisy_input_ids"]))
    # The program counts the tokens of one row alone.
    denominator = case["denominator"] + (num_rows - 1) * length
    assert corrupted.counts.tolist() == [denominator, denominator]
    with torch.no_grad():
        hidden = backbone(corrupted.input_ids, corrupted.position_ids, corrupted.visible)
        output = objective.loss(hidden, backbone.head, corrupted)
    mdm, ar = output.sums.tolist()
    expected = (case["diffusion_sum"], case["ar_sum"], case["loss_sum"] / denominator)
    losses = (case["dlm_loss_weight"] * mdm, ar, float(output.total))
    assert losses == pytest.approx(expected, rel=1e-5)


def test_the_checkpoint_names_decoder_and_block() -> None:
    assert published_model("nld-tiny").default_decoder == CausalBlockDiffusion(block_size=8, threshold=0.9)


def test_a_config_with_the_values_of_the_published_3b_model_loads(tmp_path: Path) -> None:
    """No padding token, and a context of a quarter of the original context of YaRN, whose factor is then 0.25."""
    shutil.copytree(MODELS["nld-tiny"], tmp_path, dirs_exist_ok=True)
    values = json.loads((tmp_path / "config.json").read_text())
    del values["pad_token_id"]
    values["max_position_embeddings"] = 256
    values["rope_parameters"] |= {"factor": 0.25, "original_max_position_embeddings": 1024}
    (tmp_path / "config.json").write_text(json.dumps(values))
    model = refusion_lit.load(tmp_path)
    backbone = model.backbone

    base, dim = values["rope_parameters"]["rope_theta"], values["head_dim"]
    frequencies = base ** (-np.arange(0, dim, 2) / dim)
    low, high = (dim * np.log(1024 / (beta * 2 * np.pi)) / (2 * np.log(base)) for beta in (32, 1))
    ramp = ((np.arange(dim // 2) - np.floor(low)) / (np.ceil(high) - np.floor(low))).clip(0, 1)
    rotary: Any = backbone.body.rotary_emb
    assert rotary.inv_freq.tolist() == pytest.approx((frequencies * (1 - ramp) + frequencies / 0.25 * ramp).tolist())
    assert rotary.attention_scaling == 1

    [row] = model.generate(["12+34>"], max_new_tokens=16)
    assert row.token_ids
    ids = torch.arange(16)[None]
    hidden = backbone.hidden_states(ids, ids, torch.ones(1, 16, 16).tril().bool())
    hidden.square().sum().backward()
    gradient = backbone.body.get_input_embeddings().weight.grad
    assert gradient is not None
    assert gradient[:16].abs().sum(-1).min() > 0, "a token that is read learns"
