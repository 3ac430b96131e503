"""Tables and plots of README, docs and experiments are what the committed JSON gives, and say what they are of."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from experiments.refusion_pays import solved

ROOT = Path(__file__).parents[2]
REPORTED = ("kv_reuse", "serial_blocks", "slot_certainty", "slot_size", "thresholds")
"""Experiments whose table.md and plot `refusion-lit report` makes, from predictions that are not committed."""


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the registry, filled."""
    monkeypatch.syspath_prepend(str(ROOT))
    from docs.figures import (
        pages,  # noqa: F401 # pyright: ignore[reportMissingImports,reportUnusedImport]
        registry,  # pyright: ignore[reportMissingImports]
    )

    return registry


@pytest.mark.usefixtures("registry")
def test_every_page_and_plot_is_what_the_json_gives() -> None:
    """If this fails, run ``nox -s figures``."""
    from docs.figures.__main__ import outdated  # pyright: ignore[reportMissingImports]

    assert [str(path.relative_to(ROOT)) for path in outdated()] == []


def test_another_figure_in_the_json_makes_another_page_and_plot(
    registry: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, page = registry.read, (ROOT / "README.md").read_text(encoding="utf-8")

    def changed(source: str) -> Any:
        return json.loads(re.sub(r'("score": \d\.\d*)', r"\g<1>1", json.dumps(read(source)).replace("0.984", "0.784")))

    plots = {name: plot for name, plot in registry.PLOTS.items() if "controlled" in name or "latin" in name}
    assert len(plots) == 2
    before = {name: registry.digest(plot.values()) for name, plot in plots.items()}
    monkeypatch.setattr(registry, "read", changed)
    filled = registry.fill(page, "README.md")
    assert "score: 0.784 |" in filled
    assert "score: 0.784 |" not in page
    assert all(registry.digest(plot.values()) != before[name] for name, plot in plots.items())


def test_each_table_is_shown_and_each_readme_names_its_source(registry: ModuleType) -> None:
    from docs.figures.pages import pages  # pyright: ignore[reportMissingImports]

    texts = {path: path.read_text(encoding="utf-8") for path in pages()}
    shown = {name for text in texts.values() for name in registry.names_in(text)} | set(registry.FILES.values())
    assert shown == set(registry.TABLES)
    for folder in sorted((ROOT / "experiments").glob("*/results.json")):
        page = folder.parent / "README.md"
        neighbours = page.parent.glob("*.md")
        source = f"`experiments/{folder.parent.name}/results.json` ("
        assert any(source in path.read_text(encoding="utf-8") for path in neighbours), f"{page} names no source"


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ("<!-- figures: demo -->\nno end", "expected <!-- end --> after each"),
        ("<!-- figures: demo -->\n<!-- figures: demo -->\n<!-- end -->", "expected <!-- end --> after each"),
        ("<!-- figures: dmo -->\n<!-- end -->", "expected <!-- figures: NAME --> with .*demo.*, got dmo"),
    ],
)
def test_a_wrong_marker_is_refused(registry: ModuleType, page: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"docs/a.md: {message}"):
        registry.fill(page, "docs/a.md")


def test_uncommitted_changes_show_in_the_table(registry: ModuleType) -> None:
    clean, dirty, gone = (letter * 40 for letter in "abc")
    result: dict[str, Any] = {"git": {"commit": clean, "dirty": False}}
    assert registry.provenance(result) == "commit aaaaaaaaaa"
    result["runs"] = [{"git": {"commit": dirty, "dirty": True}}, {"git": {"commit": gone, "dirty": False}}]
    result["commit_note"] = f"commit {gone[:10]} is not in the repository's history"
    text = "commit aaaaaaaaaa; **with uncommitted changes** to commit bbbbbbbbbb; "
    assert registry.provenance(result) == text + "commit cccccccccc is not in the repository's history"
    assert registry.provenance({"parts": []}) == "no commit recorded"
    page = (ROOT / "experiments" / "objective" / "README.md").read_text(encoding="utf-8")
    committed = registry.read("experiments/objective/earlier.json")["environment"]["git"]
    assert ("**with uncommitted changes**" in page) == committed["dirty"]


def test_a_picture_says_what_it_was_drawn_from(registry: ModuleType, tmp_path: Path) -> None:
    for name in ("experiments/latin_study/scores.png", "experiments/real_conversion/losses.svg"):
        plot, path = registry.PLOTS[name], tmp_path / Path(name).name
        assert registry.drawn_from(path) is None
        plot.draw(plot.values(), path)
        assert registry.drawn_from(path) is None, "a script that draws alone says nothing"
        registry.draw(plot, path)
        assert registry.drawn_from(path) == registry.digest(plot.values())
        registry.draw(plot, path)
        assert path.read_text(errors="ignore").count("<!-- data: ") == (path.suffix == ".svg")


def _git(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=False)


UNSTAMPED = {
    "experiments/lossless/drafter/drafter.json", "experiments/lossless/training.json",
    "experiments/main_results/published.json", "experiments/refusion_pays/training.json",
}  # fmt: skip
"""Files that no program of ours wrote as its result: two logs of trainings that say so, the paper's, a model's."""


def test_stamped_commits_are_in_the_history_or_the_file_says_that_they_are_not(registry: ModuleType) -> None:
    is_clone = (ROOT / ".git").exists() and shutil.which("git") is not None  # an sdist may lie in another repository
    if not is_clone or _git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("needs the whole history of the repository")
    listed = _git("ls-files", "benchmarks/*.json", "experiments/*.json").stdout.split()
    assert len(listed) > 40
    num_stamps, unstamped = 0, set()
    for name in listed:
        values = registry.read(name)
        unstamped |= {name} - {name for _ in registry.stamps(values)}
        note = values.get("commit_note", "")
        for commit in {commit for commit, _ in registry.stamps(values)}:
            num_stamps += 1
            is_kept = _git("merge-base", "--is-ancestor", commit, "HEAD").returncode == 0
            assert is_kept != (commit[:10] in note), (
                f"{name}: commit {commit} is {'' if is_kept else 'not '}an ancestor of HEAD; "
                f"measure again on a commit, or say so in commit_note, got {note!r}"
            )
    assert num_stamps > 40
    assert unstamped == UNSTAMPED


def test_all_benchmarks_of_this_machine_are_of_the_commit_that_the_page_names(registry: ModuleType) -> None:
    others = {"precision", "serve_slow_epyc", "shared_heads_xeon", "versions_slow_machine", "versions_xeon"}
    files = {path.stem: str(path) for path in (ROOT / "benchmarks" / "results").glob("*.json")}
    assert files.keys() > others
    measured = [registry.read(file)["environment"]["git"] for name, file in files.items() if name not in others]
    (commit,) = {git["commit"][:8] for git in measured}
    assert not any(git["dirty"] for git in measured)
    _says("docs/speed.md", f"all of commit {commit}, timed")


def test_sentences_on_a_processor_without_instructions_for_bfloat16(registry: ModuleType) -> None:
    found = registry.read("benchmarks/results/precision.json")
    step, alone, batch = (case["over_float32"] for case in found["cases"].values())
    assert list(found["cases"]) == ["training step", "decoding, batches of 1", "decoding, batches of 16"]
    assert not found["has_instructions"]
    _says(
        "docs/speed.md",
        f"a training step in mixed precision takes {step:.1f} times as long as in float32, decoding {alone:.1f} "
        f"times alone and {batch:.1f} times in batches of 16",
    )


def test_each_result_of_uncommitted_changes_says_so_where_it_is_shown(registry: ModuleType) -> None:
    from docs.figures.pages import pages  # pyright: ignore[reportMissingImports]

    shown = "".join(path.read_text(encoding="utf-8") for path in [*pages(), *ROOT.glob("experiments/*/table.md")])
    results = {
        name.relative_to(ROOT).as_posix(): registry.read(str(name)) for name in ROOT.glob("experiments/*/*.json")
    }
    dirty = {name for name, values in results.items() if any(changed for _, changed in registry.stamps(values))}
    assert len(dirty) > 5
    assert [name for name in dirty if f"`{name}` ({registry.provenance(results[name])})" not in shown] == []


NOT_COMPARED = {"dependency_study", "gsm8k_small", "hard_tests", "main_results"}
"""Experiments that compare nothing; `main_results` shows its own run apart from the published ones."""
COUNTED = {
    "aims", "published runs", "policy_memory", "serve soak", "random_decodes", "hard_tests mutation",
    "lossless random texts", "dependency_study source", "gsm8k_small source", "hard_tests earlier source",
}  # fmt: skip
"""Tables that compare no measurements: counts of tests, aims, a plan, sources."""


def test_comparisons_say_what_is_equal_and_what_is_not() -> None:
    """Each generated table has its caption between the table before and itself; that of the README follows it."""
    from benchmarks.table import ALONE, COMPARED, SECTIONS  # pyright: ignore[reportMissingImports]
    from docs.figures.pages import pages  # pyright: ignore[reportMissingImports]

    said = re.compile(r"Equal[^:.]*:\s[^.]+\.\s+Not\s+equal:\s")
    texts = {path.relative_to(ROOT): path.read_text(encoding="utf-8") for path in pages()}
    silent = {
        path.parent.name for path, text in texts.items() if path.parts[0] == "experiments" and not said.search(text)
    }
    assert silent == NOT_COMPARED
    models, _, own = (ROOT / "experiments" / "main_results" / "table.md").read_text(encoding="utf-8").partition("\n\n")
    assert all(line.count("(published)") == 1 for line in models.splitlines()[2:])
    assert "This run: " in own
    uncaptioned = set()
    for path, text in texts.items():
        parts = re.split(r"<!-- figures: (.+?) -->.*?<!-- end -->", text, flags=re.DOTALL)
        captions = parts[2::2] if path == Path("README.md") else parts[:-1:2]
        uncaptioned |= {name for name, caption in zip(parts[1::2], captions, strict=True) if not said.search(caption)}
    assert uncaptioned == COUNTED
    assert set(SECTIONS) - set(COMPARED) == ALONE
    assert all(said.search(text) for text in COMPARED.values())


def test_no_setting_is_chosen_on_the_test_prompts(registry: ModuleType) -> None:
    from experiments.controlled_comparison import plot  # pyright: ignore[reportMissingImports]

    runs = registry.read("experiments/controlled_comparison/results.json")["runs"]
    with pytest.raises(KeyError):
        plot.best(runs, [("soft tail", "soft_tail", "card_t")], ["sheet"])
    found = {task: plot.points(runs, task, "soft_tail")["card_t90_8"] for task in ("sheet", "walk")}
    shown = " | ".join(f"{score:.3f}, {speed:.1f}, {positions:.1f}" for speed, positions, score, _ in found.values())
    _says("experiments/controlled_comparison/README.md", f"| soft tail, CARD | {shown} |")


def test_figures_of_the_masked_model_in_other_experiments(registry: ModuleType) -> None:
    runs = registry.read("experiments/controlled_comparison/results.json")["runs"]
    squares = [run["results"] for run in runs if (run["task"], run["objective"]) == ("latin", "masked")]
    single, whole = (
        [f"{found[name]['score']:.2f}" for found in squares] for name in ("llada_1", "fast_dllm_whole_t90")
    )
    _says(
        "experiments/slot_order/README.md",
        f"has {single[0]}, {single[1]} and {single[2]} in three seeds with one token per step",
        f"{whole[0]}, {whole[1]} and {whole[2]} with a threshold over the whole canvas",
    )
    _says("experiments/latin_study/README.md", f"the masked one {whole[0]} ({whole[1]} and {whole[2]} with two further")


def test_figures_in_sentences_on_an_earlier_sample_of_mutants(registry: ModuleType) -> None:
    found = registry.read("experiments/hard_tests/mutation.json")
    first, last = (
        f"{found[name]['num_killed']} ({100 * found[name]['share_killed']:.1f} %)" for name in ("first_pass", "all")
    )
    _says("experiments/hard_tests/README.md", f"the first pass killed {first}, and {last} were killed with new tests")


def test_figures_in_sentences_on_thresholds(registry: ModuleType) -> None:
    results = registry.read("experiments/thresholds/results.json")["results"]
    at = [
        _range((found["score"] for name, found in results.items() if name.endswith(f"_t{share}")), 2)
        for share in (50, 90, 99)
    ]
    _says("experiments/thresholds/README.md", f"{at[0]} at 0.5, {at[1]} at 0.9, {at[2]} at 0.99")
    _says("docs/decoders/refusion.md", f"from {at[0]} at 0.5 to {at[2]} at 0.99")


def test_figures_in_sentences_of_other_pages(registry: ModuleType) -> None:
    squares = registry.read("experiments/latin_study/results.json")["results"]
    mixed, pairs = squares["hybrid, slots of 1, 2, 4 and 8"], squares["hybrid, slots of 2"]["one at a time"]
    one, two, four, eight = (
        f"{mixed[way]['score']:.2f}" for way in ("one at a time", "slots of 2", "slots of 4", "slots of 8")
    )
    _says(
        "docs/objectives/hybrid.md",
        f"completes {one} of the squares in slots of 1, {two} in slots of 2 ({pairs['score']:.2f} after",
        f"{four} in slots of 4 and {eight} in slots of 8",
    )
    rows = registry.read("experiments/infilling/results.json")["rows"]
    filled = {}
    for row in rows:
        if row["test"] == "holes":
            key = row["task"], row["mask_pattern"]
            filled[key] = max(filled.get(key, 0), row["score"])
    records, sums = (
        [f"{filled[task, pattern]:.2f}" for pattern in ("independent", "grouped")] for task in ("records", "additions")
    )
    _says(
        "docs/infilling.md",
        f"fill {records[0]} of the records' spans and `grouped` {records[1]}, of",
        f"of the additions' {sums[0]} and {sums[1]}",
    )
    drawn = registry.read("experiments/lossless/coupling.json")["temperatures"].values()
    shares = [f"{100 * found['shared_noise'] / found['rejection_sampling']:.0f}" for found in drawn]
    _says("docs/decoders/self_speculative.md", "accepted {}, {} and {} %".format(*shares))
    found = registry.read("benchmarks/results/head_candidates.json")["certificates"]
    heads = {(row["head"], row["candidates"]): row for row in found}
    _says(
        "docs/related.md",
        f"falls back in {100 * (1 - heads['int8', 16]['certified']):.1f} % of the reads",
        f"misses the best id in {100 * (1 - heads['rank 256', 256]['recall']):.0f} % of the reads",
    )
    rows = registry.read("benchmarks/results/head_candidates.json")["times"]
    copy = {row["positions"]: f"{row['ratio']:.2f}" for row in rows if row["head"] == "int8"}
    _says(
        "docs/related.md",
        f"it takes {copy[1]} times the head's time, with 4 positions {copy[4]} times, with 16 already {copy[16]} times",
    )
    longer = registry.read("experiments/policy_estimators/longer.json")["means"]["mean_field"]["against_exact"]
    points, high, low = (-value for value in longer["left to right"])
    means = registry.read("experiments/policy_estimators/latin.json")["means"]
    lost = [-means[name]["after"]["thresholds"]["difference_in_points"][0] for name in ("exact", "mean_field")]
    _says(
        "docs/rewards.md",
        f"the mean field is {points:.1f} points behind the exact likelihood ({low:.1f} to {high:.1f})",
        f"cost the thresholded one {min(lost):.0f} to {max(lost):.0f}",
    )


def test_commands_in_results_run_on_any_machine() -> None:
    """Their paths are relative to the repository: an absolute one is of the machine that measured."""
    results = [path for folder in ("experiments", "benchmarks") for path in sorted((ROOT / folder).rglob("*.json"))]
    stamped = [path for path in results if '"command"' in path.read_text(encoding="utf-8")]
    assert len(stamped) > 20
    absolute = re.compile(r'["=@](/(?!bin/|usr/)[\w.-]+/[^"\s]+)')
    found = {str(path.relative_to(ROOT)): absolute.findall(path.read_text(encoding="utf-8")) for path in stamped}
    assert {name: paths for name, paths in found.items() if paths} == {}


def test_figures_in_sentences_of_the_readme(registry: ModuleType) -> None:
    from docs.figures import of_benchmarks  # pyright: ignore[reportMissingImports]

    decode = registry.read("benchmarks/results/decode.json")
    mean = registry.read("benchmarks/results/versions.json")["mean"]
    alone, batched = (mean[f"this checkout / released program, batch {size}"] for size in (1, 16))
    first, longer = (registry.read(f"experiments/real_conversion/{name}.json") for name in ("results", "longer"))
    runs = [
        result["trainings"]["hybrid"]["decoders"]["refusion_8_t60"]["tokens_per_forward"] for result in (first, longer)
    ]
    own = registry.read("experiments/refusion_pays/convert.json")["runs"]["windows of 4, fourth round"]["decoders"]
    bonus, base = own["ReFusion bonus 32x1"], own["base, Autoregressive"]
    page = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    for sentence in (
        f"ReFusion decodes {of_benchmarks.mean_ratio(decode, of_benchmarks.FUSED)} times as fast as a plain",
        f"forward pass in both, it decodes {of_benchmarks.mean_ratio(decode, of_benchmarks.UNFUSED)} times as fast",
        f"Beside the released program it is {alone:.2f} times as fast, in batches of 16 {batched:.2f} times",
        (
            f"is {bonus['speed_over_autoregressive']:.2f} times as fast as `Autoregressive` on the base and makes "
            f"{bonus['tokens_per_forward']:.2f} tokens per forward pass"
        ),
        f"After training on human answers it makes {runs[0]:.2f} to {runs[1]:.2f}",
        f"perplexity of the base's own answers {base['perplexity_under_base']:.2f}",
    ):
        assert sentence in page, sentence


def _lossless(registry: ModuleType) -> dict[tuple[str, str, str], dict[str, Any]]:
    """Return the decoders of experiments/lossless by type, prompts and part."""
    runs = registry.read("experiments/lossless/results.json")["runs"]
    return {(run["dtype"], run["prompts"], run["part"]): run["decoders"] for run in runs if "decoders" in run}


def _says(path: str, *sentences: str) -> None:
    page = " ".join((ROOT / path).read_text(encoding="utf-8").split())
    assert [sentence for sentence in sentences if sentence not in page] == []


def _range(values: Iterable[float], digits: int) -> str:
    values = list(values)
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}"


def test_figures_in_sentences_of_policy_additions(registry: ModuleType) -> None:
    results = registry.read("experiments/policy_additions/results.json")
    runs = list(results["results"].values())
    seeds = [f"{100 * run['after']['left to right']['score']:.1f}" for run in runs]
    minutes = [f"{run['seconds'] / 60:.0f}" for run in runs]
    start, end, gained, speed = {}, {}, {}, {}
    for name, after in results["mean"].items():
        before = results["before"][name]
        start[name], end[name] = (f"{100 * figures['score']:.1f} %" for figures in (before, after))
        estimate, low, high = after["difference_in_points"]
        gained[name] = f"{estimate:.1f} points more", f"{low:.1f} to {high:.1f}"
        speed[name] = (
            f"{after['tokens_per_forward']:.2f} tokens per forward in place of {before['tokens_per_forward']:.2f}"
        )
    left, other = "left to right", "thresholds"
    again = registry.read("experiments/policy_additions/seed0_again.json")["results"]["0"]
    assert again["after"] == runs[0]["after"]
    rewards = [[point["reward"] for point in run["curve"]] for run in (again, runs[0])]
    assert rewards[0] == rewards[1]
    _says(
        "experiments/policy_additions/README.md",
        f"`seed0_again.json`, commit 1a472122), {again['seconds'] / 60:.0f} with other work",
        f"answers {end[left]} correctly (three seeds: {seeds[0]}, {seeds[1]} and {seeds[2]}), from {start[left]}",
        f"{gained[left][0]}, 95 % interval {gained[left][1]}",
        f"seeds 1 and 2 took {minutes[1]} and {minutes[2]} minutes beside one other job. Seed 0 took {minutes[0]}",
        f"from {start[other]} to {end[other]} ({', '.join(gained[other])}), with {speed[other]}",
    )


def test_figures_of_the_default_with_a_drafter(registry: ModuleType) -> None:
    epyc, slow = (
        registry.read(f"experiments/lossless/{name}.json")["types"] for name in ("default_epyc", "default_slow")
    )
    fast, dear = (
        [
            row["speed_over_autoregressive"]
            for values in types.values()
            for row in values["batches"]
            if row["batch_size"] == 1
        ]
        for types in (epyc, slow)
    )
    costs = [types["float32"]["forward_cost"] for types in (epyc, slow)]
    adapters = [*(found["forward_cost"]["adapters"] for found in epyc.values()), costs[1]["adapters"]]
    replayed = registry.read("experiments/lossless/rule.json")["prompts"].values()
    least = min(cost["speed"] for found in replayed for cost in found["decoders"]["default"].values())
    ratios = f"{_range(fast, 2)} times as fast as `Autoregressive` on this machine and {dear[0]:.2f} times on a"
    _says("README.md", ratios)
    _says(
        "experiments/lossless/README.md",
        ratios,
        f"{costs[0]['positions']} positions in float32 on the first machine, {costs[1]['positions']} on the second",
        f"adapters {min(adapters):.2f} to {max(adapters):.2f} of",
        f"loses {100 * (1 - least):.1f} % at most where positions are dearest",
    )


def test_figures_in_sentences_of_lossless(registry: ModuleType) -> None:
    def speeds(path: str, name: str) -> str:
        runs = registry.read(f"experiments/lossless/{path}.json")["runs"]
        found = {r["prompts"]: r["decoders"] for r in runs if (r["dtype"], r["part"]) == ("float32", "speed")}
        sets = ("GSM8K", "own.jsonl", "HumanEval", "MBPP")
        values = [f"{found[prompts][name]['speed_over_autoregressive']:.2f}" for prompts in sets]
        return f"{', '.join(values[:3])} and {values[3]}"

    lossless = _lossless(registry)
    exact, usual = (lossless[kind, "GSM8K", "speed"] for kind in ("bfloat16, batch-invariant", "bfloat16"))
    auto, plain = (
        [f"{each[name]['speed_over_generate']:.2f}" for each in (exact, usual)] for name in ("auto", "Autoregressive")
    )
    levers = registry.read("experiments/lossless/levers.json")["levers"]
    tree = [found["tree"][0] / found["two_forwards"][0] for found in levers["start"]["prompts"].values()]
    drawn, greedy, equal = (levers[name] for name in ("answers at 0.8", "as train.yaml", "decay 1"))
    steep = levers["decay 0.6"]
    middle, last = (
        [levers[f"reads the {layer} layer"]["prompts"][name]["single_forward"] for name in ("gsm8k", "mbpp")]
        for layer in ("middle", "last")
    )
    eight = levers["8 masks"]["prompts"]
    gains = [
        found["single_forward"] - greedy["prompts"][name]["single_forward"]
        for lever in levers.keys() - {"start", "as train.yaml"}
        for name, found in levers[lever]["prompts"].items()
    ]
    assert all(a < greedy["prompts"][name]["single_forward"] for a, name in zip(last, ("gsm8k", "mbpp"), strict=True))
    rates = [f"{each['prompts']['gsm8k']['single_forward']:.2f}" for each in (drawn, greedy)]
    sampled = [f"{each['sampled_tokens_per_forward']:.2f}" for each in (drawn, greedy)]
    both = lossless["float32, 2 threads", "GSM8K", "speed"]
    two, automatic = (f"{both[name]['speed_over_autoregressive']:.2f}" for name in ("two_forwards", "auto"))
    default = speeds("results", "auto").replace(" and ", ", ").split(", ")
    _says(
        "experiments/lossless/README.md",
        f"A tree of two branches needs no training and gains {_range(tree, 2)} times",
        f"{rates[0]} tokens per forward on GSM8K in place of {rates[1]}, at a temperature of 0.8 itself {sampled[0]} "
        f"in place of {sampled[1]}",
        f"(decay 1) make {equal['prompts']['gsm8k']['single_forward']:.2f} on GSM8K and "
        f"{equal['sampled_tokens_per_forward']:.2f} at 0.8",
        f"A decay of 0.6 makes {steep['prompts']['gsm8k']['single_forward']:.2f} and "
        f"{steep['sampled_tokens_per_forward']:.2f} at 0.8",
        f"middle layer make {middle[0]:.2f} and {middle[1]:.2f} on MBPP",
        f"the last layer make {last[0]:.2f} and {last[1]:.2f}, less than without. Eight masks make "
        f"{eight['gsm8k']['single_forward']:.2f} on GSM8K and {eight['own']['single_forward']:.2f} on own prompts, "
        f"where five make {greedy['prompts']['own']['single_forward']:.2f}: the sixth draft is accepted after "
        f"{100 * eight['gsm8k']['accepted_6']:.1f} % of GSM8K's tokens. **So no lever tried here raises the drafter's "
        f"tokens per forward by more than {max(gains):.2f} after forty steps.**",
        f"with two threads `two_forwards` is {two} times as fast on 25 questions, `auto` {automatic}; training",
        f"`auto` is then {auto[0]} times as fast as `generate`, which is not invariant, in place of {auto[1]}, and "
        f"`Autoregressive` {plain[0]} in place of {plain[1]}",
        f"{default[0]} on GSM8K, whose training questions the drafter has seen answered, {default[1]} on own prompts, "
        f"{default[2]} on HumanEval and {default[3]} on MBPP",
        f"`two_forwards` gains more, {speeds('results', 'two_forwards')}**",
        f"it made {speeds('results_xeon', 'two_forwards')}, and `auto`, the fastest there, "
        f"{speeds('results_xeon', 'auto')}",
    )

    def others(path: str, name: str) -> str:
        values = [float(value) for value in re.findall(r"[.\d]+", speeds(path, name))[1:]]
        return _range(values, 2)

    alone = lossless["float32", "GSM8K", "speed"]
    first, second = (
        [f"{alone[name][figure]:.2f}" for figure in ("tokens_per_forward", "speed_over_autoregressive")]
        for name in ("auto", "two_forwards")
    )
    _says(
        "experiments/lossless/README.md",
        f"in {first[0]} tokens per forward at {first[1]} times the tokens/s of `Autoregressive`; with "
        f"`layout: two_forwards` in {second[0]} at {second[1]} times",
        f"{others('results', 'auto')} times, with `two_forwards` {others('results', 'two_forwards')} times on this "
        f"machine and {others('results_xeon', 'two_forwards')} times on another",
    )


def test_figures_in_sentences_of_choose(registry: ModuleType) -> None:
    from experiments.real_conversion.table import joined  # pyright: ignore[reportMissingImports]

    text = _lossless(registry)["float32", "GSM8K", "text"]
    two, single = text["two_forwards"], text["single_forward"]
    rows = registry.read("experiments/demo/results.json")["rows"]
    demo = {row["decoder"]: row["tokens_per_forward"] for row in rows if not row["mismatch"]}
    trainings = joined(*(registry.read(f"experiments/real_conversion/{name}.json") for name in ("results", "longer")))
    decoders = {name: list(run["decoders"].values()) for name, run in trainings["trainings"].items()}
    (usual,) = decoders.pop("autoregressive")
    found = [decoder for each in decoders.values() for decoder in each]
    alone = _lossless(registry)["float32", "GSM8K", "speed"]
    speeds = [f"{alone[name]['speed_over_autoregressive']:.2f}" for name in ("two_forwards", "single_forward")]
    own = registry.read("experiments/refusion_pays/convert.json")["runs"]["windows of 4, fourth round"]["decoders"]
    perplexity = {name: f"{own[name]['perplexity_under_base']:.2f}" for name in own}
    assert two["identical"] == single["identical"] == 200
    _says(
        "docs/choose.md",
        f"the same text on all 200 with `layout: two_forwards` at {two['tokens_per_forward']:.2f} tokens per forward",
        f"and with `single_forward` at {single['tokens_per_forward']:.2f}; one prompt at a time, {speeds[0]} and "
        f"{speeds[1]} times the tokens/s of `Autoregressive`",
        f"{demo['fast_dllm']:.2f} by `FastDLLM`, {demo['refusion']:.2f} by `ReFusion`",
        (
            f"{_range((decoder['annotations_right'][0] for decoder in found), 0)} % of the sums in the answers are "
            f"right, against {usual['annotations_right'][0]:.0f} %. Solved problems, "
            f"{_range((decoder['score'][0] for decoder in found), 0)} % of {usual['num_prompts']}, do not differ"
        ),
        f"perplexity {perplexity['ReFusion bonus 32x1']} with `ReFusion` at "
        f"{own['ReFusion bonus 32x1']['tokens_per_forward']:.2f} tokens per forward, against "
        f"{perplexity['base, Autoregressive']}",
    )
    # What "do not differ" means: the intervals of all trainings overlap with that of next-token training.
    assert all(decoder["score"][1] <= usual["score"][2] for decoder in found)
    assert all(decoder["score"][2] >= usual["score"][1] for decoder in found)


def test_figures_in_sentences_of_convert(registry: ModuleType) -> None:
    from experiments.real_conversion.table import joined  # pyright: ignore[reportMissingImports]

    results = joined(*(registry.read(f"experiments/real_conversion/{name}.json") for name in ("results", "longer")))
    trainings, speed = results["trainings"], results["speed"]["rows"]
    own = registry.read("experiments/refusion_pays/convert.json")["runs"]["windows of 4, fourth round"]["decoders"]
    bonus, one_slot = own["ReFusion bonus 32x1"], own["SelfSpeculative, one slot"]
    first, longer = (trainings[name]["decoders"] for name in ("hybrid", "hybrid, longer"))
    out_of_order = [decoders["refusion_8_t60"] for decoders in (first, longer)]
    ratios = [speed[f"{name}/refusion_8_t60"]["ratio"] for name in ("hybrid", "hybrid, longer")]
    usual = trainings["autoregressive"]["decoders"]["autoregressive"]["annotations_right"]
    rates = [training["positions_per_processor_second"] for training in trainings.values()]
    assert len(trainings) == 6
    _says(
        "docs/convert.md",
        (
            f"makes {bonus['tokens_per_forward']:.2f} tokens per forward pass, "
            f"{bonus['speed_over_autoregressive']:.2f} times the tokens/s of `Autoregressive` on the base and "
            f"{bonus['speed_over_generate']:.2f} times those of transformers' `generate`; `SelfSpeculative` makes "
            f"{one_slot['tokens_per_forward']:.2f}, at {one_slot['speed_over_autoregressive']:.2f} times"
        ),
        (
            f"answers gave {longer['refusion_8_t60']['tokens_per_forward']:.2f} and "
            f"{longer['self_speculative_8']['tokens_per_forward']:.2f} tokens"
        ),
        f"makes {_range((decoder['tokens_per_forward'] for decoder in out_of_order), 2)} tokens per forward",
        f"{_range(ratios, 2)} times the tokens/s of `generate`, where our `Autoregressive` makes "
        f"{speed['autoregressive/autoregressive']['ratio']:.2f} times",
        f"{out_of_order[0]['annotations_right'][0]:.0f} % of its annotations are right "
        f"({out_of_order[1]['annotations_right'][0]:.0f} % after three times the training), below the next-token "
        f"model's {usual[1]:.0f} to {usual[2]:.0f} %",
        f"measured | {_range(rates, 0)} | 3 to 4.5 hours |",
        "the six trainings of SmolLM2-135M-Instruct",
    )
    hours = [1_500_000 / rate / 3600 for rate in rates]  # an epoch with `Hybrid`, as the page says
    assert [round(2 * hour) / 2 for hour in (min(hours), max(hours))] == [3, 4.5]


def test_figures_in_sentences_of_speed(registry: ModuleType) -> None:
    from docs.figures import of_benchmarks  # pyright: ignore[reportMissingImports]

    cases = registry.read("benchmarks/results/forwards.json")["cases"]
    times: dict[str, list[float]] = {}
    for case in cases:
        times.setdefault(case["body"], []).extend(case[f"milliseconds_{rows}"] for rows in ("1_row", "16_rows"))
    forward = [a / b for a, b in zip(times["transformers' body"], times["the fused body"], strict=True)]
    ratios = [
        case["ratios"][of_benchmarks.FUSED] / case["ratios"][of_benchmarks.UNFUSED]
        for case in registry.read("benchmarks/results/decode.json")["cases"]
        if case["case"].startswith("additions-clean, setting") and case["case"].endswith(", batch 1")
    ]
    lossless = _lossless(registry)
    slower = [
        lossless["bfloat16", prompts, "speed"][name]["speed_over_generate"] / figures["speed_over_generate"]
        for prompts in ("GSM8K", "own.jsonl")
        for name, figures in lossless["bfloat16, batch-invariant", prompts, "speed"].items()
        if "identical" in figures
    ]
    assert len(forward) == len(cases)
    found = {case["case"]: case["runs"] for case in registry.read("benchmarks/results/decode.json")["cases"]}
    wide = found["vocabulary-heavy, all accepted, 32 tokens"]
    sizes = registry.read("benchmarks/results/batches.json")["cases"]
    speeds = {int(size): {name: run["tokens_per_second"] for name, run in runs.items()} for size, runs in sizes.items()}
    over = {size: each["refusion"] / each["generate"] for size, each in speeds.items()}
    after_64 = [each["autoregressive"] / each["generate"] for size, each in speeds.items() if size >= 64]
    on_library = [each["refusion on transformers' body"] > each["generate"] for each in speeds.values()]
    assert on_library == [size <= 16 for size in speeds]
    quality = registry.read("benchmarks/results/batches.json")["quality"]
    scores = [quality[name]["score"] for name in ("autoregressive", "refusion")]
    assert round(250 * (scores[0] - scores[1]), 6) == 2, "docs/speed.md: the score differs by two answers of 250"
    rounded = lossless["bfloat16", "GSM8K", "text"]
    same = sorted(rounded[name]["identical"] for name in ("two_forwards", "single_forward"))
    many = registry.read("benchmarks/results/many_prompts.json")["cases"]
    bounded, unbounded = (f"{many[name]['extra_megabytes']:.0f} MB" for name in ("bounded", "unbounded"))
    long = registry.read("benchmarks/results/long_prompts.json")
    prefills = {int(length): case["ratios"].values() for length, case in long["cases"].items()}
    longer = [ratio for length, ratios in prefills.items() if length > 1024 for ratio in ratios]
    alone, batched, large = (
        [f"{wide[f'{name}, batch {size}']['tokens_per_second']:.0f}" for name in ("refusion", "generate")]
        for size in (1, 16, 64)
    )
    _says(
        "docs/speed.md",
        f"makes {alone[0]} tokens/s with ReFusion and {alone[1]} with `generate` for one prompt, {batched[0]} and "
        f"{batched[1]} for 16, {large[0]} and {large[1]} for 64",
        f"A forward pass of the small model is {_range(forward, 1)} times as fast",
        f"is {_range(longer, 2)} times that of transformers' causal prefill, for 1 024 tokens "
        f"{_range(prefills[1024], 2)} times (the aim was 1.15)",
        f"and its memory {long['bytes_a_token'] / 1000:.0f} KB per token",
        f"tokens took the small model {bounded}; without bounds {unbounded}",
        f"reaches {over[1]:.1f} times `generate` with one prompt at a time, {over[16]:.1f} times with 16, "
        f"{over[64]:.2f} times with 64 and {over[256]:.2f} times with 256",
        f"reaches {after_64[0]:.2f} to {after_64[-1]:.2f} times `generate` from 64 prompts",
        f"a decode with ReFusion {_range(ratios, 1)} times",
        f"takes {_range(slower, 1)} times as long",
        f"{same[0]} to {same[1]} stay the same when several tokens are verified at once",
    )
    blocks = registry.read("experiments/serial_blocks/results.json")["results"]
    computed = [f"{blocks[name]['positions_per_token']:.1f}" for name in ("b1", "b8")]
    _says("experiments/serial_blocks/README.md", f"computed per token fall too ({computed[0]} to {computed[1]})")


def test_figures_in_sentences_of_refusion_pays(registry: ModuleType) -> None:
    lossless = _lossless(registry)
    default, rounded = (lossless[dtype, "GSM8K", "speed"]["auto"] for dtype in ("float32", "bfloat16"))
    _says(
        "experiments/refusion_pays/README.md",
        (
            f"makes {default['tokens_per_forward']:.2f} tokens per forward at "
            f"{default['speed_over_autoregressive']:.2f} times in float32, with unchanged text, and "
            f"{rounded['tokens_per_forward']:.2f} at {rounded['speed_over_autoregressive']:.2f} times in bfloat16"
        ),
    )
    recipes = registry.read("experiments/refusion_pays/levers.json")["recipes"]
    names = ("SelfSpeculative, one slot", "ReFusion bonus 32x1", "ReFusion mask 8x4")
    windows, hybrid, human_windows, human, soft = (
        [f"{recipes[recipe]['decoders'][name]['tokens_per_forward']:.2f}" for name in names] for recipe in recipes
    )
    _says(
        "experiments/refusion_pays/README.md",
        f"`MaskWindows` makes {windows[0]} tokens per forward with `SelfSpeculative` and {windows[1]} with bonus "
        f"tokens, `Hybrid` {hybrid[0]} and {hybrid[1]}; on human answers {human_windows[0]} and {human_windows[1]}, "
        f"and {human[0]} and {human[1]}",
        f"({human_windows[2]} for {windows[2]}, {human[2]} for {hybrid[2]})",
        ", ".join(f"{one} for {other}" for one, other in zip(soft, windows, strict=True)),
    )


def test_sentences_on_further_trainings_are_their_results(registry: ModuleType) -> None:
    recipes = registry.read("experiments/refusion_pays/further.json")["recipes"]
    first, longer, trajectories, second = (
        {name: f"{each['tokens_per_forward']:.2f}" for name, each in recipes[recipe]["decoders"].items()}
        for recipe in ("first", "twice as long", "trajectories", "second round")
    )
    mask, drafts, long_slots, slots = (
        "ReFusion mask 8x4", "SelfSpeculative, one slot", "ReFusion bonus 32x1", "ReFusion bonus 8x4",
    )  # fmt: skip
    counts = recipes["trajectories"]["answers"]

    def gains(recipe: str) -> str:
        others = recipes[recipe]["decoders"]
        names = (mask, drafts, long_slots, slots)
        own = recipes["second round"]["decoders"]
        ratios = [own[name]["tokens_per_forward"] / others[name]["tokens_per_forward"] for name in names]
        return f"{min(ratios):.2f} to {max(ratios):.2f}"

    _says(
        "experiments/refusion_pays/README.md",
        f"of {counts['num_decoded']} questions, {counts['num_ended']} answers end, and {counts['num_trained_on']} of",
        f"`mask` infill makes {trajectories[mask]} tokens per forward in place of {longer[mask]}",
        f"({first[mask]} before)",
        f"{first[drafts]} to {longer[drafts]} with `SelfSpeculative`, {first[long_slots]} to {longer[long_slots]} and "
        f"{first[slots]} to {longer[slots]} with bonus tokens",
        f"{second[drafts]}, {second[long_slots]} and {second[slots]} tokens per forward, and {second[mask]} with",
        f"That is {gains('first')} times the first model's, and {gains('twice as long')} times what as many positions",
    )
    rows = [recipes[name]["decoders"][drafts] for name in ("second round", "twice as long")]
    own, others = (f"{row['perplexity_under_base']:.2f}" for row in rows)
    _says(
        "docs/convert.md",
        f"{second[drafts]} tokens per forward pass with `SelfSpeculative` in place of {longer[drafts]}",
        f"perplexity of {own} under the base in place of {others}",
    )


def test_sentences_on_adapters(registry: ModuleType) -> None:
    recipes = registry.read("experiments/refusion_pays/adapters.json")["recipes"]
    weights, adapters, sampled = (run["decoders"] for run in recipes.values())
    drafts, bonus, mask = "SelfSpeculative, one slot", "ReFusion bonus 32x1", "ReFusion mask 8x4"
    made = [f"{run[name]['tokens_per_forward']:.2f}" for name in (drafts, bonus) for run in (adapters, weights)]
    names = (drafts, bonus, mask)
    worth = [f"{run[name]['perplexity_under_base']:.2f}" for run in (adapters, weights) for name in names]
    beyond = [[run[name]["tokens_per_forward"] - 1 for name in names[:2]] for run in (adapters, weights)]
    shares = sorted(part / whole for part, whole in zip(*beyond, strict=True))
    _says(
        "experiments/refusion_pays/README.md",
        f"{made[0]} tokens per forward with `SelfSpeculative` in place of {made[1]}, {made[2]} in place of {made[3]} "
        "with bonus tokens",
        f"perplexity of {worth[0]} and {worth[1]} under the base in place of {worth[3]} and {worth[4]}",
        f"the text is worse, {worth[2]} for {worth[5]}",
        f"make {shares[0]:.2f} to {shares[1]:.2f} of the tokens beyond the first",
        "{} tokens per forward with `SelfSpeculative` in place of {}, {} in place of {} with bonus tokens, {} in place "
        "of {} with `mask` infill, at a perplexity of {:.2f} and {:.2f}".format(
            *(f"{run[name]['tokens_per_forward']:.2f}" for name in names for run in (sampled, weights)),
            *(sampled[name]["perplexity_under_base"] for name in names[:2]),
        ),
    )


def test_sentences_on_the_objective_with_more_positions(registry: ModuleType) -> None:
    more = registry.read("experiments/refusion_pays/ablation.json")["recipes"]
    fewer = registry.read("experiments/refusion_pays/levers.json")["recipes"]
    own, human = "own answers, Hybrid", "human answers, Hybrid"
    drafts, bonus = "SelfSpeculative, one slot", "ReFusion bonus 32x1"

    def made(recipe: dict[str, Any]) -> str:
        return " and ".join(f"{recipe['decoders'][name]['tokens_per_forward']:.2f}" for name in (drafts, bonus))

    worth = [
        f"{recipes[name]['decoders'][drafts]['perplexity_under_base']:.2f}"
        for recipes, name in ((more, human), (fewer, human), (fewer, own), (more, own))
    ]
    times = more[own]["num_positions"] / fewer[own]["num_positions"]
    chain = {"decoders": registry.read("experiments/refusion_pays/convert.json")["runs"]["windows of 4"]["decoders"]}
    trained = registry.read("experiments/refusion_pays/training.json")["runs"]["windows of 4"]["num_positions"]
    windows = more["own answers, windows of 4"]
    beyond = [
        (windows["decoders"][name]["tokens_per_forward"] - 1) / (more[own]["decoders"][name]["tokens_per_forward"] - 1)
        for name in (drafts, bonus)
    ]
    masks = [each["decoders"]["ReFusion mask 8x4"]["tokens_per_forward"] for each in (windows, more[own])]
    texts = [
        " and ".join(f"{each['decoders'][name]['perplexity_under_base']:.2f}" for name in (drafts, bonus))
        for each in (windows, more[own])
    ]
    with_windows = made(windows).replace("and", "tokens per forward with `SelfSpeculative` and")
    with_bonus = made(more[own]).replace("and", "tokens per forward with `SelfSpeculative` and")
    _says(
        "experiments/refusion_pays/README.md",
        f"windows of 4 make {beyond[0]:.1f} and {beyond[1]:.1f} times as many tokens beyond the first as `Hybrid`**: "
        f"{with_windows} with bonus tokens, where `Hybrid` makes {made(more[own])}, and {masks[0]:.2f} with `mask` "
        f"infill in place of {masks[1]:.2f}, at a perplexity of {texts[0]} under the base in place of {texts[1]}.",
        f"after {trained / 1000:.0f} thousand, on more answers, windows of 4 made {made(chain)}. One",
        f"**{times:.1f} times the positions do not make up for windows**",
        f"makes {with_bonus} with bonus tokens, where 150 thousand positions made {made(fewer[own])}, and windows "
        f"of 8 as few {made(fewer['own answers, MaskWindows'])}; windows of 4 made {made(chain)} after "
        f"{trained / 1000:.0f} thousand",
        f"a perplexity of {worth[0]} under the base with `SelfSpeculative`, from {worth[1]} after 150 thousand "
        f"positions, where own answers go from {worth[2]} to {worth[3]}. They make {made(more[human])} tokens per "
        "forward.",
    )


def test_sentences_on_slots_of_4_and_of_8(registry: ModuleType) -> None:
    recipes = registry.read("experiments/refusion_pays/slots.json")["recipes"]
    windows = next(iter(registry.read("experiments/refusion_pays/adapters.json")["recipes"].values()))["decoders"]
    of_4, of_8 = (run["decoders"] for run in recipes.values())
    drafts = "SelfSpeculative, one slot"
    apart = [abs(of_4[name]["tokens_per_forward"] - of_8[name]["tokens_per_forward"]) for name in of_4]
    assert round(max(apart), 2) == 0.03
    names = (drafts, "ReFusion bonus 8x4", "ReFusion bonus 4x8", "ReFusion mask 8x4", "ReFusion mask 4x8")
    plain, wide, narrow, wide_mask, narrow_mask = (
        [f"{run[name]['tokens_per_forward']:.2f}" for run in (of_4, of_8)] for name in names
    )
    beyond = [run[drafts]["tokens_per_forward"] - 1 for run in (windows, of_4, of_8)]
    times = [beyond[0] / each for each in beyond[1:]]
    bonus = ("ReFusion bonus 8x4", "ReFusion bonus 4x8", "ReFusion bonus 32x1")
    first, second, serial = ([run[name]["perplexity_under_base"] for run in (of_4, of_8)] for name in bonus)
    side = [*first, *second]
    _says(
        "experiments/refusion_pays/README.md",
        f"with bonus tokens {' and '.join(wide)} in the decoder's slots of 8, {' and '.join(narrow)} in those of 4",
        f"with `mask` infill {' and '.join(wide_mask)}, {' and '.join(narrow_mask)}",
        f"make {times[0]:.1f} and {times[1]:.1f} times as many tokens beyond the first with `SelfSpeculative` "
        f"({1 + beyond[0]:.2f} in the table above) as `Hybrid` of 4 and of 8 ({' and '.join(plain)})",
        f"a perplexity of {min(side):.2f} to {max(side):.2f} under the base in place of "
        f"{min(serial):.2f} and {max(serial):.2f}",
    )


def test_sentences_on_templates_made_from_schemas(registry: ModuleType) -> None:
    mask, bonus = registry.read("experiments/json_schemas/converted.json")["runs"].values()
    assert len(mask["refused"]) == len(bonus["refused"])
    _says(
        "experiments/json_schemas/README.md",
        f"{len(bonus['refused'])} of the {bonus['asked']} schemas were refused",
        f"with bonus tokens {bonus['tokens_per_forward']:.2f} per forward, where `mask` infill makes "
        f"{mask['tokens_per_forward']:.2f}",
    )
    assert all(run["keep_the_schema"] == run["parse"] == run["answered"] for run in (mask, bonus))


def test_sentences_on_prompts_unlike_the_trainings(registry: ModuleType) -> None:
    runs = registry.read("experiments/refusion_pays/convert.json")["runs"]
    code, own = (runs[f"windows of 4, third round, {name}"]["decoders"] for name in ("HumanEval", "own prompts"))

    def told(run: Any, name: str, first: str = "", last: str = "") -> str:
        figures = run[name]
        return f"{figures['tokens_per_forward']:.2f}{first} at {figures['speed_over_autoregressive']:.2f}{last}"

    def perplexity(run: Any, digits: int = 2, name: str = "ReFusion bonus 32x1") -> str:
        return f"{run[name]['perplexity_under_base']:.{digits}f}"

    bonus, drafts, mask, base = (
        "ReFusion bonus 32x1", "SelfSpeculative, one slot", "ReFusion mask 8x4", "base, Autoregressive",
    )  # fmt: skip
    intervals = ["{:.2f} to {:.2f}".format(*run[bonus]["speed_over_autoregressive_95"]) for run in (code, own)]
    _says(
        "experiments/refusion_pays/README.md",
        f"24 of HumanEval, {told(code, bonus, ' tokens per forward', ' times')} ({intervals[0]}; `SelfSpeculative` "
        f"{told(code, drafts)}) and a perplexity of {perplexity(code)} under the base, from "
        f"{perplexity(code, 2, base)}; 12 own prompts, {told(own, bonus, '', ' times')} ({intervals[1]}; "
        f"{told(own, drafts)}) and {perplexity(own)}, "
        f"from {perplexity(own, 2, base)}. The paper's `mask` infill makes {code[mask]['tokens_per_forward']:.2f} and "
        f"{own[mask]['tokens_per_forward']:.2f} tokens, with a perplexity of {perplexity(code, 1, mask)} and "
        f"{perplexity(own, 1, mask)}",
    )


def test_sentences_on_the_chain_with_a_second_round(registry: ModuleType) -> None:
    runs = registry.read("experiments/refusion_pays/convert.json")["runs"]
    trained = registry.read("experiments/refusion_pays/training.json")["runs"]
    names = ("shorter", "second round", "windows of 4", "windows of 4, second round")
    earlier, last, windows, second = (runs[name]["decoders"] for name in names)
    long_slots, drafts, mask = "ReFusion bonus 32x1", "SelfSpeculative, one slot", "ReFusion mask 8x4"
    positions = [trained[name]["num_positions"] for name in names[2:]]
    before = sum(trained[name]["num_positions"] for name in ("chain, windows", "chain, shorter"))

    def made(run: Any, decoder: str = long_slots) -> str:
        return f"{run[decoder]['tokens_per_forward']:.2f}"

    def times(run: Any, decoder: str = long_slots) -> str:
        return f"{run[decoder]['speed_over_autoregressive']:.2f}"

    pairs = [[run[long_slots]["tokens_per_forward"] for run in pair] for pair in ((earlier, last), (windows, second))]
    gains = [f"{after / before:.2f}" for before, after in pairs]
    interval = "{:.2f} to {:.2f}".format(*second[long_slots]["speed_over_autoregressive_95"])
    million = f"{sum(positions) / 1e6:.2f} million"
    shown = [f"{number:,}".replace(",", " ") for number in positions]
    of_generate = f"{second[long_slots]['speed_over_generate']:.2f} times those of"
    _says(
        "experiments/refusion_pays/README.md",
        f"{shown[0]} and {shown[1]} positions",
        f"{made(windows)} tokens per forward with ReFusion's decoder in slots of 32 after {shown[0]}",
        f"make {made(earlier)} after {f'{before:,}'.replace(',', ' ')}",
        f"need {positions[0] / before:.2f} of the positions",
        f"is missed by {2.0 - second[long_slots]['tokens_per_forward']:.2f}, and 2.3 for `SelfSpeculative` by "
        f"{2.3 - second[drafts]['tokens_per_forward']:.2f}",
        f"`SelfSpeculative` makes {times(second, drafts)} times",
        f"gives {gains[1]} times: {made(second)} tokens per forward**, and {made(second, drafts)} with "
        f"`SelfSpeculative`, from {made(windows, drafts)}; in the chain before {gains[0]} times, to {made(last)}",
        f"{million} positions so make {made(second)}, where 1.02 million made {made(last)}",
        f"makes {made(second, mask)}, from {made(windows, mask)}; in the chain before {made(last, mask)}, "
        f"from {made(earlier, mask)}",
        f"**{times(second)} times the tokens/s of `Autoregressive` ({interval}), from {times(windows)} times**",
        of_generate,
    )
    third = runs["windows of 4, third round"]["decoders"]
    positions.append(trained["windows of 4, third round"]["num_positions"])
    gain = third[long_slots]["tokens_per_forward"] / second[long_slots]["tokens_per_forward"]
    interval = "{:.2f} to {:.2f}".format(*third[long_slots]["speed_over_autoregressive_95"])
    of_generate = f"{third[long_slots]['speed_over_generate']:.2f} times those of"
    perplexity = [f"{run[long_slots]['perplexity_under_base']:.2f}" for run in (third, second)]
    all_positions = f"{sum(positions) / 1e6:.2f} million"
    shown = f"{positions[2]:,}".replace(",", " ")
    _says(
        "experiments/refusion_pays/README.md",
        f"{shown} positions in {trained['windows of 4, third round']['minutes']} minutes; {all_positions} in all",
        f"gives {gain:.2f} times: {made(third)} tokens per forward at {times(third)} times the tokens/s of "
        f"`Autoregressive` ({interval})**, and {of_generate}",
        f"`SelfSpeculative` makes {made(third, drafts)} at {times(third, drafts)} times",
        f"make more, {made(third, 'ReFusion bonus 16x2')} at {times(third, 'ReFusion bonus 16x2')} times",
        f"`mask` infill makes {made(third, mask)}, at {times(third, mask)} times. Perplexity {perplexity[0]}, from "
        f"{perplexity[1]}",
    )
    fourth = runs["windows of 4, fourth round"]["decoders"]
    told = runs["windows of 4, fourth round, forward cost 256"]["decoders"]
    positions.append(trained["windows of 4, fourth round"]["num_positions"])
    all_positions = f"{sum(positions) / 1e6:.2f} million"
    gain = fourth[long_slots]["tokens_per_forward"] / third[long_slots]["tokens_per_forward"]
    every = "SelfSpeculative, single_forward"
    interval = "{:.2f} to {:.2f}".format(*fourth[long_slots]["speed_over_autoregressive_95"])
    of_generate = f"{fourth[long_slots]['speed_over_generate']:.2f} times those of"
    perplexity = [f"{run[long_slots]['perplexity_under_base']:.2f}" for run in (windows, second, third, fourth)]
    shown = f"{positions[3]:,}".replace(",", " ")
    assert fourth[every]["tokens_per_forward"] > 2.3, "the aim"
    _says(
        "experiments/refusion_pays/README.md",
        f"{shown} positions in {trained['windows of 4, fourth round']['minutes']} minutes; {all_positions} in all",
        f"with bonus tokens at {made(fourth)} tokens per forward and {times(fourth)} times the tokens/s of our",
        f"`SelfSpeculative` makes {made(fourth, drafts)} at {times(fourth, drafts)} times and, with masks in every "
        f"forward (`layout: single_forward`), {made(fourth, every)} at {times(fourth, every)} times",
        f"gives {gain:.2f} times: {made(fourth)} tokens per forward at {times(fourth)} times the tokens/s of "
        f"`Autoregressive` ({interval})**, and {of_generate}",
        f"`mask` infill makes {made(fourth, mask)}, at {times(fourth, mask)} times. Perplexity {perplexity[-1]}, after "
        f"{perplexity[0]}, {perplexity[1]} and {perplexity[2]}",
        "`Autoregressive` made {:.1f} tokens/s beside it and {:.1f} beside the third".format(
            *(run["base, Autoregressive"]["tokens_per_second"] for run in (fourth, third))
        ),
        f"ReFusion makes {made(told)} tokens per forward in slots of 32 and {made(told, 'ReFusion bonus 16x2')} in two "
        f"of 16, `SelfSpeculative` {made(told, drafts)}",
    )
    _says(
        "docs/convert.md",
        f"after {all_positions} positions in four rounds",
        f"makes {made(fourth)} tokens per forward pass, {times(fourth)} times the tokens/s",
        of_generate,
        f"makes {made(fourth, drafts)}, at {times(fourth, drafts)} times, and {made(fourth, every)} with "
        f"`layout: single_forward`, at {times(fourth, every)} times",
        f"from {made(windows)} to {made(second)} tokens per forward pass and from {times(windows)} to {times(second)}",
        f"raises them to {made(third)} and {times(third)}",
        f"a fourth, {positions[3] // 1000} thousand, to {made(fourth)} and {times(fourth)}",
    )
    _says("docs/objectives/hybrid.md", f"need {positions[0] / before:.1f} of the positions of windows of 8")
    _says(
        "README.md",
        f"in four rounds, {all_positions} positions",
        f"(`SelfSpeculative` {made(fourth, drafts)}, with masks in every forward pass {made(fourth, every)}, aim 2.3)",
    )


def test_sentences_on_equations_and_the_way_back_to_the_base(registry: ModuleType) -> None:
    models = registry.read("experiments/refusion_pays/solved.json")["models"]
    shares = {name: solved.right_share(model) for name, model in models.items()}
    others = [share.estimate for name, share in shares.items() if name != "base"]
    base, fourth, third = (shares[name] for name in ("base", "fourth round", "third round"))
    points = solved.right_share(models["fourth round"], models["base"])
    assert third.estimate < base.low < fourth.estimate < base.high
    assert max(others) < base.estimate
    back = registry.read("experiments/refusion_pays/convert.json")["runs"]["windows of 4, fourth round, base's answers"]
    long_slots = back["decoders"]["ReFusion bonus 32x1"]
    runs = registry.read("experiments/refusion_pays/training.json")["runs"]
    training = runs["windows of 4, fourth round, base's answers"]
    positions = f"{training['num_positions']:,}".replace(",", " ")
    _says(
        "experiments/refusion_pays/README.md",
        f"of the base's equations {base.estimate:.0f} % hold, of those of the converted models {min(others):.0f} to "
        f"{max(others):.0f} %, all fewer",
        f"The fourth round's {fourth.estimate:.0f} % are within the base's interval ({base.low:.0f} to "
        f"{base.high:.0f}), which was the aim, and {-points.estimate:.0f} points less, from {-points.low:.0f} less to "
        f"{points.high:.0f} more",
        f"the third round's {third.estimate:.0f} % are outside",
        f"Of their equations {fourth.estimate:.0f} % hold, {-points.estimate:.0f} points less than of the base's",
        f"rise from {models['base']['num_ended']} of 200 to {models['fourth round']['num_ended']}",
        f"{training['num_steps']} further steps on the base's 428 answers ({positions} positions in "
        f"{training['minutes']} minutes",
        f"bring the perplexity back to {long_slots['perplexity_under_base']:.2f}, and the tokens per forward to "
        f"{long_slots['tokens_per_forward']:.2f}",
    )


@pytest.mark.parametrize("name", REPORTED)
def test_a_report_of_an_experiment_is_of_its_results(name: str) -> None:
    folder = ROOT / "experiments" / name
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))["results"]
    shown = {}
    header, _, *lines = (folder / "table.md").read_text(encoding="utf-8").splitlines()
    titles = [cell.strip() for cell in header.strip("|").split("|")]
    for line in lines:
        cells = [cell.strip().replace("\\", "") for cell in line.strip("|").split("|")]
        if cells[0] in results:
            figures = (cells[titles.index(title)].partition(" ")[0] for title in ("score %", "tokens/forward"))
            shown[cells[0]] = tuple(figures)
    expected = {
        row: (f"{100 * figures['score']:.1f}", f"{figures['tokens_per_forward']:.2f}")
        for row, figures in results.items()
    }
    assert shown == expected
    picture = (folder / "tradeoff.svg").read_text(encoding="utf-8")
    drawn = re.findall(r"(\w+)[^<>\n]*: score ([\d.]+) %[^<>\n]*?, ([\d.]+) tokens per forward", picture)
    assert {row: (score, speed) for row, score, speed in drawn} == expected


def test_figures_in_sentences_on_attention_and_linear_layers(registry: ModuleType) -> None:
    calls, linear, apart = (
        registry.read(f"benchmarks/results/{name}.json") for name in ("attention_calls", "linear", "shared_heads_xeon")
    )
    over_one = sorted(case["over one call"] for case in calls["cases"].values())
    joint = [1 - 1 / row["joint_ratio"] for dtype in ("float32", "bfloat16") for row in linear[dtype][:7]]
    packed = [row["ratio"] for dtype in ("float32", "bfloat16") for row in linear[dtype]]
    single, several = (
        [case["ratio"] for case in apart["cases"] if (case["num_queries"] == 1) == is_one] for is_one in (True, False)
    )
    together = registry.read("benchmarks/results/shared_heads.json")["cases"]
    one, more = (
        [case["ratio"] for case in together if (case["num_queries"] == 1) == is_one] for is_one in (True, False)
    )
    _says(
        "docs/speed.md",
        f"that is {_range(one, 1)} times as fast with one query per head, {_range(more, 1)} times with four or eight",
        f"prompts of 60 to 1 200 tokens {over_one[-1]:.2f} times as fast and ReFusion's {over_one[-2]:.2f} times, and "
        "changes the other twelve cases of `benchmarks/results/attention_calls.json` by "
        f"{_range(over_one[:-2], 2)} times",
        f"takes {100 * min(joint):.0f} to {100 * max(joint):.0f} % less time up to 64 tokens",
        f"{_range(packed, 2)} times as fast on an EPYC",
        f"on a Xeon it is {_range(single, 1)} times and {_range(several, 1)} times",
    )


def test_figures_in_sentences_on_the_server(registry: ModuleType) -> None:
    rows = registry.read("benchmarks/results/serve.json")["rows"]
    speed = {(row["server"], row["clients"]): row["tokens_per_second"] for row in rows}

    def times(server: str, clients: int, other: str = "transformers serve", digits: int = 1) -> str:
        return f"{speed[server, clients] / speed[other, clients]:.{digits}f}"

    batching = "transformers serve, continuous batching"
    own = ("Autoregressive", "SelfSpeculative")
    slow = registry.read("benchmarks/results/serve_slow_epyc.json")
    ratios = [aim["value"] for aim in slow["aims"]]
    found = {(row["server"], row["clients"]): row["tokens_per_second"] for row in slow["rows"]}
    assert all(row["same_text"] == 16 for row in slow["rows"])
    (others,) = (aim["value"] for aim in registry.read("benchmarks/results/serve.json")["aims"] if aim["bound"] < 0.1)
    replayed = registry.read("experiments/lossless/rule.json")["prompts"]["gsm8k"]["decoders"]
    fixed = max(costs["32"]["speed"] for name, costs in replayed.items() if name != "default")
    _says(
        "docs/serve.md",
        f"makes {times(own[1], 1, digits=2)} times the tokens per second",
        f"`Autoregressive` makes {times(own[0], 1, digits=2)} times",
        f"take {100 * others:.1f} % of the processor time at 16 clients",
        f"our servers make {times(own[0], 16)} times the tokens per second of `transformers serve`",
        f"and {times(own[0], 16, batching)} times those of its continuous batching",
        f"they make {times(own[0], 64)} and {times(own[1], 64)} times those of `transformers serve`, and "
        f"{times(own[0], 64, batching)} and {times(own[1], 64, batching)} times",
        f"at one client {ratios[2]:.2f} times, `Autoregressive` {ratios[0]:.2f} times, by processor time "
        f"{ratios[3]:.2f} and {ratios[1]:.2f}; at 16 clients {ratios[4]:.1f} times, "
        f"{found[own[0], 16] / found[batching, 16]:.1f} times those of continuous batching; "
        f"other threads {100 * ratios[-1]:.1f} %",
        f"no fixed number of drafts gives more than {fixed:.2f} times",
    )
    _says("experiments/lossless/README.md", f"gains more than {fixed:.2f} at a cost of 32")


def test_figures_in_sentences_on_the_other_start(registry: ModuleType) -> None:
    short = registry.read("experiments/policy_estimators/other_start.json")
    mean = {name: each["after"]["left to right"] for name, each in short["means"].items()}
    lost, low, high = (-value for value in mean["exact"]["difference_in_points"])
    seeds = [100 * run["after"]["left to right"]["score"] for run in short["results"]["exact"].values()]
    _says(
        "experiments/policy_estimators/README.md",
        f"The exact likelihood loses {lost:.1f} points left to right ({high:.1f} to {low:.1f})",
        "its three seeds end at {:.1f}, {:.1f} and {:.1f} %".format(*seeds),
    )
    found = registry.read("experiments/policy_estimators/longer.json")["means"]
    gains = {n: {way: e["difference_in_points"][0] for way, e in mean["after"].items()} for n, mean in found.items()}
    behind = {n: {way: [-v for v in e] for way, e in mean["against_exact"].items()} for n, mean in found.items()}
    left, thresholds = ([gains[n][way] for n in found] for way in ("left to right", "thresholds"))
    mean_field, coupled = behind["mean_field"], behind["coupled"]["thresholds"]
    _says(
        "experiments/policy_estimators/README.md",
        "{:.1f}, {:.1f} and {:.1f} points more left to right, {:.1f}, {:.1f} and {:.1f} by thresh".format(
            *left, *thresholds
        ),
        "{0:.1f} points less than the exact likelihood left to right ({2:.1f} to {1:.1f})".format(
            *mean_field["left to right"]
        ),
        "{0:.1f} by thresholds ({2:.1f} to {1:.1f})".format(*mean_field["thresholds"]),
        "({:.1f} points less, {:.1f} to {:+.1f})".format(
            behind["coupled"]["left to right"][0], *found["coupled"]["against_exact"]["left to right"][1:]
        ),
        "ends {0:.1f} points lower by thresholds ({2:.1f} to {1:.1f})".format(*coupled),
    )
    longer = registry.read("experiments/policy_additions/other_start.json")
    before, after = longer["before"], longer["results"]["0"]["after"]
    scores = {name: f"{100 * before[name]['score']:.1f} to {100 * after[name]['score']:.1f} %" for name in before}
    speeds = [each["thresholds"]["tokens_per_forward"] for each in (after, before)]
    _says(
        "experiments/policy_additions/README.md",
        f"{scores['left to right']}**, by thresholds {scores['thresholds']}, at {speeds[0]:.2f} tokens per forward",
        f"where its start makes {speeds[1]:.2f}",
    )
