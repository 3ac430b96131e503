"""Gathers everything that run.py has made into results.json."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from experiments.common import write_json
from measure import GENERATE, answer_figures, losses, made, make_decoders, perplexity, timed

import refusion_lit
from refusion_lit.evaluation.predictions import read_json_lines
from refusion_lit.reports.results import environment

JUDGE = "autoregressive"
"""The next-token model: it judges all answers, and ``generate`` decodes it."""
_LOSSES = ("train/num_positions", "train/loss", "train/ar", "train/mdm", "val/loss", "val/ar", "val/mdm")


def collect(work: Path, names: Sequence[str], output: Path, *, judge_dir: Path, num_timed: int, device: str) -> None:
    """Measure what is trained and decoded, and write it.

    Args:
        work: What run.py has made.
        names: The trainings.
        output: The file to write.
        judge_dir: What run.py has made with the next-token model; without it there are no perplexities and speeds.
        num_timed: Number of problems that all decoders answer alone, for their speed; the first one does not count.
        device: Device of the models.
    """
    torch.set_num_threads(1)
    trainings = {name: training(name, work) for name in names if (work / f"{name}_plan.json").exists()}
    decoded = [name for name in trainings if _tests(name, work)]
    judge = _loaded(JUDGE, judge_dir, device) if _tests(JUDGE, judge_dir) else None
    for name in decoded:
        trainings[name]["decoders"] = _decoders(name, work, judge)
        trainings[name]["followed"] = _followed(name, work, judge)
    result: dict[str, Any] = {"trainings": trainings}
    if judge is not None:
        if JUDGE in decoded:
            result["references"] = _references(work, judge)
        queries = [line["prompt"] for line in _predictions(judge_dir)][:num_timed]
        result["speed"] = _speed(decoded, work, judge, queries, device)
    recorded = environment(None, sys.argv)
    recorded.pop("command", None)  # it says where things lay on that machine
    write_json(output, {**result, "environment": recorded})


def training(name: str, work: Path) -> dict[str, Any]:
    """Return how a training went, as far as it has come."""
    fit, done = work / "runs" / name / "fit", work / f"{name}_trained.json"
    curve = [{key: row[key] for key in ("step", *_LOSSES) if key in row} for row in losses(fit)]
    result = {**json.loads((work / f"{name}_plan.json").read_text()), "is_finished": done.exists(), "curve": curve}
    if done.exists():
        last_start = json.loads(done.read_text())
        cost, rows = last_start["cost_since_last_start"], losses(fit)
        rows = [row for row in rows if row["step"] > last_start["first_step"] and "train/num_positions" in row]
        computed = [row["train/num_positions"] for row in rows]
        result["cost_since_last_start"] = cost
        if computed:  # nothing was left to do otherwise
            result["positions_per_processor_second"] = round(
                (computed[-1] - computed[0]) / cost["processor_seconds"], 1
            )
    return result


def _tests(name: str, work: Path) -> dict[str, Path]:
    """Return the finished test of each decoder on the last weights."""
    runs = {decoder: work / "runs" / name / f"test_{decoder}" for decoder in make_decoders(name)}
    return {decoder: run for decoder, run in runs.items() if (run / "decoded.json").exists()}


def _decoders(name: str, work: Path, judge: refusion_lit.TextModel | None) -> dict[str, Any]:
    """Return the figures of each decoder on the last weights."""
    result = {}
    for decoder, test in _tests(name, work).items():
        record = json.loads((test / "results.json").read_text())
        lines = read_json_lines(test / f"predictions_{decoder}.jsonl")
        figures = answer_figures(lines)
        figures["positions_per_token"] = round(record["results"][decoder]["positions_per_token"], 2)
        if judge is not None:
            figures["perplexity"] = round(perplexity(lines, judge, work / "perplexity" / f"{name}_{decoder}.json"), 3)
        result[decoder] = {"decoder": record["decoders"][decoder], **figures}
    return result


def _followed(name: str, work: Path, judge: refusion_lit.TextModel | None) -> dict[str, Any]:
    """Return the figures of the first decoder over the training, by step, on the problems that all steps have."""
    folder, result = work / "runs" / name, {}
    first, test = next(iter(_tests(name, work).items()))
    at = {int(run.name.removeprefix("step_")): run for run in folder.glob("step_*") if (run / "decoded.json").exists()}
    files = {step: run / "predictions.jsonl" for step, run in sorted(at.items())}
    num = min((len(read_json_lines(file)) for file in files.values()), default=0)
    plan = json.loads((work / f"{name}_plan.json").read_text())
    files[plan["num_steps"]] = test / f"predictions_{first}.jsonl"
    for step, file in files.items() if num else ():
        lines = read_json_lines(file)[:num]
        result[str(step)] = {"decoder": first, **answer_figures(lines)}
        if judge is not None:
            kept = work / "perplexity" / f"{name}_step_{step}.json"
            result[str(step)]["perplexity"] = round(perplexity(lines, judge, kept), 3)
    return result


def _references(work: Path, judge: refusion_lit.TextModel) -> dict[str, Any]:
    """Return the figures of the data's own answers to the same problems."""
    end = int(judge.tokenizer.eos_token_id)  # type: ignore[arg-type]
    lines = []
    for line in _predictions(work):
        ids = [*judge.tokenizer(line["reference"], add_special_tokens=False).input_ids, end]
        lines.append({"id": line["id"], "prompt": line["prompt"], "response": line["reference"], "response_ids": ids,
                      "score": 1.0, "num_tokens": len(ids), "num_forwards": len(ids)})  # fmt: skip
    figures = answer_figures(lines)
    figures["perplexity"] = round(perplexity(lines, judge, work / "perplexity" / "references.json"), 3)
    return {key: value for key, value in figures.items() if key not in ("score", "tokens_per_forward")}


def _predictions(judge_dir: Path) -> list[dict[str, Any]]:
    """Return the next-token model's answers."""
    ((decoder, test),) = _tests(JUDGE, judge_dir).items()
    return read_json_lines(test / f"predictions_{decoder}.jsonl")


def _speed(
    names: Sequence[str], work: Path, judge: refusion_lit.TextModel, queries: Sequence[str], device: str
) -> dict[str, Any]:
    """Return tokens per second of all decoders beside ``generate``; measured again when there are other ones."""
    kept, decoders, length = work / "speed.json", {}, 0
    for name in names:
        for decoder, test in _tests(name, work).items():
            record = json.loads((test / "results.json").read_text())
            length = record["sampling"]["max_new_tokens"]
            decoders[f"{name}/{decoder}"] = name, record["decoders"][decoder]
    if kept.exists() and json.loads(kept.read_text())["rows"].keys() == {GENERATE, *decoders}:
        return json.loads(kept.read_text())
    models = {name: judge if name == JUDGE else _loaded(name, work, device) for name in names}
    rows = {row: (models[name], made(values)) for row, (name, values) in decoders.items()}
    figures = timed(judge, rows, queries, length)
    result = {
        "trainings": list(names), "num_prompts": len(queries) - 1, "baseline": GENERATE, "dtype": "bfloat16",
        "device": device, "num_threads": torch.get_num_threads(), "max_new_tokens": length, "rows": figures,
        "git": environment(None, [])["git"],
    }  # fmt: skip
    write_json(kept, result)
    return result


def _loaded(name: str, work: Path, device: str) -> refusion_lit.TextModel:
    """Return a model with its last weights in bfloat16."""
    paths = (work / "runs" / name / "fit" / "checkpoints").glob("weights_step=*.ckpt")
    last = max(paths, key=lambda path: int(path.stem.partition("=")[2]))
    return refusion_lit.load(last, dtype="bfloat16", device=device)
