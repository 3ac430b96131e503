"""I-DLM: texts, numbers of forward passes and losses of the authors' rules and of NeMo AutoModel's program."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from refusion_lit.contrib import CARD
from refusion_lit.decoding import Autoregressive, Decoder, Generation, IntrospectiveStrided, decode
from refusion_lit.families.block_diffusion.objective import three_part_ranges
from refusion_lit.learning.batch import ResponseBatch
from refusion_lit.modeling.visibility import ranges_mask
from refusion_lit.noise import KeyedNoise
from refusion_lit.objectives import Introspective
from refusion_lit.types import Prompt, SamplingParams
from support.published import end_at, published_model, reference, select_runs, with_batch_sizes

NEVER = 31
"""An id that no text has."""
EOS = 18


def decode_runs(
    runs: list[dict[str, Any]], decoder: Decoder, num_tokens: int, batch_size: int, eos_token_id: int = EOS
) -> list[Generation]:
    model: Any = end_at(published_model("idlm-tiny").backbone, eos_token_id)
    prompts = [Prompt(token_ids=tuple(run["prompt"]), id=str(i)) for i, run in enumerate(runs)]
    return decode(model, decoder, prompts, SamplingParams(max_new_tokens=num_tokens), batch_size=batch_size).rows


@pytest.mark.parametrize(("setting", "batch_size"), with_batch_sizes(range(8)))
def test_strided_decoding_is_the_authors(setting: int, batch_size: int) -> None:
    options = reference("idlm_generate")["settings"][setting]
    runs = select_runs("idlm_generate", setting, batch_size)
    num_verified = options.get("verify_num_specs") if options.get("use_spec_verify", True) else 0
    decoder = IntrospectiveStrided(stride=options["gen_block_size"], num_verified=num_verified)
    rows = decode_runs(runs, decoder, options["max_new_tokens"], batch_size)
    exact = decode_runs(runs, Autoregressive(), options["max_new_tokens"], batch_size)
    for run, row, sequential in zip(runs, rows, exact, strict=True):
        assert row.token_ids == run["output"]
        assert row.num_forwards == run["num_forwards"]
        assert sequential.token_ids == run["autoregressive_output"]


@pytest.mark.parametrize(("setting", "batch_size"), with_batch_sizes(range(6)))
def test_blocks_are_filled_as_nemo_does(setting: int, batch_size: int) -> None:
    options = reference("idlm_nemo_generate")["settings"][setting]
    runs = select_runs("idlm_nemo_generate", setting, batch_size)
    num_tokens, size, threshold = options["max_new_tokens"], options["block_size"], options["threshold"]
    num_blocks = -(-num_tokens // size)
    quota = {"threshold": 1.0, "num_steps": -(-options["steps"] // num_blocks)} if threshold is None else {}
    decoder = CARD(**({"block_size": size, "threshold": threshold, "max_rounds": None} | quota))
    ends = "eos_token_id" in options
    rows = decode_runs(runs, decoder, num_tokens, batch_size, EOS if ends else NEVER)
    for run, row in zip(runs, rows, strict=True):
        output = run["output"]
        assert row.token_ids == (output[: output.index(EOS) + 1] if ends and EOS in output else output)
        assert row.num_forwards == run["num_forwards"]


@pytest.mark.parametrize("index", range(6))
def test_losses(index: int) -> None:
    case = reference("idlm_loss")["batches"][index]
    backbone = published_model("idlm-tiny", "float64").backbone
    answers, is_text = torch.tensor(case["answer_mask"]), torch.tensor(case["attention_mask"])
    responses = answers.sum(1)
    batch = ResponseBatch(
        input_ids=torch.tensor(case["clean_input_ids"]), sample_keys=torch.arange(len(answers)),
        prompt_lengths=is_text.sum(1) - responses, response_lengths=responses,
    )  # fmt: skip
    assert torch.equal(batch.in_response, answers.bool())
    options = {
        "block_size": case["block_length"],
        "clean_weight": case["clean_loss_weight"],
        "auto_balance": case["auto_balance"],
    }
    for targets in ("response", "masks"):
        objective = Introspective(**options, noisy_targets=targets)  # type: ignore[arg-type]
        corrupted = objective.corrupt(batch, KeyedNoise(batch.sample_keys), backbone.special_tokens)
        num_tokens = batch.input_ids.shape[1]
        assert torch.equal(corrupted.input_ids[:, :num_tokens], torch.tensor(case["noisy_input_ids"]))
        assert corrupted.counts.tolist() == [case["num_targets"]] * 2
        with torch.no_grad():
            hidden = backbone(corrupted.input_ids, corrupted.position_ids, corrupted.visible)
            output = objective.loss(hidden, backbone.head, corrupted)
        losses = (*output.means.tolist(), float(output.total))
        if targets == "response":
            assert losses == pytest.approx((case["loss_noisy"], case["loss_clean"], case["loss"]), rel=1e-5)
        elif "authors" in case and case["authors"] is not None:
            theirs = case["authors"]
            assert losses == pytest.approx((theirs["task_loss"], theirs["clean_ce_loss"], theirs["loss"]), rel=1e-5)


@pytest.mark.parametrize("name", reference("idlm_loss")["masks"])
def test_masks(name: str) -> None:
    length, size = map(int, name.split("_"))
    ranges = three_part_ranges(length, size, torch.tensor([length]), causal=True)
    expected = torch.tensor(reference("idlm_loss")["masks"][name]).bool()
    assert torch.equal(ranges_mask(ranges, 2 * length)[0], expected)


def test_the_checkpoint_names_decoder_and_stride() -> None:
    model = published_model("idlm-tiny")
    assert model.default_decoder == IntrospectiveStrided(stride=4)
    assert model.backbone.special_tokens.mask_token_id == 19
