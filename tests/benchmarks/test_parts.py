"""Benchmarks time what they say: a training step counts its tokens, body and head are both found."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from benchmarks.common import SMALL, decoded, golden_model, golden_runs, random_model
from benchmarks.host_time import DECODERS, milliseconds_a_call
from benchmarks.overhead import PARTS, timed
from benchmarks.precision import MODEL, mixed_step
from benchmarks.training import OBJECTIVES, draw_batch, make_step, ragged_batches
from benchmarks.training_memory import OBJECTIVES as MEMORY_OBJECTIVES
from benchmarks.training_memory import SAMPLE, make_corrupted, measure

from benchmarks import load_memory
from refusion_lit.decoding import ReFusion
from refusion_lit.modeling.formats import FORMATS
from refusion_lit.types import Prompt


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_training_step_counts_its_tokens(objective: str) -> None:
    outcome = make_step(random_model(SMALL), OBJECTIVES[objective], draw_batch(2, 3, 5, 32)).run()
    assert outcome["num_tokens"] == 16
    assert 0 < outcome["num_labels"] <= 20


@pytest.mark.parametrize("is_mixed", [False, True])
def test_a_step_in_mixed_precision_multiplies_in_bfloat16(is_mixed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODEL, "vocab_size", 512)
    model, dtypes = random_model({**MODEL, "num_hidden_layers": 1}), set()
    model.head.register_forward_hook(lambda _module, _inputs, output: dtypes.add(output.dtype))
    assert mixed_step(model, is_mixed=is_mixed).run()["num_tokens"] == 2 * (32 + 96)
    assert dtypes == {torch.bfloat16 if is_mixed else torch.float32}


def test_packed_and_padded_steps_have_the_same_tokens() -> None:
    backbone = random_model(SMALL)
    padded, packed = (make_step(backbone, OBJECTIVES["hybrid"], batch).run() for batch in ragged_batches(32))
    assert padded["num_tokens"] == packed["num_tokens"]


def test_body_and_head_are_timed() -> None:
    model = golden_model("clean")
    seconds = timed(model)
    prompt = Prompt(token_ids=tuple(golden_runs("clean")["runs"][0]["prompt"]), id="0")
    decoded(model, ReFusion(slot_size=4), [prompt], 16)
    assert all(seconds[part] > 0 for part in PARTS)


@pytest.mark.parametrize("name", DECODERS)
def test_host_time_is_counted_between_calls(name: str) -> None:
    milliseconds = milliseconds_a_call(DECODERS[name], 64, 1, 32)
    assert milliseconds["milliseconds"] > 0
    # From left to right a call per token, of which the first two are left out; by the schedule several tokens per call.
    assert milliseconds["num_calls"] in ((30,) if name == "autoregressive" else range(1, 16))


@pytest.mark.parametrize("name", MEMORY_OBJECTIVES)
def test_a_training_step_is_measured_with_ranges_and_with_a_matrix(name: str) -> None:
    length = 2 * SAMPLE
    assert make_corrupted(name, length, random_model(SMALL)).input_ids.numel() in (length, 2 * length)
    for way in ("ranges", "matrix"):
        assert measure(name, length, way)["seconds"] > 0


@pytest.mark.parametrize("name", FORMATS)
def test_a_model_of_each_published_format_is_loaded_and_measured(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 64}
    monkeypatch.setattr(load_memory, "_SIZES", {**load_memory._SIZES, **small})
    assert load_memory.save(FORMATS[name], tmp_path, 3) > 0
    loaded = load_memory.load(str(tmp_path), name)
    assert 0 < loaded["before"] <= loaded["peak"]
