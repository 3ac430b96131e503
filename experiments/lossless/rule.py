"""When does drafting pay? Replays the default of `SelfSpeculative` on recorded texts, for several costs of a forward.

usage: python experiments/lossless/rule.py [--prompts NAME=FILE@NUMBER ...] [--max_new_tokens N] [--output FILE]
       python experiments/lossless/rule.py --recorded [--output FILE]

The model answers each prompt by itself. Then one forward finds how many of the drafter's drafts would be accepted after
every token of the answer. With these counts the decoder itself runs, by hand and without a model: it chooses when to
draft, and the forwards and positions are counted. The time of a forward is a fixed cost, in positions, and its
positions; a drafter's adapters add a fifth of the fixed cost to a forward with masks. Nothing is timed, so other work
on the machine changes nothing. `--recorded` replays the counts that the output holds, and needs no model.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

import refusion_lit
from refusion_lit.decoding import Autoregressive, Decoder, SelfSpeculative
from refusion_lit.engine.requests import Forward, MoreDrafts, Reading, Request
from refusion_lit.learning.batch import ResponseBatch
from refusion_lit.noise import KeyedNoise
from refusion_lit.objectives import GatedDraft
from refusion_lit.reports.results import environment
from refusion_lit.types import Prompt, SamplingParams, SpecialTokens

sys.path.append(str(Path(__file__).parents[2]))

from experiments.common import write_json
from experiments.lossless.table import BASE, HERE, read_prompts

COSTS = (10.0, 20.0, 32.0)
"""Fixed costs of a forward, in positions: in float32 16 and 26 were measured on CPUs (default_*.json)."""
TOLD = 32.0
"""The cost that a decoder is told on a CPU, whatever the true one."""
ADAPTERS = 0.2
NUM_MASKS = 5
MASKS = tuple(range(2, 2 + NUM_MASKS))
SPECIAL = SpecialTokens(mask_token_id=None, eos_token_ids=(1,), pad_token_id=0, vocab_size=2, draft_token_ids=MASKS)
RIGHT, WRONG = 0, 1
DECODERS: dict[str, Decoder] = {
    "default": SelfSpeculative(),
    **{f"{num} drafts": SelfSpeculative(layout="two_forwards", num_drafts=num) for num in (1, 2, 3, 5)},
}


@torch.no_grad()
def accepted_after(model: refusion_lit.TextModel, prompt: Prompt, answer: list[int]) -> list[int]:
    """Return how many drafts are accepted after each token, from the prompt's last one to the answer's last but one."""
    backbone, keys = model.backbone, torch.zeros(1, dtype=torch.long)
    batch = ResponseBatch(
        input_ids=torch.tensor([[*prompt.token_ids, *answer]]),
        prompt_lengths=torch.tensor([len(prompt.token_ids)]),
        response_lengths=torch.tensor([len(answer)]),
        sample_keys=keys,
    )
    masked = GatedDraft(stride=1).corrupt(batch, KeyedNoise(keys), backbone.special_tokens)
    hidden = backbone(masked.input_ids, masked.position_ids, masked.visible, masked.num_drafts)
    logits = backbone.logits(hidden[0, -masked.num_drafts :]).float()
    logits[:, list(backbone.special_tokens.banned_token_ids)] = -torch.inf
    is_right = (logits.argmax(-1) == masked.labels[0, -masked.num_drafts :]).reshape(len(answer), NUM_MASKS)
    return is_right.long().cumprod(-1).sum(-1).tolist()


def replayed(decoder: Decoder, accepted: list[int], cost: float) -> tuple[int, float]:
    """Run a decoder on a text of right tokens; return its forwards, and their time in positions."""
    prompt = Prompt(token_ids=(RIGHT,), id="0")
    state = decoder.begin(prompt, SamplingParams(max_new_tokens=len(accepted)), SPECIAL)
    state.forward_cost = TOLD
    num_forwards, seconds = 0, 0.0
    forward: Forward | None = None

    def answers(request: Request) -> list[Reading]:
        assert forward is not None
        offsets = request.draft_at if isinstance(request, MoreDrafts) else [b.draft_at for b in forward.branches]
        rows = []
        for branch, at in zip(forward.branches, offsets, strict=True):
            num_right = len(branch.tokens)
            if branch.tokens[0] in MASKS:
                num_right = accepted[branch.positions[0] - 1]
            rows.append(Reading(tokens=[RIGHT if offset < num_right else WRONG for offset in at]))
        return rows

    while not state.finished and state.num_committed < len(accepted):
        steps = decoder.step(state)
        request = next(steps)
        while True:
            if isinstance(request, Forward):
                forward = request
                has_masks = any(branch.tokens[0] in MASKS for branch in forward.branches)
                num_forwards += 1
                seconds += cost * (1 + ADAPTERS * has_masks) + sum(len(branch.tokens) for branch in forward.branches)
            try:
                request = steps.send(answers(request))
            except StopIteration:
                break
    return num_forwards, seconds


def figures(texts: list[list[int]]) -> dict[str, Any]:
    """Return tokens per forward, and the speed over a decoder without drafts, by cost and decoder."""
    num_tokens = sum(map(len, texts))
    figures: dict[str, Any] = {}
    for cost in COSTS:
        plain = sum(replayed(Autoregressive(), text, cost)[1] for text in texts)
        for name, decoder in DECODERS.items():
            runs = [replayed(decoder, text, cost) for text in texts]
            figures.setdefault(name, {})[f"{cost:g}"] = {
                "tokens_per_forward": round(num_tokens / sum(run[0] for run in runs), 3),
                "speed": round(plain / sum(run[1] for run in runs), 3),
            }
    return figures


def main() -> None:
    """Record, replay and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    files = [f"{name}={HERE / file}" for name, file in (("chat", "chat.jsonl@20"), ("own", "own.jsonl@12"))]
    parser.add_argument("--prompts", nargs="*", default=[])
    parser.add_argument("--max_new_tokens", type=int, default=128)
    parser.add_argument("--recorded", action="store_true", help="replay the counts in the output")
    parser.add_argument("--output", type=Path, default=HERE / "rule.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    described = environment(0, sys.argv)
    if options.recorded:
        result = json.loads(options.output.read_text(encoding="utf-8")) | {"environment": described}
        for prompts in result["prompts"].values():
            prompts["decoders"] = figures([[int(count) for count in text] for text in prompts["accepted"]])
        write_json(options.output, result)
        return
    model = refusion_lit.load(BASE, dtype="float32", draft=HERE / "drafter")
    result: dict[str, Any] = {"max_new_tokens": options.max_new_tokens, "prompts": {}, "environment": described}
    for entry in [*files, *options.prompts]:
        name, _, source = entry.partition("=")
        prompts = read_prompts(model, *source.split("@"))
        sampling = SamplingParams(max_new_tokens=options.max_new_tokens)
        rows = model.decode(prompts, Autoregressive(), sampling, batch_size=16).rows
        texts = [accepted_after(model, prompt, row.token_ids) for prompt, row in zip(prompts, rows, strict=True)]
        counts = ["".join(map(str, text)) for text in texts]
        result["prompts"][name] = {"num_prompts": len(prompts), "accepted": counts, "decoders": figures(texts)}
        print(name, result["prompts"][name]["decoders"]["default"], flush=True)
        write_json(options.output, result)


if __name__ == "__main__":
    main()
