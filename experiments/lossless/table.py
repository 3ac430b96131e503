"""Does SmolLM2 say the same with a drafter, in how many forwards, and how fast?

usage: python experiments/lossless/table.py [--prompts NAME=FILE@NUMBER ...] [--parts PART ...] [--output FILE]

Three parts. *speed*, the default: some prompts one by one, all decoders in turn on the same prompt, so that other work
on the machine meets all; their texts are compared. *text*: all prompts in batches of 16, the decoder's text against the
model's own, token by token. *masks*: what a forward costs more when most of its tokens are masks. FILE holds a JSON
object a line with ``prompt``, ``question`` or ``text``; its first NUMBER prompts are taken. own.jsonl, beside this
file, is always measured. What the output holds already is kept. Each part records the machine's load before and after
it. At the end the table is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import refusion_lit
from refusion_lit.decoding import Autoregressive, Decoder, SelfSpeculative
from refusion_lit.evaluation.predictions import read_json_lines
from refusion_lit.modeling.load import BackboneConfig, DType
from refusion_lit.reports.intervals import bootstrap
from refusion_lit.reports.results import environment
from refusion_lit.types import Prompt, SamplingParams

sys.path.append(str(Path(__file__).parents[2]))

from experiments.common import library_generate, write_json

HERE = Path(__file__).parent
BASE = Path("runs/smollm2/base")
REFERENCE = "Autoregressive"
DECODERS: dict[str, Decoder] = {
    REFERENCE: Autoregressive(),
    **{
        layout: SelfSpeculative(layout=None if layout == "auto" else layout)
        for layout in ("auto", "two_forwards", "single_forward")
    },
}
"""The model's own decoding, and the layouts of :class:`SelfSpeculative`."""
LIBRARY = "transformers.generate"


def read_prompts(model: refusion_lit.TextModel, path: str, count: str) -> list[Prompt]:
    """Return the first prompts of a JSONL file, compressed or not."""
    rows = read_json_lines(path, "prompts")[: int(count)]
    texts = (next(row[name] for name in ("prompt", "question", "text") if name in row) for row in rows)
    return [Prompt(token_ids=tuple(model.encode(text)), id=str(i)) for i, text in enumerate(texts)]


def compared(model: refusion_lit.TextModel, prompts: list[Prompt], max_new_tokens: int) -> dict[str, Any]:
    """Decode all prompts with and without drafts; return counts, and how many texts are the same."""
    sampling, result, reference = SamplingParams(max_new_tokens=max_new_tokens), {}, []
    for name, decoder in DECODERS.items():
        rows = model.decode(prompts, decoder, sampling, batch_size=16).rows
        texts = [row.token_ids for row in rows]
        reference = reference or texts
        tokens, forwards = sum(row.num_tokens for row in rows), sum(row.num_forwards for row in rows)
        result[name] = {
            "identical": sum(a == b for a, b in zip(texts, reference, strict=True)),
            "tokens_per_forward": round(tokens / forwards, 3),
            "positions_per_token": round(sum(row.num_positions for row in rows) / tokens, 2),
        }
    return result


def timed(model: refusion_lit.TextModel, prompts: list[Prompt], max_new_tokens: int) -> dict[str, Any]:
    """Decode prompts one by one with all decoders and transformers' generate in turn; return tokens per second."""
    sampling = SamplingParams(max_new_tokens=max_new_tokens)
    names = [*DECODERS, LIBRARY]
    tokens: dict[str, list[int]] = {name: [] for name in names}
    forwards: dict[str, list[int]] = {name: [] for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    texts: dict[str, list[Any]] = {name: [] for name in DECODERS}
    for number, prompt in enumerate(prompts):
        for name in names:
            started = time.perf_counter()
            if name in DECODERS:
                row = model.decode([prompt], DECODERS[name], sampling).rows[0]
                count, num_forwards = row.num_tokens, row.num_forwards
                texts[name].append(row.token_ids)
            else:
                count = num_forwards = library_generate(model, prompt, max_new_tokens)
            if number:  # the first prompt warms up
                seconds[name].append(time.perf_counter() - started)
                tokens[name].append(count)
                forwards[name].append(num_forwards)
    result: dict[str, dict[str, Any]] = {}
    for name in names:
        result[name] = {
            "tokens_per_forward": round(sum(tokens[name]) / sum(forwards[name]), 3),
            "tokens_per_second": round(sum(tokens[name]) / sum(seconds[name]), 2),
            "num_tokens": tokens[name],  # per prompt, so that intervals can be computed again
            "num_forwards": forwards[name],
            "seconds": [round(value, 4) for value in seconds[name]],
        }
        for title, other in (("autoregressive", REFERENCE), ("generate", LIBRARY)):
            data = (tokens[name], seconds[name], tokens[other], seconds[other])
            result[name] |= speed_over(title, *data)
    for name, figures in texts.items():
        result[name]["identical"] = sum(a == b for a, b in zip(figures, texts[REFERENCE], strict=True))
    return result


def speed_over(title: str, *data: Sequence[float]) -> dict[str, Any]:
    """Return the speed as times another decoder's, with the paired 95 % interval over prompts.

    Args:
        title: Name of the other decoder in the result.
        data: Tokens and seconds of every prompt, then the same of the other decoder.
    """
    ratio = bootstrap(
        lambda tokens, seconds, other_tokens, other_seconds: tokens / seconds * other_seconds / other_tokens, *data
    )
    figures: dict[str, Any] = {f"speed_over_{title}": round(ratio.estimate, 3)}
    if len(data[0]) > 7:  # fewer prompts say nothing of the spread
        figures[f"speed_over_{title}_95"] = [round(ratio.low, 3), round(ratio.high, 3)]
    return figures


def mask_cost(model: refusion_lit.TextModel, prompts: list[Prompt], max_new_tokens: int) -> dict[str, Any]:
    """Draft and verify in turn; return milliseconds of the body for six tokens, and for a token and five masks."""
    first_mask, make = model.backbone.special_tokens.draft_token_ids[0], model.backbone.runner
    milliseconds: dict[str, list[float]] = {"six tokens": [], "a token and five masks": []}

    def stopped() -> Any:
        body = make()

        def run(input_ids: torch.Tensor, *args: Any) -> torch.Tensor:
            started = time.perf_counter()
            hidden = body(input_ids, *args)
            if input_ids.numel() == 6 and (input_ids[0, 0] < first_mask):
                name = "a token and five masks" if bool((input_ids[0, 1:] >= first_mask).all()) else "six tokens"
                milliseconds[name].append(1000 * (time.perf_counter() - started))
            return hidden

        return run

    model.backbone.runner = stopped  # pyright: ignore[reportAttributeAccessIssue] - the engine takes it at its start
    sampling = SamplingParams(max_new_tokens=max_new_tokens)
    model.decode(prompts, DECODERS["two_forwards"], sampling, batch_size=1)
    del model.backbone.runner
    result = {
        name: {"median_ms": round(statistics.median(values), 1), "best_ms": round(min(values), 1), "count": len(values)}
        for name, values in milliseconds.items()
    }
    for name, figures in result.items():
        print(f"{name}: median {figures['median_ms']} ms, best {figures['best_ms']} ms", flush=True)
    return result


PARTS = {"text": compared, "speed": timed, "masks": mask_cost}
COLUMNS = {
    "text": {"same text": "", "tokens/forward": "tokens_per_forward"},
    "speed": {
        "alone: same text": "",
        "alone: tokens/forward": "tokens_per_forward",
        "tokens/s, times `Autoregressive`": "speed_over_autoregressive",
        "times `generate`": "speed_over_generate",
    },
}
"""Titles of each part's columns, and their figures after the share of equal texts."""


def main() -> None:
    """Measure in float32 and bfloat16, and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--draft", type=Path, default=HERE / "drafter")
    parser.add_argument("--prompts", nargs="*", default=[], metavar="NAME=FILE@NUMBER")
    parser.add_argument("--parts", nargs="*", choices=tuple(PARTS), default=["speed"])
    parser.add_argument("--num_timed", type=int, default=3, help="the first one warms up")
    parser.add_argument("--max_new_tokens", type=int, default=96)
    parser.add_argument("--dtypes", nargs="*", default=["float32"])
    parser.add_argument("--batch_invariant", action="store_true", help="load the model so")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path("runs/smollm2/results.json"))
    args = parser.parse_args()
    if not (BASE / "config.json").is_file():
        sys.exit(f"{BASE} is missing; make it with `nox -s real_model -- fetch`.")
    torch.set_num_threads(args.threads)
    warnings.filterwarnings("ignore")
    sets = [text.replace("@", "=").split("=") for text in (*args.prompts, f"own.jsonl={HERE / 'own.jsonl'}@100")]
    result: dict[str, Any] = {"max_new_tokens": args.max_new_tokens, "runs": []}
    if args.output.is_file():
        result = json.loads(args.output.read_text(encoding="utf-8"))
    overrides = BackboneConfig(source=str(BASE), batch_invariant=args.batch_invariant)
    for weights in args.dtypes:
        model = refusion_lit.load(BASE, dtype=_dtype(weights), draft=args.draft, overrides=overrides)
        dtype = run_type(weights, batch_invariant=args.batch_invariant, threads=args.threads)
        for name, file, count in sets:
            prompts = read_prompts(model, file, count)
            for part in args.parts:
                if any((run["dtype"], run["prompts"], run["part"]) == (dtype, name, part) for run in result["runs"]):
                    continue
                some = prompts if part == "text" else prompts[: args.num_timed]
                print(f"{dtype}, {name}, {part}: {len(some)} prompts", flush=True)
                load_before = os.getloadavg()
                figures = PARTS[part](model, some, args.max_new_tokens)
                key = "forwards" if part == "masks" else "decoders"
                run = {"dtype": dtype, "prompts": name, "part": part, "num_prompts": len(some), key: figures}
                run |= {"load_before": load_before, "load_after": os.getloadavg()}
                run |= {"environment": environment(None, sys.argv)}
                result["runs"].append(run)
                write_json(args.output, result)
    print(markdown(result["runs"]))
    program = Path(sys.executable).with_name("refusion-lit")
    model_options = f"--ckpt_path {BASE} --draft {args.draft}"
    print(f"next: {program} chat {model_options}")
    print(f'next: {program} trace {model_options} --prompt "What is the capital of France?"')


def run_type(weights: str, *, batch_invariant: bool, threads: int) -> str:
    """Return what the table calls the type; finished parts are known by it, their prompts and the part's name."""
    return weights + ", batch-invariant" * batch_invariant + f", {threads} threads" * (threads > 1)


def markdown(runs: list[dict[str, Any]]) -> str:
    """Return a table of all runs: one line for each type, set of prompts and decoder."""
    rows = [run for run in runs if "decoders" in run]
    columns = {part: titles for part, titles in COLUMNS.items() if any(run["part"] == part for run in rows)}
    titles = [title for part in columns.values() for title in part]
    marks = ["--:" if figure else "---" for part in columns.values() for figure in part.values()]
    lines = [
        f"| type | prompts | decoder | {' | '.join(titles)} |",
        f"| --- | --- | --- | {' | '.join(marks)} |",
    ]
    for dtype, prompts in dict.fromkeys((run["dtype"], run["prompts"]) for run in rows):
        parts = {run["part"]: run for run in rows if (run["dtype"], run["prompts"]) == (dtype, prompts)}
        for name in DECODERS:
            cells = []
            for part, figures in columns.items():
                keys = [figure for figure in figures.values() if figure]
                cells += _cells(parts[part], name, keys) if part in parts else [""] * len(figures)
            lines.append(f"| {dtype} | {prompts} | `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def _with_interval(figures: dict[str, Any], key: str) -> str:
    """Return a figure with its 95 % interval over prompts, if it has one."""
    ends = figures.get(f"{key}_95")
    return f"{figures[key]:.2f}" + (f" ({ends[0]:.2f} to {ends[1]:.2f})" if ends and ends[0] < ends[1] else "")


def _cells(run: dict[str, Any], name: str, keys: Sequence[str]) -> list[str]:
    """Return how many texts of a decoder are the same, and some of its figures with their intervals."""
    figures = run["decoders"][name]
    same = "the reference" if name == REFERENCE else f"{figures['identical']} of {run['num_prompts']}"
    return [same, *(_with_interval(figures, key) for key in keys)]


def _dtype(name: str) -> DType:
    assert name in ("float32", "float64", "bfloat16", "float16"), name
    return name


if __name__ == "__main__":
    main()
