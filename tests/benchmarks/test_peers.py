"""What the benchmarks compare with is right: the plain decoder's text, the replayed model's forwards."""

from __future__ import annotations

from typing import Any

import pytest
from benchmarks.common import golden_model, golden_runs, random_model, random_prompts
from benchmarks.plain_refusion import PlainReFusion
from benchmarks.replay import ACCEPTED_IN_PARTS, ALL_ACCEPTED, Replay, ReplayedModel, Schedule

from refusion_lit.decoding import ReFusion, decode
from refusion_lit.types import ForwardCost, SamplingParams

REFERENCE: dict[str, Any] = {"fused": False, "infill_layout": "reference"}
TINY = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 300,
}  # fmt: skip


@pytest.mark.parametrize("name", ["clean", "mid"])
def test_the_plain_decoder_gives_the_reference_text_with_the_reference_number_of_forwards(name: str) -> None:
    reference, model = golden_runs(name), golden_model(name)
    eos = reference["eos_token_id"]
    for run in reference["runs"]:
        options = reference["settings"][run["setting"]]
        plain = PlainReFusion(
            model.model,
            model.special_tokens,
            ReFusion(
                slot_size=options["slot_size"],
                num_serial_blocks=options["serial_num_blocks"],
                slot_threshold=options["slot_threshold"],
                token_threshold=options["token_threshold"],
            ),
            options["gen_length"],
        )
        expected = run["output"]
        assert plain.decode(run["prompt"]) == (expected[: expected.index(eos) + 1] if eos in expected else expected)
        assert plain.num_forwards == len(run["forward_shapes"])


@pytest.mark.parametrize("schedule", [ALL_ACCEPTED, ACCEPTED_IN_PARTS])
@pytest.mark.parametrize("num_serial_blocks", [1, 2])
def test_a_replayed_model_follows_its_schedule(schedule: Schedule, num_serial_blocks: int) -> None:
    model = random_model(TINY)
    mask = model.special_tokens.mask_token_id
    assert mask is not None
    replay = Replay(schedule, 5, mask)
    text = [3 + (5 + place) % 125 for place in range(128)]
    options = ReFusion(num_serial_blocks=num_serial_blocks, **REFERENCE)
    output = decode(
        ReplayedModel(model, replay),
        options,
        random_prompts(3, 5),
        SamplingParams(max_new_tokens=128),
        batch_size=2,
    )
    for row in output.rows:
        assert row.token_ids == text
        # By hand: 8 rounds of two forwards; in four of them two completion rounds of two forwards more.
        assert row.num_forwards == schedule.num_forwards(16) == (32 if schedule.prefixes else 16)
    plain = PlainReFusion(model.model, model.special_tokens, options, 128, replay.overwrite)
    assert plain.decode(random_prompts(1, 5)[0].token_ids) == text
    assert plain.num_forwards == schedule.num_forwards(16)


def test_a_replayed_model_has_the_limits_and_the_measured_cost_of_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = golden_model("clean")
    monkeypatch.setattr(model, "forward_cost", lambda num_rows: ForwardCost(float(num_rows)))
    replayed = ReplayedModel(model, Replay(ALL_ACCEPTED, 4, 511))
    assert replayed.forward_cost(3) == ForwardCost(3.0)
    assert replayed.max_positions == model.max_positions == 512
    assert replayed.learns_positions == model.learns_positions
