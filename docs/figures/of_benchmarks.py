"""Tables of README and docs that show benchmarks, reference outputs of published programs, and random tests."""

from __future__ import annotations

from statistics import geometric_mean
from typing import Any

from benchmarks.batches import plot as draw_batches
from benchmarks.batches import rates
from benchmarks.growth import plot as draw_growth
from benchmarks.table import batches, llama_cpp, load_memory, projection, serve, serve_soak, weight_only
from benchmarks.table import table as markdown_table
from docs.figures.registry import PLOTS, Plot, table

from refusion_lit.reports.projection import DEVICES, MODELS

Result = dict[str, Any]


def _path(benchmark: str) -> str:
    return f"benchmarks/results/{benchmark}.json"


FUSED, UNFUSED = "refusion / plain", "refusion on transformers' body / plain"
"""Ratios of decode.json: a plain ReFusion against ours, with our fused forward and with transformers' in both."""


def mean_ratio(results: Result, ratio: str) -> str:
    """Return a ratio of decode.json: geometric mean and range over the six settings of the reference outputs."""
    cases = (case for case in results["cases"] if case["case"].startswith("additions-clean, setting"))
    golden = [case["ratios"][ratio] for case in cases if case["case"].endswith(", batch 1")]
    return f"{geometric_mean(golden):.2f} ({min(golden):.2f} to {max(golden):.2f})"


@table("decode summary", _path("decode"))
def _decode_summary(results: Result) -> str:
    rows = [
        ["a plain ReFusion, same text, our fused forward", "tokens/s : tokens/s", mean_ratio(results, FUSED)],
        [
            "a plain ReFusion, same text, transformers' forward in both", "tokens/s : tokens/s",
            mean_ratio(results, UNFUSED),
        ],
        [
            "transformers' `generate`, other texts", "speed-up : tokens per forward",
            mean_ratio(results, "tokens/s over generate's, divided by tokens per forward"),
        ],
    ]  # fmt: skip
    return markdown_table(["ReFusion compared with", "ratio", "mean of six settings (lowest to highest)"], rows)


table("batches", _path("batches"))(batches)


table("projection", _path("projection"))(projection)


@table("projection constants", _path("projection"))
def _projection_constants(results: Result) -> str:  # noqa: ARG001 - the constants stand in the package
    devices = [
        [
            f"`{name}`", f"{device.bytes_per_second / 1e9:.0f}", f"{device.operations_per_second / 1e12:.4g}",
            f"{device.launch_seconds * 1e6:.1f}", device.source,
        ]
        for name, device in DEVICES.items()
    ]  # fmt: skip
    models = [
        [
            f"`{name}`", f"{(size.num_body_weights + size.num_head_weights) / 1e9:.2f}",
            f"{2 * size.num_cache_values / 1024:.0f}", size.source,
        ]
        for name, size in MODELS.items()
    ]  # fmt: skip
    head = ["device", "GB/s", "TFLOPS", "microseconds per launch", "source"]
    return "\n".join([
        markdown_table(head, devices),
        markdown_table(["model", "billion weights read", "KB of cache per token, bfloat16", "source"], models),
    ])  # fmt: skip


@table("projection paper", _path("projection"))
def _projection_paper(results: Result) -> str:
    paper = results["paper"]
    shown = ("2", "2.5", "3")
    rows = [
        [
            f"`{row['device']}`", f"{row['qwen']:.0f}", f"{row['llada']:.0f}",
            *(f"{row['over_qwen'][number]:.2f}" for number in shown),
            *(f"{row['over_llada'][number]:.1f}" for number in shown),
        ]
        for row in paper["devices"]
    ]  # fmt: skip
    head = ["predicted for", "Qwen3-8B tokens/s", "LLaDA-8B tokens/s"]
    head += [f"ReFusion : Qwen3-8B at {number} tokens/forward" for number in shown]
    head += [f"ReFusion : LLaDA-8B at {number}" for number in shown]
    ratios = paper["published_ratios"]
    tasks = list(ratios["Qwen3-8B"])
    names = ("Qwen3-8B", "LLaDA-8B", "Dream-7B")
    published = [[name, *(ratios[name][task] for task in tasks)] for name in names]
    note = (
        f"Published, tokens/s of ReFusion over tokens/s of the other model; mean over Qwen3-8B "
        f"{paper['mean_over_qwen']:.2f}, geometric mean over LLaDA-8B and Dream-7B "
        f"{paper['geometric_mean_over_diffusion']:.1f}:\n"
    )
    return "\n".join([markdown_table(head, rows), note, markdown_table(["published", *tasks], published)])


table("serve", _path("serve"))(serve)
table("serve soak", _path("serve_soak"))(serve_soak)
table("serve soak loaded", _path("serve_soak_loaded"))(serve_soak)


@table("shared_prefixes", _path("shared_prefixes"))
def _shared_prefixes(results: Result) -> str:
    rows = [[case, values["times_the_prompts"]] for case, values in results["cases"].items()]
    return markdown_table(["decoder, batch size", "prompts/s shared : not shared"], rows)


@table("training_memory", _path("training_memory"))
def _training_memory(results: Result) -> str:
    rows = []
    for name, case in results["cases"].items():
        shared = case["ways"]["ranges"].keys() & case["ways"]["matrix"].keys()
        longest = max(shared, key=int)
        ranges, matrix = (case["ways"][way][longest]["extra_megabytes"] for way in ("ranges", "matrix"))
        rows.append([name, f"{case['bytes_a_token'] / 1000:.0f}", f"{matrix / ranges:.1f}"])
    return markdown_table(["objective", "KB per token", "memory with the matrix : without, 4096 tokens"], rows)


@table("policy_memory", _path("policy_memory"))
def _policy_memory(results: Result) -> str:
    rows = [
        [name, f"{part['bytes_an_answer'] / 2**20:.2f}", f"{part['planned'] / 2**20:.2f}"]
        for name, part in results["parts"].items()
    ]
    return markdown_table(["memory", "MB per answer", "planned"], rows)


@table("head times", _path("head_candidates"))
def _head_times(results: Result) -> str:
    times = {(row["head"], row["positions"]): row for row in results["times"]}
    positions = (1, 4, 16)
    rows = []
    for head in ("float32", "bfloat16", "int8", "rank 64", "rank 256"):
        cells = (times[head, number] for number in positions)
        rows.append([head, *(f"{cell['milliseconds']:.0f} ms, {cell['ratio']:.2f}" for cell in cells)])
    return markdown_table(["head", *(f"{n} position{'s' * (n > 1)}" for n in positions)], rows)


@table("positions per token", "experiments/demo/results.json")
def _positions_per_token(results: Result) -> str:
    size = 4096 * 2  # bytes of a position's hidden state: 4096 values in bfloat16
    rows = []
    for row in results["rows"]:
        if row["decoder"] in ("autoregressive", "refusion", "llada") and not row["mismatch"]:
            positions, trips = row["positions_per_token"], 1 / row["tokens_per_forward"]
            rows.append([f"`{row['decoder']}`", f"{positions:.1f}", f"{trips:.2f}", f"{positions * size / 1000:.0f}"])
    head = ["decoder", "positions per token", "round trips per token", "kilobytes per token (4096 values, bfloat16)"]
    return markdown_table(head, rows)


_PUBLISHED = {
    "LLaDA": "published/llada_generate", "Fast-dLLM on LLaDA": "published/fast_dllm_v1_llada",
    "Dream": "published/dream_generate", "Fast-dLLM on Dream": "published/fast_dllm_v1_dream",
    "Fast-dLLM v2": "published/fast_dllm_v2_generate", "SDAR": "published_2026/sdar_generate",
    "WeDLM 8B, engine": "published_2026/wedlm_engine", "WeDLM 7B, engine": "published_2026/wedlm_qwen2_engine",
    "Nemotron-Labs-Diffusion": "published_2026/nld_generate",
    "I-DLM": "published_2026/idlm_generate", "I-DLM in NeMo AutoModel": "published_2026/idlm_nemo_generate",
    "SDAR-MoE": "published_2026/sdar_moe_generate", "LLaDA2.0": "published_2026/llada2_generate",
    "LLaDA2.1": "published_2026/llada21_generate", "LLaDA2.1, rough model": "published_2026/llada21_editing",
    "LLaDA2.x in diffusers": "published_2026/llada2_diffusers",
}  # fmt: skip


_WRITTEN_ANEW = ("Nemotron-Labs-Diffusion", "I-DLM")
"""Programs that could not be run whole: their functions were written again from their sources."""


@table("published runs", *(f"tests/goldens/{name}.json" for name in _PUBLISHED.values()))
def _published_runs(*goldens: Result) -> str:
    rows = []
    sums = {"released programs": [0, 0], "both programs written out anew": [0, 0]}
    for program, golden in zip(_PUBLISHED, goldens, strict=True):
        is_anew = program in _WRITTEN_ANEW
        runs = golden["runs"]
        not_run = golden.get("settings_the_released_program_cannot_run", ())
        as_released = [run for run in runs if run["setting"] not in not_run]
        unmended = sum(run.get("released_program_output") is None for run in as_released)
        rows.append([program + ", written out anew" * is_anew, len(runs), f"{unmended} of {len(runs)}"])
        total = sums["both programs written out anew" if is_anew else "released programs"]
        total[0] += len(runs)
        total[1] += unmended
    rows += [[name, num_runs, f"{unmended} of {num_runs}"] for name, (num_runs, unmended) in sums.items()]
    head = ["program", "runs, faults mended", "runs that needed no mending"]
    return markdown_table(head, rows)


table("load_memory", _path("load_memory"))(load_memory)


def growth_costs(results: Result) -> Result:
    """Return seconds per token by decoder and answer length."""
    return {name: case["seconds_a_token"] for name, case in results["cases"].items()}


PLOTS[_path("growth").replace(".json", ".png")] = Plot(
    growth_costs,
    lambda costs, path: draw_growth({k: {int(n): s for n, s in v.items()} for k, v in costs.items()}, path),
    (_path("growth"),),
)


PLOTS[_path("batches").replace(".json", ".png")] = Plot(rates, draw_batches, (_path("batches"),))


table("llama_cpp", _path("llama_cpp"))(llama_cpp)
table("weight_only", _path("weight_only"))(weight_only)


@table("random_decodes", "experiments/hard_tests/random_decodes.json")
def _random_decodes(results: Result) -> str:
    cases = results["decoders"]
    fewest = min(case["decodes"] for case in cases.values())
    rows = [[len(cases), results["num_decodes"], results["num_prompts"], fewest, results["num_failures"]]]
    return markdown_table(["decoders", "decodes", "prompts", "fewest decodes of a decoder", "failures"], rows)
