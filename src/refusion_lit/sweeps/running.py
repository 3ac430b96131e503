"""Runs a sweep: plans its points, runs the unfinished ones and collects the results."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import yaml
from rich.console import Console

from refusion_lit.sweeps.files import LOCK, LOG, OUTCOME, POINT, kill_orphans, tail
from refusion_lit.sweeps.points import Point, Resolve, plan
from refusion_lit.sweeps.progress import SweepProgress
from refusion_lit.sweeps.spec import Sweep
from refusion_lit.sweeps.table import Row, collect_rows, write_table
from refusion_lit.utils.files import read_json, write_atomically, write_json_atomically
from refusion_lit.utils.locks import try_lock

COMMAND = (sys.executable, "-m", "refusion_lit.cli")


@dataclass(frozen=True, kw_only=True)
class SweepResult:
    """The results of a sweep.

    Attributes:
        directory: The sweep's directory.
        rows: The table, one row per point and decoder; see :func:`~refusion_lit.sweeps.table.collect_rows`.
        failed: Ids of the points that failed.
        num_reused: Number of points that an earlier run of the sweep had finished.
        files: The table files written.
    """

    directory: Path
    rows: list[Row]
    failed: tuple[str, ...]
    num_reused: int
    files: tuple[Path, ...]


def run(
    sweep: Sweep,
    *,
    directory: str | Path,
    resolve: Resolve,
    relative_to: str | Path = ".",
    resume: bool = False,
    command: Sequence[str] = COMMAND,
    console: Console | None = None,
) -> SweepResult:
    """Run the points of a sweep, each in its own process and directory (``DIRECTORY/points/ID``).

    Finished points are never run again. With ``resume``, points that failed or were interrupted start over.

    Args:
        sweep: The sweep.
        directory: The sweep's directory; replaces ``sweep.directory``.
        resolve: Validates and completes the config of a point without building anything;
            :func:`refusion_lit.cli.sweep.resolver` returns the one of the command line.
        relative_to: Directory that the sweep's paths are relative to.
        resume: Whether the directory may exist already.
        command: Command that takes a subcommand and its options.
        console: Where to show progress; standard error by default.

    Raises:
        ValueError: If the sweep or a point is invalid or the directory is in use; nothing has run then.
        KeyboardInterrupt: If interrupted, after the points' processes have been stopped.
    """
    directory = Path(directory).resolve()
    console = console or Console(stderr=True)
    if directory.exists() and any(directory.iterdir()) and not resume:
        raise ValueError(f"directory: expected a new directory, got {directory}, which exists; add --resume.")
    sweep.launcher.check()
    points = plan(sweep, Path(relative_to).resolve(), resolve)
    lock = try_lock(directory / LOCK)
    if lock is None:
        raise ValueError(f"directory: expected no running sweep in {directory}, got one; wait for it to end.")
    with lock:
        write_json_atomically(
            directory / "sweep.json", {"swept": sweep.swept, "points": [point.id for point in points]}
        )
        unfinished = [point for point in points if not is_finished(directory, point)]
        for point in unfinished:
            _prepare(directory, point, sweep, command)
        names = {point.id for point in points}
        outcomes = [path.parent for path in (directory / "points").glob(f"*/{OUTCOME}")]
        if others := [path.name for path in outcomes if path.name not in names]:
            console.print(
                f"{len(others)} points of other options stay in {directory / 'points'}, but not in the table",
                markup=False, highlight=False,
            )  # fmt: skip
        if num_reused := len(points) - len(unfinished):
            console.print(f"{num_reused} of {len(points)} points are already finished", markup=False, highlight=False)
        try:
            _launch(sweep, {_folder(directory, point): point for point in unfinished}, console)
        finally:  # write the table of the finished points even if interrupted
            rows = collect_rows(directory, points, sweep.swept)
            files = write_table(directory, rows)
    failed = tuple(dict.fromkeys(row["point"] for row in rows if row["status"] != "finished"))
    return SweepResult(directory=directory, rows=rows, failed=failed, num_reused=num_reused, files=tuple(files))


def is_finished(directory: Path, point: Point) -> bool:
    """Return whether a point has results."""
    outcome = read_json(_folder(directory, point) / OUTCOME)
    return isinstance(outcome, dict) and outcome.get("status") == "finished"


def commands(directory: Path, point: Point, command: Sequence[str] = COMMAND) -> dict[str, list[str]]:
    """Return the command line of each subcommand of a point."""
    folder = _folder(directory, point)
    return {
        subcommand: [
            *command,
            subcommand,
            f"--config={folder / subcommand}.yaml",
            f"--runs_dir={folder.parent}",
            f"--run_name={point.id}",
            f"--run_version={subcommand}",
        ]
        for subcommand in point.configs
    }


def describe(directory: Path, points: Sequence[Point], command: Sequence[str] = COMMAND) -> str:
    """Return a list of the points with their states and command lines."""
    lines = []
    for number, point in enumerate(points, start=1):
        state = "finished" if is_finished(directory, point) else "to run"
        lines.append(f"[{number}/{len(points)}] {point.id} ({state}) {point.label}")
        lines += [f"    {shlex.join(arguments)}" for arguments in commands(directory, point, command).values()]
    return "\n".join(lines)


def _folder(directory: Path, point: Point) -> Path:
    return directory / "points" / point.id


def _prepare(directory: Path, point: Point, sweep: Sweep, command: Sequence[str]) -> None:
    """Remove what an earlier run of the point left, and write the files that its process reads."""
    folder = _folder(directory, point)
    if folder.exists():
        kill_orphans(folder)
        (folder / OUTCOME).unlink(missing_ok=True)
        shutil.rmtree(folder)
    for subcommand, config in point.configs.items():
        write_atomically(folder / f"{subcommand}.yaml", yaml.safe_dump(config, sort_keys=False))
    values = {
        "id": point.id,
        "options": point.options,
        "seed": point.seed,
        "test_checkpoint": sweep.test_checkpoint,
        "commands": commands(directory, point, command),
    }
    write_json_atomically(folder / POINT, values)


def _launch(sweep: Sweep, points: dict[Path, Point], console: Console) -> None:
    with SweepProgress(len(points), console) as progress, closing(sweep.launcher.launch(list(points))) as ends:
        for end in ends:
            if end is None:
                progress.tick()
                continue
            outcome = read_json(end.folder / OUTCOME)
            if not isinstance(outcome, dict):
                error = f"{end.how}, without a result\n{tail(end.folder / LOG)}".strip()
                outcome = {"status": "failed", "seconds": None, "error": error}
                write_json_atomically(end.folder / OUTCOME, outcome)
            label = points[end.folder].label
            progress.ended(label, outcome["status"], outcome["seconds"], outcome.get("error"))
