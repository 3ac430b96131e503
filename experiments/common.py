"""What experiments share. A script appends the repository's root to ``sys.path``: Python adds its own folder only."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from refusion_lit import TextModel
from refusion_lit.decoding import Decoder, GenerationCallback
from refusion_lit.modeling.diffusion_gemma import DiffusionGemmaBody
from refusion_lit.modeling.load import DType, decoding_dtype
from refusion_lit.tasks import Example
from refusion_lit.types import Prompt, SamplingParams
from refusion_lit.utils.files import write_atomically


def argument_parser(description: str | None, work_dir: str, output: Path | None) -> argparse.ArgumentParser:
    """Return a parser with the first line of a description, ``--work_dir`` and ``--output``, which have defaults."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--work_dir", type=Path, default=Path(work_dir))
    parser.add_argument("--output", type=Path, default=output)
    return parser


def command(*args: str, **environment: str) -> None:
    """Run a refusion-lit command with one thread, in an environment with these variables."""
    args += ("--num_threads", "1") if args[0] in {"fit", "test"} else ()  # the other commands have no such option
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    subprocess.run([sys.executable, "-m", "refusion_lit.cli", *args], check=True, env=variables)


def configs(*paths: Path) -> list[str]:
    """Return the options that name config files."""
    return [item for path in paths for item in ("--config", str(path))]


def seeds(seed: int) -> list[str]:
    """Return the options that set all seeds."""
    return ["--seed_everything", str(seed), "--model.seed", str(seed), "--data.seed", str(seed)]


def places(run: Path) -> list[str]:
    """Return the options that let a run land in a directory."""
    return ["--runs_dir", str(run.parents[1]), "--run_name", run.parent.name, "--run_version", run.name]


def built(options: Sequence[str]) -> Any:
    """Return the command line of a ``fit`` that has made trainer, model and data, but runs nothing, in no directory."""
    from refusion_lit.cli.lightning import RefusionCLI

    class Built(RefusionCLI):
        def _choose_directory(self, config: Any) -> None: ...

        def _run_subcommand(self, subcommand: str) -> None: ...

    return Built(["fit", *options, "--trainer.logger=false"])


def step_positions(options: Sequence[str], num_steps: int | None = None) -> list[int]:
    """Return the token positions that the model computes in each of a training's first steps; of an epoch by default.

    Args:
        options: Those of ``fit``.
        num_steps: How many steps.
    """
    cli = built(options)
    cli.model.configure_model()
    batches = islice(cli.datamodule.train_dataloader(), num_steps)
    corrupted = [cli.model.corrupt(micro_batch.batch) for micro_batch in batches]
    conditions = isinstance(cli.model.backbone.body, DiffusionGemmaBody)  # a canvas is computed twice
    return [rows.input_ids.numel() + conditions * rows.num_canvas * len(rows.input_ids) for rows in corrupted]


def train(run: Path, *options: str, **environment: str) -> Path:
    """Train in a directory unless that is done, or resume there; return the last checkpoint."""
    last, done = run / "checkpoints" / "last.ckpt", run / "trained"
    if not done.exists():
        resumed = ["--ckpt_path", "last"] if last.exists() else []  # a path would begin a new metrics.csv
        command("fit", *options, *places(run), *resumed, **environment)
        done.touch()
    return last


def fast_dtype() -> DType:
    """Return bfloat16 if this processor has instructions for it, else float32, which is then several times as fast."""
    return decoding_dtype({"dtype": "bfloat16"}, "cpu")


def precision() -> list[str]:
    """Return the option by which ``fit`` computes in ``fast_dtype``, with weights in float32."""
    return ["--trainer.precision", "bf16-mixed" if fast_dtype() == "bfloat16" else "32-true"]


PLACES = ("command", "working_directory", "resumed")
"""Entries of a run's ``environment.json`` that name places on the machine; committed results leave them out."""


def read_environment(run: Path) -> dict[str, Any]:
    """Return the environment that a run has recorded, without the places on its machine."""
    recorded = json.loads((run / "environment.json").read_text(encoding="utf-8"))
    return {name: value for name, value in recorded.items() if name not in PLACES}


def write_json(path: Path, values: Any) -> None:
    """Write a whole JSON file or nothing, in a new folder if need be."""
    write_atomically(path, json.dumps(values, indent=1) + "\n")


def kept(path: Path, make: Callable[..., Any], *args: Any) -> Any:
    """Return the JSON value in a file, which is made and written if there is no such file."""
    if path.exists():
        print(f"{path} is there", flush=True)
    else:
        write_json(path, make(*args))
    return json.loads(path.read_text(encoding="utf-8"))


def decode_examples(
    model: TextModel,
    examples: Sequence[Example],
    score: Callable[[Example, str], float],
    decoder: Decoder,
    sampling: SamplingParams,
    callbacks: Sequence[GenerationCallback] = (),
) -> tuple[list[float], dict[str, float]]:
    """Decode the queries of examples in batches of 50; return each one's score, and the figures of all."""
    prompts = [Prompt(token_ids=tuple(model.encode(e.query)), id=e.id) for e in examples]
    rows = model.decode(prompts, decoder, sampling, batch_size=50, callbacks=callbacks).rows
    scores = [score(e, row.text) for e, row in zip(examples, rows, strict=True)]
    names = ("num_tokens", "num_forwards", "num_positions")
    tokens, forwards, positions = (sum(getattr(row, name) for row in rows) for name in names)
    rates = {"tokens_per_forward": tokens / forwards, "positions_per_token": positions / tokens}
    return scores, {"score": sum(scores) / len(scores), **rates}


def library_generate(model: TextModel, prompt: Prompt, max_new_tokens: int) -> int:
    """Decode a prompt with transformers' generate; return the number of new tokens."""
    ids = torch.tensor([prompt.token_ids], device=model.backbone.device)
    library: Any = model.backbone.model
    with torch.no_grad():
        output = library.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False,
            eos_token_id=list(model.backbone.special_tokens.eos_token_ids),
            pad_token_id=model.backbone.special_tokens.pad_token_id,
        )  # fmt: skip
    return output.shape[1] - ids.shape[1]
