"""Decode the comparison's models with decoders that need no training of their own, and fine-tune one with R2FT.

usage: python experiments/controlled_comparison/more.py [--work_dir DIR] [--output FILE] [--task NAME]

Search and groups over the hybrid model, convolutional decoding over the masked one, before and after R2FT, and APD with
the autoregressive model as its verifier. Trainings that run.py has finished in the same directory are taken from there.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import run
import yaml

import refusion_lit
from refusion_lit.contrib import APD, Convolutional, SlotSearch
from refusion_lit.decoding import Decoder, FastDLLM, FirstHitting, LLaDA, ReFusion
from refusion_lit.reports.results import environment

sys.path.append(str(Path(__file__).parents[2]))

from experiments.common import argument_parser, command, configs, train, write_json

HERE = Path(__file__).parent
NUM_STEPS = 500
"""Steps of R2FT."""


def make_decoders(objective: str, length: int) -> dict[str, Decoder]:
    """Return the decoders of a model; the first one of the hybrid and the masked model is to compare with."""
    if objective == "hybrid":
        slots: dict[str, Any] = {"slot_size": 8, "num_serial_blocks": 1}
        return {
            "refusion_8_t90": ReFusion(**slots, slot_threshold=0.9, token_threshold=0.9),
            "search_beam_1": SlotSearch(**slots, selection="beam", beam_size=1),
            "search_beam_4": SlotSearch(**slots, selection="beam", beam_size=4),
            "first_hitting_8": FirstHitting(num_steps=8),
            "first_hitting_16": FirstHitting(num_steps=16),
            "first_hitting_32": FirstHitting(num_steps=32),
        }
    steps = {size: LLaDA(steps=length // size) for size in (1, 2, 4)}
    kernels = {f"conv_{width}_{size}": Convolutional(steps=length // size, kernel_size=width)
               for width in (8, 32) for size in (2, 4)}  # fmt: skip
    apd = {
        f"apd_r{round(100 * weight)}": APD(mixture_weight=weight, max_lookahead=16) for weight in (0.3, 0.5, 0.7, 0.9)
    }
    whole = {"fast_dllm_whole_t90": FastDLLM(block_length=None, threshold=0.9, stop_at_eos=True)}
    return {**whole, **{f"llada_whole_{size}": decoder for size, decoder in steps.items()}, **kernels, **apd}


def r2ft(task: str, work: Path, masked: Path) -> Path:
    """Fine-tune the masked model unless that is done; return the checkpoint."""
    base, fit = work / "masked_export", work / "runs" / f"{task}_r2ft_seed0" / "fit"
    if not base.exists():
        command("export", "--ckpt_path", str(masked), "--output", str(base))
    files = configs(*(HERE / f"{name}.yaml" for name in ("common", f"task_{task}", "objective_r2ft")))
    source = ["--model.backbone", yaml.safe_dump({"source": str(base), "config": {}})]
    source += ["--data.tokenizer", "PretrainedTokenizer", "--data.tokenizer.init_args.source", str(base)]
    length = ["--model.objective.init_args.pad_responses_to", str(run.LENGTHS[task])]
    return train(fit, *files, *source, *length, "--trainer.max_steps", str(NUM_STEPS))


def main() -> None:
    """Train what is missing, decode, and write the result."""
    parser = argument_parser(__doc__, "runs/controlled_comparison", HERE / "more.json")
    parser.add_argument("--task", choices=("walk", "sheet"), default="walk")
    args = parser.parse_args()
    trained = {name: run.train(args.task, name, 0, args.work_dir)[0] for name in ("hybrid", "masked", "autoregressive")}
    trained["r2ft"] = r2ft(args.task, args.work_dir, trained["masked"])
    results: dict[str, dict[str, dict[str, float]]] = {}
    for objective in ("hybrid", "masked", "r2ft"):
        model = refusion_lit.load(trained[objective], verifier=trained["autoregressive"])
        decoders = make_decoders(objective, run.LENGTHS[args.task])
        results[objective] = {
            name: run.measured(model, args.task, "test", decoder) for name, decoder in decoders.items()
        }
        print(objective, results[objective], flush=True)
    recorded = environment(0, ["python", "experiments/controlled_comparison/more.py"])
    written = {"task": args.task, "r2ft_steps": NUM_STEPS, "results": results, "environment": recorded}
    write_json(args.output, written)


if __name__ == "__main__":
    main()
