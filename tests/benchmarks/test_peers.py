"""What the benchmarks compare with is right: the plain decoder's text, the replayed model's forwards."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks.common import (
    ROOT,
    decoded,
    expected_response,
    golden_model,
    golden_runs,
    random_model,
    random_prompts,
    refusion_options,
    write,
)
from benchmarks.peers import check_same_text, ours, plain
from benchmarks.replay import ACCEPTED_IN_PARTS, ALL_ACCEPTED, Replay, ReplayedModel, Schedule

from benchmarks import versions
from refusion_lit.decoding import ReFusion
from refusion_lit.types import Prompt

REFERENCE: dict[str, Any] = {"fused": False, "infill_layout": "reference"}
TINY = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 300,
}  # fmt: skip


@pytest.mark.parametrize("name", ["clean", "mid"])
def test_the_plain_decoder_gives_the_reference_text(name: str) -> None:
    reference, model = golden_runs(name), golden_model(name)
    for number, setting in enumerate(reference["settings"]):
        runs = [run for run in reference["runs"] if run["setting"] == number][:5]
        prompts = [Prompt(token_ids=tuple(run["prompt"]), id=str(i)) for i, run in enumerate(runs)]
        options = ReFusion(**refusion_options(setting))
        outcome = plain(model, options, prompts, setting["gen_length"]).run()
        expected = [tuple(expected_response(run)) for run in runs]
        assert outcome["text"] == hash(tuple(expected))
        assert outcome["num_tokens"] == sum(map(len, expected))


@pytest.mark.parametrize("schedule", [ALL_ACCEPTED, ACCEPTED_IN_PARTS])
@pytest.mark.parametrize("num_serial_blocks", [1, 2])
def test_a_replayed_model_follows_its_schedule(schedule: Schedule, num_serial_blocks: int) -> None:
    model = random_model(TINY)
    mask = model.special_tokens.mask_token_id
    assert mask is not None
    replay = Replay(schedule, 5, mask)
    text = [3 + (5 + place) % 125 for place in range(128)]
    options = ReFusion(num_serial_blocks=num_serial_blocks, **REFERENCE)
    acting, prompts = ReplayedModel(model, replay), random_prompts(3, 5)
    output = decoded(acting, options, prompts, 128, batch_size=2)
    for row in output.rows:
        assert row.token_ids == text
        # By hand: 8 rounds of two forwards; in four of them two completion rounds of two forwards more.
        assert row.num_forwards == schedule.num_forwards(16) == (32 if schedule.prefixes else 16)
    works = {"ours": ours(acting, options, prompts, 128), "plain": plain(model, options, prompts, 128, replay)}
    for work in works.values():
        work.outcome = work.run()
    check_same_text(works)


def test_a_replayed_model_has_the_limits_of_its_model() -> None:
    model = golden_model("clean")
    replayed = ReplayedModel(model, Replay(ALL_ACCEPTED, 4, 511))
    assert replayed.max_positions == model.max_positions == 512
    assert replayed.learns_positions == model.learns_positions


def test_versions_are_compared_on_the_reference_text() -> None:
    worker = versions.Contestant("ours", sys.executable, ROOT / "src")
    assert worker.answer()["torch"]
    cases = versions.compared({versions.THIS: worker, versions.OTHER: worker}, 1, (1, 16), 2)
    worker.stop()
    assert list(cases) == [f"setting {i + 1}" for i in range(6)]
    for case in cases.values():
        assert list(case["ratios"]) == [f"this checkout / other checkout, batch {size}" for size in (1, 16)]
        for sizes in case["contestants"].values():
            assert all(one["reference_text"] and one["num_forwards"] > 0 for one in sizes.values())


def test_results_name_no_directory_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["decode", "--checkout=/srv/a/b", "--released", "/srv/c", "--model", "tests/d"])
    write("decode", {}, {}, output=str(tmp_path / "x.json"), seconds=1.0, seed=0)
    written = json.loads((tmp_path / "x.json").read_text(encoding="utf-8"))
    expected = ["python", "-m", "benchmarks.decode", "--checkout=b", "--released", "c", "--model", "tests/d"]
    assert written["environment"]["command"] == expected
