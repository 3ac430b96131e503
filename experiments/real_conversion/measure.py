"""Figures of the trained models: answers, perplexity of the answers, speed beside transformers' generate, losses.

Everything that takes long is kept in the working directory and not measured again.
"""

from __future__ import annotations

import csv
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import yaml
from experiments.common import library_generate, write_json
from experiments.real_conversion.annotations import count_annotations

import refusion_lit
from refusion_lit import decoding
from refusion_lit.evaluation.likelihood import autoregressive
from refusion_lit.reports.intervals import Interval, ratio_interval, score_interval
from refusion_lit.tasks.gsm8k import extract_answer
from refusion_lit.types import Prompt, SamplingParams

HERE = Path(__file__).parent
GENERATE = "transformers.generate"
Line = dict[str, Any]


def make_decoders(name: str) -> dict[str, Any]:
    """Return the decoders in a training's config, in order."""
    return yaml.safe_load((HERE / f"{name}.yaml").read_text(encoding="utf-8"))["model"]["decoders"]


def answer_figures(lines: Sequence[Line]) -> dict[str, Any]:
    """Return what can be said about answers without a model, with 95 % intervals over prompts, shares in percent."""
    counts = [count_annotations(line["response"]) for line in lines]
    num_right, num = [float(right) for right, _ in counts], [float(total) for _, total in counts]
    annotations = ratio_interval(num_right, num) if sum(num) else Interval(estimate=0.0, low=0.0, high=100.0)
    scale = 100.0 if sum(num) else 1.0
    return {
        "num_prompts": len(lines),
        "score": _rounded(score_interval([100.0 * line["score"] for line in lines])),
        "annotations_right": _rounded(annotations, scale),
        "annotations_per_answer": round(sum(num) / len(lines), 2),
        "ends_with_answer": _rounded(score_interval([100.0 * ends_with_answer(line["response"]) for line in lines])),
        "tokens_per_answer": round(sum(line["num_tokens"] for line in lines) / len(lines), 1),
        "tokens_per_forward": round(_ratio(lines, "num_tokens", "num_forwards"), 3),
    }


def ends_with_answer(response: str) -> bool:
    """Whether the last line of a response is ``#### number``."""
    last = response.strip().rpartition("\n")[2]
    return last.startswith("####") and extract_answer(last) is not None


def perplexity(lines: Sequence[Line], judge: refusion_lit.TextModel, kept: Path) -> float:
    """Return the perplexity of answers under a next-token model.

    Args:
        lines: Predictions with ``prompt`` and ``response_ids``.
        judge: The model.
        kept: File that keeps each answer's log-likelihood.
    """
    known = dict(json.loads(kept.read_text())) if kept.exists() else {}
    for number, line in enumerate(lines, 1):
        if line["id"] not in known and line["response_ids"]:
            value, _ = autoregressive(judge.backbone, judge.encode(line["prompt"]), line["response_ids"])
            known[line["id"]] = value, len(line["response_ids"])
        if number % 50 == 0 or number == len(lines):
            write_json(kept, list(known.items()))
    values = [known[line["id"]] for line in lines if line["id"] in known]
    return math.exp(-sum(value for value, _ in values) / sum(num for _, num in values))


def timed(
    baseline: refusion_lit.TextModel,
    rows: dict[str, tuple[refusion_lit.TextModel, decoding.Decoder]],
    queries: Sequence[str],
    max_new_tokens: int,
) -> dict[str, dict[str, float]]:
    """Answer queries one by one with transformers' generate and with decoders, in turns; return tokens per second.

    All meet the same other work on the machine, so ratios hold where seconds do not. The first query warms up.
    ``ratio`` is the median over queries of the speed over that of ``generate``.

    Args:
        baseline: The model that ``generate`` decodes.
        rows: Model and decoder by name.
        queries: The queries.
        max_new_tokens: Length limit.
    """
    counts: dict[str, list[tuple[int, float]]] = {name: [] for name in (GENERATE, *rows)}
    for number, query in enumerate(queries):
        for name in counts:
            model, decoder = rows.get(name, (baseline, None))
            prompt = Prompt(token_ids=tuple(model.encode(query)), id=str(number))
            start = time.perf_counter()
            if decoder is None:
                num_tokens = library_generate(model, prompt, max_new_tokens)
            else:
                sampling = SamplingParams(max_new_tokens=max_new_tokens)
                num_tokens = model.decode([prompt], decoder, sampling).rows[0].num_tokens
            if number:
                counts[name].append((num_tokens, time.perf_counter() - start))
    speeds = {name: [num / seconds for num, seconds in pairs] for name, pairs in counts.items()}
    return {
        name: {
            "tokens_per_second": round(sum(num for num, _ in pairs) / sum(seconds for _, seconds in pairs), 2),
            "ratio": round(median(a / b for a, b in zip(speeds[name], speeds[GENERATE], strict=True)), 3),
        }
        for name, pairs in counts.items()
    }


def made(described: dict[str, Any]) -> decoding.Decoder:
    """Return the decoder that a ``results.json`` describes."""
    options = dict(described)
    return getattr(decoding, options.pop("class"))(**options)


def losses(fit: Path) -> list[dict[str, float]]:
    """Return the logged figures in a training's directory by step."""
    by_step: dict[int, dict[str, float]] = {}
    if (fit / "metrics.csv").is_file():
        with (fit / "metrics.csv").open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                step = int(row["step"])
                losses = {name: float(value) for name, value in row.items() if value and "/" in name}
                by_step.setdefault(step, {"step": step + 1}).update(losses)
    return [by_step[step] for step in sorted(by_step)]


def _ratio(lines: Sequence[Line], numerator: str, denominator: str) -> float:
    return sum(line[numerator] for line in lines) / sum(line[denominator] for line in lines)


def _rounded(interval: Interval, scale: float = 1.0) -> list[float]:
    return [round(scale * value, 1) for value in (interval.estimate, interval.low, interval.high)]
