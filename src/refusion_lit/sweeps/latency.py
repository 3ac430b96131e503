"""Measures the speeds of a sweep's models, in turns and in one process, after the points have run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from refusion_lit.checkpoints.models import load
from refusion_lit.evaluation.latency import Entrant, choose_baseline, measure_latency, summarize
from refusion_lit.evaluation.predictions import read_json_lines
from refusion_lit.plugins import find_class
from refusion_lit.reports.results import RESULTS, is_speed_baseline
from refusion_lit.sweeps.points import Point
from refusion_lit.types import LatencyOptions, Prompt, SamplingParams
from refusion_lit.utils.files import digest, read_object, write_json_atomically
from refusion_lit.utils.nested import get_nested

_SEPARATOR = "/"


def measure_points(
    folders: Mapping[Path, Point], options: LatencyOptions, progress: Callable[[int, int], None]
) -> None:
    """Measure the decoders of finished points and write the speeds into their ``results.json``.

    A decoder decodes prompts from its point's test, with the test's number of CPU threads. Decoders for which a model
    was not trained are left out. A second call with the same points and options measures nothing.

    Args:
        folders: Finished points by directory.
        options: Prompts and batch sizes.
        progress: Called with the number of decoded batches and of all batches.
    """
    results = {folder: read_object(folder / "test" / RESULTS) for folder in folders}
    tests = [[str(folder), values.get("fingerprints"), _num_threads(values)] for folder, values in results.items()]
    key = digest([asdict(options), tests])
    if all(get_nested(values, "latency_results.key") == key for values in results.values()):
        return
    entrants: dict[str, Entrant] = {}
    for folder, point in folders.items():
        entrants |= _entrants(folder, results[folder], point)
    if not entrants:
        return
    timings = measure_latency(entrants, options, progress=progress)
    summary = summarize(timings, choose_baseline(entrants))
    for folder, values in results.items():
        prefix = f"{folder.name}{_SEPARATOR}"
        figures = {
            name.removeprefix(prefix): values for name, values in summary["decoders"].items() if name.startswith(prefix)
        }
        latency = {"key": key, "baseline": summary["baseline"], "decoders": figures}
        write_json_atomically(folder / "test" / RESULTS, {**values, "latency_results": latency})


def _num_threads(results: Mapping[str, Any]) -> int | None:
    """Return a test's number of CPU threads, set by OMP_NUM_THREADS or the option."""
    return get_nested(results, "environment.hardware.num_threads")


def _entrants(folder: Path, results: Mapping[str, Any], point: Point) -> dict[str, Entrant]:
    """Return the decoders of a point with its model and the prompts of its test, by point and name."""
    from refusion_lit.decoding import Decoder

    config = point.configs["test"]
    source = folder / "fit" / "checkpoints" / "last.ckpt" if "fit" in point.configs else config["ckpt_path"]
    verifier = get_nested(config, "model.decoding.verifier")
    model = load(source, verifier=verifier)
    sampling = SamplingParams(**{**results["sampling"], "stop": tuple(results["sampling"].get("stop") or ())})
    entrants = {}
    for name, options in results["decoders"].items():
        if results["mismatches"].get(name):
            continue
        decoder_class: Any = find_class(Decoder, options["class"])
        predictions = read_json_lines(folder / "test" / f"predictions_{name}.jsonl")
        entrants[f"{folder.name}{_SEPARATOR}{name}"] = Entrant(
            model=model,
            decoder=decoder_class(**{option: value for option, value in options.items() if option != "class"}),
            sampling=sampling,
            prompts=[Prompt(token_ids=tuple(model.encode(row["prompt"])), id=str(row["id"])) for row in predictions],
            num_threads=_num_threads(results),
        )
    return entrants


def summary_sentence(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """Return a sentence on the fastest decoder within two points of the baseline's score; None without decoders.

    If all scores are lower, the sentence says so and names the fastest decoder of all, with its score.

    Args:
        rows: Rows of the table, with ``score`` and ``latency``.
    """
    measured = [row for row in rows if get_nested(row, "latency.1")]
    baseline = next((row for row in measured if is_speed_baseline(row["latency"])), None)
    others = [row for row in measured if row is not baseline]
    if baseline is None or not others:
        return None
    name = baseline["class"]
    good = [row for row in others if row["score"] >= baseline["score"] - 0.02]
    best = max(good or others, key=lambda row: row["latency"]["1"]["times_baseline"][0])
    estimate, low, high = best["latency"]["1"]["times_baseline"]
    speed = f"{estimate:.1f} times as fast ({low:.1f} to {high:.1f})"
    batches = [
        f"{best['latency'][size]['times_baseline'][0]:.1f} times in batches of {size}"
        for size in sorted(best["latency"], key=int)
        if size != "1"
    ]
    speeds = "; ".join([speed, *([", ".join(batches)] if batches else [])])
    figures = f"{best['class']} is the fastest one prompt at a time: {speeds}"
    if good:
        return f"At a score within two points of {name}, {figures}."
    scores = f"its score is {best['score']:.3f}, {name}'s {baseline['score']:.3f}"
    return f"No decoder has a score within two points of {name}. Of all, {figures}; {scores}."
