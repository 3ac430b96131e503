"""Speeds of all models of a sweep, measured in turns in one process after the points have run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from refusion_lit.checkpoints.models import load
from refusion_lit.evaluation.latency import Entrant, LatencyOptions, choose_baseline, measure_latency, summarize
from refusion_lit.plugins import find_class
from refusion_lit.reports.results import RESULTS
from refusion_lit.sweeps.points import Point
from refusion_lit.types import Prompt, SamplingParams
from refusion_lit.utils.files import digest, read_object, write_json_atomically

_SEPARATOR = "/"


def measure_points(folders: Mapping[Path, Point], options: LatencyOptions, console: Console) -> None:
    """Measure the decoders of finished points and write the speeds into their ``results.json``.

    A decoder decodes prompts of the test of its point. Decoders that a model was not trained for are left out. A second
    call with the same points and options measures nothing. Measuring uses the points' ``num_threads`` if all points
    have the same number, and otherwise torch's default: a small model is slower on more threads.

    Args:
        folders: Finished points by directory.
        options: Prompts and batch sizes.
        console: Where progress is shown.
    """
    files = {folder: folder / "test" / RESULTS for folder in folders}
    num_threads = {point.configs["test"].get("num_threads") for point in folders.values()}
    key = digest(
        [
            str(options),
            str(num_threads),
            *([str(file), read_object(file).get("fingerprints")] for file in files.values()),
        ]
    )
    if all((read_object(file).get("latency_results") or {}).get("key") == key for file in files.values()):
        return
    entrants: dict[str, Entrant] = {}
    for folder, file in files.items():
        entrants |= _entrants(folder, read_object(file), folders[folder])
    if not entrants:
        return
    tenth = 0
    with Progress(console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("speeds, one decoder at a time", total=None)

        def report(num_done: int, num_batches: int) -> None:
            nonlocal tenth
            progress.update(task, completed=num_done, total=num_batches)
            if not console.is_terminal and 10 * num_done // num_batches > tenth:
                tenth = 10 * num_done // num_batches
                console.print(f"speeds: {10 * tenth} %", highlight=False)

        num_threads_before = torch.get_num_threads()
        if len(num_threads) == 1 and (number := next(iter(num_threads))) is not None:
            torch.set_num_threads(number)
        try:
            timings = measure_latency(entrants, options, progress=report)
        finally:
            torch.set_num_threads(num_threads_before)
    summary = summarize(timings, choose_baseline(entrants))
    for folder, file in files.items():
        prefix = f"{folder.name}{_SEPARATOR}"
        figures = {
            name.removeprefix(prefix): values for name, values in summary["decoders"].items() if name.startswith(prefix)
        }
        latency = {"key": key, "baseline": summary["baseline"], "decoders": figures}
        write_json_atomically(file, {**read_object(file), "latency_results": latency})


def _entrants(folder: Path, results: Mapping[str, Any], point: Point) -> dict[str, Entrant]:
    """Return the decoders of a point with its model and the prompts of its test, by point and name."""
    from refusion_lit.decoding import Decoder

    config = point.configs["test"]
    source = folder / "fit" / "checkpoints" / "last.ckpt" if "fit" in point.configs else config["ckpt_path"]
    verifier = (config["model"].get("decoding") or {}).get("verifier")
    model = load(source, verifier=verifier)
    sampling = SamplingParams(**{**results["sampling"], "stop": tuple(results["sampling"].get("stop") or ())})
    entrants = {}
    for name, options in results["decoders"].items():
        if results["mismatches"].get(name):
            continue
        decoder_class: Any = find_class(Decoder, options["class"])
        decoder = decoder_class(**{n: v for n, v in options.items() if n != "class"})
        lines = (folder / "test" / f"predictions_{name}.jsonl").read_text(encoding="utf-8").splitlines()
        prompts = [
            Prompt(token_ids=tuple(model.encode(line["prompt"])), id=str(line["id"])) for line in map(json.loads, lines)
        ]
        entrants[f"{folder.name}{_SEPARATOR}{name}"] = Entrant(
            model=model, decoder=decoder, sampling=sampling, prompts=prompts
        )
    return entrants


def summary_sentence(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """Return a sentence on the fastest decoder whose score is at most two points below the baseline's; None without.

    Args:
        rows: Rows of the table, with ``score`` and ``latency``.
    """
    measured = [row for row in rows if (row.get("latency") or {}).get("1")]
    baseline = next((row for row in measured if row["latency"]["1"]["times_baseline"] == [1.0, 1.0, 1.0]), None)
    if baseline is None:
        return None
    good = [row for row in measured if row is not baseline and row["score"] >= baseline["score"] - 0.02]
    name = baseline["class"]
    if not good:
        return f"No decoder has a score within two points of {name}."
    best = max(good, key=lambda row: row["latency"]["1"]["times_baseline"][0])
    estimate, low, high = best["latency"]["1"]["times_baseline"]
    text = f"At a score within two points of {name}, {best['class']} is the fastest one prompt at a time: "
    text += f"{estimate:.1f} times as fast ({low:.1f} to {high:.1f})"
    batches = [
        f"{best['latency'][size]['times_baseline'][0]:.1f} times in batches of {size}"
        for size in sorted(best["latency"], key=int)
        if size != "1"
    ]
    return f"{text}; {', '.join(batches)}." if batches else f"{text}."
