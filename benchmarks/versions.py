"""Versions: this checkout beside another one and beside the released ReFusion program, in one run.

usage: python -m benchmarks.versions [--checkout DIR] [--released DIR --released_python PYTHON] [--rounds 9]

``--checkout`` is another checkout of this project, a git worktree for example. ``--released`` is a checkout of
github.com/ML-GSAI/ReFusion (commit 448c0d8), and ``--released_python`` an interpreter with transformers 4.52.4, pandas
and tqdm. All decode additions-clean in the six settings of the reference outputs, each with its own defaults, at batch
1 and 16. The released program decodes one prompt at a time: its time for the same prompts counts at both.

Each contestant is a process with one thread that loads the model once. They take turns, in a new random order in each
round, so that other work on the machine hits all alike; a ratio is the median over rounds of the ratio in a round, by
processor time.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import time
from itertools import combinations, cycle, islice
from pathlib import Path
from typing import Any

from benchmarks.common import GOLDENS, ROOT, expected_response, golden_runs, summary_line, write
from jsonargparse import auto_cli

THIS, OTHER, RELEASED = "this checkout", "other checkout", "released program"


class Contestant:
    """A process that decodes what it is asked for.

    Args:
        kind: ``ours`` or ``released``.
        python: Its interpreter.
        path: Where its modules are.

    Attributes:
        path: Where its modules are.
    """

    def __init__(self, kind: str, python: str, path: Path) -> None:
        self.path = path
        # -P: the worker's own folder must not be where its imports are looked for.
        command = [python, "-P", str(Path(__file__).with_name("version_worker.py")), kind]
        self._process = subprocess.Popen(
            [*command, str(GOLDENS / "models" / "additions-clean")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=path,
            env={**os.environ, "PYTHONPATH": str(path), "OMP_NUM_THREADS": "1"},
        )

    def answer(self) -> dict[str, Any]:
        """Return its next answer; the first one comes when the model is loaded and has its libraries' versions."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the decoding process in {self.path} ended; its error is above")
        return json.loads(line)

    def decode(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return what it answers to a request (see ``version_worker.py``)."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self.answer()

    def stop(self) -> None:
        """Let it end: it has no more requests."""
        self._process.communicate()


def read_commit(directory: Path) -> str | None:
    """Return the commit of a checkout, ``None`` if it is none."""
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=directory, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def measured(
    contestants: dict[str, Contestant], runs: list[dict[str, Any]], requests: dict[int, dict[str, Any]], rounds: int
) -> dict[str, Any]:
    """Let contestants decode a setting's prompts in turns.

    Args:
        contestants: By name.
        runs: Of the reference outputs, in the order of the prompts.
        requests: By batch size.
        rounds: How often each is asked; one more time warms up.

    Returns:
        For each contestant and batch size the number of forwards, seconds of all rounds, and whether the text is the
        reference's.
    """
    turns = [(name, size) for name in contestants for size in requests if name != RELEASED or size == min(requests)]
    answers: dict[tuple[str, int], list[dict[str, Any]]] = {turn: [] for turn in turns}
    for number in range(rounds + 1):
        random.Random(number).shuffle(turns)
        for name, size in turns:
            answers[name, size].append(contestants[name].decode(requests[size]))
    expected = [expected_response(run) for run in runs]
    return {
        name: {
            str(size): {
                "num_forwards": answers[name, size][-1]["num_forwards"],
                "reference_text": all(answer["responses"] == expected for answer in answers[name, size]),
                "median_seconds": statistics.median(answer["process_seconds"] for answer in answers[name, size][1:]),
                "seconds": [answer["process_seconds"] for answer in answers[name, size][1:]],
                "wall_seconds": [answer["wall_seconds"] for answer in answers[name, size][1:]],
            }
            for size in requests
            if (name, size) in answers
        }
        for name in contestants
    }


def ratio(figures: dict[str, Any], fast: str, slow: str, size: int) -> float:
    """Return how many times as fast one contestant is as another; the released program has one batch size only."""

    def seconds(name: str) -> list[float]:
        sizes = figures[name]
        return sizes.get(str(size), next(iter(sizes.values())))["seconds"]

    return statistics.median(s / f for f, s in zip(seconds(fast), seconds(slow), strict=True))


def compared(
    contestants: dict[str, Contestant], rounds: int, batch_sizes: tuple[int, ...], num_prompts: int
) -> dict[str, dict[str, Any]]:
    """Return what was measured and the ratios between contestants, for each setting."""
    reference = golden_runs("clean")
    cases: dict[str, dict[str, Any]] = {}
    for number, setting in enumerate(reference["settings"]):
        runs = list(islice(cycle(run for run in reference["runs"] if run["setting"] == number), num_prompts))
        prompts = [run["prompt"] for run in runs]
        requests = {size: {"setting": setting, "prompts": prompts, "batch_size": size} for size in batch_sizes}
        figures = measured(contestants, runs, requests, rounds)
        ratios = {
            f"{fast} / {slow}, batch {size}": round(ratio(figures, fast, slow, size), 3)
            for size in batch_sizes
            for fast, slow in combinations(contestants, 2)
        }
        cases[f"setting {number + 1}"] = {"contestants": figures, "ratios": ratios}
        same = all(one["reference_text"] for sizes in figures.values() for one in sizes.values())
        print(number + 1, ratios, "same text" if same else "TEXTS DIFFER", flush=True)
    return cases


def main(
    checkout: str | None = None,
    released: str | None = None,
    released_python: str | None = None,
    rounds: int = 9,
    batch_sizes: tuple[int, ...] = (1, 16),
    num_prompts: int = 32,
    output: str | None = None,
) -> None:
    """Compare versions.

    Args:
        checkout: Another checkout of this project.
        released: A checkout of the released program.
        released_python: The interpreter of the released program.
        rounds: How often each contestant decodes the prompts of a setting at a batch size.
        batch_sizes: Prompts decoded together, the first one 1.
        num_prompts: Prompts of a setting; above 20, the first ones come again.
        output: Where to write the JSON.
    """
    if not (checkout or released) or bool(released) != bool(released_python):
        raise SystemExit("expected --checkout, or --released with --released_python; give what to compare with.")
    started = time.perf_counter()
    contestants = {THIS: Contestant("ours", sys.executable, ROOT / "src")}
    if checkout:
        contestants[OTHER] = Contestant("ours", sys.executable, Path(checkout).resolve() / "src")
    if released and released_python:
        contestants[RELEASED] = Contestant("released", released_python, Path(released).resolve())
    try:
        about = {name: {"commit": read_commit(one.path), **one.answer()} for name, one in contestants.items()}
        cases = compared(contestants, rounds, batch_sizes, num_prompts)
    finally:
        for contestant in contestants.values():
            contestant.stop()
    means = {
        name: round(statistics.geometric_mean(case["ratios"][name] for case in cases.values()), 3)
        for name in next(iter(cases.values()))["ratios"]
    }
    summary = [summary_line(f"additions-clean, mean of six settings: {name}", mean) for name, mean in means.items()]
    results = {"contestants": about, "summary": summary, "mean": means, "cases": cases}
    config = {"rounds": rounds, "batch_sizes": batch_sizes, "num_prompts": num_prompts}
    write("versions", config, results, output=output, seconds=time.perf_counter() - started, seed=0)


if __name__ == "__main__":
    auto_cli(main)
