"""The conversion of a pretrained model in miniature: train, be killed, resume, decode, measure."""

from __future__ import annotations

import json
import random
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from refusion_lit.cli import main
from support.tiny import make_base
from tasks.samples import write_jsonl

FOLDER = Path(__file__).parents[2] / "experiments" / "real_conversion"
CHARACTERS = "0123456789+=#<> \n"
BUDGET = 950
"""Number of positions that a training computes."""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Return run.py as a module."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import run as module  # pyright: ignore[reportMissingImports]

    yield module
    for name in ("run", "measure", "results"):
        sys.modules.pop(name)


def test_the_committed_table_has_a_row_for_every_decoder(run: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    import table  # pyright: ignore[reportMissingImports]

    sys.modules.pop("table")
    results, longer = (json.loads((FOLDER / f"{name}.json").read_text()) for name in ("results", "longer"))
    results = table.joined(results, longer)
    num_rows = {f"`{name}`": len(run.make_decoders(name)) for name in run.NAMES}
    num_rows |= {"`hybrid, longer`": len(run.make_decoders("hybrid")), "references": 1}
    assert Counter(row[0] for row in table.rows(results)) == num_rows
    assert table.markdown(results) in (FOLDER / "table.md").read_text()


def write_data(folder: Path) -> Path:
    """Write sums with an annotation and a final answer."""
    folder.mkdir()
    rng = random.Random(0)
    for name, count in (("train", 160), ("test", 3)):
        pairs = [(rng.randrange(100), rng.randrange(100)) for _ in range(count)]
        rows = [{"question": f"{a}+{b}=", "answer": f"<<{a}+{b}={a + b}>>{a + b}\n#### {a + b}"} for a, b in pairs]
        write_jsonl(folder / f"{name}.jsonl", rows)
    return folder


def check_result(result: dict[str, Any]) -> None:
    """Check the figures of all trainings, of the data's answers, and of the decoders' speed."""
    for name, training in result["trainings"].items():
        assert training["is_finished"]
        assert training["num_positions"] == pytest.approx(BUDGET, rel=0.1)
        curve = [row["train/num_positions"] for row in training["curve"] if "train/num_positions" in row]
        assert curve[-1] == training["num_positions"]
        assert sorted(map(int, training["followed"])) == [training["num_steps"] // 2, training["num_steps"]]
        for decoder, figures in training["decoders"].items():
            assert figures["num_prompts"] == 3
            assert figures["perplexity"] > 1
            assert f"{name}/{decoder}" in result["speed"]["rows"]
    assert result["references"]["annotations_right"][0] == 100
    assert result["references"]["ends_with_answer"][0] == 100
    assert result["speed"]["rows"]["transformers.generate"]["ratio"] == 1


def test_a_killed_conversion_resumes_and_ends_in_a_result(
    run: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = make_base(tmp_path / "base", CHARACTERS, max_positions=512)
    work, output, commands = tmp_path / "work", tmp_path / "results.json", []

    def in_this_process(*args: str) -> dict[str, float]:
        commands.append(args)
        assert main(args) == 0
        if len(commands) == 2:  # after the second training, before it is noted
            raise KeyboardInterrupt
        return {"seconds": 1.0, "processor_seconds": 1.0, "peak_memory_gb": 1.0}

    monkeypatch.setattr(run, "refusion_lit", in_this_process)
    options = run.options
    monkeypatch.setattr(run, "options", lambda *args: [*options(*args), "--model.sampling.max_new_tokens=56"])
    for name, value in (("NUM_FOLLOWED", 2), ("CHECKPOINTS", 4)):
        monkeypatch.setattr(run, name, value)
    data = write_data(tmp_path / "data")
    args = [f"--base={base}", f"--data={data}", f"--work_dir={work}", f"--output={output}", f"--budget={BUDGET}"]
    monkeypatch.setattr(sys, "argv", ["run.py", *args, "--num_timed=2", "--only", "autoregressive", "hybrid"])
    everything = run.PARTS
    monkeypatch.setattr(run, "PARTS", ("fit",))
    with pytest.raises(KeyboardInterrupt):
        run.main()
    monkeypatch.setattr(run, "PARTS", everything)
    run.main()
    kinds = [command for command, *_ in commands]
    assert kinds == ["fit", "fit", "test", "predict", "fit", "test", "test", "predict"]  # a test for each decoder
    assert [len(list(run.glob("predictions_*.jsonl"))) for run in work.glob("runs/*/test_*")] == [1, 1, 1]
    fit = work / "runs" / "hybrid" / "fit"  # resumed at its last step, so nothing was left to log
    assert [path.name for path in fit.glob("metrics*.csv")] == ["metrics.csv"]

    assert run.length(8, num_accumulated=2, num_kept=1)["val_check_interval"] == 16

    result: dict[str, Any] = json.loads(output.read_text())
    check_result(result)
    # The other training had no step left when it resumed.
    assert "positions_per_processor_second" in result["trainings"]["autoregressive"]
    assert "positions_per_processor_second" not in result["trainings"]["hybrid"]

    count = len(commands)
    run.main()
    assert len(commands) == count
    assert json.loads(output.read_text())["trainings"] == result["trainings"]

    # The same training elsewhere, measured by the other's next-token model.
    other, output = tmp_path / "other", tmp_path / "other.json"
    shutil.copytree(work / "runs" / "hybrid", other / "runs" / "hybrid")
    for path in work.glob("hybrid*.*"):
        shutil.copy(path, other)
    argv = ["run.py", *args, f"--work_dir={other}", f"--judge_dir={work}", f"--output={output}", "--num_timed=2"]
    argv += ["--only", "hybrid"]
    monkeypatch.setattr(sys, "argv", argv)
    run.main()
    assert len(commands) == count
    judged = json.loads(output.read_text())
    assert "references" not in judged
    assert judged["trainings"]["hybrid"]["decoders"].keys() == result["trainings"]["hybrid"]["decoders"].keys()
    assert all(figures["perplexity"] > 1 for figures in judged["trainings"]["hybrid"]["decoders"].values())
    assert len(judged["speed"]["rows"]) == 3
