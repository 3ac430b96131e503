"""Compare the time of training steps: every objective against autoregression, packed rows against padded ones.

All see the same samples, with lengths like GSM8K's (log-normal), and the same backbone; a step is corruption, forward,
loss and backward. Objectives take turns within each repetition, so that a busy machine slows all of them, and the ratio
is the median over repetitions. Times are of this process's CPU on a CPU, of the clock on a GPU. Results are printed and
written to ``benchmarks/results/training_step.json``.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from refusion_lit.data.collate import EncodedExample, collate_responses
from refusion_lit.data.packing import pack_samples
from refusion_lit.modeling.backbone import Backbone
from refusion_lit.noise import KeyedNoise
from refusion_lit.objectives import Autoregressive, BlockMasked, Hybrid, Masked, Objective
from refusion_lit.objectives.packing import pack
from refusion_lit.types import ModelTraits, ResponseBatch, SpecialTokens

RESULTS = Path(__file__).parent / "results" / "training_step.json"
OBJECTIVES = {"autoregressive": Autoregressive(), "hybrid": Hybrid(), "masked": Masked(), "block": BlockMasked()}


def make_backbone(options: argparse.Namespace) -> Backbone:
    """Return a model with random weights."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3",
        hidden_size=options.hidden,
        intermediate_size=3 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=options.hidden // 4,
        vocab_size=options.vocab,
        tie_word_embeddings=True,
    )
    model = AutoModelForCausalLM.from_config(
        config, dtype=getattr(torch, options.dtype), attn_implementation=options.attention
    )
    special = SpecialTokens(mask_token_id=2, eos_token_ids=(1,), pad_token_id=0, vocab_size=options.vocab)
    return Backbone(model, ModelTraits(), special).to(options.device).train()


def make_samples(options: argparse.Namespace, count: int) -> list[EncodedExample]:
    """Return samples of random tokens; about two fifths of each are its prompt."""
    generator = torch.Generator().manual_seed(1)
    lengths = (150 * (0.36 * torch.randn(count, generator=generator)).exp()).long().clamp(20, options.pack_length)
    tokens = torch.randint(3, options.vocab, (count, options.pack_length), generator=generator)
    return [
        EncodedExample(str(i), tokens[i, : 2 * n // 5].tolist(), tokens[i, 2 * n // 5 : n].tolist())
        for i, n in enumerate(lengths.tolist())
    ]


def step_time(backbone: Backbone, objective: Objective, batch: ResponseBatch, epoch: int) -> tuple[float, float]:
    """Run a step; return its seconds and those of its corruption."""
    on_gpu = backbone.device.type == "cuda"

    def clock() -> float:
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() if on_gpu else time.process_time()

    backbone.zero_grad()
    start = clock()
    noise = KeyedNoise.for_samples(batch.sample_keys, seed=0, epoch=epoch)
    corrupted = objective.corrupt(batch, noise, backbone.special_tokens)
    if batch.rows is not None:
        corrupted = pack(corrupted, batch.rows, pad_token_id=0)
    middle = clock()
    hidden = backbone(corrupted.input_ids, corrupted.position_ids, corrupted.attention_mask)
    objective.loss(hidden, backbone.head, corrupted).total.backward()
    return clock() - start, middle - start


def interleaved(
    ways: dict[str, Callable[[int], tuple[float, float]]], repetitions: int
) -> dict[str, list[tuple[float, float]]]:
    """Time each way once a repetition; the first two repetitions are not kept."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for repetition in range(repetitions + 2):
        for name, way in ways.items():
            found = way(repetition)
            if repetition >= 2:
                times[name].append(found)
    return times


def table(times: dict[str, list[tuple[float, float]]], base: str) -> dict[str, dict[str, float]]:
    """Return medians and the ratio to a way."""
    return {
        name: {
            "milliseconds": round(1e3 * statistics.median(total for total, _ in found), 1),
            "corruption_milliseconds": round(1e3 * statistics.median(part for _, part in found), 2),
            f"over_{base}": round(
                statistics.median(a / b for (a, _), (b, _) in zip(found, times[base], strict=True)), 3
            ),
        }
        for name, found in times.items()
    }


def main() -> None:
    """Measure, print and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=128, help="width of the model")
    parser.add_argument("--layers", type=int, default=4, help="layers of the model")
    parser.add_argument("--vocab", type=int, default=2048, help="rows of the head")
    parser.add_argument("--batch", type=int, default=16, help="samples a step in the comparison of objectives")
    parser.add_argument("--rows", type=int, default=4, help="packed rows a step in the comparison of packing")
    parser.add_argument("--pack-length", type=int, default=512, help="tokens a packed row")
    parser.add_argument("--repetitions", type=int, default=15, help="how often each way is timed")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--dtype", default="float32", help="float32 or bfloat16")
    parser.add_argument("--attention", default="sdpa", help="sdpa, eager or flex_attention")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--output", type=Path, default=RESULTS, help="where to write the JSON")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    backbone = make_backbone(options)

    by_length = sorted(make_samples(options, 64 * options.batch), key=len)
    first = len(by_length) // 2
    batch = collate_responses(by_length[first : first + options.batch], 0).to(options.device)
    objectives = interleaved(
        {
            name: lambda epoch, objective=objective: step_time(backbone, objective, batch, epoch)
            for name, objective in OBJECTIVES.items()
        },
        options.repetitions,
    )

    samples = make_samples(options, 64 * options.rows)
    rows = pack_samples([len(sample) for sample in samples], options.pack_length, seed=0)
    rows = rows[:: len(rows) // options.rows][: options.rows]  # the first ones hold the longest samples
    chosen = [samples[i] for row in rows for i in row]
    numbers = [number for number, row in enumerate(rows) for _ in row]
    packed = collate_responses(chosen, 0, rows=numbers).to(options.device)
    padded = collate_responses(chosen, 0).to(options.device)
    packing = interleaved(
        {
            "padded": lambda epoch: step_time(backbone, OBJECTIVES["hybrid"], padded, epoch),
            "packed": lambda epoch: step_time(backbone, OBJECTIVES["hybrid"], packed, epoch),
        },
        options.repetitions,
    )
    gpu = torch.cuda.get_device_name() if options.device == "cuda" else None
    results = {
        "model": {name: getattr(options, name) for name in ("hidden", "layers", "vocab", "dtype", "attention")},
        "objectives": {"shape": list(batch.input_ids.shape), "ways": table(objectives, "autoregressive")},
        "packing": {
            "num_samples": len(chosen),
            "padded_shape": list(padded.input_ids.shape),
            "packed_shape": [options.rows, options.pack_length],
            "ways": table(packing, "padded"),
        },
        "repetitions": options.repetitions,
        "environment": {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "device": gpu or options.device,
            "machine": f"{platform.system()} {platform.machine()}",
            "num_threads": torch.get_num_threads(),
        },
    }
    text = json.dumps(results, indent=2)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(text + "\n")
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main()
