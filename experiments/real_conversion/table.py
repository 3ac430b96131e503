"""The table and the curves of results.json and longer.json; `nox -s figures` writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from refusion_lit.reports.intervals import wilson
from refusion_lit.reports.plots import curves_plot

HEAD = (
    "training", "decoder", "problems", "score in %", "annotations right in %", "annotations/answer",
    "ends with `#### number` in %", "perplexity", "tokens/forward", "positions/token", "tokens/s, times `generate`",
)  # fmt: skip
FIGURES = {
    "score": "problems solved in %",
    "annotations_right": "annotations right in %",
    "ends_with_answer": "answers that end with #### number in %",
    "perplexity": "perplexity of the answers",
    "tokens_per_forward": "tokens per forward",
}
SPEEDS = "Speeds are medians of five problems, with other work on the machine, without intervals."
WINDOW = 8
"""Logged steps that a point of the loss curves is the mean of."""


SUMMARY = (
    "training",
    "decoder",
    "score in %",
    "annotations right in %",
    "ends with `#### number` in %",
    "tokens/forward",
)

_LEFT_OUT = ("`fast_dllm_dual_4`", "`block_t60`")


def summary(results: dict[str, Any]) -> list[list[str]]:
    """Return the columns of :data:`SUMMARY`, without adapters and the settings with the worst scores."""
    shown = (row for row in rows(results) if "lora" not in row[0] and row[1] not in _LEFT_OUT)
    return [[row[HEAD.index(title)] for title in SUMMARY] for row in shown]


def rows(results: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return a row for each decoder of each training, and one for the data's own answers."""
    speed, rows = results["speed"]["rows"], []
    for name, training in results["trainings"].items():
        for decoder, figures in training.get("decoders", {}).items():
            ratio = speed.get(f"{name}/{decoder}", {}).get("ratio")
            rows.append((f"`{name}`", f"`{decoder}`", *_cells(figures), "-" if ratio is None else f"{ratio:.2f}"))
    if "references" in results:
        rows.append(("references", "-", *_cells(results["references"]), "-"))
    return rows


def _cells(figures: dict[str, Any]) -> tuple[str, ...]:
    def annotations() -> str:
        """Return the share of right annotations; resampling problems gives no interval if all or none are right."""
        estimate, low, high = figures["annotations_right"]
        if low == high:
            num = round(figures["annotations_per_answer"] * figures["num_prompts"])
            interval = wilson(round(estimate * num / 100), num)
            low, high = 100 * interval.low, 100 * interval.high
        return f"{estimate:.1f} ({low:.1f} to {high:.1f})"

    def share(name: str) -> str:
        """Return a share of right answers with Wilson's interval, which also holds for few right answers."""
        if figures.get(name) is None:
            return "-"
        num_prompts = figures["num_prompts"]
        interval = wilson(round(figures[name][0] * num_prompts / 100), num_prompts)
        return f"{100 * interval.estimate:.1f} ({100 * interval.low:.1f} to {100 * interval.high:.1f})"

    def number(name: str, digits: int) -> str:
        return f"{figures[name]:.{digits}f}" if name in figures else "-"

    return (
        str(figures["num_prompts"]), share("score"), annotations(),
        number("annotations_per_answer", 2), share("ends_with_answer"), number("perplexity", 2),
        number("tokens_per_forward", 2), number("positions_per_token", 1),
    )  # fmt: skip


def loss_curves(results: dict[str, Any]) -> dict[str, list[tuple[float, float]]]:
    """Return each loss term of each training, smoothed, over thousands of positions computed."""
    curves = {}
    for name, training in results["trainings"].items():
        for term in ("ar", "mdm"):
            logged = [row for row in training["curve"] if f"train/{term}" in row]
            groups = [logged[start : start + WINDOW] for start in range(0, len(logged), WINDOW)]
            points = [(_mean(group, "train/num_positions") / 1000, _mean(group, f"train/{term}")) for group in groups]
            if points:
                curves[f"{name}: {term}"] = points
    return curves


def _mean(rows: list[dict[str, float]], name: str) -> float:
    return sum(row[name] for row in rows) / len(rows)


def followed(results: dict[str, Any], figure: str) -> dict[str, list[tuple[float, float]]]:
    """Return a figure of each training's first decoder over thousands of positions computed."""
    curves = {}
    for name, training in results["trainings"].items():
        a_step = training["num_positions"] / training["num_steps"] / 1000
        for step, figures in training.get("followed", {}).items():
            value = figures[figure]
            label = f"{name}, {figures['decoder']}"
            point = (int(step) * a_step, value[0] if isinstance(value, list) else value)
            curves.setdefault(label, []).append(point)
    return curves


def joined(results: dict[str, Any], longer: dict[str, Any]) -> dict[str, Any]:
    """Return results.json with the trainings of longer.json beside its own."""
    later = {f"{name}, longer": training for name, training in longer["trainings"].items()}
    speeds = {row.replace("/", ", longer/"): speed for row, speed in longer["speed"]["rows"].items()}
    speed = {**results["speed"], "rows": results["speed"]["rows"] | speeds}
    return {**results, "trainings": results["trainings"] | later, "speed": speed}


def markdown(results: dict[str, Any]) -> str:
    """Return the table."""
    lines = [HEAD, ["---", "---", *["--:"] * (len(HEAD) - 2)], *rows(results)]
    table = "".join("| " + " | ".join(line) + " |\n" for line in lines)
    return f"{table}\n{SPEEDS}"


def curves(results: dict[str, Any]) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Return the curves of each picture that has any, by its name."""
    plots = {"losses": loss_curves(results), **{name: followed(results, name) for name in FIGURES}}
    return {name: points for name, points in plots.items() if points}


def draw(name: str, curves: dict[str, list[tuple[float, float]]], path: Path) -> None:
    """Draw the curves of a picture, ``losses`` or one of :data:`FIGURES`."""
    label = FIGURES.get(name, "loss in nats")
    path.write_text(curves_plot(curves, "thousands of positions computed", label), encoding="utf-8")
