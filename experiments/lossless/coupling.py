"""How many sampled drafts does the Gumbel coupling accept, how many rejection sampling, and what does it save?

usage: python experiments/lossless/coupling.py [--prompts FILE@NUMBER] [--temperatures T ...] [--output FILE]

A draft is a sample of q, the token that it is compared with one of p, the model's distribution after it. With shared
noise both are drawn with the same Gumbel noise, so that the text depends on the seed alone; rejection sampling accepts
with the highest probability that any scheme has, sum of min(p, q), and its text depends on the drafts. The shares are
of the same drafts, those of the Gumbel coupling; tokens per forward are of a decode with each.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import refusion_lit
from refusion_lit.decoding import SelfSpeculative, decode
from refusion_lit.engine import sampler
from refusion_lit.engine.sampler import draw_tokens, filter_logits
from refusion_lit.modeling.interface import LanguageModel
from refusion_lit.reports.results import environment
from refusion_lit.types import Prompt, SamplingParams

HERE = Path(__file__).parent
DECODER = SelfSpeculative(layout="two_forwards")


class Couplings:
    """Draws tokens as the engine does, and counts what becomes of drafts.

    A position has one noise key, so the second draw under a key since the last verification is that of the token that
    a draft is compared with.

    Attributes:
        num_tested: Drafts that were compared, those after a wrong one included.
        num_accepted: Those equal to the exact token.
        optimum: Expected number that rejection sampling would accept of them.
    """

    def __init__(self) -> None:
        self.num_tested, self.num_accepted, self.optimum = 0, 0, 0.0
        self._drafted: dict[int, tuple[torch.Tensor, int]] = {}

    def draw(
        self, logits: torch.Tensor, sampling: SamplingParams, noise_keys: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        """Draw a token at every position."""
        tokens = draw_tokens(logits, sampling, noise_keys, **options)
        before = self.num_tested
        probabilities = filter_logits(logits, sampling, **options).softmax(-1)
        for key, p, token in zip(noise_keys.tolist(), probabilities, tokens.tolist(), strict=True):
            if key not in self._drafted:
                self._drafted[key] = p, token
                continue
            q, draft = self._drafted[key]
            self.num_tested += 1
            self.num_accepted += draft == token
            self.optimum += float(torch.minimum(p, q).sum())
        if self.num_tested > before:
            self._drafted.clear()
        return tokens


def coupling(model: LanguageModel, prompts: Sequence[Prompt], sampling: SamplingParams) -> dict[str, Any]:
    """Decode prompts one by one with each coupling; return the share of drafts accepted, and tokens per forward."""
    couplings = Couplings()
    with patch.object(sampler, "draw_tokens", couplings.draw):
        shared = _tokens_per_forward(model, prompts, sampling, DECODER)
    return {
        "num_drafts": couplings.num_tested,
        "shared_noise": round(couplings.num_accepted / couplings.num_tested, 4),
        "rejection_sampling": round(couplings.optimum / couplings.num_tested, 4),
        "tokens_per_forward": {
            "shared_noise": shared,
            "rejection": _tokens_per_forward(model, prompts, sampling, replace(DECODER, coupling="rejection")),
        },
    }


def _tokens_per_forward(
    model: LanguageModel, prompts: Sequence[Prompt], sampling: SamplingParams, decoder: SelfSpeculative
) -> float:
    rows = decode(model, decoder, prompts, sampling, batch_size=1).rows
    return round(sum(row.num_tokens for row in rows) / sum(row.num_forwards for row in rows), 3)


def markdown(temperatures: dict[str, dict[str, Any]]) -> str:
    """Return the table of the README."""
    lines = [
        "| temperature | drafts | by Gumbel coupling | by rejection sampling | tokens/forward | by rejection |",
        "| --: | --: | --: | --: | --: | --: |",
    ]
    for temperature, figures in temperatures.items():
        shares = (f"{100 * figures[key]:.1f} %" for key in ("shared_noise", "rejection_sampling"))
        speeds = (f"{value:.2f}" for value in figures["tokens_per_forward"].values())
        cells = (temperature, str(figures["num_drafts"]), *shares, *speeds)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure at each temperature, and write the result."""
    from table import BASE, read_prompts  # in this folder; `nox -s figures` imports this module from elsewhere

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--draft", type=Path, default=HERE / "drafter")
    parser.add_argument("--prompts", default=f"{HERE / 'own.jsonl'}@12", metavar="FILE@NUMBER")
    parser.add_argument("--temperatures", nargs="*", type=float, default=[0.5, 0.7, 1.0])
    parser.add_argument("--max_new_tokens", type=int, default=96)
    parser.add_argument("--output", type=Path, default=HERE / "coupling.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = refusion_lit.load(BASE, dtype="float32", draft=args.draft)
    file, _, count = args.prompts.rpartition("@")
    prompts = read_prompts(model, file, count)
    figures = {}
    for temperature in args.temperatures:
        sampling = SamplingParams(max_new_tokens=args.max_new_tokens, temperature=temperature)
        figures[str(temperature)] = coupling(model.backbone, prompts, sampling)
        print(temperature, figures[str(temperature)], flush=True)
    recorded = environment(None, [Path(sys.argv[0]).name, *sys.argv[1:]])
    print(markdown(figures))
    result = {"prompts": f"{Path(file).name}@{count}", "dtype": "float32", "temperatures": figures}
    args.output.write_text(json.dumps({**result, "environment": recorded}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
