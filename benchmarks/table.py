"""Make benchmarks/results/README.md from the results' JSON.

usage: python -m benchmarks.table
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS
from jsonargparse import auto_cli

Result = dict[str, Any]

SHOWN = {
    "refusion": "ReFusion", "refusion on transformers' body": "ReFusion, transformers' forward",
    "autoregressive": "Autoregressive", "generate": "generate",
}  # fmt: skip
"""What ``batches`` compares, as its plot and its table name it."""


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines) + "\n"


def machine(result: Result) -> str:
    """Say in a line where and from what a result comes."""
    known = result["environment"]
    hardware, git = known["hardware"], known["git"] or {}
    device = ", ".join(hardware["devices"]) or hardware["processor"] or hardware["machine"]
    commit = git.get("commit", "unknown")[:10] + (" **with uncommitted changes**" if git.get("dirty") else "")
    return (
        f"{device}, {hardware['num_cpus']} cores, {hardware['num_threads']} thread(s), "
        f"torch {known['packages']['torch']}, transformers {known['packages']['transformers']}, commit {commit}"
    )


def _field(value: object) -> object:
    """Return a value of a result, a name of a forward pass in the field's words."""
    if not isinstance(value, str):
        return value
    return value.replace("the fused body", "fused").replace("transformers' body", "transformers' forward")


def decoding(result: Result) -> str:
    rows = []
    for case in result["cases"]:
        for name, run in case["runs"].items():
            ratio = case["ratios"].get(f"{name.removesuffix(', batch 1')} / plain", "")
            share = run.get("share_of_bandwidth_limit")
            rows.append([
                case["case"], _field(name), run["tokens_per_second"], len(run["seconds"]), run["tokens_per_forward"],
                ratio, "" if share is None else f"{share:.0%}",
            ])  # fmt: skip
    head = ["case", "decoder", "tokens/s", "repeats", "tokens/forward", "times plain", "of bandwidth limit"]
    return table(head, rows)


def versions(result: Result) -> str:
    pairs = list(result["mean"])
    rows = [[case, *values["ratios"].values()] for case, values in result["cases"].items()]
    about = "\n".join(
        f"- {name}: commit {(one['commit'] or 'unknown')[:10]}, transformers {one['transformers']}"
        for name, one in result["contestants"].items()
    )
    texts = [one["reference_text"] for case in result["cases"].values() for sizes in case["contestants"].values()
             for one in sizes.values()]  # fmt: skip
    text = "All texts are the reference's." if all(texts) else "Some texts are not the reference's."
    note = f"{about}\n\nTimes as fast, by processor time. {text}\n\n"
    return note + table(["additions-clean", *pairs], [*rows, ["mean", *result["mean"].values()]])


def gpu_training(result: Result) -> str:
    rows = [
        [name, run["tokens_per_second"], f"{run['model_flop_utilisation']:.0%}", run["over_autoregressive"]]
        for name, run in result["runs"].items()
    ]
    return table(["objective", "tokens/s", "model-FLOP utilisation", "over autoregressive"], rows)


def overhead(result: Result) -> str:
    rows = [
        [name, f"{case['share_outside']:.1%}", *case["milliseconds_a_call"].values()]
        for name, case in result["cases"].items()
    ]
    rows.append(["mean", f"{result['mean_share_outside']:.1%}"] + [""] * 3)
    head = ["additions-clean", "outside backbone and LM head", "backbone (ms per call)", "LM head", "outside"]
    return table(head, rows)


def forwards(result: Result) -> str:
    note = "Fastest of all repeats. Ratio: the time of 16 forward passes of a row over a forward pass of 16 rows.\n\n"
    head = ["threads", "forward", "positions per row", "1 row (ms)", "16 rows (ms)", "times the positions/s"]
    return note + table(head, [[_field(value) for value in case.values()] for case in result["cases"]])


def long_prompts(result: Result) -> str:
    rows = [
        [length, name, f"{run['median_seconds'] * 1e3:.0f}", case["ratios"].get(name, ""),
         case["extra_megabytes"][name]]
        for length, case in result["cases"].items()
        for name, run in case["runs"].items()
    ]  # fmt: skip
    head = ["tokens", "prefill", "milliseconds", "over transformers", "extra megabytes"]
    return table(head, rows) + f"\n{result['bytes_a_token']} bytes per token, processor time.\n"


def shared_prefixes(result: Result) -> str:
    rows = [
        [case, *(f"{run['prompts_per_second']:.1f}" for run in values["runs"].values()), values["times_the_prompts"]]
        for case, values in result["cases"].items()
    ]
    return table(["case", "shared (prompts/s)", "alone (prompts/s)", "times"], rows)


def host_time(result: Result) -> str:
    cases = result["cases"]
    lengths = list(next(iter(cases.values()))["lengths"])
    rows = [
        [case, *(one["milliseconds"] for one in values["lengths"].values()), values["growth"]]
        for case, values in cases.items()
    ]
    return table(["milliseconds per call", *(f"{n} cached" for n in lengths), "growth"], rows)


def batches(result: Result) -> str:
    rows = []
    for size, case in result["cases"].items():
        prompts = [f"{case[name]['num_prompts'] / case[name]['median_seconds']:.0f}" for name in SHOWN]
        rows.append([size, *prompts, *(f"{case[name]['tokens_per_second']:.0f}" for name in SHOWN)])
    names = [name.replace("Autoregressive", "`Autoregressive`").replace("generate", "`generate`")
             for name in SHOWN.values()]  # fmt: skip
    head = ["batch size", *(f"{name} (prompts/s)" for name in names), *(f"{name} (tokens/s)" for name in names)]
    quality = ", ".join(
        f"{values['score']:.3f} and {values['tokens_per_prompt']:.1f} tokens ({SHOWN[name]})"
        for name, values in result["quality"].items()
    )
    return f"{table(head, rows)}\nMean score and length of an answer: {quality}.\n"


def linear(result: Result) -> str:
    names = ("num_tokens", "torch_milliseconds", "packed_milliseconds", "ratio", "joint_milliseconds", "joint_ratio")
    rows = [[dtype, *(case[name] for name in names)] for dtype in ("float32", "bfloat16") for case in result[dtype]]
    head = ["type", "tokens", "torch (ms, the fastest)", "packed weights", "torch / packed", "one product per input"]
    return table([*head, "packed / one product"], rows)


def shared_heads(result: Result) -> str:
    head = ["shape", "batch size", "queries", "heads apart (ms, the fastest)", "together", "ratio"]
    return table(head, [list(case.values()) for case in result["cases"]])


def fast_paths(result: Result) -> str:
    figures = [
        (name, way, ratio) for name, case in result["cases"].items() for way, ratio in case["without / with"].items()
    ]
    ways = list(dict.fromkeys(way for _, way, _ in figures))
    cells = {(name, way): ratio for name, way, ratio in figures}
    rows = [[name, *(cells.get((name, way), "") for way in ways)] for name in result["cases"]]
    note = (
        "Time without the fast path, over the time with it: above 1 it pays. `nothing` is the noise. The greedy choice "
        "in blocks of ids has since been replaced by numpy's argmax, which is not measured here yet.\n\n"
    )
    return note + table(["case", *ways], rows)


def head_candidates(result: Result) -> str:
    candidates = table(
        ["head", "candidates", "certified", "recall"], [list(row.values()) for row in result["certificates"]]
    )
    head = ["positions", "head", "ms, the fastest", "over the exact head"]
    return candidates + "\n" + table(head, [list(row.values()) for row in result["times"]])


def training(result: Result) -> str:
    rows = [
        [case, name, f"{run['median_seconds'] * 1e3:.1f}", run["extra_megabytes"], values["over_autoregressive"][name]]
        for case, values in result["cases"].items()
        for name, run in values["runs"].items()
    ]
    text = table(["model", "objective", "milliseconds per step", "peak megabytes", "over autoregressive"], rows)
    packing = result["packing"]
    rows = [
        [name, packing["shapes"][name], f"{run['median_seconds'] * 1e3:.1f}",
         packing["packed_over_padded"] if name == "packed" else ""]
        for name, run in packing["runs"].items()
    ]  # fmt: skip
    title = f"### Packing ({packing['num_samples']} samples with lengths like GSM8K's)\n\n"
    return f"{text}\n{title}{table(['rows', 'shape', 'milliseconds per step', 'over padded'], rows)}"


def precision(result: Result) -> str:
    rows = [
        [case, *(f"{run['median_seconds'] * 1e3:.1f}" for run in values["runs"].values()), values["over_float32"]]
        for case, values in result["cases"].items()
    ]
    has = "has" if result["has_instructions"] else "has no"
    head = ["work", "milliseconds in float32", "in bfloat16", "bfloat16 over float32"]
    about = f"The processor {has} instructions for bfloat16. Process time; what ran beside it was not recorded."
    return f"{about}\n\n{table(head, rows)}"


def training_memory(result: Result) -> str:
    rows = [
        [name, way, *(f"{figures[n]['extra_megabytes']:.0f}" if n in figures else "" for n in case["ways"]["ranges"]),
         case["bytes_a_token"] if way == "ranges" else ""]
        for name, case in result["cases"].items()
        for way, figures in case["ways"].items()
    ]  # fmt: skip
    lengths = [f"{n} tokens" for n in next(iter(result["cases"].values()))["ways"]["ranges"]]
    return "Megabytes of a step.\n\n" + table(["objective", "what tokens see as", *lengths, "bytes per token"], rows)


def growth(result: Result) -> str:
    cases = result["cases"]
    lengths = list(next(iter(cases.values()))["seconds_a_token"])
    rows = [
        [name, *(f"{value * 1e3:.2f}" for value in case["seconds_a_token"].values()), case["growth"]]
        for name, case in cases.items()
    ]
    text = table(["milliseconds per token", *(f"{n} tokens" for n in lengths), "growth"], rows)
    return text + "\n![milliseconds per token against answer length](growth.png)\n"


def soak(result: Result) -> str:
    return (
        f"{result['num_decodes']} decodes in {result['minutes']:g} minutes: {result['lowest_megabytes']} to "
        f"{result['highest_megabytes']} MB, {result['megabytes_an_hour']} MB per hour (straight line)."
    )


def many_prompts(result: Result) -> str:
    first, last = result["config"]["lengths"]
    note = f"{result['config']['num_prompts']} prompts of {first} to {last} tokens.\n\n"
    rows = [
        [name, case.get("num_answers", 0), case.get("cache_megabytes", ""), case.get("extra_megabytes", "")]
        for name, case in result["cases"].items()
    ]
    return note + table(["memory", "answers", "megabytes of cache", "extra megabytes"], rows)


def startup(result: Result) -> str:
    cases = result["cases"].items()
    rows = [[name, f"{case['processor_seconds']:.2f}", f"{case['seconds']:.2f}"] for name, case in cases]
    note = "Seconds on the clock include the time that the machine gave to other work.\n\n"
    return note + table(["command", "seconds of the processor", "seconds on the clock"], rows)


def loss_memory(result: Result) -> str:
    rows = [[name, way["extra_megabytes"], way["seconds"]] for name, way in result["ways"].items()]
    return table(["way", "extra megabytes", "seconds"], rows)


def policy_memory(result: Result) -> str:
    rows = [[name, part["bytes_an_answer"], part["planned"]] for name, part in result["parts"].items()]
    return table(["memory", "bytes per answer", "planned"], rows)


def load_memory(result: Result) -> str:
    sizes = ("small", "large")
    names = {"gigabytes": "GB of weights", "peak_over_weights": "peak over weights", "seconds": "seconds"}
    rows = [
        [name, *(layout[size][figure] for size in sizes for figure in names)]
        for name, layout in result["layouts"].items()
    ]
    return table(["checkpoint format", *(f"{size}: {name}" for size in sizes for name in names.values())], rows)


def encoding(result: Result) -> str:
    cases = result["milliseconds_per_sample"]
    rows = [[number, *case.values()] for number, case in cases.items()]
    return table(["added tokens", *(f"{way} (ms per sample)" for way in cases["0"])], rows)


def serve(result: Result) -> str:
    config = result["config"]
    rows = []
    for row in result["rows"]:
        first, per_token = row["first_token_seconds"], row["seconds_per_token"]
        rows.append([
            row["server"], row["clients"], row["tokens_per_second"], row["tokens_per_processor_second"],
            f"{row['share_of_other_threads']:.1%}",
            f"{first['p50']:.2f}, {first['p95']:.2f}", f"{per_token['p50']:.3f}, {per_token['p95']:.3f}",
            f"{row['same_text']} of {config['num_prompts'][str(row['clients'])]}",
        ])  # fmt: skip
    head = ["server", "clients", "tokens/s", "tokens per processor second", "other threads",
            "first token (s; p50, p95)", "per token (s; p50, p95)", "texts of `Autoregressive`"]  # fmt: skip
    return _load(config) + table(head, rows)


def _load(config: Result) -> str:
    loads = config["load_before"][0], config["load_after"][0]
    return f"Load of the machine before and after: {loads[0]:.1f} and {loads[1]:.1f}.\n\n"


def serve_soak(result: Result) -> str:
    low, high = result["megabytes_after_half_the_time"]
    names = ["answers", "calls", "given_up", "refused", "busy", "timed_out", "different", "lost"]
    head = ["minutes", *(name.replace("_", " ") for name in names), "megabytes after half the time"]
    row = [result["config"]["minutes"], *(result[name] for name in names), f"{low} to {high}"]
    return _load(result["config"]) + table(head, [row])


def llama_cpp(result: Result) -> str:
    """Return the speeds of llama.cpp and of two decoders on the same weights."""
    rows = [
        [name, f"{run['tokens_per_second']:.1f}", f"{run['tokens_per_forward']:.2f}", run["num_texts_as_llama_cpp_F32"]]
        for name, run in result["runs"].items()
    ]
    num_texts = len(result["config"]["questions"])
    return table(["program", "tokens/s", "tokens per forward pass", f"equal texts, of {num_texts}"], rows)


def weight_only(result: Result) -> str:
    """Return how fast products with rounded weights are, by number of positions."""
    kinds = dict.fromkeys(row["weights"] for row in result["times"])
    numbers = dict.fromkeys(row["positions"] for row in result["times"])
    times = {(row["weights"], row["positions"]): row for row in result["times"]}
    rows = [
        [kind, *(f"{times[kind, n]['milliseconds']:.1f} ({times[kind, n]['speed_over_float32']:.1f})" for n in numbers)]
        for kind in kinds
    ]
    return table(["weights", *(f"{n} position{'s' * (n > 1)}, ms (times float32)" for n in numbers)], rows)


def projection(result: Result) -> str:
    """Return measured beside predicted speeds, and the fitted constants."""
    rows = [
        [
            row["decoder"], row["batch_size"], row["prompt_length"], f"{row['tokens_per_call']:.1f}",
            f"{row['measured']:.1f}", f"{row['predicted']:.1f}", f"{row['ratio']:.2f}",
            "yes" if row["is_fitted"] else "no",
        ]
        for row in result["rows"]
    ]  # fmt: skip
    head = ["decoder", "batch size", "prompt", "tokens/call", "tokens/s", "predicted", "predicted : measured", "fitted"]
    constants = result["constants"]
    note = f" {result['note']}" if "note" in result else ""
    return table(head, rows) + (
        f"\nFitted: {constants['gigabytes_per_second']:.1f} GB/s, {constants['gigaflops']:.0f} GFLOPS, "
        f"{constants['launch_microseconds']:.0f} microseconds per launch. Largest error of a decoder that was not "
        f"fitted: {100 * result['largest_error']:.0f} %.{note}\n"
    )


SECTIONS: dict[str, Callable[[Result], str]] = {
    "versions": versions,
    "decode": decoding, "gpu_qwen": decoding, "batches": batches, "forwards": forwards,
    "overhead": overhead, "growth": growth, "long_prompts": long_prompts, "shared_prefixes": shared_prefixes,
    "host_time": host_time, "linear": linear, "shared_heads": shared_heads,
    "fast_paths": fast_paths, "head_candidates": head_candidates,
    "training": training, "gpu_training": gpu_training, "precision": precision,
    "training_memory": training_memory,
    "policy_memory": policy_memory, "loss_memory": loss_memory, "load_memory": load_memory, "encoding": encoding,
    "many_prompts": many_prompts, "startup": startup, "soak": soak, "serve": serve, "serve_soak": serve_soak,
    "projection": projection, "llama_cpp": llama_cpp, "weight_only": weight_only,
}  # fmt: skip
"""How a result is shown, by its name or the beginning of it, in the order of the page."""

COMPARED = {
    "versions": (
        "Equal: model (0.3 million parameters), prompts, settings, thread. Not equal: the forward pass, which is fused "
        "in ours; the version of transformers; and the batch: the released program decodes one prompt at a time, also "
        "beside our batches of 16."
    ),
    "decode": (
        "Equal in a case: model, thread, and for ReFusion and plain prompts and text. Not equal: `generate`, "
        "`autoregressive` and `llada` write other texts, on additions-clean of other lengths and to fewer prompts; "
        "plain, `generate` and the row that says so have transformers' forward, the others the fused one. Plain, the "
        "program that exports carry, makes 1.5 times the forward passes of the authors' program and 1.66 times ours."
    ),
    "batches": (
        "Equal: backbone, samples, training steps, prompts, length of the answers, thread. Not equal: the model, the "
        "text, and the forward pass, which `generate` and the column that says so have from transformers."
    ),
    "forwards": "Equal in a row: weights, positions, cache, threads. Not equal: the forward pass.",
    "overhead": "Equal: model, thread. Not equal: prompts and settings.",
    "growth": (
        "Equal: model, prompt, length, thread. Not equal: the text; ReFusion's schedule accepts all drafts, LLaDA "
        "makes one step per token."
    ),
    "long_prompts": (
        "Equal in a length: weights, prompt, thread. Not equal: the forward pass; ReFusion makes a second forward "
        "pass, of 8 positions."
    ),
    "shared_prefixes": "Equal in a row: model, prompts, text, thread. Not equal: sharing.",
    "host_time": "Equal: tokens, schedule. Not equal: entries in the cache; the model itself does nothing.",
    "linear": "Equal: weights, thread. Not equal: the layout of the weights.",
    "shared_heads": "Equal in a row: tensors, thread. Not equal: the calls of attention.",
    "fast_paths": "Equal in a row: weights, prompts, thread. Not equal: the fast path that is left out.",
    "head_candidates": "Equal: hidden states, weights. Not equal: the copy that proposes; times are of random weights.",
    "training": "Equal: backbone, samples, thread. Not equal: the objective, and with it the positions of a row.",
    "gpu_training": "Equal: backbone, samples. Not equal: the objective, and with it the positions of a row.",
    "precision": "Equal in a row: model, tokens, thread. Not equal: the type, and so the text.",
    "gpu_qwen": (
        "Equal in a case: weights, prompts, device, and for ReFusion and plain the text. Not equal: the text of "
        "`autoregressive` and `generate`; plain and `generate` have transformers' forward, the others the fused one."
    ),
    "llama_cpp": (
        "Equal: weights before rounding to 8 and 4 bits, prompts, length limit, thread. Not equal: the type of the "
        "weights, and so the text; texts are compared with llama.cpp's in float32."
    ),
    "weight_only": "Equal: shapes of the matrices, thread. Not equal: the type of the weights, and so the products.",
    "policy_memory": "Equal in a row: model, answers. Not equal: memory measured, and memory planned from the lengths.",
    "encoding": "Equal in a row: tokenizer, samples, tokens, thread. Not equal: how often the added tokens are read.",
    "load_memory": "Equal: size of the weights, shards, type. Not equal: the format.",
    "training_memory": (
        "Equal: model, tokens of a row, which block doubles. Not equal: objective, and the form of the mask."
    ),
    "loss_memory": "Equal: hidden states, LM head, labels, thread. Not equal: the chunks.",
    "many_prompts": "Equal: model, prompts. Not equal: bounds, and in the last two rows the available memory.",
    "serve": (
        "Equal: model, prompts, greedy texts, threads. Not equal: our servers decode 16 rows at a time, `transformers "
        "serve` one, or many by continuous batching."
    ),
}
"""What is equal in a part's comparison and what is not; ``ALONE`` compare nothing."""
ALONE = {"projection", "startup", "soak", "serve_soak"}


def sections(results: dict[str, Result]) -> Iterator[str]:
    """Yield the page's parts; every result has one.

    Raises:
        KeyError: If a result has none.
    """
    shown = {name: max((part for part in SECTIONS if name.startswith(part)), key=len, default="") for name in results}
    order = list(SECTIONS)
    for name in sorted(results, key=lambda name: (order.index(shown[name]) if shown[name] else -1, name)):
        title = name.replace("_", " ").capitalize()
        git = results[name].get("environment", {}).get("git") or {}
        doubts = ["Measured on a tree **with uncommitted changes**."] * bool(git.get("dirty"))
        doubts += [f"Note: {note}."] if (note := results[name].get("commit_note")) else []
        doubts += [COMPARED[shown[name]]] if shown[name] in COMPARED else []
        above = " ".join(doubts) + "\n\n" if doubts else ""
        yield f"## {title}\n\n{above}{SECTIONS[shown[name]](results[name])}"


def page(results: dict[str, Result]) -> str:
    """Return the page of all results."""
    lines = [
        "# Results",
        (
            "`nox -s figures` makes this page from the JSON beside it; run `nox -s bench` to measure. "
            "Unless a part says otherwise, the programs of a table ran in turns in one process, in a new random order "
            "in each round, a ratio is a median over rounds, and memory was measured in a separate process. Seconds, "
            "every repeat, config and versions are in the JSON."
        ),
        "\n".join(
            f"- {name}: {machine(result)}"
            for name, result in results.items()
            if "processor" in result.get("environment", {}).get("hardware", {})
        ),
        *sections(results),
    ]
    return "\n\n".join(line.rstrip() for line in lines) + "\n"


def main(directory: str = str(RESULTS)) -> None:
    """Write the page.

    Args:
        directory: Where the JSON is and the page goes.
    """
    results = {path.stem: json.loads(path.read_text()) for path in sorted(Path(directory).glob("*.json"))}
    (Path(directory) / "README.md").write_text(page(results), encoding="utf-8")


if __name__ == "__main__":
    auto_cli(main)
