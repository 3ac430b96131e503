"""Convert SmolLM2 by five objectives with equal positions computed, decode the test problems, and measure.

usage: python experiments/real_conversion/run.py --data DIR [--base DIR] [--work_dir DIR] [--parts PART ...]
           [--only NAME ...]

``base`` is the model's directory, ``data`` holds GSM8K's train.jsonl and test.jsonl. Finished parts are skipped and
interrupted trainings and decodes resumed, so it can be killed at any time. ``measure`` takes what is there.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any

import yaml

from refusion_lit.checkpoints.files import find_newest, read_checkpoint
from refusion_lit.modeling.vocabulary import read_special_tokens
from refusion_lit.utils.files import write_atomically

sys.path.append(str(Path(__file__).parents[2]))

from experiments.common import built, configs, kept, places, write_json
from measure import make_decoders
from results import collect

HERE = Path(__file__).parent
PARTS = ("fit", "decode", "measure")
NAMES = ("autoregressive", "hybrid", "masked", "block", "hybrid_lora")
BUDGET = 140_000
"""Token positions computed in each training: padding, lengthened responses and doubled sequences count."""
NUM_FOLLOWED = 25
"""Number of test problems decoded with weights from before the end of a training."""
CHECKPOINTS = 8
"""Number of times that a training saves its state."""


def options(name: str, base: Path, data: Path, accelerator: str) -> list[str]:
    """Return the options of a training except where it lands and how long it is."""
    return [
        *configs(HERE / "common.yaml", HERE / f"{name}.yaml"),
        "--trainer.accelerator", accelerator,
        "--model.backbone.source", str(base), "--data.tokenizer.init_args.source", str(base),
        "--data.task.train", str(data / "train.jsonl"), "--data.task.test", str(data / "test.jsonl"),
    ]  # fmt: skip


def plan(args: list[str], budget: int) -> tuple[int, int, int]:
    """Return the number of optimizer steps that compute about ``budget`` positions, these, and micro-batches a step.

    The number of steps is a multiple of ``CHECKPOINTS``, so that the last one is saved.
    """
    from refusion_lit.noise import KeyedNoise

    cli = built(args)
    special_tokens = read_special_tokens(cli.datamodule.built_tokenizer)

    def positions(batch: Any) -> int:
        noise = KeyedNoise.for_samples(batch.sample_keys, seed=0, epoch=0)
        return cli.model.objective.corrupt(batch, noise, special_tokens).input_ids.numel()

    num_accumulated: int = cli.trainer.accumulate_grad_batches
    step = total = 0
    newest: tuple[int, int] = (0, 0)
    loader = cli.datamodule.train_dataloader()
    for epoch in count():
        loader.sampler.set_epoch(epoch)
        for number, batch in enumerate(loader, 1):
            total += positions(batch.batch)
            step += number % num_accumulated == 0 or number == len(loader)
            if number % num_accumulated == 0 and step % CHECKPOINTS == 0:
                if newest[0] and abs(total - budget) >= abs(newest[1] - budget):
                    return newest[0], newest[1], num_accumulated
                newest = step, total
    raise AssertionError("count ends")


def length(num_steps: int, num_accumulated: int, num_kept: int) -> dict[str, Any]:
    """Return the Trainer's options that depend on the number of steps; weights are kept ``num_kept`` times."""
    checkpoint = "lightning.pytorch.callbacks.ModelCheckpoint"
    state = {"save_last": True, "save_top_k": 0, "every_n_train_steps": num_steps // CHECKPOINTS}
    weights = {"save_weights_only": True, "save_top_k": -1, "every_n_train_steps": num_steps // num_kept}
    return {
        "max_steps": num_steps,
        "val_check_interval": num_steps // num_kept * num_accumulated,
        "callbacks": [
            {"class_path": checkpoint, "init_args": state},
            {"class_path": checkpoint, "init_args": {**weights, "filename": "weights_{step}"}},
        ],
    }


def refusion_lit(*args: str) -> dict[str, float]:
    """Run a command with one thread; return what it cost."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "refusion_lit.cli", *args], env=environment)
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())  # a training saves after its step, then both end
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, args)
    seconds = time.perf_counter() - start
    return {
        "seconds": round(seconds, 1),
        "processor_seconds": round(usage.ru_utime + usage.ru_stime, 1),
        "peak_memory_gb": round(usage.ru_maxrss * 1024 / 1e9, 2),
    }


def fit(name: str, shared: list[str], work: Path, budget: int, num_kept: int) -> None:
    """Train by one objective, or resume its training; ``shared`` are its :func:`options`."""
    run, done = work / "runs" / name / "fit", work / f"{name}_trained.json"
    if done.exists():
        print(f"{name}: trained", flush=True)
        return
    settings = work / f"{name}.yaml"
    if not settings.exists():
        num_steps, num_positions, num_accumulated = plan(shared, budget)
        write_json(work / f"{name}_plan.json", {"num_steps": num_steps, "num_positions": num_positions})
        write_atomically(settings, yaml.safe_dump({"trainer": length(num_steps, num_accumulated, num_kept)}))
        print(f"{name}: {num_steps} steps, {num_positions} positions", flush=True)
    last, _ = find_newest([run], resumable=True)
    first_step = 0 if last is None else int(read_checkpoint(last)["global_step"])
    cost = refusion_lit("fit", *shared, *configs(settings), *places(run), "--ckpt_path", "last")
    write_json(done, {"cost_since_last_start": cost, "first_step": first_step})


def weights(name: str, work: Path) -> list[tuple[int, Path]]:
    """Return the kept weights of a training with their steps, in order."""
    paths = (work / "runs" / name / "fit" / "checkpoints").glob("weights_step=*.ckpt")
    return sorted((int(path.stem.partition("=")[2]), path) for path in paths)


def decode(name: str, shared: list[str], work: Path) -> None:
    """Decode the test problems on the last weights, a run for each decoder, and some with the first one on the others.

    A decoder that is added to a config later is decoded by the same command.
    """
    if not (work / f"{name}_trained.json").exists():
        return
    *earlier, (_, last) = weights(name, work)
    shared = [*shared, "--trainer.precision", "bf16-true"]
    for decoder, described in make_decoders(name).items():
        only = ["--model.decoders", json.dumps({decoder: described})]
        _decoded("test", [*shared, *only, "--ckpt_path", str(last)], work / "runs" / name / f"test_{decoder}")
    for step, path in earlier:
        few = ["--ckpt_path", str(path), "--data.max_eval_prompts", str(NUM_FOLLOWED)]
        _decoded("predict", [*shared, *few], work / "runs" / name / f"step_{step}")


def _decoded(command: str, args: list[str], run: Path) -> None:
    """Run a test or prediction, or resume it."""
    resumes = ["--model.resume", "true"] if (run / "config.yaml").exists() else []
    kept(run / "decoded.json", refusion_lit, command, *args, *places(run), *resumes)


def main() -> None:
    """Run what is missing."""
    parser = argparse.ArgumentParser(description="Convert SmolLM2 by five objectives, decode, and measure.")
    parser.add_argument("--base", type=Path, default=Path("runs/smollm2/base"))
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work_dir", type=Path, default=Path("runs/real_conversion"))
    parser.add_argument("--parts", nargs="*", default=PARTS, choices=PARTS)
    parser.add_argument("--only", nargs="*", default=NAMES, choices=NAMES)
    parser.add_argument("--budget", type=int, default=BUDGET, help="positions computed in each training")
    parser.add_argument(
        "--num_kept", type=int, default=2, choices=(1, 2, 4, 8), help="times that weights are kept, and followed"
    )
    parser.add_argument("--accelerator", default="cpu", choices=("cpu", "gpu"))
    parser.add_argument("--num_timed", type=int, default=6)
    parser.add_argument(
        "--judge_dir", type=Path, help="work_dir of the next-token model that judges all answers, if another one"
    )
    parser.add_argument("--output", type=Path, default=HERE / "results.json")
    args = parser.parse_args()
    args.work_dir.mkdir(parents=True, exist_ok=True)
    for name in args.only:
        shared = options(name, args.base, args.data, args.accelerator)
        if "fit" in args.parts:
            fit(name, shared, args.work_dir, args.budget, args.num_kept)
        if "decode" in args.parts:
            decode(name, shared, args.work_dir)
    if "measure" in args.parts:
        device = "cuda" if args.accelerator == "gpu" else "cpu"
        judge_dir = args.judge_dir or args.work_dir
        collect(args.work_dir, args.only, args.output, judge_dir=judge_dir, num_timed=args.num_timed, device=device)


if __name__ == "__main__":
    main()
