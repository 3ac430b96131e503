"""SDAR and WeDLM: texts, numbers of forward passes, logits and losses of the authors' programs."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import ceil
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from refusion_lit.decoding import BlockDiffusion, Decoder, Generation, WeDLM, decode
from refusion_lit.families.block_diffusion.objective import three_part_ranges
from refusion_lit.learning.batch import ResponseBatch
from refusion_lit.modeling.visibility import ranges_mask
from refusion_lit.noise import KeyedNoise
from refusion_lit.objectives import DualStream
from refusion_lit.types import ModelTraits, Prompt, SamplingParams
from support.attention_masks import order_mask, pattern_order
from support.published import published_model, reference, select_runs, with_batch_sizes


def list_settings(*names: str) -> list[tuple[str, int]]:
    """Return the names of files with their settings that have runs."""
    return [(name, setting) for name in names
            for setting in sorted({run["setting"] for run in reference(name)["runs"]})]  # fmt: skip


def decode_runs(
    name: str, runs: list[dict[str, Any]], decoder: Decoder, sampling: SamplingParams, batch_size: int,
    eos_token_ids: tuple[int, ...] | None = None,
) -> list[Generation]:  # fmt: skip
    """Decode the prompts of runs, by default up to the model's EOS tokens."""
    model: Any = Retrained(published_model(reference(name)["model"]).backbone, decoder, eos_token_ids)
    prompts = [Prompt(token_ids=tuple(run["prompt"]), id=str(i)) for i, run in enumerate(runs)]
    return decode(model, decoder, prompts, sampling, batch_size=batch_size, trace=True).rows


class Retrained:
    """A model with other EOS tokens, and trained with the decoder's block size (SDAR's runs have two sizes)."""

    def __init__(self, backbone: Any, decoder: Decoder, eos_token_ids: tuple[int, ...] | None) -> None:
        self._backbone = backbone
        special = backbone.special_tokens
        self.special_tokens = replace(special, eos_token_ids=eos_token_ids or special.eos_token_ids)
        self.traits = replace(backbone.traits, block_size=decoder.requirements().block_size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backbone, name)


def cut(tokens: list[int], eos: tuple[int, ...]) -> list[int]:
    """Cut a response behind its first EOS token."""
    end = next((i for i, token in enumerate(tokens) if token in eos), len(tokens))
    return tokens[: end + 1]


# SDAR.


def sdar_decoder(options: dict[str, Any]) -> BlockDiffusion:
    strategy = options["remasking_strategy"]
    rules: dict[str, dict[str, Any]] = {
        "low_confidence_static": {"threshold": 1.0},
        "low_confidence_dynamic": {"threshold": options.get("confidence_threshold")},
        "sequential": {"sampling_rule": "sequential"},
        "entropy_bounded": {"sampling_rule": "entropy_bounded", "entropy_bound": options.get("eb_threshold")},
    }
    num_steps = None if strategy == "entropy_bounded" else options["denoising_steps"]
    size = options["block_length"]
    return BlockDiffusion(block_size=size, num_steps=num_steps, confidence="tempered", fused=False, **rules[strategy])


def num_forwards_until_final(run: dict[str, Any]) -> int:
    """Return how many of a run's forwards pass until its text is final; the program completes the last block."""
    missing = set(range(len(run["output"])))
    for number, changes in enumerate(run["changes_per_forward"], start=1):
        missing -= {place for place, _ in changes}
        if not missing:
            return number
    raise AssertionError("the text is never final")


@pytest.mark.parametrize(
    ("name", "setting", "batch_size"), with_batch_sizes(list_settings("sdar_generate", "sdar_moe_generate"))
)
def test_sdar(name: str, setting: int, batch_size: int) -> None:
    """Our decoder stops where the text is final, and does not store the last block."""
    options = reference(name)["settings"][setting]
    runs = select_runs(name, setting, batch_size)
    sampling = SamplingParams(max_new_tokens=options["gen_length"], top_k=options["top_k"] or None)
    rows = decode_runs(name, runs, sdar_decoder(options), sampling, batch_size)
    for run, row in zip(runs, rows, strict=True):
        assert row.token_ids == run["output"]
        phases = [entry.phase for entry in row.trace]
        assert phases.count("denoise") == num_forwards_until_final(run)
        assert phases.count("store") == max(run["num_forwards_to_store"] - 1, 0)
        assert row.num_forwards == len(phases)


# WeDLM.


def engine_decoder(options: dict[str, Any]) -> WeDLM:
    return WeDLM(
        window_size=options["wedlm_window_size"],
        entropy_threshold=options["wedlm_entropy_threshold"],
        position_penalty=options["wedlm_pos_penalty_factor"],
    )


@pytest.mark.parametrize(
    ("name", "setting", "batch_size"), with_batch_sizes(list_settings("wedlm_engine", "wedlm_qwen2_engine"))
)
def test_wedlm_engine(name: str, setting: int, batch_size: int) -> None:
    """The engine reads the prompt in a forward of its own, and makes a last forward that only confirms."""
    golden = reference(name)
    options = golden["settings"][setting]
    runs = select_runs(name, setting, batch_size)
    eos = (golden["eos_token_id"], *options["stop_token_ids"])
    sampling = SamplingParams(max_new_tokens=options["max_tokens"])
    rows = decode_runs(name, runs, engine_decoder(options), sampling, batch_size, eos)
    for run, row in zip(runs, rows, strict=True):
        assert row.token_ids == run["output"]
        assert row.num_forwards == run["num_forwards"] - 2


NEVER = 31
"""An id that no text has."""


@pytest.mark.parametrize(
    ("name", "setting", "batch_size"),
    with_batch_sizes(list_settings("wedlm_generate", "wedlm_qwen2_generate")),
)
def test_generate_wedlm(name: str, setting: int, batch_size: int) -> None:
    """The program ignores EOS tokens; in settings 7 and 8, it divides the logits by a temperature and draws nothing."""
    golden = reference(name)
    options = golden["settings"][setting]
    runs = select_runs(name, setting, batch_size)
    threshold = options["confidence_threshold"] or None
    decoder = WeDLM(
        selection="confidence",
        window_size=options["block_size"],
        confidence_threshold=threshold,
        confidence_temperature=options["temperature"],
    )
    sampling = SamplingParams(max_new_tokens=options["max_new_tokens"])
    eos = (golden["eos_token_id"],)
    whole = decode_runs(name, runs, decoder, sampling, batch_size, (NEVER,))
    ended = decode_runs(name, runs, decoder, sampling, batch_size, eos)
    for run, row, short in zip(runs, whole, ended, strict=True):
        assert row.token_ids == run["output"]
        assert row.num_forwards == run["num_forwards"]
        assert row.round_ratios == run["committed_per_step"]
        assert short.token_ids == cut(run["output"], eos)
        assert short.num_forwards <= run["num_forwards"]


# Logits and losses.


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-5), ("float32", 1e-4)])
def test_sdar_logits(dtype: str, tolerance: float) -> None:
    golden = reference("sdar_logits")
    backbone = published_model(golden["model"], dtype).backbone
    for case in golden["cases"]:
        ids = torch.tensor([case["inputs"]])
        traits = ModelTraits(attention="block_causal", block_size=case["block_length"], predictions=("mask",))
        positions = torch.arange(ids.shape[1])[None]
        visible = order_mask(pattern_order(traits, positions), torch.tensor([ids.shape[1]]))
        assert_logits(backbone, ids, positions, visible, case["logits"], tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-5), ("float32", 1e-4)])
@pytest.mark.parametrize("name", ["wedlm_logits", "wedlm_qwen2_logits"])
def test_wedlm_logits(name: str, dtype: str, tolerance: float) -> None:
    golden = reference(name)
    backbone = published_model(golden["model"], dtype).backbone
    for fed, expected in zip(golden["inputs"], golden["logits"], strict=True):
        ids, positions = torch.tensor([fed["input_ids"]]), torch.tensor([fed["position_ids"]])
        visible = torch.ones(1, ids.shape[1], ids.shape[1]).tril().bool()
        assert_logits(backbone, ids, positions, visible, expected, tolerance)


def assert_logits(
    backbone: Any, ids: Tensor, positions: Tensor, visible: Tensor, expected: Any, tolerance: float
) -> None:
    with torch.no_grad():
        logits = backbone.logits(backbone.hidden_states(ids, positions, visible))[0]
    wanted = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(logits.double(), wanted, atol=tolerance, rtol=0)


class DrawnMasks(KeyedNoise):
    """Noise with which ``DualStream`` masks the tokens that the authors' program masked."""

    def __init__(self, ratios: Tensor, is_masked: Tensor) -> None:
        self._ratios = ratios
        self._is_masked = is_masked

    def uniform(self, stream: str, size: int) -> Tensor:
        assert stream == "block_ratio"
        return self._ratios[:, :size]

    def bits(self, stream: str, size: int) -> Tensor:
        assert stream == "token_order"
        return F.pad((~self._is_masked).long(), (0, size - self._is_masked.shape[1]), value=2)


def read_bounds(case: dict[str, Any]) -> list[tuple[int, int]]:
    """Return where the samples of a packed batch begin and end."""
    return list(pairwise(case["cum_seqlens"]))


def unpack(case: dict[str, Any], pad_token_id: int) -> tuple[ResponseBatch, DrawnMasks]:
    """Return the samples of a packed batch in rows of their own, and the noise that masks the same tokens."""
    size, bounds = case["block_size"], read_bounds(case)
    width = max(stop - start for start, stop in bounds)
    ids = torch.full((len(bounds), width), pad_token_id)
    prompts, responses = [], []
    ratios = torch.zeros(len(bounds), ceil(width / size), dtype=torch.float64)
    is_masked = torch.zeros(len(bounds), width, dtype=torch.bool)
    for row, (start, stop) in enumerate(bounds):
        ids[row, : stop - start] = torch.tensor(case["clean_input_ids"][start:stop])
        num_targets = sum(label != -100 for label in case["labels"][start:stop])
        prompts.append(stop - start - num_targets)
        responses.append(num_targets)
        noisy = slice(start + stop, 2 * stop)  # of the sample's [clean; noisy] in the doubled pack
        for place, masked, ratio in zip(
            case["logical_positions"][noisy], case["masked"][noisy], case["p_mask"][noisy], strict=True
        ):
            if masked:
                is_masked[row, place] = True
                ratios[row, place // size] = ratio
    batch = ResponseBatch(
        input_ids=ids, sample_keys=torch.arange(len(bounds)), prompt_lengths=torch.tensor(prompts),
        response_lengths=torch.tensor(responses),
    )  # fmt: skip
    return batch, DrawnMasks(ratios, is_masked)


@pytest.mark.parametrize("index", range(4))
def test_wedlm_loss(index: int) -> None:
    """``weighting: uniform`` (batch 2) has no counterpart: its mean is taken from the weights' signs."""
    case = reference("wedlm_loss")["batches"][index]
    backbone = published_model("wedlm-tiny", "float64").backbone
    batch, noise = unpack(case, backbone.special_tokens.pad_token_id)
    objective = DualStream(block_size=case["block_size"], ar_weight=case["ar_loss_weight"])
    corrupted = objective.corrupt(batch, noise, backbone.special_tokens)
    width = batch.input_ids.shape[1]
    for row, (start, stop) in enumerate(read_bounds(case)):
        length = stop - start
        # The program packs [clean; noisy] of every sample; our rows have the noisy copy first.
        for ours, theirs in ((corrupted.input_ids, "packed_input_ids"), (corrupted.position_ids, "logical_positions")):
            assert ours[row, :length].tolist() == case[theirs][start + stop : 2 * stop]
            assert ours[row, width : width + length].tolist() == case[theirs][2 * start : start + stop]
    if case["weighting"] == "uniform":
        is_mask_target = (corrupted.weights > 0) & (corrupted.terms == 0)
        weights = corrupted.weights.where(~is_mask_target, 1.0)
        counts = torch.stack((is_mask_target.sum().double(), corrupted.counts[1]))
        corrupted = replace(corrupted, weights=weights, counts=counts)
    with torch.no_grad():
        hidden = backbone(corrupted.input_ids, corrupted.position_ids, corrupted.visible)
        output = objective.loss(hidden, backbone.head, corrupted)
    mdm, ar = (output.sums / output.counts).tolist()
    assert (mdm, ar, float(output.total)) == pytest.approx((case["mlm_loss"], case["ar_loss"], case["loss"]), rel=1e-5)


@pytest.mark.parametrize("name", ["7_3", "8_4"])
def test_wedlm_masks(name: str) -> None:
    length, size = map(int, name.split("_"))
    expected = torch.tensor(reference("wedlm_loss")["masks"][name]).bool()
    ranges = three_part_ranges(length, size, torch.tensor([length]), causal=True)
    ours = ranges_mask(ranges, 2 * length)[0]
    clean_first = torch.arange(2 * length).roll(length)
    assert torch.equal(ours[clean_first][:, clean_first], expected)
