"""Tables and plots of the experiments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.table import table as markdown_table
from docs.figures.registry import PLOTS, ROOT, Plot, read, stamps, table
from experiments.controlled_comparison import plot as controlled
from experiments.decoder_families import table as decoder_families
from experiments.demo import table as demo
from experiments.dependency_study import run as dependency
from experiments.latin_study import plot as latin
from experiments.lossless import coupling
from experiments.lossless import table as lossless
from experiments.main_results import run as main_results
from experiments.policy_additions import plot as policy
from experiments.real_conversion import table as conversion
from experiments.refusion_pays import curve as conversions
from experiments.refusion_pays import solved

from refusion_lit.reports.intervals import Interval, wilson

Result = dict[str, Any]


def _path(experiment: str, name: str = "results.json") -> str:
    return f"experiments/{experiment}/{name}"


@table("demo", _path("demo"))
@table("demo epyc", _path("demo", "results_epyc.json"))
def _demo(results: Result) -> str:
    return demo.table(results["rows"])


@table("lossless", _path("lossless"))
def _lossless(results: Result) -> str:
    return lossless.markdown([run for run in results["runs"] if run["part"] in lossless.COLUMNS])


@table("lossless coupling", _path("lossless", "coupling.json"))
def _coupling(results: Result) -> str:
    return coupling.markdown(results["temperatures"])


@table("json schemas", _path("json_schemas"))
@table("json schemas converted", _path("json_schemas", "converted.json"))
def _json_schemas(results: Result) -> str:
    head = ["decoder", "asked", "answered", "parse", "keep the schema", "tokens", "tokens/forward", "ms/forward"]
    keys = ("asked", "answered", "parse", "keep_the_schema", "tokens", "tokens_per_forward", "cpu_ms_per_forward")
    rows = [[f"`{name}`", *(run[key] for key in keys)] for name, run in results["runs"].items()]
    return markdown_table(head, rows)


DEFAULTS = ("default_epyc", "default_slow")
"""Files of the default with a drafter, by machine."""


@table("lossless default", *(_path("lossless", f"{name}.json") for name in DEFAULTS))
def _default(*machines: Result) -> str:
    rows = [
        [
            machine["environments"][0]["hardware"]["processor"].split("(")[0] + (", slow" if "slow" in name else ""),
            dtype,
            row["batch_size"],
            f"{row['identical']} of {row['num_decodes']}",
            "the same" if row["same_forwards"] else "others",
            f"{row['tokens_per_forward']:.2f}",
            _speed(row, "autoregressive", digits=3),
            f"{row['control_over_autoregressive']:.3f}",
        ]
        for name, machine in zip(DEFAULTS, machines, strict=True)
        for dtype, values in machine["types"].items()
        for row in values["batches"]
    ]
    head = [
        "machine", "type", "batch size", "same text", "forwards", "tokens/forward",
        "tokens/s, times `Autoregressive`", "`Autoregressive` again",
    ]  # fmt: skip
    return markdown_table(head, rows)


@table("lossless rule", _path("lossless", "rule.json"))
def _rule(results: Result) -> str:
    rows = []
    for name, of in results["prompts"].items():
        for decoder, by_cost in of["decoders"].items():
            speeds = [f"{values['speed']:.3f}" for values in by_cost.values()]
            forwards = f"{by_cost['32']['tokens_per_forward']:.2f}"
            rows.append([name, of["num_prompts"], decoder, forwards, *speeds])
    return markdown_table(["prompts", "number", "decoder", "tokens/forward", "cost 10", "cost 20", "cost 32"], rows)


@table("lossless levers", _path("lossless", "levers.json"))
def _drafter_levers(results: Result) -> str:
    rows = []
    for name, lever in results["levers"].items():
        rate = lever["sampled_tokens_per_forward"]
        for prompts, of in lever["prompts"].items():
            accepted = (f"{100 * of[f'accepted_{k}']:.1f} %" for k in (1, 3, 5))
            speeds = (f"{of[way][0]:.2f}" for way in ("two_forwards", "tree"))
            sampled = "" if rate is None or prompts != "own" else f"{rate:.2f}"
            rows.append([name, prompts, of["num_prompts"], *accepted, f"{of['single_forward']:.2f}", *speeds, sampled])
    head = [
        "training", "prompts", "number", "1 accepted", "3", "5", "tokens/forward, `single_forward`",
        "`two_forwards`, speed", "with two branches", "tokens/forward at 0.8",
    ]  # fmt: skip
    return markdown_table(head, rows)


@table("lossless random texts", _path("lossless", "random_texts.json"))
def _random_texts(results: Result) -> str:
    names = {
        "vocab_size": "vocabulary", "num_prompts": "prompts", "num_equal": "with the same text",
        "num_hybrid": "of hybrid models", "num_greedy": "greedy", "num_ended": "ended by a token",
        "num_stopped": "ended by a stop string",
    }  # fmt: skip
    rows = [
        [
            *(run[key] for key in names),
            f"{run['num_tokens'] / run['num_prompts']:.1f}",
            f"{run['tokens_per_forward']:.2f}",
        ]
        for run in results["runs"]
    ]
    return markdown_table([*names.values(), "tokens per text", "tokens/forward"], rows)


@table("refusion_pays small models", _path("refusion_pays", "small_models.json"))
def _bonus(results: Result) -> str:
    titles = ("model", "`infill`", "forward cost", "right answers", "tokens/forward", "positions/token")
    rows = [
        [
            f"`additions-{row['model']}`",
            f"`{row['infill']}`",
            f"{row['forward_cost']:.0f}" if row["infill"] == "bonus" else "",
            f"{row['num_right']} of {row['num_prompts']}",
            f"{row['num_tokens'] / row['num_forwards']:.2f}",
            f"{row['num_positions'] / row['num_tokens']:.2f}",
        ]
        for row in results["rows"]
    ]
    return markdown_table(titles, rows)


@table("refusion_pays rounds", _path("refusion_pays", "rounds.json"))
def _rounds(results: Result) -> str:
    ways = ("left to right", "thresholds", "looser thresholds", "bonus")
    rows = [
        [f"`{task}`", name, *[_round(model["decoders"][way], is_start=name == "start") for way in ways]]
        for task, result in results.items()
        for name, model in result["models"].items()
    ]
    return markdown_table(("task", "training", *ways), rows)


def _round(figures: Result, *, is_start: bool) -> str:
    """Return a score in percent, the points gained, and tokens per forward with their factor."""
    score, tokens = f"{100 * figures['score']:.1f}", f"{figures['tokens_per_forward']:.2f}"
    if is_start:
        return f"{score} % at {tokens}"
    return f"{score} % ({figures['points'][0]:+.1f}) at {tokens} ({figures['times_tokens_per_forward']:.2f})"


@table("refusion_pays convert", _path("refusion_pays", "convert.json"))
def _real_model(results: Result) -> str:
    titles = (
        "training", "decoder", "prompts", "tokens/forward", "positions/token", "tokens/s, times `Autoregressive`",
        "times `generate`", "same text as the base", "tokens before the first difference", "perplexity under the base",
    )  # fmt: skip
    rows = [
        [
            f"`{name}`",
            f"`{decoder}`",
            run["num_prompts"],
            f"{figures['tokens_per_forward']:.2f}",
            f"{figures['positions_per_token']:.1f}",
            _speed(figures, "autoregressive"),
            _speed(figures, "generate"),
            figures["identical"],
            f"{figures['common_prefix']:.0f}",
            f"{figures['perplexity_under_base']:.2f}",
        ]
        for name, run in results["runs"].items()
        for decoder, figures in run["decoders"].items()
    ]
    return markdown_table(titles, rows)


@table("refusion_pays solved", _path("refusion_pays", "solved.json"))
def _equations(results: Result) -> str:
    titles = ("model", "decoder", "solved", "ended", "equations", "of which right in %", "points more than the base")
    base = results["models"]["base"]
    rows = [
        [
            name,
            f"`{model['decoder']}`",
            model["num_solved"],
            model["num_ended"],
            sum(every for _, every in solved.num_equations(model)),
            _interval(solved.right_share(model)),
            "" if model is base else _interval(solved.right_share(model, base)),
        ]
        for name, model in results["models"].items()
    ]
    return markdown_table(titles, rows)


def _interval(interval: Interval) -> str:
    return f"{interval.estimate:.0f} ({interval.low:.0f} to {interval.high:.0f})"


@table("refusion_pays levers", _path("refusion_pays", "levers.json"))
@table("refusion_pays adapters", _path("refusion_pays", "adapters.json"))
@table("refusion_pays ablation", _path("refusion_pays", "ablation.json"))
@table("refusion_pays slots", _path("refusion_pays", "slots.json"))
@table("refusion_pays further", _path("refusion_pays", "further.json"))
def _levers(results: Result) -> str:
    titles = (
        "training", "steps", "positions", "decoder", "tokens/forward", "positions/token",
        "tokens/s, times `Autoregressive`", "tokens before the first difference", "perplexity under the base",
    )  # fmt: skip
    reference = "base, Autoregressive"
    recipes = list(results["recipes"].items())
    shown = [("none", recipes[0][1], reference)]
    shown += [(name, run, decoder) for name, run in recipes for decoder in run["decoders"] if decoder != reference]
    rows = []
    for name, run, decoder in shown:
        figures = run["decoders"][decoder]
        rows.append(
            [
                name,
                "" if name == "none" else run["num_steps"],
                "" if name == "none" else run["num_positions"],
                f"`{decoder}`",
                f"{figures['tokens_per_forward']:.2f}",
                f"{figures['positions_per_token']:.1f}",
                _speed(figures, "autoregressive"),
                f"{figures['common_prefix']:.0f}",
                f"{figures['perplexity_under_base']:.2f}",
            ]
        )
    return markdown_table(titles, rows)


def _speed(figures: Result, other: str, digits: int = 2) -> str:
    """Return a ratio of speeds, with its interval where there are prompts enough for one; empty if not measured."""
    ratio, interval = (figures.get(f"speed_over_{other}{suffix}") for suffix in ("", "_95"))
    shown = "" if ratio is None else f"{ratio:.{digits}f}"
    return shown if interval is None else f"{shown} ({interval[0]:.{digits}f} to {interval[1]:.{digits}f})"


_CONTROLLED, _MORE = _path("controlled_comparison"), _path("controlled_comparison", "more.json")


@table("controlled_comparison", _CONTROLLED, _MORE, file=_path("controlled_comparison", "table.md"))
def _controlled(results: Result, more: Result) -> str:
    return controlled.table(results["runs"], more)


@table("controlled_comparison families", _CONTROLLED)
def _families(results: Result) -> str:
    return controlled.best(results["runs"], controlled.FAMILIES, controlled.TASKS)


@table("controlled_comparison successors", _CONTROLLED)
def _successors(results: Result) -> str:
    first = [run for run in results["runs"] if run["seed"] == 0]
    return controlled.best(first, controlled.SUCCESSORS, ("sheet", "walk"))


_SPEEDS = _path("controlled_comparison", "speeds.json")


@table("controlled_comparison noises on sheet", _CONTROLLED, _SPEEDS)
def _noises_on_sheet(results: Result, speeds: Result) -> str:
    return controlled.noises(results["runs"], speeds, "sheet")


@table("controlled_comparison noises on walk", _CONTROLLED, _SPEEDS)
def _noises_on_walk(results: Result, speeds: Result) -> str:
    return controlled.noises(results["runs"], speeds, "walk")


@table("controlled_comparison choices", _CONTROLLED, _SPEEDS)
def _choices(results: Result, speeds: Result) -> str:
    return controlled.choices(results["runs"], speeds)


@table("controlled_comparison untrained", _MORE)
def _untrained(more: Result) -> str:
    return controlled.untrained(more)


@table("decoder_families", _path("decoder_families"), file=_path("decoder_families", "table.md"))
def _decoder_families(results: Result) -> str:
    return decoder_families.table(results["rows"])


@table("hard_tests mutation", _path("hard_tests", "mutation_seed1.json"))
def _mutation(results: Result) -> str:
    later = sum(mutant["num_tests"] is None and mutant["status"] == "killed" for mutant in results["mutants"])
    killed, total = results["all"]["num_killed"], results["all"]["num_mutants"]
    labels = {
        "first pass: at most 8 hypothesis examples, and the shortest tests up to 40 seconds per mutant": killed - later,
        f"with new tests for {later} survivors (`num_tests: null` in the JSON)": killed,
    }
    rows = []
    for label, count in labels.items():
        found_in = wilson(count, total)
        interval = f"{100 * found_in.low:.0f} to {100 * found_in.high:.0f} %"
        rows.append([label, f"{count} of {total}", f"{100 * count / total:.0f} %", interval])
    return markdown_table(["tests", "killed", "share", "95 % interval (Wilson)"], rows)


def _wilson(row: Result, digits: int = 2) -> str:
    """Return a score of right and wrong answers with Wilson's interval."""
    found = wilson(round(row["score"] * row["num_prompts"]), row["num_prompts"])
    return f"{found.estimate:.{digits}f} ({found.low:.{digits}f} to {found.high:.{digits}f})"


@table("infilling", _path("infilling"))
def _infilling(results: Result) -> str:
    rows_by_case = {(row["task"], row["test"], row["mask_pattern"], row["decoder"]): row for row in results["rows"]}
    decoders = ("one_token", "one_slot", "certain", "less_certain")
    rows = []
    for task, test in (("additions", "holes"), ("records", "holes"), ("records", "plain")):
        for pattern in ("independent", "grouped"):
            cells = (rows_by_case[task, test, pattern, decoder] for decoder in decoders)
            figures = [f"{_wilson(cell)}, {cell['tokens_per_forward']:.1f}" for cell in cells]
            name = "template" if test == "holes" else test
            rows.append([f"{task}, {name}", f"`{pattern}`", *figures])
    return markdown_table(["test", "trained with", *(f"`{name}`" for name in decoders)], rows)


@table("latin_study", _path("latin_study"), file=_path("latin_study", "table.md"))
def _latin(results: Result) -> str:
    return latin.table(results)


@table(
    "main_results",
    _path("main_results"),
    _path("main_results", "published.json"),
    file=_path("main_results", "table.md"),
)
def _main_results(results: Result, published: Result) -> str:
    return main_results.table(results["results"], published)


@table("objective", _path("objective"))
def _objective(results: Result) -> str:
    points: dict[tuple[float, float], dict[str, Result]] = {}
    for row in results["rows"]:
        weights = tuple(row[f"model.objective.init_args.{name}_weight"] for name in ("ar", "mdm"))
        points.setdefault(weights, {})[row["decoder"]] = row
    rows = []
    for (next_token, masked), by_decoder in points.items():
        cells = (by_decoder[name] for name in ("refusion", "refusion_bold"))
        figures = [text for cell in cells for text in (_wilson(cell, 3), f"{cell['tokens_per_forward']:.2f}")]
        rows.append([f"{next_token:g}", f"{masked:g}", *figures])
    head = ["AR weight", "MDM weight (lambda)"]
    head += [text for threshold in (0.9, 0.3) for text in (f"score, thresholds {threshold}", "tokens/forward")]
    return markdown_table(head, rows)


@table("precision", _path("precision"))
def _precision(results: Result) -> str:
    rows = [
        [
            f"{run['learning_rate']:.0e}".replace("e-0", "e-"), f"`{run['precision']}`", run["weights"],
            f"{run['val_loss_before']:.2f}", f"{run['val_loss']:.2f}", f"{100 * run['unchanged_weights']:.0f} %",
        ]
        for run in results["runs"].values()
    ]  # fmt: skip
    head = ["learning rate", "`precision`", "weights", "loss before", "loss after", "unchanged weights"]
    return markdown_table(head, rows)


_ORDERS = {
    "sequential": "sequential", "random": "random", "confidence": "highest confidence",
    "best next (beam of 1)": "best next slot (beam of 1)", "beam of 4": "beam of 4",
    "tree search, 8 simulations": "tree search, 8 simulations",
    "ReFusion, all certain slots": "`ReFusion`, all above the threshold", "from the known end": "from the known end",
}  # fmt: skip
"""Orders of slots as they are named in slot_order's JSON, and in its table."""


@table("slot_order", _path("slot_order"))
def _slot_order(results: Result) -> str:
    figures, rows = results["results"], []
    for name, label in _ORDERS.items():
        walk = figures["walk"][name]
        row = [label, f"{walk['score_forwards']:.2f}", f"{walk['score_backwards']:.2f}"]
        for task in ("latin", "sudoku"):
            one = figures[task].get(name)
            row += (
                [f"{one['score']:.2f}", f"{one['tokens_per_forward']:.2f}", f"{one['positions_per_token']:.0f}"]
                if one
                else [""] * 3
            )
        latin_squares = figures["latin"].get(name)
        rows.append([*row, f"{latin_squares['share_in_text_order']:.2f}" if latin_squares else ""])
    head = ["order", "walk, known first", "walk, known last", "latin", "t/f", "p/t", "sudoku", "t/f", "p/t"]
    return markdown_table([*head, "in text order"], rows)


@table("policy_additions", _path("policy_additions"))
def _policy_additions(results: Result) -> str:
    runs = {f"seed {seed}": run for seed, run in results["results"].items()}
    return markdown_table(policy.HEAD, policy.rows(results["before"], {**runs, "mean": {"after": results["mean"]}}))


def _policy_curves(results: Result) -> policy.Curves:
    return policy.curves({f"seed {seed}": run for seed, run in results["results"].items()})


@table("policy_estimators", _path("policy_estimators"))
@table("policy_estimators longer", _path("policy_estimators", "longer.json"))
@table("policy_estimators other start", _path("policy_estimators", "other_start.json"))
@table("policy_estimators sheet", _path("policy_estimators", "sheet.json"))
@table("policy_estimators latin", _path("policy_estimators", "latin.json"))
def _estimators(results: Result) -> str:
    runs = _by_estimator(results)
    for name, mean in results["means"].items():
        runs[f"`{name}`, mean of {len(results['results'][name])}"] = mean
    rows = policy.rows(results["before"], runs)
    against = [["", ""], *(list(run["against_exact"].values()) for run in runs.values())]
    cells = [
        [f"{interval[0]:+.1f}, {interval[1]:+.1f} to {interval[2]:+.1f}" if interval else "" for interval in pair]
        for pair in against
    ]
    head = [*policy.HEAD, "left to right, against exact", "thresholds, against exact"]
    return markdown_table(head, [[*row, *pair] for row, pair in zip(rows, cells, strict=True)])


@table("policy_estimators gradients", _path("policy_estimators", "gradients.json"))
def _policy_gradients(results: Result) -> str:
    rows = []
    for name, figures in results["results"].items():
        step = figures["steps"]["0.02"]
        measured = f"{step['slope']:.2f} ± {1.96 * step['standard_error']:.2f}"
        ratio = f"{figures['signal'] / figures['noise']:.3f}"
        rows.append([name, f"{figures['signal']:.5f}", f"{figures['noise']:.5f}", ratio, f"{step['back']:.3f}",
                     f"{step['ahead']:.3f}", measured])  # fmt: skip
    head = ["roll-outs", "signal", "noise", "signal/noise", "reward a step back", "a step ahead", "slope of the reward"]
    return markdown_table(head, rows)


@table("policy_real", _path("policy_real"))
def _policy_real(results: Result) -> str:
    names = ("overlong", "length", "entropy", "rollout_seconds")
    runs, rows = results["results"], []
    for first in range(0, results["config"]["num_updates"], 4):
        parts = [run["curve"][first : first + 4] for run in runs.values()]
        rewards = [f"{fmean(point['reward'] for point in part):.2f}" for part in parts]
        means = [f"{fmean(point[name] for part in parts for point in part):.2f}" for name in names]
        rows.append([f"{parts[0][0]['step']} to {parts[0][-1]['step']}", *rewards, *means])
    head = [*(f"reward, {name}" for name in runs), "at the limit", "tokens", "entropy", "seconds of roll-out"]
    return markdown_table(["updates", *head], rows)


@table("policy_real test", _path("policy_real"))
def _policy_real_test(results: Result) -> str:
    runs, rows = [run["after"] for run in results["results"].values()], []
    for name, after in results["mean"].items():
        before = results["before"][name]["mean"]
        change, low, high = (bound / 100 for bound in after["difference_in_points"])
        means = [f"{run[name]['mean']:.2f}" for run in runs]
        rows.append([name, f"{before:.2f}", *means, f"{change:+.2f}, {low:+.2f} to {high:+.2f}"])
    lengths = [run["reward"]["num_tokens"] for run in (results["before"], *runs)]
    rows.append(["tokens per answer", *(f"{length:.1f}" for length in lengths), ""])
    head = ["mean over test questions", "before", *results["results"], "mean of the seeds, difference (95 %)"]
    return markdown_table(head, rows)


def _by_estimator(results: Result) -> dict[str, Any]:
    results_by_name = results["results"].items()
    return {f"`{name}`, seed {seed}": run for name, runs in results_by_name for seed, run in runs.items()}


_CONVERSION = (_path("real_conversion"), _path("real_conversion", "longer.json"))


@table("real_conversion", *_CONVERSION, file=_path("real_conversion", "table.md"))
def _conversion(results: Result, longer: Result) -> str:
    return conversion.markdown(conversion.joined(results, longer))


@table("real_conversion cost", *_CONVERSION)
def _conversion_cost(results: Result, longer: Result) -> str:
    trainings = conversion.joined(results, longer)["trainings"]
    rows = [
        [f"`{name}`", training["num_positions"], f"{training['positions_per_processor_second']:.0f}",
         f"{training['cost_since_last_start']['peak_memory_gb']:.1f}"]
        for name, training in trainings.items()
    ]  # fmt: skip
    return markdown_table(["training", "positions", "positions per processor second", "peak memory (GB)"], rows)


_LOSSLESS_MACHINES = {"EPYC": "results.json", "Xeon": "results_xeon.json", "faster EPYC": "results_fast_epyc.json"}
_LOSSLESS = tuple(_path("lossless", name) for name in _LOSSLESS_MACHINES.values())
_LOSSLESS_PROMPTS = {"GSM8K": "GSM8K", "own.jsonl": "chat", "HumanEval": "HumanEval", "MBPP": "MBPP"}


def _lossless_runs(machines: Sequence[Result], prompts: str, decoder: str) -> list[Result]:
    """Return a decoder's figures in float32, one prompt at a time, on every machine."""
    key = ("float32", prompts, "speed")
    return [
        next(run for run in results["runs"] if (run["dtype"], run["prompts"], run["part"]) == key)["decoders"][decoder]
        for results in machines
    ]


def _range(values: Sequence[float]) -> str:
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return low if low == high else f"{low} to {high}"


def _lossless_machines(decoder: str, *machines: Result) -> str:
    """Return a decoder's figures on all machines, with the range over machines."""
    rows = []
    for prompts, title in _LOSSLESS_PROMPTS.items():
        runs = _lossless_runs(machines, prompts, decoder)
        cells = []
        for run in runs:
            low, high = run["speed_over_autoregressive_95"]
            cells.append(f"{run['speed_over_autoregressive']:.2f} ({low:.2f} to {high:.2f})")
        rows.append(
            [
                title,
                _range([run["tokens_per_forward"] for run in runs]),
                *cells,
                _range([run["speed_over_autoregressive"] for run in runs]),
            ]
        )
    head = ["prompts", "tokens/forward", *(f"times, {name}" for name in _LOSSLESS_MACHINES), "range"]
    return markdown_table(head, rows)


table("lossless summary", *_LOSSLESS)(partial(_lossless_machines, "auto"))
table("lossless two_forwards", *_LOSSLESS)(partial(_lossless_machines, "two_forwards"))


@table("lossless generate", *_LOSSLESS)
def _lossless_generate(*machines: Result) -> str:
    """Return speeds over transformers' `generate` on all machines: the baseline's and the default's."""
    decoders = {"Autoregressive": "`Autoregressive`", "auto": "`auto`"}
    rows = [
        [title, label, *(_speed(run, "generate") for run in _lossless_runs(machines, prompts, decoder))]
        for prompts, title in _LOSSLESS_PROMPTS.items()
        for decoder, label in decoders.items()
    ]
    return markdown_table(["prompts", "decoder", *(f"times `generate`, {name}" for name in _LOSSLESS_MACHINES)], rows)


@table("lossless range", *_LOSSLESS)
def _lossless_range(*machines: Result) -> str:
    """Return the default's range over machines."""
    rows = []
    for prompts, title in _LOSSLESS_PROMPTS.items():
        runs = _lossless_runs(machines, prompts, "auto")
        ratios = [run["speed_over_autoregressive"] for run in runs]
        rows.append([title, _range([run["tokens_per_forward"] for run in runs]), _range(ratios)])
    return markdown_table(["prompts", "tokens/forward", "times `Autoregressive`, three machines"], rows)


@table("lossless exactness", _path("lossless"))
def _lossless_exactness(results: Result) -> str:
    """Return how many texts of GSM8K equal the texts of `Autoregressive`, by type and batch size."""
    kinds = ("float32", "bfloat16, batch-invariant", "bfloat16")
    runs = {(run["dtype"], run["part"]): run for run in results["runs"] if run["prompts"] == "GSM8K"}
    rows = []
    for kind in kinds:
        alone, batch = runs[kind, "speed"], runs[kind, "text"]
        rows += [
            [
                kind,
                f"`{name}`",
                *(f"{run['decoders'][name]['identical']} of {run['num_prompts']}" for run in (alone, batch)),
            ]
            for name in ("auto", "two_forwards", "single_forward")
        ]
    return markdown_table(["type", "`layout`", "same text, alone", "same text, batches of 16"], rows)


@table("refusion_pays summary", _path("refusion_pays", "convert.json"))
def _refusion_pays_summary(results: Result) -> str:
    """Return the first and the last round; details.md has all rounds."""
    names = {"windows of 4": "1", "windows of 4, fourth round": "4"}
    decoders = {
        "SelfSpeculative, one slot": "`SelfSpeculative`, one slot",
        "ReFusion mask 8x4": "`ReFusion`, `infill: mask` (the paper's), 4 slots of 8 at once",
        "ReFusion bonus 32x1": "`ReFusion`, `infill: bonus`, 1 slot of 32 at a time",
    }
    rows = [
        [
            number,
            decoders[decoder],
            f"{figures['tokens_per_forward']:.2f}",
            _speed(figures, "autoregressive"),
            f"{figures['perplexity_under_base']:.2f}",
        ]
        for run, number in names.items()
        for decoder, figures in results["runs"][run]["decoders"].items()
        if decoder in decoders
    ]
    head = ["rounds", "decoder", "tokens/forward", "tokens/s, times `Autoregressive`", "perplexity under the base"]
    return markdown_table(head, rows)


_STARTS = {
    "40 updates": "results.json",
    "200 updates": "longer.json",
    "40 updates, another start model": "other_start.json",
    "30 updates on sheets": "sheet.json",
    "20 updates on Latin squares": "latin.json",
}


@table("policy_estimators summary", *(_path("policy_estimators", name) for name in _STARTS.values()))
def _estimators_summary(*files: Result) -> str:
    """Return the score from left to right before and after, means over three seeds."""
    rows = []
    for name, results in zip(_STARTS, files, strict=True):
        scores = [100 * results["before"]["left to right"]["score"]]
        row = [name, f"{scores[0]:.1f}"]
        for likelihood in ("exact", "coupled", "mean_field", "trajectory"):
            mean = results["means"].get(likelihood)
            change = mean and mean["after"]["left to right"]["difference_in_points"]
            row.append(f"{change[0]:+.1f} ({change[1]:+.1f} to {change[2]:+.1f})" if change else "")
        rows.append(row)
    return markdown_table(["training", "start", "`exact`", "`coupled`", "`mean_field`", "`trajectory`"], rows)


@table("real_conversion summary", *_CONVERSION)
def _conversion_summary(results: Result, longer: Result) -> str:
    return markdown_table(conversion.SUMMARY, conversion.summary(conversion.joined(results, longer)))


def _is_doubtful(source: str) -> bool:
    """Return whether a result's code cannot be restored: uncommitted changes, or a commit outside the history."""
    values = read(source)
    note = values.get("commit_note", "") if isinstance(values, dict) else ""
    return any(is_dirty for _, is_dirty in stamps(values)) or "not in the repository" in note


_RESULTS = [
    path.relative_to(ROOT).as_posix()
    for pattern in ("benchmarks/results/*.json", "experiments/*/*.json")
    for path in sorted(ROOT.glob(pattern))
]
_DOUBTFUL = tuple(filter(_is_doubtful, _RESULTS))


@table("to measure again", *_DOUBTFUL)
def _to_measure_again(*results: Any) -> str:  # noqa: ANN401 - JSON
    """Return the results whose code cannot be restored, with the reason."""
    rows = [
        [
            f"[{source.removeprefix('experiments/')}](../{source})",
            "uncommitted changes" if any(is_dirty for _, is_dirty in stamps(values)) else "commit not in the history",
        ]
        for source, values in zip(_DOUBTFUL, results, strict=True)
    ]
    return markdown_table(["result", "reason"], rows)


def _nothing(_: Result) -> str:
    """Return no text but the source: another program made the table beside, or there is none."""
    return ""


for _name in ("kv_reuse", "serial_blocks", "slot_certainty", "slot_size", "thresholds", "gsm8k_small"):
    table(f"{_name} source", _path(_name))(_nothing)
table("dependency_study source", _path("dependency_study"))(_nothing)


def _plot(experiment: str, name: str, data: Callable[..., Any], draw: Callable[[Any, Path], None]) -> None:
    PLOTS[_path(experiment, name)] = Plot(data, draw, (_path(experiment),))


_plot("latin_study", "scores.png", latin.points, latin.draw)
_plot("policy_estimators", "reward.svg", lambda results: policy.mean_curves(results["results"]), policy.draw)
for _picture, _source in (("sheets", "sheet"), ("squares", "latin")):
    PLOTS[_path("policy_estimators", f"{_picture}.svg")] = Plot(
        lambda results: policy.mean_curves(results["results"]),
        policy.draw,
        (_path("policy_estimators", f"{_source}.json"),),
    )
_plot("policy_additions", "reward.svg", _policy_curves, policy.draw)
_plot("policy_real", "reward.svg", lambda results: policy.curves(results["results"]), policy.draw)
PLOTS[_path("refusion_pays", "curve.svg")] = Plot(
    conversions.points,
    conversions.draw,
    (_path("refusion_pays", "training.json"), _path("refusion_pays", "convert.json")),
)
_plot("dependency_study", "dependency.png", lambda results: results["curves"], dependency.plot)
PLOTS[_path("controlled_comparison", "noise.png")] = Plot(
    lambda results, speeds: {task: controlled.noise_rows(results["runs"], speeds, task) for task in ("sheet", "walk")},
    controlled.draw_noises,
    (_CONTROLLED, _SPEEDS),
)
_plot(
    "controlled_comparison",
    "score_vs_tokens_per_forward.png",
    lambda results: controlled.drawn(results["runs"]),
    controlled.draw,
)


def _curves(name: str, results: Result, longer: Result) -> Any:  # noqa: ANN401 - JSON
    return conversion.curves(conversion.joined(results, longer))[name]


for _name in ("losses", *conversion.FIGURES):
    PLOTS[_path("real_conversion", f"{_name}.svg")] = Plot(
        partial(_curves, _name), partial(conversion.draw, _name), _CONVERSION
    )
