"""Does a model decode in fewer forwards after training on its own answers, and again after a second round?

usage: python experiments/refusion_pays/rounds.py [--task additions] [--work_dir runs/rounds] [--output FILE]

A half-trained small model answers training prompts, token by token; from the same weights, several recipes train on
these answers. The best one's model answers further prompts, for a second round. Each model decodes the same test
prompts. Finished parts are kept, and a training resumes.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import refusion_lit
from refusion_lit.contrib.rl.trajectory import TrajectoryRecorder
from refusion_lit.decoding import Decoder, ReFusion, SelfSpeculative
from refusion_lit.reports.intervals import score_difference
from refusion_lit.reports.results import environment
from refusion_lit.tasks import Task
from refusion_lit.types import Prompt, SamplingParams

sys.path.append(str(Path(__file__).parents[2]))

from experiments.common import argument_parser, command, configs, kept, train, write_json
from experiments.policy_additions.run import start_model
from experiments.policy_estimators.run import HERE as ESTIMATORS
from experiments.policy_estimators.run import SETTINGS, Setting
from experiments.refusion_pays.recorded import write_states

HERE = Path(__file__).parent
OBJECTIVE = "--model.objective"
OWN = "experiments.refusion_pays"
TASKS = {"additions": SETTINGS["additions"], "sheet": replace(SETTINGS["sheet"], step=700)}
RECIPES: dict[str, tuple[str, ...]] = {
    "given": (),
    "own": (),
    "own_correct": (),
    "own_serial": (
        OBJECTIVE,
        "experiments.refusion_pays.serial.SerialHybrid",
        f"{OBJECTIVE}.slot_sizes",
        "[8]",
        f"{OBJECTIVE}.block_size",
        "32",
    ),
    "own_recorded": (OBJECTIVE, f"{OWN}.recorded.RecordedStates"),
    "recorded_correct": (OBJECTIVE, f"{OWN}.recorded.RecordedStates"),
    "own_windows": (OBJECTIVE, "MaskWindows", f"{OBJECTIVE}.num_tilings", "1", "--data.batch_size", "20"),
}
"""Options of a training beside rounds.yaml: about equal positions per step."""
SECOND = ("own_correct", "recorded_correct")
"""Recipes of which there is a second round."""
TEACHER = ReFusion(slot_size=8, num_serial_blocks=2, slot_threshold=1.0, infill="autoregressive")
"""Takes one slot at a time, by confidence, and fills it from left to right."""
DECODERS: dict[str, Decoder] = {
    "left to right": SelfSpeculative(slot_size=8),
    "thresholds": ReFusion(slot_size=8, num_serial_blocks=2, slot_threshold=0.9, token_threshold=0.9),
    "looser thresholds": ReFusion(slot_size=8, num_serial_blocks=2, slot_threshold=0.7, token_threshold=0.7),
    "bonus": ReFusion(slot_size=8, num_serial_blocks=2, slot_threshold=0.9, token_threshold=0.9, infill="bonus"),
}


def answers(model: Path, task: Task, first: int, count: int, length: int, record: Path) -> dict[str, Any]:
    """Let a model answer training prompts by the teacher's decoder; keep the answers that ended, and all states."""
    loaded = refusion_lit.load(str(model))
    examples = list(task.examples("train")[first : first + count])
    prompts = [Prompt(token_ids=tuple(loaded.encode(example.query)), id=example.id) for example in examples]
    recorder = TrajectoryRecorder(TEACHER)
    sampling = SamplingParams(max_new_tokens=length)
    rows = loaded.decode(prompts, TEACHER, sampling, batch_size=100, callbacks=[recorder]).rows
    write_states(record, recorder.trajectories.values())
    pairs = [(e, row) for e, row in zip(examples, rows, strict=True) if row.finish_reason == "eos" and row.text]
    records = [
        {"id": e.id, "prompt": e.query, "own": row.text, "given": e.response, "score": task.score(e, row.text)}
        for e, row in pairs
    ]
    print(f"{model}: {len(records)} of {count} answers ended", flush=True)
    return {"rows": records, "share_correct": sum(row["score"] == 1 for row in records) / len(records)}


def measured(path: Path, model: Path, task: Task, num_prompts: int, length: int) -> dict[str, Any]:
    """Decode test prompts greedily, each alone, by the decoders that are not in a file yet; return what it holds."""
    record = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    missing = {name: decoder for name, decoder in DECODERS.items() if name not in record}
    if not missing:
        return record
    loaded = refusion_lit.load(str(model))
    examples = list(task.examples("test"))[:num_prompts]
    prompts = [Prompt(token_ids=tuple(loaded.encode(example.query)), id=example.id) for example in examples]
    for name, decoder in missing.items():
        rows = loaded.decode(prompts, decoder, SamplingParams(max_new_tokens=length), batch_size=1).rows
        scores = [task.reward(e, row.text) for e, row in zip(examples, rows, strict=True)]
        tokens, forwards, positions = (
            sum(getattr(row, key) for row in rows) for key in ("num_tokens", "num_forwards", "num_positions")
        )
        figures = {"tokens_per_forward": tokens / forwards, "positions_per_token": positions / tokens}
        record[name] = {"score": sum(scores) / len(scores), **figures, "scores": scores}
        print(model, name, {key: round(value, 3) for key, value in record[name].items() if key != "scores"}, flush=True)
    write_json(path, record)
    return record


def write_answers(path: Path, rows: list[dict[str, Any]], recipe: str) -> Path:
    """Write what a recipe trains on."""
    text = "given" if recipe == "given" else "own"
    chosen = [row for row in rows if not recipe.endswith("_correct") or row["score"] == 1]
    lines = [json.dumps({"id": row["id"], "prompt": row["prompt"], "response": row[text]}) for row in chosen]
    path.write_text("\n".join([*lines, ""]), encoding="utf-8")
    return path


def against(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Return each decoder's figures, its points of score and its factor of tokens per forward over another model's."""
    differences = {}
    for name, figures in after.items():
        interval = score_difference(*([100 * s for s in figures[name]["scores"]] for figures in (after, before)))
        differences[name] = {key: round(value, 4) for key, value in figures.items() if key != "scores"}
        differences[name]["points"] = [round(bound, 1) for bound in (interval.estimate, interval.low, interval.high)]
        factor = figures["tokens_per_forward"] / before[name]["tokens_per_forward"]
        differences[name]["times_tokens_per_forward"] = round(factor, 3)
    return differences


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """The trainings on one task, in a work directory.

    Attributes:
        setting: The task, with its start model and length limit.
        work: The directory.
        num_answers: Training prompts answered in a round.
        num_prompts: Test prompts.
    """

    setting: Setting
    work: Path
    num_answers: int
    num_prompts: int

    def measured(self, model: Path, name: str) -> dict[str, Any]:
        """Return a model's figures on test prompts."""
        return measured(self.work / f"{name}.json", model, self.setting.task, self.num_prompts, self.setting.length)

    def answers(self, model: Path, number: int, name: str) -> dict[str, Any]:
        """Return a model's answers to the training prompts of a round."""
        first, record = (number - 1) * self.num_answers, self._record(name)
        made = (model, self.setting.task, first, self.num_answers, self.setting.length, record)
        return kept(self.work / f"{name}.json", answers, *made)

    def _record(self, name: str) -> Path:
        """Return the file of the states in which a round's answers were decoded."""
        return self.work / f"{name}_states.jsonl"

    def trained(self, source: Path, recipe: str, number: int, data: str) -> tuple[Path, float]:
        """Train a model on its answers, and export it; return it and the share of answers that are right."""
        answers, name = self.answers(source, number, data), f"{recipe}_{number}"
        file = write_answers(self.work / f"{name}.jsonl", answers["rows"], recipe)
        options = [*configs(HERE / "rounds.yaml"), *RECIPES[recipe], "--data.task.init_args.train", str(file)]
        options += ["--model.backbone.source", str(source), "--data.tokenizer.init_args.source", str(source)]
        options += [f"{OBJECTIVE}.record", str(self._record(data))] if "recorded" in recipe else []
        last, exported = train(self.work / name / "fit", *options), self.work / name / "model"
        if not (exported / "config.json").exists():
            command("export", "--ckpt_path", str(last), "--output", str(exported))
        return exported, answers["share_correct"]


def main() -> None:
    """Run all parts that are not done, and write the result."""
    parser = argument_parser(__doc__, "runs/rounds", HERE / "rounds.json")
    parser.add_argument("--task", choices=list(TASKS), default="additions")
    parser.add_argument("--num_answers", type=int, default=4000)
    parser.add_argument("--num_prompts", type=int, default=500)
    args = parser.parse_args()
    setting, work = TASKS[args.task], args.work_dir / args.task
    work.mkdir(parents=True, exist_ok=True)
    rounds = Rounds(setting=setting, work=work, num_answers=args.num_answers, num_prompts=args.num_prompts)
    start = start_model(work, setting.step, *(ESTIMATORS / f"{name}.yaml" for name in setting.overlays[:1]))
    before, after = rounds.measured(start, "before"), {}
    record: dict[str, Any] = {"start": {"decoders": against(before, before)}}
    for recipe in RECIPES:
        model, share = rounds.trained(start, recipe, 1, "answers_1")
        after[recipe] = rounds.measured(model, f"{recipe}_1")
        record[recipe] = {"share_right": share, "decoders": against(before, after[recipe])}
    for recipe in SECOND:
        model, share = rounds.trained(work / f"{recipe}_1" / "model", recipe, 2, f"answers_2_{recipe}")
        compared = against(after[recipe], rounds.measured(model, f"{recipe}_2"))
        record[f"{recipe}, second round"] = {"share_right": share, "decoders": compared}
    result = json.loads(args.output.read_text(encoding="utf-8")) if args.output.exists() else {}
    about = environment(0, ["python", "experiments/refusion_pays/rounds.py", "--task", args.task])
    write_json(args.output, {**result, args.task: {"models": record, "environment": about}})


if __name__ == "__main__":
    main()
