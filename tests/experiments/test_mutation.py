"""Mutation testing: which file a result goes to, what it records, and which kept work is refused."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "experiments" / "hard_tests"
PLACE = {"path": "src/refusion_lit/decoding/a.py", "line": 1, "operator": "AddNot", "before": "", "after": ""}


@pytest.fixture
def mutation(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Return mutation.py as a module that runs without the packages of the extra ``mutation``."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import mutation  # pyright: ignore[reportMissingImports]

    monkeypatch.setattr(mutation, "version", lambda name: "1")
    yield mutation
    for name in ("mutation", "mutants"):
        sys.modules.pop(name)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Make a repository with a committed package of one file."""
    root = tmp_path / "repository"
    package = root / "src" / "refusion_lit"
    package.mkdir(parents=True)
    (package / "a.py").write_text("a = 1\n")
    git(root, "init", "--quiet")
    git(root, "add", ".")
    git(root, "-c", "user.name=a", "-c", "user.email=a@a.a", "commit", "--quiet", "--no-gpg-sign", "-m", "a")
    return root


@pytest.fixture
def work(tmp_path: Path) -> Path:
    work = tmp_path / "work"
    work.mkdir()
    return work


def git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True).stdout.strip()


def outcome(number: int, status: str, *, again: bool = False) -> dict[str, Any]:
    return {**PLACE, "number": number, "num_tests": None if again else 2, "status": status, "by": None, "seconds": 1.0}


def test_each_seed_has_its_own_file(mutation: ModuleType) -> None:
    assert [mutation.result_path(seed).name for seed in (0, 1, 2)] == [
        "mutation.json", "mutation_seed1.json", "mutation_seed2.json"
    ]  # fmt: skip


def test_committed_results_follow_from_their_mutants(mutation: ModuleType) -> None:
    record = json.loads(mutation.result_path(1).read_text())
    assert record["seed"] == 1
    for name, counts in mutation.summary(record["mutants"]).items():
        interval = counts.pop("wilson_95")
        # Committed with a normal quantile of 1.96, which can move the last digit.
        assert record[name].pop("wilson_95") == pytest.approx(interval, abs=1.1e-4)
        assert record[name] == counts


def test_every_mutated_package_has_modules(mutation: ModuleType) -> None:
    root = FOLDER.parents[1]
    assert [name for name in mutation.PACKAGES if not any((root / "src/refusion_lit" / name).rglob("*.py"))] == []
    assert [name for name in mutation.TESTS if not any((root / name).rglob("test_*.py"))] == []


def test_a_summary_counts_each_package_that_has_mutants(mutation: ModuleType) -> None:
    paths = {"families": "src/refusion_lit/families/llada/decoder.py", "engine": "src/refusion_lit/engine/batch.py"}
    summary = mutation.summary([{**outcome(0, "killed"), "path": path} for path in paths.values()])
    assert {name: counts["num_mutants"] for name, counts in summary.items()} == {"all": 2, "families": 1, "engine": 1}


def test_a_result_has_the_source_and_the_first_pass(
    mutation: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mutation, "FOLDER", tmp_path)
    results = [outcome(0, "killed"), outcome(1, "survived"), outcome(2, "survived"), outcome(1, "killed", again=True)]
    args = argparse.Namespace(seed=3, examples=8)
    mutation.write_result(args, results, [0, 1, 2], 50, {"coverage": {"num_branches": 4}}, "abc")
    record = json.loads((tmp_path / "mutation_seed3.json").read_text())
    assert record["source_commit"] == "abc"
    assert (record["all"]["num_killed"], record["first_pass"]["num_killed"]) == (2, 1)
    assert record["first_pass"]["by_status"] == {"killed": 1, "survived": 2}
    assert [result["status"] for result in record["mutants"]] == ["killed", "killed", "survived"]


def test_mutants_run_again_only_after_their_first_pass(mutation: ModuleType) -> None:
    done = mutation.latest([outcome(0, "killed"), outcome(1, "survived")])
    assert mutation.numbers_again(None, done) == set()
    assert mutation.numbers_again("1,0", done) == {0, 1}
    with pytest.raises(ValueError, match=r"--only: expected .* got \[7\]; run without --only first"):
        mutation.numbers_again("1,7", done)


def test_work_resumes_on_the_same_source(mutation: ModuleType, root: Path, work: Path) -> None:
    commit = git(root, "rev-parse", "HEAD")
    assert mutation.check_source(work, root) == commit
    (work / "measured.json").write_text("{}")
    (root / "tests").mkdir()
    (root / "tests" / "test_a.py").write_text("")  # new tests are what --only is for
    assert mutation.check_source(work, root) == commit


@pytest.mark.parametrize("change", ["edit", "rename", "add"])
def test_work_on_another_source_is_refused(mutation: ModuleType, root: Path, work: Path, change: str) -> None:
    commit, file = mutation.check_source(work, root), root / "src" / "refusion_lit" / "a.py"
    if change == "edit":
        file.write_text("a = 2\n")
    elif change == "rename":
        file.rename(file.with_name("b.py"))
    else:
        file.with_name("b.py").write_text("")
    with pytest.raises(ValueError, match=rf"^--work: .*give another directory .* or check out {commit} to resume"):
        mutation.check_source(work, root)


@pytest.mark.parametrize("name", ["measured.json", "mutants-1.jsonl"])
def test_work_on_an_unrecorded_source_is_refused(mutation: ModuleType, root: Path, work: Path, name: str) -> None:
    (work / name).write_text("")
    with pytest.raises(ValueError, match=r"digest unknown\)"):
        mutation.check_source(work, root)


def test_a_source_without_a_commit_is_recorded_without_one(
    mutation: ModuleType, root: Path, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "src" / "refusion_lit" / "a.py").write_text("a = 2\n")
    assert mutation.check_source(work, root) is None
    shutil.rmtree(root / ".git")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(root.parent))
    assert mutation.source_commit(root) is None
