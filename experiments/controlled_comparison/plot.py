"""The tables and the plot of results.json and more.json; `nox -s figures` writes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

from refusion_lit.reports.intervals import ratio_interval, wilson

TASKS = ("sheet", "walk", "latin")
STYLES = {
    "hybrid": ("#00796b", "o"),
    "autoregressive": ("#555555", "s"),
    "masked": ("#c2410c", "^"),
    "block": ("#1d4ed8", "D"),
    "block_clipped": ("#60a5fa", "D"),
    "dual_stream": ("#9333ea", "v"),
    "soft_tail": ("#be185d", "P"),
    "diffusion_forcing": ("#0891b2", "X"),
    "staggered": ("#65a30d", "<"),
    "editable": ("#a16207", ">"),
    "editable_clipped": ("#facc15", ">"),
    "sdar": ("#0f172a", "d"),
    "sdar_clipped": ("#64748b", "d"),
    "zarya": ("#ea580c", "*"),
    "uniform": ("#e11d48", "p"),
    "diffusion_gemma": ("#fb7185", "h"),
}

Run = dict[str, Any]
Point = tuple[float, float, float, list[float]]


def points(runs: list[Run], task: str, objective: str, split: str = "results") -> dict[str, Point]:
    """Return for each decoder means over seeds of tokens per forward, positions per token and score; and all scores.

    The split is ``results`` for the test prompts or ``validation``.
    """
    matching = [run for run in runs if _matches(run, task, objective)]
    if not matching or any(split not in run for run in matching):
        return {}
    chosen = [run[split] for run in matching]
    return {
        name: (
            mean(results[name]["tokens_per_forward"] for results in chosen),
            mean(results[name]["positions_per_token"] for results in chosen),
            mean(results[name]["score"] for results in chosen),
            [results[name]["score"] for results in chosen],
        )
        for name in chosen[0]
    }


def _matches(run: Run, task: str, objective: str) -> bool:
    return (run["task"], run["objective"], run["budget_factor"]) == (task, objective, 1)


def table(runs: list[Run], more: dict[str, Any]) -> str:
    """Return every decoder of every model as a Markdown table, the decoders of more.py last."""
    lines = [
        "| task | objective | decoder | score | by seed | tokens/forward | positions/token |",
        "| --- | --- | --- | --: | --- | --: | --: |",
    ]
    for task in TASKS:
        for objective in STYLES:
            for name, (speed, positions, score, scores) in points(runs, task, objective).items():
                lines.append(_line(task, objective, name, (score, speed, positions), scores))
        for run in runs:
            if run["task"] == task and run["budget_factor"] != 1:
                objective = f"{run['objective']}, {run['budget_factor']:g} times the budget"
                lines += _single(task, objective, run["results"])
    for objective, figures in more["results"].items():
        lines += _single(more["task"], f"{objective}, more.py", figures)
    return "\n".join(lines)


def _single(task: str, objective: str, figures: dict[str, Any]) -> Iterator[str]:
    for name, values in figures.items():
        cells = tuple(values[key] for key in ("score", "tokens_per_forward", "positions_per_token"))
        yield _line(task, objective, name, cells, cells[:1])


def _line(task: str, objective: str, decoder: str, cells: Sequence[float], scores: Sequence[float]) -> str:
    score, speed, positions = cells
    seeds = ", ".join(f"{value:.3f}" for value in scores)
    return f"| {task} | {objective} | `{decoder}` | {score:.3f} | {seeds} | {speed:.2f} | {positions:.1f} |"


FAMILIES = (
    ("hybrid, ReFusion", "hybrid", "refusion"),
    ("autoregressive", "autoregressive", ""),
    ("masked, LLaDA in blocks of 16, one token per step", "masked", "llada_1"),
    ("masked, Fast-dLLM, whole canvas, threshold 0.9", "masked", "fast_dllm_whole_t90"),
    ("block diffusion", "block", ""),
    ("block diffusion, clipped noise", "block_clipped", ""),
)
"""Rows of the table of families: label, objective, a setting or how the names of those to choose from begin."""
SUCCESSORS = (
    ("hybrid, ReFusion, for comparison", "hybrid", "refusion_8_t90"),
    ("soft tail, CARD", "soft_tail", "card_t90_8"),
    ("diffusion forcing, D2F", "diffusion_forcing", "d2f_t90"),
    ("staggered sets, set diffusion", "staggered", "sets_16_t90"),
    ("dual stream, WeDLM", "dual_stream", "wedlm_16_e40"),
    ("editable blocks, token editing", "editable", "editing_t95_90"),
    ("editable blocks, clipped noise, token editing", "editable_clipped", "editing_t95_90"),
    ("block diffusion in blocks of 4, SDAR", "sdar", "sdar_t85"),
    ("block diffusion in blocks of 4, clipped noise, SDAR", "sdar_clipped", "sdar_t85"),
    ("hybrid with Zarya's options, ReFusion", "zarya", "refusion_8_t90"),
)
"""One setting each, that of ``configs``: these runs have no validation figures to choose by."""


NEXT_TOKEN = "none, next token"
EDITING = ("editing_t30_50", "editing_t50_50", "editing_t70_50", "editing_t95_90")
"""Settings that edit; the other settings of the model fill masks alone."""
NOISES = (
    (NEXT_TOKEN, "autoregressive", ""),
    ("masked slots, ReFusion", "hybrid", "refusion"),
    ("masks over the response, Fast-dLLM", "masked", "fast_dllm"),
    ("masks over the response, LLaDA", "masked", "llada"),
    ("masks in blocks, block diffusion", "block", "block"),
    ("masks in blocks, clipped, block diffusion", "block_clipped", "block"),
    ("masks and wrong tokens in blocks, token editing", "editable", EDITING),
    ("random tokens in canvases", "uniform", "uniform"),
    ("random tokens in canvases, self-conditioning", "diffusion_gemma", "diffusion_gemma"),
)
"""Rows of the tables of noises, in the form of the rows of families."""


def choose_setting(runs: list[Run], task: str, objective: str, settings: str | tuple[str, ...]) -> str | None:
    """Return the setting of an objective that is shown; ``None`` if the objective has no run.

    Of several settings the setting with the highest mean score on validation prompts is chosen, and of equal ones the
    setting with the most tokens per forward there. The test prompts choose nothing. Next-token decoding is no setting
    of a model that has other decoders.

    Args:
        runs: All runs.
        task: The task.
        objective: The objective.
        settings: A setting, or how the names of the settings to choose from begin; may have several beginnings.

    Raises:
        KeyError: If there are several settings, and no validation figures.
    """
    tested = points(runs, task, objective)
    decoders = {name: options["class"] for run in runs for name, options in run["decoders"].items()}
    begins = [name for name in tested if name.startswith(settings)]
    parallel = [name for name in begins if decoders[name] != "Autoregressive"]
    names = [name for name in begins if name == settings] or parallel or begins
    if len(names) > 1:
        validated = points(runs, task, objective, "validation")
        names = [max(names, key=lambda name: (round(validated[name][2], 6), validated[name][0]))]
    return names[0] if names else None


def noise_rows(runs: list[Run], speeds: Mapping[str, Any], task: str) -> list[dict[str, Any]]:
    """Return a task's rows of noises.

    Each row has its label, the scores by seed, their mean with Wilson's interval over all answers, tokens per forward
    pass and positions per token with the lowest and the highest seed, and by batch size the tokens per second, and the
    speed as times next-token decoding, with their intervals.

    Args:
        runs: All runs.
        speeds: The content of speeds.json.
        task: The task.
    """
    rows = []
    for label, objective, settings in NOISES:
        name = choose_setting(runs, task, objective, settings)
        if name is None:
            continue
        *_, score, scores = points(runs, task, objective)[name]
        seeds = [run["results"][name] for run in runs if _matches(run, task, objective)]
        num_prompts = sum(figures["num_prompts"] for figures in seeds)
        interval = wilson(round(score * num_prompts), num_prompts)
        measured = speeds["tasks"][task][label]
        rows.append({
            "label": label, "scores": scores, "score": [score, interval.low, interval.high],
            "tokens_per_forward": _with_range(seeds, "tokens_per_forward"),
            "positions_per_token": _with_range(seeds, "positions_per_token"),
            "tokens_per_second": {size: _speed(measured[size]) for size in _BATCH_SIZES},
            "times": {size: measured[size]["times_baseline"] for size in _BATCH_SIZES},
        })  # fmt: skip
    return rows


_BATCH_SIZES = ("1", "16", "64")


def _with_range(seeds: Sequence[Mapping[str, float]], figure: str) -> list[float]:
    """Return the mean over seeds, the lowest and the highest."""
    values = [figures[figure] for figures in seeds]
    return [mean(values), min(values), max(values)]


def _speed(measured: Mapping[str, Any]) -> list[float]:
    """Return tokens per second with the interval over batches."""
    interval = ratio_interval(measured["num_tokens"], measured["seconds"])
    return [interval.estimate, interval.low, interval.high]


def noises(runs: list[Run], speeds: Mapping[str, Any], task: str) -> str:
    """Return :func:`noise_rows` as two Markdown tables, of answers and of speeds."""
    rows = noise_rows(runs, speeds, task)
    lines = [
        "| noise, decoder | score | seeds | tokens/forward | positions/token |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        seeds = ", ".join(f"{seed:.2f}" for seed in row["scores"])
        cells = [
            _range(row["score"], ".2f"), seeds, _range(row["tokens_per_forward"], ".1f"),
            _range(row["positions_per_token"], ".1f"),
        ]  # fmt: skip
        lines.append(f"| {row['label']} | {' | '.join(cells)} |")
    lines += [
        "",
        "| noise, decoder | tokens/s: alone | 16 | 64 | times: alone | 16 | 64 |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        cells = [_range(speed, ".0f") for speed in row["tokens_per_second"].values()]
        cells += map(_ratio, row["times"].values())
        lines.append(f"| {row['label']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def choices(runs: list[Run], speeds: Mapping[str, Any]) -> str:
    """Return a Markdown table of score and speed of the noises among which users choose, by task."""
    lines = [
        "| noise, decoder | task | score | tokens/forward | alone | 16 | 64 |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    shown = ("hybrid", "masked", "block_clipped")
    labels = [label for label, objective, settings in NOISES if objective in shown and settings != "llada"]
    rows = {task: {row["label"]: row for row in noise_rows(runs, speeds, task)} for task in ("sheet", "walk")}
    for label in labels:
        for task, found in rows.items():
            row = found[label]
            cells = [label, task, _range(row["score"], ".2f"), _range(row["tokens_per_forward"], ".1f")]
            lines.append(f"| {' | '.join([*cells, *map(_ratio, row['times'].values())])} |")
    return "\n".join(lines)


def _range(values: Sequence[float], spec: str) -> str:
    """Return an estimate with the ends of its interval; the estimate alone where all are written alike."""
    estimate, low, high = (f"{value:{spec}}" for value in values)
    return estimate if estimate == low == high else f"{estimate} ({low} to {high})"


def _ratio(values: Sequence[float]) -> str:
    estimate, low, high = values
    if low == high == 1:
        return "1"
    return "{} ({} to {})".format(
        *(f"{value:.1f}" if value >= 1 else f"{value:.2g}" for value in (estimate, low, high))
    )


def draw_noises(rows: Mapping[str, list[dict[str, Any]]], path: Path) -> None:
    """Draw score over speed alone, one panel per task and one point per noise, with both intervals."""
    figure, axes = plt.subplots(1, len(rows), figsize=(12, 4.6), sharey=True)
    colours = {label: STYLES[objective] for label, objective, _ in NOISES}
    for axis, (task, values) in zip(axes, rows.items(), strict=True):
        for row in values:
            colour, marker = colours[row["label"]]
            (speed, *ends), (score, *limits) = row["times"]["1"], row["score"]
            axis.errorbar(
                speed, score, color=colour, marker=marker, markersize=7, capsize=2, linestyle="none",
                label=row["label"],
                xerr=[[speed - ends[0]], [ends[1] - speed]], yerr=[[score - limits[0]], [limits[1] - score]],
                markerfacecolor="none" if row["label"].endswith("LLaDA") else colour,
            )  # fmt: skip
        axis.set_xscale("log", base=2)
        axis.set_xticks([0.25, 0.5, 1, 2, 4, 8], ["0.25", "0.5", "1", "2", "4", "8"])
        axis.set_xlabel("tokens/s of one prompt, times next-token decoding")
        axis.set_title(task)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("score, mean of three seeds")
    axes[0].set_ylim(-0.03, 1.03)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    figure.tight_layout(rect=(0, 0.14, 1, 1))
    figure.savefig(path, dpi=110)
    plt.close(figure)


def best(runs: list[Run], rows: Sequence[tuple[str, str, str]], tasks: Sequence[str]) -> str:
    """Return each family's setting: score by seed, tokens per forward, positions per token.

    :func:`choose_setting` chooses the settings. A family that was not trained on a task has ``--``.
    """
    lines = [f"| | {' | '.join(tasks)} |", "| --- |" + " --- |" * len(tasks)]
    for label, objective, setting in rows:
        cells = []
        for task in tasks:
            name = choose_setting(runs, task, objective, setting)
            if name is None:
                cells.append("--")
                continue
            speed, positions, score, scores = points(runs, task, objective)[name]
            seeds = f" ({', '.join(f'{value:.2f}' for value in scores)})" if len(scores) > 1 else ""
            cells.append(f"{score:.3f}{seeds}, {speed:.1f}, {positions:.1f}")
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


UNTRAINED = (
    ("hybrid", "`ReFusion`, one serial block", "hybrid", ("refusion_8_t90",)),
    ("hybrid", "`SlotSearch`, beam of 1 and of 4", "hybrid", ("search_beam_1", "search_beam_4")),
    ("hybrid", "`FirstHitting`, 8, 16 and 32 steps", "hybrid", tuple(f"first_hitting_{n}" for n in (8, 16, 32))),
    (
        "masked", "`LLaDA` without blocks, 1, 2 and 4 tokens per step", "masked",
        tuple(f"llada_whole_{n}" for n in (1, 2, 4)),
    ),
    ("masked", "the same with a kernel of 8, 2 and 4 tokens per step", "masked", ("conv_8_2", "conv_8_4")),
    ("masked", "with a kernel of 32, 2 and 4 tokens per step", "masked", ("conv_32_2", "conv_32_4")),
    (
        "masked, then R2FT", "`LLaDA` without blocks, 2 and 4 tokens per step", "r2ft",
        ("llada_whole_2", "llada_whole_4"),
    ),
    ("masked, then R2FT", "with a kernel of 8, 2 and 4 tokens per step", "r2ft", ("conv_8_2", "conv_8_4")),
    ("masked, then R2FT", "with a kernel of 32, 2 and 4 tokens per step", "r2ft", ("conv_32_2", "conv_32_4")),
    (
        "masked and autoregressive", "`APD`, weights 0.3, 0.5, 0.7, 0.9", "masked",
        tuple(f"apd_r{n}" for n in (30, 50, 70, 90)),
    ),
)  # fmt: skip
"""Rows of the table of more.json: model and decoder as shown, then where they are found."""


def untrained(more: dict[str, Any]) -> str:
    """Return what more.py has decoded: score, tokens per forward, positions per token of each setting."""
    lines = ["| model | decoder | |", "| --- | --- | --- |"]
    for model, decoder, key, names in UNTRAINED:
        cells = [
            f"{figures['score']:.3f}, {figures['tokens_per_forward']:.1f}, {figures['positions_per_token']:.1f}"
            for figures in (more["results"][key][name] for name in names)
        ]
        lines.append(f"| {model} | {decoder} | {'; '.join(cells)} |")
    return "\n".join(lines)


def drawn(runs: list[Run]) -> dict[str, Any]:
    """Return what the plot shows: by task its seeds, and each objective's tokens per forward and scores."""
    shown: dict[str, Any] = {}
    for task in TASKS:
        curves = {objective: points(runs, task, objective) for objective in STYLES}
        shown[task] = {
            "seeds": sorted({run["seed"] for run in runs if run["task"] == task}),
            "points": {name: [point[::2][:2] for point in value.values()] for name, value in curves.items() if value},
        }
    return shown


def draw(shown: dict[str, Any], path: Path) -> None:
    """Draw what :func:`drawn` returns, one panel per task and one colour per objective."""
    figure, axes = plt.subplots(1, len(shown), figsize=(13, 4.2), sharey=True)
    for axis, (task, values) in zip(axes, shown.items(), strict=True):
        for objective, curve in values["points"].items():
            colour, marker = STYLES[objective]
            speeds, scores = zip(*curve, strict=True)
            axis.scatter(speeds, scores, c=colour, marker=marker, s=42, alpha=0.75, label=objective)
        seeds = values["seeds"]
        axis.set_title(f"{task} (one to {len(seeds)} seeds per model)" if len(seeds) > 1 else f"{task} (one seed)")
        axis.set_xscale("log", base=2)
        axis.set_xticks([0.5, 1, 2, 4, 8, 16, 32], ["0.5", "1", "2", "4", "8", "16", "32"])
        axis.set_xlabel("tokens per forward")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("score on 200 test prompts")
    axes[0].set_ylim(-0.03, 1.03)
    axes[-1].legend(*axes[0].get_legend_handles_labels(), loc="upper right", fontsize=8)  # sheet has all objectives
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
