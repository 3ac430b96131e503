"""Batch sizes: ReFusion beside one token per forward, each on a model trained for it, from one prompt to 256 at a time.

usage: python -m benchmarks.batches [--repeats 3] [--threads 1] [--batch_sizes '[1, 16, 256]']

The models are two of experiments/demo: equal backbones, samples and steps, one trained by ``Hybrid``, one by
``Autoregressive``. A sweep that is not finished is trained first (eight minutes of two cores). All answers have the
same length. The test prompts are repeated to fill the largest batch twice. Rounds are interleaved in one process;
seconds are processor time of this process if it has one thread. Our decoders admit a prompt when another ends,
``generate`` when all of a batch have.
"""

from __future__ import annotations

import csv
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from benchmarks.common import RESULTS, Work, decoded, draw, interleaved, with_library_body, write
from benchmarks.peers import check_same_text, library, ours
from benchmarks.table import SHOWN
from jsonargparse import auto_cli

import refusion_lit
from refusion_lit.decoding import Autoregressive, Decoder, ReFusion
from refusion_lit.modeling.backbone import Backbone
from refusion_lit.tasks import Example, Sheet
from refusion_lit.types import Prompt

DEMO = Path(__file__).parents[1] / "experiments" / "demo" / "sweep.yaml"
OPTIONS = yaml.safe_load(DEMO.read_text(encoding="utf-8"))["options"]
TASK = Sheet(**OPTIONS["data.task"]["init_args"])
NUM_TOKENS: int = OPTIONS["model.sampling.max_new_tokens"]


def trained(sweep: Path) -> dict[str, refusion_lit.TextModel]:
    """Return the models of the demo by the name of a decoder that was tested on each; train what is missing."""
    if not (sweep / "report").is_dir():  # which comes last
        command = ["sweep", "--config", str(DEMO), "--directory", str(sweep), "--resume"]
        subprocess.run([sys.executable, "-m", "refusion_lit.cli", *command], check=True)
    with (sweep / "results.csv").open(encoding="utf-8", newline="") as table:
        folders = {row["decoder"]: Path(row["folder"]) for row in csv.DictReader(table) if not row["mismatch"]}
    names = ("refusion", "autoregressive")
    checkpoints = {name: folders[name] / "fit" / "checkpoints" / "last.ckpt" for name in names}
    return {name: refusion_lit.load(path, device="cpu", dtype="float32") for name, path in checkpoints.items()}


def score(text_model: refusion_lit.TextModel, decoder: Decoder, examples: Sequence[Example]) -> dict[str, float]:
    """Return the mean score of a decoder's answers to the task's prompts, and their length in tokens."""
    prompts = make_prompts(text_model, examples, len(examples))
    rows = decoded(text_model.backbone, decoder, prompts, NUM_TOKENS, batch_size=50).rows
    texts = [text_model.detokenize(row.token_ids) for row in rows]
    scores = [TASK.score(example, text) for example, text in zip(examples, texts, strict=True)]
    lengths = [row.num_tokens for row in rows]
    return {"score": statistics.fmean(scores), "tokens_per_prompt": statistics.fmean(lengths)}


def make_prompts(model: refusion_lit.TextModel, examples: Sequence[Example], number: int) -> list[Prompt]:
    """Return the examples' prompts, repeated under names of their own."""
    encoded = [tuple(model.encode(example.query)) for example in examples]
    return [Prompt(token_ids=encoded[i % len(encoded)], id=str(i)) for i in range(number)]


def make_works(
    models: dict[str, refusion_lit.TextModel], examples: Sequence[Example], batch_size: int
) -> dict[str, Work]:  # fmt: skip
    """Return what is timed at a batch size, by name; works with the same model get the same prompts."""
    number = max(2 * batch_size, 16)
    hybrid, other = models.values()
    prompts, others = (make_prompts(model, examples, number) for model in (hybrid, other))
    body: Backbone = hybrid.backbone
    decoder = ReFusion(slot_size=8)
    return {
        "refusion": ours(body, decoder, prompts, NUM_TOKENS, batch_size),
        "refusion on transformers' body": ours(with_library_body(body), decoder, prompts, NUM_TOKENS, batch_size),
        "autoregressive": ours(other.backbone, Autoregressive(), others, NUM_TOKENS, batch_size),
        "generate": library(other.backbone, others, NUM_TOKENS, batch_size, ends=True),
    }


def rates(results: dict[str, Any]) -> dict[str, dict[int, float]]:
    """Return prompts per second by shown name and batch size."""
    return {
        shown: {
            int(size): case[name]["num_prompts"] / case[name]["median_seconds"]
            for size, case in results["cases"].items()
        }
        for name, shown in SHOWN.items()
    }


def plot(rates: dict[str, dict[int, float]], path: Path) -> None:
    """Draw prompts per second over the batch size."""
    draw(rates, path, "prompts at a time", "prompts per second")


def main(
    repeats: int = 3,
    threads: int = 1,
    batch_sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256),
    sweep: str = "runs/sweep_demo",
    output: str | None = None,
) -> None:
    """Measure.

    Args:
        repeats: Rounds of the interleaved timing.
        threads: Threads of torch.
        batch_sizes: Prompts decoded at the same time.
        sweep: Directory of the demo's sweep.
        output: Where to write the JSON.
    """
    models = trained(Path(sweep))
    torch.set_num_threads(threads)
    started = time.perf_counter()
    examples = TASK.examples("test")
    quality = {
        "refusion": score(models["refusion"], ReFusion(slot_size=8), examples),
        "autoregressive": score(models["autoregressive"], Autoregressive(), examples),
    }
    print(quality, flush=True)
    cases: dict[str, dict[str, Any]] = {}
    for batch_size in batch_sizes:
        works = make_works(models, examples, batch_size)
        interleaved(works, repeats, clock=time.process_time if threads == 1 else None)
        check_same_text({name: work for name, work in works.items() if name.startswith("refusion")})
        cases[str(batch_size)] = {name: work.summary() for name, work in works.items()}
        print(batch_size, {name: run["tokens_per_second"] for name, run in cases[str(batch_size)].items()}, flush=True)
    config = {"repeats": repeats, "threads": threads, "num_tokens": NUM_TOKENS, "slot_size": 8}
    results = {"quality": quality, "cases": cases}
    write("batches", config, results, output=output, seconds=time.perf_counter() - started, seed=0)
    # After the JSON, which says whether the checkout was clean.
    plot(rates(results), (Path(output) if output else RESULTS / "batches.json").with_suffix(".png"))


if __name__ == "__main__":
    auto_cli(main)
