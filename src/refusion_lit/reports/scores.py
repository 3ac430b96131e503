"""Reads responses, scores and counts per prompt from the predictions files of a test run."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from refusion_lit.utils.fingerprint import read_fingerprint
from refusion_lit.utils.natural import natural_key

_SCORED = ".scored.jsonl"


@dataclass(frozen=True, kw_only=True)
class ScoredPrediction:
    """One line of a predictions file, reduced to what a report shows. ``score`` is in [0, 1]."""

    prompt: str
    response: str
    reference: str | None
    score: float
    num_tokens: int
    num_forwards: int


def read_scores(folder: Path, decoder: str, notes: list[str]) -> dict[str, ScoredPrediction]:
    """Return a decoder's predictions by prompt id in natural order, from the files of all processes.

    Scores that ``refusion-lit score`` wrote later for these very predictions take precedence over those of the test.
    A prompt that a distributed sampler repeated counts once.

    Args:
        folder: The run's directory.
        decoder: The decoder's name in the config.
        notes: Remarks for the reader are appended here: rescored files, lines that are not predictions.
    """
    pattern = re.compile(rf"predictions_{re.escape(decoder)}(_rank\d+)?(\.scored)?\.jsonl")
    paths = [path for path in folder.iterdir() if pattern.fullmatch(path.name)]
    predictions: dict[str, ScoredPrediction] = {}
    for path in sorted(paths, key=lambda path: (not path.name.endswith(_SCORED), path.name)):
        if path.name.endswith(_SCORED):
            original = path.with_name(path.name.removesuffix(_SCORED) + ".jsonl")
            if original.exists() and (read_fingerprint(original) or {}) != (read_fingerprint(path) or {}):
                notes.append(f"{path.name} scores other predictions than those of {original.name} and was left out.")
                continue
            notes.append(f"{path.name}: the scores of {decoder} are those written by `refusion-lit score`.")
        with path.open(encoding="utf-8", errors="replace") as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    identity, prediction = _parse(json.loads(line))
                except (ValueError, LookupError, TypeError, OverflowError, RecursionError):
                    notes.append(f"{path.name}, line {number}: not a prediction, left out.")
                    continue
                predictions.setdefault(identity, prediction)
    return _in_order(predictions)


def scores_of(predictions: Iterable[Mapping[str, Any]]) -> dict[str, ScoredPrediction]:
    """Return predictions by prompt id in natural order, from the values that were written as lines."""
    return _in_order(dict(map(_parse, predictions)))


def _in_order(predictions: Mapping[str, ScoredPrediction]) -> dict[str, ScoredPrediction]:
    return dict(sorted(predictions.items(), key=lambda item: natural_key(item[0])))


def _parse(values: Mapping[str, Any]) -> tuple[str, ScoredPrediction]:
    score = float(values["score"] or 0.0)  # a missing score counts as 0, as in the metrics
    num_tokens, num_forwards = int(values["num_tokens"]), int(values["num_forwards"])
    # Counts are summed as float64, which is exact below 2**53.
    if not (0 <= score <= 1 and 0 <= num_tokens < 2**53 and 0 <= num_forwards < 2**53):
        raise ValueError("out of range")
    reference = values.get("reference")
    identity, prompt, response = (str(values[key]) for key in ("id", "prompt", "response"))
    for text in (identity, prompt, response, str(reference)):
        text.encode()  # raises for a lone surrogate, which no file can hold
    return identity, ScoredPrediction(
        prompt=prompt,
        response=response,
        reference=None if reference is None else str(reference),
        score=score,
        num_tokens=num_tokens,
        num_forwards=num_forwards,
    )
