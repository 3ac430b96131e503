"""Start: how long a command takes until its help or a usage error is on the screen.

Help is text in the package; a usage error takes as long as the imports of the parser.

usage: python -m benchmarks.startup [--repeats 7]

Whole processes are measured, from their start to their end: processor time, which other work on the machine changes
little, and time on the clock.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.common import ROOT, Work, interleaved, summary_line, write
from jsonargparse import auto_cli

from refusion_lit.decoding import TraceRound
from refusion_lit.traces.document import Trace, write_trace

QUICKSTART = str(ROOT / "configs" / "quickstart.yaml")
COMMANDS = (
    "init", "report", "score", "sweep", "export", "import-gguf", "fit", "test", "predict", "validate", "generate",
    "chat", "trace", "evaluate",
)  # fmt: skip
ERRORS = {
    "fit, unknown option": ["fit", "--config", QUICKSTART, "--precision=16"],
    "fit, unknown key in the config": ["fit", "--config", str(ROOT / "experiments" / "thresholds" / "small.yaml")],
    "test, value of another type": ["test", "--config", QUICKSTART, "--data.batch_size=many"],
    "generate, unknown option": ["generate", "--ckpt_path=x", "--promt=1"],
    "generate, value out of range": ["generate", "--ckpt_path=x", "--prompt=1", "--decoder.slot_threshold=1.5"],
    "sweep, missing file": ["sweep", "--config=none.yaml"],
    "report, missing run": ["report", "none"],
    "unknown command": ["trian"],
}


class Process(Work):
    """Runs a command.

    Args:
        args: Its arguments.
        code: The exit code that it must have.

    Attributes:
        processor_seconds: What each repeat, and the one before the first, took of the processor.
    """

    def __init__(self, args: list[str], code: int) -> None:
        super().__init__(self._once)
        self._args, self._code = args, code
        self.processor_seconds: list[float] = []

    def _once(self) -> dict[str, int]:
        before = _processor_seconds()
        command = [sys.executable, "-m", "refusion_lit.cli", *self._args]
        done = subprocess.run(command, capture_output=True, check=False)
        assert done.returncode == self._code, done.stderr.decode()
        self.processor_seconds.append(_processor_seconds() - before)
        return {}


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def saved_trace(folder: Path) -> Path:
    """Write a small trace."""
    draft = TraceRound(phase="plan", shape=(1, 4), positions=[2, 3], tokens=[5, 1], probabilities=[0.9, 0.8])
    draft.accepted = [2, 3]
    trace = Trace(
        decoder="ReFusion", prompt="a", response="a", prompt_length=2, token_ids=(5, 1), slot_size=2,
        finish_reason="eos", seconds=0.0, rounds=(draft,), pieces={1: "1", 5: "5"},
    )  # fmt: skip
    write_trace(trace, folder / "trace.json")
    return folder / "trace.json"


def main(repeats: int = 7, output: str | None = None) -> None:
    """Time commands.

    Args:
        repeats: Runs of each command.
        output: Where to write the JSON.
    """
    started = time.perf_counter()
    works = {f"{name} --help": Process([name, "--help"], 0) for name in COMMANDS}
    works |= {name: Process(args, 2) for name, args in ERRORS.items()}
    with tempfile.TemporaryDirectory() as folder:
        trace = ["trace", f"--trace_file={saved_trace(Path(folder))}", f"--output={folder}/t.html"]
        works["trace of a file"] = Process(trace, 0)
        interleaved(works, repeats)
    medians = {name: statistics.median(work.processor_seconds[1:]) for name, work in works.items()}
    shown = max(value for name, value in medians.items() if name.endswith("--help"))
    summary = [summary_line("help of a command, the slowest, in seconds of the processor", shown)]
    cases = {
        name: {
            "processor_seconds": round(medians[name], 3),
            "seconds": round(work.summary()["median_seconds"], 3),
            "all": [round(s, 3) for s in work.seconds],
        }
        for name, work in works.items()
    }
    seconds = time.perf_counter() - started
    write("startup", {"repeats": repeats}, {"summary": summary, "cases": cases}, output=output, seconds=seconds, seed=0)


if __name__ == "__main__":
    auto_cli(main)
