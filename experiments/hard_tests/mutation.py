"""Mutation testing of the decoders and objectives on a seeded sample of mutants.

usage: python experiments/hard_tests/mutation.py [--num 300] [--seed 0] [--work runs/mutation]
       python experiments/hard_tests/mutation.py --only 12,40 [--tests tests/engine/test_engine.py]

1. The tree is copied to ``--work``; nothing is ever changed in place.
2. The unmutated tests run once, with the lines that each test executes (coverage contexts) and its seconds.
3. A mutant: cosmic-ray's operators name sites (a place in the source and a kind of change: another binary operator,
   another comparison, a number one more or less, a negated condition, a decorator or a loop's rounds left out, ...).
   Sites are drawn without replacement, each with one of its changes at random: drawn change by change, the eleven
   replacements of every ``+`` would crowd out the rest. Left out is what does not parse and what changes annotations
   alone, which never run.
4. For each mutant the tests that execute the statement run, the shortest first, until one fails. A test that takes more
   processor time than it took in step 2 (under coverage, which is several times slower) and five seconds kills the
   mutant, too. Hypothesis is derandomized, does not shrink, and tries at most ``--examples`` examples a test. Tests
   after the first ``--budget`` seconds (of step 2) are left out, which can only make survivors.

Finished mutants are kept in ``--work``; the next start resumes there, and refuses them if the package's source has
changed. The result is written beside this file: ``mutation.json`` for seed 0, ``mutation_seed1.json`` for seed 1. With
``--only``, finished mutants of those numbers run again, with all tests of the files that cover them (or of ``--tests``)
as they are now and with all their examples, and the result is updated.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mutants import PACKAGES, sample, statement

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent
TESTS = (
    "tests/engine", "tests/refusion", "tests/families", "tests/contrib", "tests/learning", "tests/contract",
    "tests/training",
)  # fmt: skip
FLAGS = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--assert=plain")
MAX_BYTES = 6 * 2**30


class Watch:
    """A pytest plugin: chooses and orders tests, limits their time, and remembers what failed and how long it took."""

    def __init__(self, limits: dict[str, float] | None = None, num_examples: int = 1000) -> None:
        self.limits, self.num_examples, self.seconds, self.failed = limits, num_examples, {}, []

    def pytest_configure(self) -> None:
        from hypothesis import Phase, settings

        phases = (Phase.explicit, Phase.generate)
        settings.register_profile("mutation", deadline=None, derandomize=True, database=None, phases=phases)
        settings.load_profile("mutation")

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        if self.limits is not None:
            order = {name: i for i, name in enumerate(self.limits)}
            items[:] = sorted((item for item in items if item.nodeid in order), key=lambda item: order[item.nodeid])
        for item in items:
            self.limit_examples(item.function)

    def limit_examples(self, function: Any) -> None:
        from hypothesis import settings

        chosen = getattr(function, "_hypothesis_internal_use_settings", None)
        if chosen is not None and chosen.max_examples > self.num_examples:
            function._hypothesis_internal_use_settings = settings(chosen, max_examples=self.num_examples)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        if self.limits is not None:
            signal.signal(signal.SIGPROF, lambda *_: os._exit(124))
            signal.setitimer(signal.ITIMER_PROF, self.limits[nodeid])

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if report.failed:
            self.failed.append(report.nodeid)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.failed.append(f"import of {report.nodeid}")

    def pytest_sessionfinish(self) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)


# The source, and what the tests cover.


def source_digest(root: Path) -> str:
    """Return a SHA-256 digest of the package's Python files, their paths included."""
    package, digest = root / "src" / "refusion_lit", hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package).as_posix()}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def source_commit(root: Path) -> str | None:
    """Return the commit that has the current ``src``; ``None`` outside a repository or with uncommitted changes."""
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=True)
        status = ["git", "status", "--porcelain", "--", "src"]
        changes = subprocess.run(status, cwd=root, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return None if changes.strip() else head.stdout.strip()


def check_source(work: Path, root: Path) -> str | None:
    """Check that kept work is of the current source, which is recorded in ``source.json`` when the work begins.

    A mutant's number means another mutant as soon as the source changes.

    Returns:
        The commit of the source, ``None`` if it is unknown.

    Raises:
        ValueError: If kept work is of another source, or of an unrecorded one.
    """
    path, digest = work / "source.json", source_digest(root)
    if path.exists():
        kept = json.loads(path.read_text())
    elif (work / "measured.json").exists() or any(work.glob("mutants-*.jsonl")):
        kept = {"digest": "unknown", "commit": None}
    else:
        kept = {"digest": digest, "commit": source_commit(root)}
        path.write_text(json.dumps(kept) + "\n")
    if kept["digest"] != digest:
        resume = f", or check out {kept['commit']} to resume" if kept["commit"] else ""
        raise ValueError(
            f"--work: expected work on the current source (digest {digest[:12]}), got {work} with work on another one "
            f"(digest {kept['digest'][:12]}); give another directory to start from scratch{resume}."
        )
    return kept["commit"]


def prepare(work: Path) -> Path:
    """Copy the sources and tests to ``work/tree``, in place of an earlier copy."""
    tree = work / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    for name in ("src", "tests", "configs", "experiments", "benchmarks"):  # tests import from all of them
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy2(ROOT / "pyproject.toml", tree)
    return tree


def measure(tree: Path, target: Path) -> dict[str, Any]:
    """Return the seconds of each test and, by file and line, the tests that execute it."""
    program = (
        "import json, sys, pytest; from mutation import Watch; watch = Watch();"
        "code = pytest.main(sys.argv[2:], plugins=[watch]); json.dump(watch.seconds, open(sys.argv[1], 'w'));"
        "sys.exit(code)"
    )
    covered = [f"--cov={tree}/src/refusion_lit/{name}" for name in PACKAGES]
    flags = [*FLAGS, *covered, "--cov-context=test", "--cov-report=json", "--cov-report="]
    environment = os.environ | {"PYTHONPATH": f"{tree}/src{os.pathsep}{Path(__file__).parent}", "OMP_NUM_THREADS": "1"}
    report = tree / "coverage.json"
    (tree / ".coveragerc").write_text("[run]\nbranch = true\n[json]\nshow_contexts = true\n")
    flags[flags.index("--cov-report=json")] = f"--cov-report=json:{report}"
    flags.append("--cov-config=.coveragerc")
    command = [sys.executable, "-c", program, "seconds.json", *flags, *TESTS]
    subprocess.run(command, cwd=tree, env=environment, check=True)
    files = json.loads(report.read_text())["files"]
    lines = {
        str((tree / name).resolve().relative_to(tree.resolve())): {
            line: sorted({test.rpartition("|")[0] for test in tests} - {""})
            for line, tests in coverage["contexts"].items()
        }
        for name, coverage in files.items()
    }
    branches = [coverage["summary"] for coverage in files.values()]
    kinds = ("num_branches", "covered_branches", "num_statements", "covered_lines")
    total = {kind: sum(summary[kind] for summary in branches) for kind in kinds}
    measured = {"seconds": json.loads((tree / "seconds.json").read_text()), "lines": lines, "coverage": total}
    target.write_text(json.dumps(measured))
    return measured


def covering(mutant: dict[str, Any], tree: Path, measured: dict[str, Any], budget: float) -> dict[str, float]:
    """Return the tests that execute the mutated statement, shortest first, with their seconds, up to a sum of them."""
    lines = measured["lines"].get(mutant["path"], {})
    wanted, in_function = statement((tree / mutant["path"]).read_text(), mutant["line"])
    names = {name for line, tests in lines.items() if not in_function or int(line) in wanted for name in tests}
    seconds = {name: measured["seconds"][name] for name in names if name in measured["seconds"]}
    ordered = sorted(seconds.items(), key=lambda item: (item[1], item[0]))
    total = itertools.accumulate(value for _, value in ordered)
    return {name: value for (name, value), until in zip(ordered, total, strict=True) if until <= budget}


# Runs.


def in_child(work: Callable[[], int], log: Path, limit: float) -> tuple[int, float]:
    """Run in a forked process, which has all imports already.

    Returns:
        Its exit code (124: too late) and processor seconds.
    """

    def used() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime - before.ru_utime - before.ru_stime

    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started, child = time.monotonic(), os.fork()
    if child == 0:
        code = 70
        try:
            with log.open("w") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            resource.setrlimit(resource.RLIMIT_DATA, (MAX_BYTES, MAX_BYTES))
            code = work()
        finally:
            os._exit(code)
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status), used()
        if time.monotonic() - started > limit:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return 124, used()
        time.sleep(0.02)


def run_tests(
    tree: Path, files: list[str], limits: dict[str, float] | None, target: Path, num_examples: int
) -> Callable[[], int]:
    """Return what a child does: the tests in order, until one fails, whose name is written to ``target``."""

    def work() -> int:
        import pytest

        os.chdir(tree)
        sys.path[:0] = [str(tree / "src"), str(tree / "tests")]
        watch = Watch(limits, num_examples)
        code = pytest.main([*FLAGS, "-x", *files], plugins=[watch])
        target.write_text("\n".join(watch.failed))
        return int(code)

    return work


def judge(
    mutant: dict[str, Any], tree: Path, tests: dict[str, float], num_examples: int, files: list[str] | None = None
) -> dict[str, Any]:
    """Run a mutant's tests, or all tests of some files; return the verdict."""
    result = {key: mutant[key] for key in ("number", "path", "line", "operator", "before", "after")}
    result["num_tests"] = len(tests) if files is None else None
    limits = {name: seconds + 5 for name, seconds in tests.items()} if files is None else None
    limit = 10 * sum(tests.values()) + 300 if files is None else 1800
    if files is None:
        files = sorted({name.partition("::")[0] for name in tests})
    if not files:
        return result | {"status": "survived", "by": None, "seconds": 0.0}
    path, killer, log = tree / mutant["path"], tree / "killer.txt", tree / "log.txt"
    original, times = path.read_bytes(), path.stat()
    killer.write_text("")
    path.write_text(mutant["source"])
    try:
        code, seconds = in_child(run_tests(tree, files, limits, killer, num_examples), log, limit)
    finally:
        path.write_bytes(original)
        os.utime(path, (times.st_atime, times.st_mtime))
    status = {0: "survived", 124: "too late"}.get(code, "killed" if code > 0 else "crashed")
    by = killer.read_text().partition("\n")[0] or None
    return result | {"status": status, "by": by, "seconds": round(seconds, 1)}


def summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Return counts and the 95 % interval of the share of killed mutants, in total and for each package."""
    # Imported here, after all runs: a forked run must import the package from the mutated tree, not inherit this one.
    from refusion_lit.reports.intervals import wilson

    def counted(chosen: list[dict[str, Any]]) -> dict[str, Any]:
        num_killed = sum(result["status"] != "survived" for result in chosen)
        interval = wilson(num_killed, len(chosen))
        return {
            "num_mutants": len(chosen),
            "num_killed": num_killed,
            "share_killed": round(interval.estimate, 4),
            "wilson_95": [round(interval.low, 4), round(interval.high, 4)],
            "by_status": dict(Counter(result["status"] for result in chosen)),
        }

    parts: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        # The package that the result names, not PACKAGES: results of an earlier layout are summed up too.
        parts.setdefault(Path(result["path"]).parts[2], []).append(result)
    return {"all": counted(results)} | {name: counted(parts[name]) for name in sorted(parts)}


def preload() -> None:
    """Import what every child needs, but nothing of the project."""
    import lightning  # noqa: F401
    import torch
    import transformers.models.qwen3.modeling_qwen3 as _  # noqa: F401
    from transformers import AutoModelForCausalLM, Qwen3Config  # noqa: F401

    torch.set_num_threads(1)
    sys.dont_write_bytecode = True


def finished(path: Path) -> Iterator[dict[str, Any]]:
    """Read the results so far, in the order they were found: a mutant that ran again has more than one."""
    if path.exists():
        yield from map(json.loads, path.read_text().splitlines())


def latest(results: Iterable[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return each mutant's last result by its number."""
    return {result["number"]: result for result in results}


def of_first_pass(results: Iterable[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return each mutant's last result without ``--only`` by its number; results with it have no ``num_tests``."""
    return latest(result for result in results if result["num_tests"] is not None)


def numbers_again(only: str | None, done: dict[int, dict[str, Any]]) -> set[int]:
    """Return the numbers of ``--only``; each must have a result, which is its first pass.

    Raises:
        ValueError: If a mutant has none.
    """
    again = set() if only is None else {int(number) for number in only.split(",")}
    if new := sorted(again - done.keys()):
        raise ValueError(f"--only: expected numbers of finished mutants, got {new}; run without --only first.")
    return again


def result_path(seed: int) -> Path:
    """Return where the result of a seed is written."""
    return FOLDER / ("mutation.json" if seed == 0 else f"mutation_seed{seed}.json")


def main() -> None:
    """Run and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--num", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "mutation")
    parser.add_argument("--only", help="numbers of mutants, with commas: run these again with today's tests")
    parser.add_argument("--tests", nargs="*", help="with --only: files of tests to run")
    parser.add_argument("--examples", type=int, default=8, help="hypothesis examples a test at most")
    parser.add_argument("--budget", type=float, default=80, help="seconds of tests a mutant at most")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    commit = check_source(args.work, ROOT)
    measured_at, done_at = args.work / "measured.json", args.work / f"mutants-{args.seed}.jsonl"
    results = list(finished(done_at))
    done = latest(results)
    again = numbers_again(args.only, done)
    tree = prepare(args.work)
    measured = json.loads(measured_at.read_text()) if measured_at.exists() else measure(tree, measured_at)
    mutants, num_sites = sample(tree, args.num, args.seed)
    preload()
    for name in ("src", "tests"):
        subprocess.run([sys.executable, "-m", "compileall", "-q", str(tree / name)], check=True)
    with done_at.open("a") as file:
        for mutant in mutants:
            if mutant["number"] not in again if again else mutant["number"] in done:
                continue
            if mutant["number"] in again:
                known = {name.partition("::")[0] for name in covering(mutant, tree, measured, math.inf)}
                result = judge(mutant, tree, {}, 1000, args.tests or sorted(known))
            else:
                result = judge(mutant, tree, covering(mutant, tree, measured, args.budget), args.examples)
            results.append(result)
            file.write(json.dumps(result) + "\n")
            file.flush()
            print(f"{mutant['number']:4d} {result['status']:9} {result['seconds']:6.1f} s  {result['path']}:"
                  f"{result['line']}  {result['after']}  {result['by'] or ''}", flush=True)  # fmt: skip
    numbers = [mutant["number"] for mutant in mutants]
    if latest(results).keys() >= set(numbers):
        sys.path.insert(0, str(ROOT / "src"))
        write_result(args, results, numbers, num_sites, measured, commit)


def write_result(
    args: argparse.Namespace,
    results: list[dict[str, Any]],
    numbers: list[int],
    num_sites: int,
    measured: dict[str, Any],
    commit: str | None,
) -> None:
    """Write the result of a sample beside this file.

    Args:
        args: The options.
        results: Every result so far, in the order they were found.
        numbers: The numbers of the sample's mutants.
        num_sites: Number of places that could be changed.
        measured: What :func:`measure` returned.
        commit: The commit of the source, ``None`` if it is unknown.
    """
    from refusion_lit.reports.results import environment

    last, first = ([outcomes[number] for number in numbers] for outcomes in (latest(results), of_first_pass(results)))
    record = {
        "source_commit": commit,
        "seed": args.seed,
        "num_sites": num_sites,
        "num_examples": args.examples,
        **summary(last),
        "first_pass": summary(first)["all"],
        "coverage": measured["coverage"],
        "seconds": round(sum(result["seconds"] for result in last)),
        "versions": {name: version(name) for name in ("cosmic-ray", "hypothesis", "pytest", "coverage", "torch")},
        "environment": environment(args.seed, ["mutation.py", *sys.argv[1:]]),
        "mutants": last,
    }
    result_path(args.seed).write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(summary(last)))


if __name__ == "__main__":
    main()
