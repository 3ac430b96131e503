"""Make benchmarks/results/README.md from the results' JSON.

usage: python -m benchmarks.table
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS
from jsonargparse import auto_cli


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines) + "\n"


def machine(result: dict[str, Any]) -> str:
    """Say in a line where and from what a result comes."""
    known = result["environment"]
    hardware, git = known["hardware"], known["git"] or {}
    device = ", ".join(hardware["devices"]) or hardware["processor"] or hardware["machine"]
    commit = git.get("commit", "unknown")[:10] + (" and changes" if git.get("dirty") else "")
    return (
        f"{device}, {hardware['num_cpus']} cores, {hardware['num_threads']} thread(s), "
        f"torch {known['packages']['torch']}, transformers {known['packages']['transformers']}, commit {commit}"
    )


def case_rows(cases: list[dict[str, Any]]) -> Iterator[list[object]]:
    """Return a row for every run of every case of a decoding result."""
    for case in cases:
        for name, run in case["runs"].items():
            ratio = case["ratios"].get(f"{name.removesuffix(', batch 1')} / plain", "")
            share = run.get("share_of_bandwidth_limit")
            yield [
                case["case"], name, run["tokens_per_second"], run["tokens_per_forward"], ratio,
                "" if share is None else f"{share:.0%}",
            ]  # fmt: skip


def sections(results: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Return the page's parts."""
    aims = [
        [entry["aim"], entry["bound"], entry["value"], "yes" if entry["met"] else "no"]
        for result in results.values()
        for entry in result.get("aims", [])
    ]
    yield "## Aims\n\n" + table(["aim", "bound", "measured", "met"], aims)
    for name in results:
        if name == "decode" or name.startswith("gpu_qwen"):
            head = ["case", "decoder", "tokens/s", "tokens/forward", "times plain", "of bandwidth limit"]
            yield f"## {name}\n\n" + table(head, case_rows(results[name]["cases"]))
    yield from forward_costs(results)
    if "gpu_training" in results:
        rows = [
            [name, run["tokens_per_second"], f"{run['model_flop_utilisation']:.0%}", run["over_autoregressive"]]
            for name, run in results["gpu_training"]["runs"].items()
        ]
        head = ["objective", "tokens/s", "model-FLOP utilisation", "over autoregressive"]
        yield "## training on a GPU\n\n" + table(head, rows)
    if "overhead" in results:
        rows = [
            [name, f"{case['share_outside']:.1%}", *case["milliseconds_a_call"].values(),
             ", ".join(f"{place} {share:.1%}" for place, share in list(case["where_outside"].items())[:4])]
            for name, case in results["overhead"]["cases"].items()
        ]  # fmt: skip
        head = ["case", "outside body and head", "body (ms a call)", "head", "outside", "most of it in"]
        yield "## overhead\n\n" + table(head, rows)
    if "forwards" in results:
        rows = [list(case.values()) for case in results["forwards"]["cases"]]
        head = ["threads", "body", "positions a row", "1 row (ms)", "16 rows (ms)", "times the positions/s"]
        yield "## bare forwards\n\n" + table(head, rows)
    yield from scale(results)
    if "training" in results:
        rows = [
            [case, name, f"{run['median_seconds'] * 1e3:.1f}", run["extra_megabytes"],
             values["over_autoregressive"][name]]
            for case, values in results["training"]["cases"].items()
            for name, run in values["runs"].items()
        ]  # fmt: skip
        head = ["model", "objective", "milliseconds a step", "peak megabytes", "over autoregressive"]
        yield "## training\n\n" + table(head, rows)
        packing = results["training"]["packing"]
        rows = [
            [name, packing["shapes"][name], f"{run['median_seconds'] * 1e3:.1f}",
             packing["packed_over_padded"] if name == "packed" else ""]
            for name, run in packing["runs"].items()
        ]  # fmt: skip
        head = ["rows", "shape", "milliseconds a step", "over padded"]
        yield f"## packing ({packing['num_samples']} samples with lengths like GSM8K's)\n\n" + table(head, rows)
    if "training_memory" in results:
        rows = [
            [name, way, *(f"{found[n]['extra_megabytes']:.0f}" if n in found else "" for n in case["ways"]["ranges"]),
             case["bytes_a_token"] if way == "ranges" else ""]
            for name, case in results["training_memory"]["cases"].items()
            for way, found in case["ways"].items()
        ]  # fmt: skip
        lengths = [f"{n} tokens" for n in next(iter(results["training_memory"]["cases"].values()))["ways"]["ranges"]]
        head = ["objective", "what tokens see as", *lengths, "bytes a token"]
        yield "## training memory (megabytes of a step)\n\n" + table(head, rows)
    if "growth" in results:
        cases = results["growth"]["cases"]
        lengths = list(next(iter(cases.values()))["seconds_a_token"])
        rows = [
            [name, *(f"{value * 1e3:.2f}" for value in case["seconds_a_token"].values()), case["growth"]]
            for name, case in cases.items()
        ]
        text = table(["milliseconds a token", *(f"{n} tokens" for n in lengths), "growth"], rows)
        yield "## growth\n\n" + text + "\n![milliseconds a token against answer length](growth.png)\n"
    if "soak" in results:
        soak = results["soak"]
        text = (
            f"{soak['num_decodes']} decodes in {soak['minutes']:g} minutes: {soak['lowest_megabytes']} to "
            f"{soak['highest_megabytes']} MB, {soak['megabytes_an_hour']} MB an hour (straight line)."
        )
        yield "## soak\n\n" + text
    if "many_prompts" in results:
        found = results["many_prompts"]
        rows = [
            [name, case.get("num_answers", 0), case.get("cache_megabytes", ""), case.get("extra_megabytes", "")]
            for name, case in found["cases"].items()
        ]
        first, last = found["config"]["lengths"]
        title = f"## {found['config']['num_prompts']} prompts of {first} to {last} tokens\n\n"
        yield title + table(["memory", "answers", "megabytes of cache", "extra megabytes"], rows)
    if "startup" in results:
        cases = results["startup"]["cases"].items()
        rows = [[name, f"{case['processor_seconds']:.2f}", f"{case['seconds']:.2f}"] for name, case in cases]
        note = "Seconds on the clock include the time that the machine gave to other work.\n\n"
        yield "## startup\n\n" + note + table(["command", "seconds of the processor", "seconds on the clock"], rows)
    yield from memory(results)


def forward_costs(results: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Return the parts on measured and fixed costs of a forward."""
    for name in results:
        if name.startswith("forward_cost"):
            cases = results[name]["cases"]
            rows = [[size, *case["tokens_per_second"].values()] for size, case in cases.items()]
            costs = next(iter(cases.values()))["tokens_per_second"]
            head = ["batch size", *(f"`forward_cost: {cost}`" for cost in costs)]
            yield f"## {name} (tokens/s)\n\n" + table(head, rows)


def memory(results: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Return the parts on the memory of the loss and of loading."""
    if "loss_memory" in results:
        ways = results["loss_memory"]["ways"].items()
        rows = [[name, way["extra_megabytes"], way["seconds"]] for name, way in ways]
        yield "## loss memory\n\n" + table(["way", "extra megabytes", "seconds"], rows)
    if "layouts" in results.get("load_memory", {}):
        layouts = results["load_memory"]["layouts"].items()
        rows = [[name, layout["gigabytes"], layout["peak_over_weights"]] for name, layout in layouts]
        yield "## memory of loading\n\n" + table(["layout", "gigabytes of weights", "peak over weights"], rows)


def scale(results: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Return the parts on long prompts, shared prefixes, host time and batch sizes."""
    if "long_prompts" in results:
        found = results["long_prompts"]
        rows = [
            [length, name, f"{run['median_seconds'] * 1e3:.0f}", case["ratios"].get(name, ""),
             case["extra_megabytes"][name]]
            for length, case in found["cases"].items()
            for name, run in case["runs"].items()
        ]  # fmt: skip
        head = ["tokens", "prefill", "milliseconds", "over transformers", "extra megabytes"]
        text = f"\n{found['bytes_a_token']} bytes a token, processor time.\n"
        yield "## long prompts\n\n" + table(head, rows) + text
    if "shared_prefixes" in results:
        rows = [
            [case, *(f"{run['prompts_per_second']:.1f}" for run in values["runs"].values()),
             values["times_the_prompts"]]
            for case, values in results["shared_prefixes"]["cases"].items()
        ]  # fmt: skip
        yield "## shared prefixes\n\n" + table(["case", "shared (prompts/s)", "alone (prompts/s)", "times"], rows)
    if "host_time" in results:
        cases = results["host_time"]["cases"]
        lengths = list(next(iter(cases.values()))["lengths"])
        rows = [
            [case, *(one["milliseconds"] for one in values["lengths"].values()), values["growth"]]
            for case, values in cases.items()
        ]
        head = ["milliseconds a call", *(f"{n} cached" for n in lengths), "growth"]
        yield "## host time\n\n" + table(head, rows)
    if "batches" in results:
        cases = results["batches"]["cases"]
        rows = [[size, *case["tokens_per_second"].values()] for size, case in cases.items()]
        names = next(iter(cases.values()))["tokens_per_second"]
        yield "## batch sizes (tokens/s)\n\n" + table(["batch", *names], rows)


def main(directory: str = str(RESULTS)) -> None:
    """Write the table.

    Args:
        directory: Where the JSON is and the table goes.
    """
    results = {path.stem: json.loads(path.read_text()) for path in sorted(Path(directory).glob("*.json"))}
    lines = [
        "# Results",
        (
            "`python -m benchmarks.table` makes this page from the JSON beside it; run `nox -s bench` to measure. "
            "Every ratio is a median over rounds in which all its decoders ran, in random order, in one process. "
            "A text is the same for all ReFusion runs of a case; seconds, every repeat, config and versions are "
            "in the JSON."
        ),
        "\n".join(
            f"- {name}: {machine(result)}"
            for name, result in results.items()
            if "processor" in result.get("environment", {}).get("hardware", {})
        ),
        *sections(results),
    ]
    (Path(directory) / "README.md").write_text("\n\n".join(line.rstrip() for line in lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    auto_cli(main)
