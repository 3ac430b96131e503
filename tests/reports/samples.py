"""Functions that write result files like ``test``, with given scores and counts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from refusion_lit.reports.model_card import model_card as make_card
from refusion_lit.types import ModelTraits

HOSTILE = "<script>alert(1)</script>&\"'$x_1$"


def prediction(
    identity: str, score: float | None = 1.0, tokens: int = 10, forwards: int = 2, text: str = "answer"
) -> dict[str, Any]:
    """Return a line of a file of predictions."""
    return {"id": identity, "prompt": text, "response": text, "response_ids": [], "reference": text, "score": score,
            "num_tokens": tokens, "num_forwards": forwards, "seconds": 0.1}  # fmt: skip


def predictions(scores: Sequence[float], tokens: int = 10, forwards: int = 2) -> list[dict[str, Any]]:
    return [prediction(f"p{i}", score, tokens, forwards) for i, score in enumerate(scores)]


def write_run(
    folder: Path,
    decoders: dict[str, list[dict[str, Any]]],
    *,
    mismatches: dict[str, list[str]] | None = None,
    options: dict[str, object] | None = None,
) -> Path:
    """Write a run with a ``results.json``.

    Args:
        folder: The run's directory.
        decoders: Predictions by name of the decoder.
        mismatches: Reasons why the model does not fit a decoder, by name.
        options: Options of the point, if the run belongs to a sweep.
    """
    folder.mkdir(parents=True)
    results = {}
    for name, lines in decoders.items():
        (folder / f"predictions_{name}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        tokens, forwards = (sum(line[key] for line in lines) for key in ("num_tokens", "num_forwards"))
        results[name] = {
            "score": sum(line["score"] or 0 for line in lines) / len(lines), "tokens_per_forward": tokens / forwards,
            "num_prompts": len(lines), "num_forwards": forwards, "num_calls": 5, "calls_per_batch": 7.5,
            "tokens_per_call": 1.5, "tokens_per_second": 123.4, "positions_per_token": 2.0, "latency_median": 0.1,
            "latency_p95": 0.2,
        }  # fmt: skip
    content = {
        "sampling": {"max_new_tokens": 8, "temperature": 0.0}, "max_batch_size": 8, "batch_size": 3,
        "decoders": {name: {"class": "ReFusion"} for name in decoders}, "results": results,
        "mismatches": mismatches or {},
        "environment": {"command": ["refusion-lit", "test", "--x=a b"], "seed": 11, "git": None,
                        "packages": {"torch": "2.99"}, "hardware": {"devices": ["Some GPU"], "num_cpus": 4}},
        "config": {"trainer": {"max_steps": 3}, "note": HOSTILE},
    }  # fmt: skip
    (folder / "results.json").write_text(json.dumps(content))
    if options is not None:
        (folder.parent / "point.json").write_text(json.dumps({"options": options}))
    return folder


def write_sweep(root: Path) -> Path:
    """Write a sweep over two options with six points, and a seventh that failed."""
    for i, size in enumerate((4, 8, 16)):
        for j, threshold in enumerate((0.5, 0.9)):
            options = {"model.decoders.refusion.slot_size": size, "model.decoders.refusion.slot_threshold": threshold}
            lines = predictions([1.0, float(j), 0.0], tokens=10 + 2 * i, forwards=2 + j)
            write_run(root / "points" / f"{i}{j}" / "test", {"refusion": lines}, options=options)
    failed = root / "points" / "99"
    failed.mkdir()
    (failed / "point.json").write_text(json.dumps({"options": {"model.decoders.refusion.slot_size": 99}}))
    (failed / "outcome.json").write_text(json.dumps({"status": "failed", "error": "log\nout of memory"}))
    return root


def model_card(
    name: str,
    traits: ModelTraits,
    run: Path | None = None,
    results: Sequence[Path] = (),
    *,
    prompt: str = "input_ids = tokenizer('...', split_special_tokens=True, return_tensors='pt').input_ids",
    decoder: dict[str, Any] | None = None,
    drafter: object = None,
) -> str:
    """Return the card of a model without weights."""
    config = SimpleNamespace(refusion_lit={"decoder": decoder} if decoder else {})
    special = SimpleNamespace(mask_token_id=None)
    backbone: Any = SimpleNamespace(
        traits=traits, config=config, drafter=drafter, adapters=None, special_tokens=special
    )
    return make_card(name, backbone, prompt, run, results)
