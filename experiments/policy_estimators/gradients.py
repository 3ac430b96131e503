"""Do the gradients of roll-outs point where the reward rises? Their noise, and the reward after a step along them.

usage: python experiments/policy_estimators/gradients.py [--work_dir runs/policy_gradients] [--output FILE]

For each setting ``fit`` with a learning rate of 0 adds up gradients over updates on fresh prompts, unscaled advantages
and the loss per token, so that their mean is an estimate of the gradient of the expected reward. Then the model takes
a step along it, and back, and the mean reward of sampled answers is compared with what the gradient predicts. Finished
parts are skipped.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from torch.optim import Optimizer

import refusion_lit
from refusion_lit import TextModel
from refusion_lit.decoding import Decoder, ReFusion, SelfSpeculative
from refusion_lit.reports.results import environment
from refusion_lit.types import Prompt, SamplingParams

sys.path.append(str(Path(__file__).parents[2]))

from experiments.common import argument_parser, configs, kept, write_json
from experiments.policy_additions.run import CONFIGS, TASK, start_model, trained

HERE = Path(__file__).parent
LENGTH = 64
DECODERS: dict[str, tuple[str, Decoder]] = {
    "slot by slot, exact": ("exact", SelfSpeculative(slot_size=8)),
    "thresholds": ("trajectory", ReFusion(slot_size=8, num_serial_blocks=2)),
}


class Gradients(Callback):
    """Adds up the gradients of a training that takes no step, and writes them where it stops.

    Args:
        path: The file.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._gradients: list[torch.Tensor] = []
        self._names: list[str] = []

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:  # noqa: ARG002
        """Keep the gradient of an update, before it is clipped."""
        gradients = {name: p.grad.flatten() for name, p in pl_module.named_parameters() if p.grad is not None}
        self._names = list(gradients)
        self._gradients.append(torch.cat(list(gradients.values())))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        """Write names of parameters, the mean gradient, and the squared norms of the mean and of each gradient."""
        stacked = torch.stack(self._gradients).double()
        squares = stacked.square().sum(1)
        torch.save({"names": self._names, "mean": stacked.mean(0), "squares": squares}, self._path)


def noise(gradients: dict[str, Any]) -> dict[str, float]:
    """Return unbiased estimates of the squared norm of the expected gradient, and of the variance of one update's."""
    number = len(gradients["squares"])
    mean_square = float(gradients["squares"].mean())
    signal = (number * float(gradients["mean"].square().sum()) - mean_square) / (number - 1)
    return {"signal": signal, "noise": mean_square - signal}


def sampled_reward(model: TextModel, decoder: Decoder, num_prompts: int, num_samples: int) -> list[float]:
    """Return the mean reward of each prompt's sampled answers; answers that hit the length limit have reward 0."""
    examples = list(TASK.examples("test"))[:num_prompts]
    prompts = [Prompt(token_ids=tuple(model.encode(e.query)), id=f"{e.id}/{i}")
               for e in examples for i in range(num_samples)]  # fmt: skip
    sampling = SamplingParams(max_new_tokens=LENGTH, temperature=1.0, seed=7)
    rows = model.decode(prompts, decoder, sampling, batch_size=250).rows
    scores = [0.0 if row.finish_reason == "length" else float(TASK.score(examples[index // num_samples], row.text) or 0)
              for index, row in enumerate(rows)]  # fmt: skip
    return [sum(scores[start : start + num_samples]) / num_samples for start in range(0, len(scores), num_samples)]


def shifted(start: Path, gradients: dict[str, Any], size: float) -> TextModel:
    """Return the model a distance along the direction in which the loss falls."""
    model = refusion_lit.load(str(start))
    parameters = dict(model.backbone.named_parameters())
    direction = -gradients["mean"] / gradients["mean"].norm()
    offset = 0
    with torch.no_grad():
        for name in gradients["names"]:
            parameter = parameters[name.removeprefix("backbone.")]
            part = direction[offset : offset + parameter.numel()]
            parameter += size * part.view_as(parameter).to(parameter.dtype)
            offset += parameter.numel()
    return model


def steps(start: Path, gradients: dict[str, Any], decoder: Decoder, sizes: Sequence[float], num_prompts: int) -> Any:
    """Return rewards after steps along the gradient, with the change per distance and its standard error."""
    steps = {}
    for size in sizes:
        ahead, back = (sampled_reward(shifted(start, gradients, s), decoder, num_prompts, 4) for s in (size, -size))
        slopes = [(a - b) / (2 * size) for a, b in zip(ahead, back, strict=True)]
        mean = sum(slopes) / len(slopes)
        error = math.sqrt(sum((slope - mean) ** 2 for slope in slopes) / (len(slopes) - 1) / len(slopes))
        rewards = [sum(values) / len(values) for values in (back, ahead)]
        steps[str(size)] = {"back": rewards[0], "ahead": rewards[1], "slope": mean, "standard_error": error}
    return steps


def main() -> None:
    """Run and write the result."""
    parser = argument_parser(__doc__, "runs/policy_gradients", HERE / "gradients.json")
    parser.add_argument("--start_dir", type=Path, default=Path("runs/policy_additions"))
    parser.add_argument("--num_updates", type=int, default=40)
    parser.add_argument("--num_prompts", type=int, default=300)
    args = parser.parse_args()
    start = start_model(args.start_dir)
    results: dict[str, Any] = {}
    for number, (name, (estimator, decoder)) in enumerate(DECODERS.items()):
        path = args.work_dir / f"gradients{number}.pt"
        options = configs(CONFIGS / "policy.yaml", HERE / "common.yaml", HERE / f"{estimator}.yaml")
        options += ["--model.objective.init_args.unit", "token", "--model.objective.init_args.scale_rewards", "false"]
        options += ["--model.optimizer.init_args.lr", "0.0", "--trainer.max_steps", str(args.num_updates)]
        options += ["--trainer.val_check_interval", str(args.num_updates), "--trainer.enable_progress_bar", "false"]
        options += ["--trainer.callbacks+", "experiments.policy_estimators.gradients.Gradients"]
        options += ["--trainer.callbacks.path", str(path)]
        if not path.exists():
            trained(args.work_dir / f"setting{number}" / "fit", start, 0, *options)
        gradients = torch.load(path, weights_only=True)
        predicted = LENGTH * float(gradients["mean"].norm())
        figures = noise(gradients)
        unbiased = LENGTH * figures["signal"] / float(gradients["mean"].norm())
        measured = kept(
            args.work_dir / f"steps{number}.json", steps, start, gradients, decoder, (0.02,), args.num_prompts
        )
        results[name] = {**figures, "slope_of_these_updates": predicted, "slope": unbiased, "steps": measured}
        print(name, results[name], flush=True)
        about = environment(0, ["python", "experiments/policy_estimators/gradients.py"])
        config = {"num_updates": args.num_updates, "num_prompts": args.num_prompts}
        write_json(args.output, {"config": config, "results": results, "environment": about})


if __name__ == "__main__":
    main()
