"""Growth: cost of a token against the length of the answer.

usage: python -m benchmarks.growth [--repeats 3] [--lengths '[64, 128, 256, 512, 1024]']

ReFusion in serial blocks of 64 tokens (a replayed schedule: two slots of 8 a round, all accepted), autoregressive
decoding, and LLaDA with one step per token, on a model of hidden size 96 and 3 layers. Writes a JSON and a plot.
"""

from __future__ import annotations

import time
import warnings
from pathlib import Path

import torch
from benchmarks.common import RESULTS, SMALL, Work, draw, interleaved, random_model, random_prompts, summary_line, write
from benchmarks.peers import ours, replayed
from benchmarks.replay import ALL_ACCEPTED, Replay
from jsonargparse import auto_cli

from refusion_lit.decoding import Autoregressive, LLaDA, ReFusion

BLOCK = 64


def plot(costs: dict[str, dict[int, float]], path: Path) -> None:
    """Draw milliseconds per token over the answer's length."""
    milliseconds = {name: {n: 1e3 * value for n, value in values.items()} for name, values in costs.items()}
    draw(milliseconds, path, "answer length (tokens)", "milliseconds per token")


def main(
    repeats: int = 3,
    threads: int = 1,
    lengths: tuple[int, ...] = (64, 128, 256, 512, 1024),
    prompt_length: int = 32,
    output: str | None = None,
) -> None:
    """Measure growth.

    Args:
        repeats: Rounds of the interleaved timing; LLaDA's answers of 512 tokens and more are timed twice.
        threads: Threads of torch.
        lengths: Answer lengths, multiples of 64.
        prompt_length: Tokens of the prompt.
        output: Where to write the JSON; the plot lands beside it.
    """
    warnings.filterwarnings("ignore", message=".* does not fit this model")
    torch.set_num_threads(threads)
    started = time.perf_counter()
    mask = SMALL["vocab_size"] - 1
    causal, bidirectional = (random_model(SMALL, attention=kind) for kind in ("causal", "bidirectional"))
    replay = Replay(ALL_ACCEPTED, prompt_length, mask)
    works: dict[tuple[str, int], Work] = {}
    prompts = random_prompts(1, prompt_length)
    for length in lengths:
        decoder = ReFusion(num_serial_blocks=length // BLOCK)
        works["ReFusion", length] = ours(replayed(causal, replay), decoder, prompts, length)
        works["autoregressive", length] = ours(replayed(causal, replay), Autoregressive(), prompts, length)
        repeated = min(repeats, 2) if length >= 512 else repeats
        works["LLaDA", length] = ours(replayed(bidirectional, replay), LLaDA(), prompts, length, max_repeats=repeated)
    interleaved({f"{name}, {length} tokens": work for (name, length), work in works.items()}, repeats)
    names = ("ReFusion", "autoregressive", "LLaDA")
    summaries = {key: work.summary() for key, work in works.items()}
    costs = {
        name: {n: summaries[name, n]["median_seconds"] / summaries[name, n]["num_tokens"] for n in lengths}
        for name in names
    }
    growth = {name: costs[name][lengths[-1]] / costs[name][lengths[0]] for name in names}
    span = f"cost of a token, {lengths[-1]} tokens over {lengths[0]}"
    summary = [
        summary_line(f"{span}: ReFusion", growth["ReFusion"]),
        summary_line(f"{span}: LLaDA, one step per token", growth["LLaDA"]),
    ]
    cases = {
        name: {
            "seconds_a_token": costs[name],
            "growth": round(growth[name], 3),
            "runs": {n: summaries[name, n] for n in lengths},
        }
        for name in names
    }
    config = {
        "repeats": repeats, "threads": threads, "lengths": lengths, "prompt_length": prompt_length, "model": SMALL,
        "tokens_a_serial_block": BLOCK,
    }  # fmt: skip
    seconds = time.perf_counter() - started
    write("growth", config, {"summary": summary, "cases": cases}, output=output, seconds=seconds, seed=0)
    # After the JSON, which says whether the checkout was clean.
    plot(costs, Path(output).with_suffix(".png") if output else RESULTS / "growth.png")


if __name__ == "__main__":
    auto_cli(main)
