"""Which change of the training makes a drafter better? Trains one further under each, and counts accepted drafts.

usage: python experiments/lossless/levers.py --answers GREEDY.jsonl --sampled SAMPLED.jsonl
           [--prompts NAME=FILE@NUMBER ...] [--steps N] [--levers NAME ...] [--output FILE]

Each lever starts from the drafter of this folder, sees as many answers in the same order for as many steps, and changes
one thing of `train.yaml`: how weights decay with the offset, what the answers were drawn with, how many masks there
are, or what a mask reads beside its embedding: the frozen model's state of the anchor after its middle or its last
layer, through a matrix that starts at zero. Then one forward for each prompt finds how many drafts would be accepted
after every token of the model's own answer, and whether the second choice of the first mask would have been right: with
that, two branches are a tree. The decoders are replayed on these counts as by `rule.py`: nothing is timed. Sampled text
is decoded by the decoder itself. FILE holds what `refusion-lit generate` writes for `runs/smollm2/base`; what the
output holds already is kept.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import refusion_lit
from refusion_lit.decoding import Autoregressive, SelfSpeculative, decode
from refusion_lit.evaluation.predictions import read_json_lines
from refusion_lit.learning.batch import IGNORE_INDEX, CorruptedBatch, ResponseBatch
from refusion_lit.modeling.backbone import Backbone
from refusion_lit.modeling.drafter import Drafter
from refusion_lit.modeling.load import attach
from refusion_lit.modeling.transformers_forward import sdpa_mask
from refusion_lit.noise import KeyedNoise
from refusion_lit.objectives import GatedDraft
from refusion_lit.reports.results import environment
from refusion_lit.types import Prompt, SamplingParams

sys.path.append(str(Path(__file__).parents[2]))

from experiments.common import fast_dtype, write_json
from experiments.lossless.table import BASE, HERE, read_prompts

BATCH_SIZE, NUM_WARMUP, LEARNING_RATE = 4, 5, 7e-4
COST = 20.0
"""Fixed cost of a forward, in positions; 16 and 26 were measured on CPUs in float32 (default_*.json)."""
ADAPTERS = 0.2
"""Share of the adapters in a forward's fixed cost."""


@dataclass(frozen=True)
class Lever:
    """What a training changes.

    Attributes:
        decay: Weight of mask k over that of mask k - 1.
        answers: How the answers were drawn: ``greedy`` or ``sampled``.
        num_masks: Of the drafter.
        reads: Share of the layers after which the anchor's state is read; ``None``: no state.
    """

    decay: float = 0.8
    answers: str = "greedy"
    num_masks: int = 5
    reads: float | None = None


LEVERS = {
    "as train.yaml": Lever(),
    "decay 0.6": Lever(decay=0.6),
    "decay 1": Lever(decay=1.0),
    "answers at 0.8": Lever(answers="sampled"),
    "8 masks": Lever(num_masks=8),
    "reads the middle layer": Lever(reads=0.5),
    "reads the last layer": Lever(reads=1.0),
}


class LeverModel:
    """The frozen model with a drafter that a lever has widened.

    Args:
        backbone: The model, with the drafter to start from.
        lever: What is changed.
    """

    def __init__(self, backbone: Backbone, lever: Lever) -> None:
        self.backbone = backbone
        assert isinstance(self.backbone.drafter, Drafter)
        if lever.num_masks > len(self.backbone.drafter.masks):
            attach(self.backbone, with_masks(self.backbone.drafter, lever.num_masks))
        drafter = self.backbone.drafter
        assert isinstance(drafter, Drafter)
        self.drafter = drafter
        self.lever = lever
        size = self.drafter.masks.shape[1]
        self.read = nn.Linear(size, size, bias=False, dtype=self.drafter.masks.dtype)
        nn.init.zeros_(self.read.weight)

    def parameters(self) -> list[nn.Parameter]:
        """Return what is trained."""
        return [*self.drafter.parameters(), *([] if self.lever.reads is None else self.read.parameters())]

    def mask_logits(self, batch: CorruptedBatch) -> Tensor:
        """Return the logits of the labelled masks; see ``modeling/drafter.py`` for the two passes."""
        body: Any = self.backbone.body
        length = batch.input_ids.shape[1] - batch.num_drafts
        text_ids, mask_ids = batch.input_ids[:, :length], batch.input_ids[:, length:]
        visible = batch.visible
        assert isinstance(visible, Tensor)
        with torch.no_grad():
            text = body(
                input_ids=text_ids, position_ids=batch.position_ids[:, :length], use_cache=True,
                attention_mask=torch.ones_like(text_ids), output_hidden_states=self.lever.reads is not None,
            )  # fmt: skip
        first = self.backbone.special_tokens.draft_token_ids[0]
        distance = (mask_ids - first).clamp(min=0)
        embedded = self.drafter.masks[distance]
        if self.lever.reads is not None:
            layer = round(self.lever.reads * (len(text.hidden_states) - 1))
            anchors = (batch.position_ids[:, length:] - 1 - distance).clamp(0, length - 1)
            states = text.hidden_states[layer].gather(1, anchors[..., None].expand(-1, -1, embedded.shape[-1]))
            embedded = embedded + self.read(states / states.norm(dim=-1, keepdim=True) * embedded.norm(dim=-1).mean())
        with self.drafter.adapt(body):
            drafts = body(
                inputs_embeds=embedded, position_ids=batch.position_ids[:, length:], use_cache=True,
                attention_mask=sdpa_mask(visible[:, length:], batch.input_ids.shape[1], visible.device),
                past_key_values=text.past_key_values,
            )  # fmt: skip
        is_labelled = batch.labels[:, length:] != IGNORE_INDEX
        return self.backbone.logits(drafts.last_hidden_state[is_labelled])

    def corrupted(
        self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], stride: int, key: int
    ) -> CorruptedBatch:
        """Return prompts and answers with masks after every ``stride``-th token."""
        pad = self.backbone.special_tokens.pad_token_id
        rows = [torch.tensor([*prompt, *answer]) for prompt, answer in zip(prompts, answers, strict=True)]
        keys = torch.arange(len(rows)) + key
        batch = ResponseBatch(
            input_ids=nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad),
            prompt_lengths=torch.tensor([len(prompt) for prompt in prompts]),
            response_lengths=torch.tensor([len(answer) for answer in answers]),
            sample_keys=keys,
        )
        objective = GatedDraft(stride=stride, decay=self.lever.decay)
        return objective.corrupt(batch, KeyedNoise(keys), self.backbone.special_tokens)


def loaded() -> refusion_lit.TextModel:
    """Return the base with the drafter of this folder."""
    return refusion_lit.load(BASE, dtype="float32", draft=HERE / "drafter")


def with_masks(drafter: Drafter, num_masks: int) -> Drafter:
    """Return a drafter with more masks, which start as the last one."""
    drafter.options = replace(drafter.options, num_masks=num_masks)
    missing = num_masks - len(drafter.masks)
    drafter.masks = nn.Parameter(torch.cat((drafter.masks.data, drafter.masks.data[-1:].expand(missing, -1))))
    return drafter


def train(wide: LeverModel, texts: list[tuple[list[int], list[int]]], num_steps: int) -> list[float]:
    """Train a drafter on prompts and answers; return the loss of each step."""
    optimizer = torch.optim.AdamW(wide.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    losses = []
    for step in range(num_steps):
        some = texts[step * BATCH_SIZE : (step + 1) * BATCH_SIZE]
        batch = wide.corrupted(*zip(*some, strict=True), stride=4, key=step * BATCH_SIZE)
        is_labelled = batch.labels != IGNORE_INDEX
        with torch.autocast("cpu", torch.bfloat16, enabled=fast_dtype() == "bfloat16"):
            logits = wide.mask_logits(batch)
        token_losses = F.cross_entropy(logits.float(), batch.labels[is_labelled], reduction="none")
        loss = (token_losses * batch.weights[is_labelled]).sum() / batch.counts.sum()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(wide.parameters(), 1.0)
        rate = min((step + 1) / NUM_WARMUP, 1.0) * max(0.05, 1 - step / num_steps)
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * rate
        optimizer.step()
        losses.append(round(loss.item(), 4))
        if step % 10 == 9:
            print(f"  step {step + 1}: loss {sum(losses[-10:]) / 10:.3f}", flush=True)
    return losses


@torch.no_grad()
def accepted_after(wide: LeverModel, prompt: Prompt, answer: list[int]) -> tuple[list[int], list[int]]:
    """Return how many drafts are accepted after each token of an answer, by the first choices and by a second branch.

    The second branch has the first mask's second choice in place of its first one.
    """
    batch = wide.corrupted([prompt.token_ids], [answer], stride=1, key=0)
    size = wide.lever.num_masks
    labels = batch.labels[0, -batch.num_drafts :]
    is_labelled = labels != IGNORE_INDEX
    logits = wide.mask_logits(batch).float()
    logits[:, list(wide.backbone.special_tokens.banned_token_ids)] = -torch.inf
    choices = logits.topk(2).indices
    is_right = torch.zeros(len(labels), 2, dtype=torch.bool)
    is_right[is_labelled] = choices == labels[is_labelled, None]
    first, second = is_right.reshape(len(answer), size, 2).long().unbind(-1)
    other = torch.cat((second[:, :1], first[:, 1:]), 1)
    return first.cumprod(-1).sum(-1).tolist(), other.cumprod(-1).sum(-1).tolist()


def figures(texts: list[list[int]], others: list[list[int]], num_masks: int) -> dict[str, Any]:
    """Return the share of accepted drafts, and tokens per forward and speed of the replayed decoders."""
    counts = [count for text in texts for count in text]
    figures: dict[str, Any] = {
        f"accepted_{k}": round(sum(count >= k for count in counts) / len(counts), 4) for k in range(1, num_masks + 1)
    }
    both = [[max(pair) for pair in zip(*pairs, strict=True)] for pairs in zip(texts, others, strict=True)]
    figures["single_forward"] = round(len(counts) / sum(num_forwards(text, 1, num_masks) for text in texts), 3)
    figures["two_forwards"] = max(replayed(texts, num, 1) for num in range(1, num_masks + 1))
    figures["tree"] = max(replayed(both, num, 2) for num in range(1, num_masks + 1))
    return figures


def num_forwards(accepted: list[int], extra: int, num_drafts: int) -> int:
    """Return the forwards for a text, of which each takes the accepted drafts and ``extra`` tokens of its own."""
    place = count = 0
    while place < len(accepted):
        place += min(accepted[place], num_drafts) + extra
        count += 1
    return count


def replayed(texts: list[list[int]], num_drafts: int, num_branches: int) -> tuple[float, int, float]:
    """Return the speed over a decoder without drafts, the drafts in each branch, and tokens per forward.

    A forward takes a token and drafts by ``num_drafts`` masks; the next one verifies them and adds a token.
    """
    num_rounds = sum(num_forwards(text, 2, num_drafts) for text in texts)
    num_tokens = sum(map(len, texts))
    cost = COST * (2 + ADAPTERS) + 2 + num_drafts + num_branches * num_drafts
    return round(num_tokens * (COST + 1) / (num_rounds * cost), 3), num_drafts, round(num_tokens / (2 * num_rounds), 3)


def measured(wide: LeverModel, sets: dict[str, tuple[list[Prompt], list[list[int]]]]) -> dict[str, Any]:
    """Return the figures of a drafter for each set of prompts."""
    levers: dict[str, Any] = {}
    for name, (prompts, answers) in sets.items():
        pairs = [accepted_after(wide, *pair) for pair in zip(prompts, answers, strict=True)]
        texts, others = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        counts = {
            key: ["".join(map(str, text)) for text in rows] for key, rows in (("first", texts), ("second", others))
        }
        levers[name] = {"num_prompts": len(prompts), **figures(texts, others, wide.lever.num_masks), "accepted": counts}
        shown = {key: value for key, value in levers[name].items() if key != "accepted"}
        print(f"  {name}: {shown}", flush=True)
    return levers


def sampled(wide: LeverModel, prompts: list[Prompt]) -> float:
    """Return tokens per forward at a temperature of 0.8, as the decoder makes them."""
    decoder = SelfSpeculative(layout="single_forward")
    sampling = SamplingParams(max_new_tokens=96, temperature=0.8)
    rows = decode(wide.backbone, decoder, prompts, sampling, batch_size=16).rows
    return round(sum(row.num_tokens for row in rows) / sum(row.num_forwards for row in rows), 3)


def main() -> None:
    """Train and measure each lever that the output lacks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--answers", type=Path, required=True, help="greedy answers of the base")
    parser.add_argument("--sampled", type=Path, required=True, help="the base's answers at a temperature of 0.8")
    parser.add_argument("--prompts", nargs="*", default=[], metavar="NAME=FILE@NUMBER")
    parser.add_argument("--steps", type=int, default=50, help="of four answers each")
    parser.add_argument("--levers", nargs="*", choices=tuple(LEVERS), default=list(LEVERS))
    parser.add_argument("--output", type=Path, default=HERE / "levers.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {"num_steps": options.steps, "batch_size": BATCH_SIZE, "cost": COST, "levers": {}}
    if options.output.is_file():
        result = json.loads(options.output.read_text(encoding="utf-8"))
    base = loaded()
    files = {"greedy": options.answers, "sampled": options.sampled}
    needed = options.steps * BATCH_SIZE
    rows = {
        name: [(base.encode(row["prompt"]), row["response_ids"][:192]) for row in read_json_lines(path, name)]
        for name, path in files.items()
    }
    if min(map(len, rows.values())) < needed:
        sys.exit(f"--answers, --sampled: expected {needed} answers, got {[*map(len, rows.values())]}")
    sets: dict[str, tuple[list[Prompt], list[list[int]]]] = {}
    for entry in [f"own={HERE / 'own.jsonl'}@12", *options.prompts]:
        name, _, source = entry.partition("=")
        prompts = read_prompts(base, *source.split("@"))
        generations = base.decode(prompts, Autoregressive(), SamplingParams(max_new_tokens=128), batch_size=16).rows
        sets[name] = prompts, [row.token_ids for row in generations]
    for name in ("start", *options.levers):
        if name in result["levers"]:
            continue
        print(name, flush=True)
        torch.manual_seed(0)
        wide = LeverModel(loaded().backbone, LEVERS.get(name, Lever()))
        started = time.perf_counter()
        losses = [] if name == "start" else train(wide, rows[wide.lever.answers], options.steps)
        minutes = round((time.perf_counter() - started) / 60, 1)
        generations = measured(wide, sets)
        some = [prompt for prompts, _ in sets.values() for prompt in prompts[:8]]
        rate = None if wide.lever.reads is not None else sampled(wide, some)
        kept = {"losses": losses, "minutes": minutes, "prompts": generations, "sampled_tokens_per_forward": rate}
        result["levers"][name] = kept | {"environment": environment(0, sys.argv)}
        write_json(options.output, result)


if __name__ == "__main__":
    main()
