"""Runs a sweep: plans its points, runs those that are not finished, gathers the results."""

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

from refusion_lit.sweeps.files import LOG, OUTCOME, POINT, read_json, stop_left_over, tail, take_lock, write_json
from refusion_lit.sweeps.files import write_whole as _write
from refusion_lit.sweeps.points import Point, Resolve, plan
from refusion_lit.sweeps.progress import SweepProgress
from refusion_lit.sweeps.spec import Sweep
from refusion_lit.sweeps.table import Row, gather, write_table

COMMAND = (sys.executable, "-m", "refusion_lit.cli")


@dataclass(frozen=True, kw_only=True)
class SweepResult:
    """What a sweep came to.

    Attributes:
        directory: Where everything is.
        rows: The table: a row for each point and decoder, see :func:`~refusion_lit.sweeps.table.gather`.
        failed: Ids of the points that failed.
        num_reused: Points that an earlier run of the sweep had finished.
        files: The tables written.
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
    """Run a sweep's points, each in its own process and folder (``DIRECTORY/points/ID``).

    A finished point is never run again; with ``resume`` one that failed, or was cut off, is run from its start.

    Args:
        sweep: The sweep.
        directory: Where everything goes; takes the place of ``sweep.directory``.
        resolve: Checks and completes a point's config without building anything;
            :func:`refusion_lit.cli.sweep.resolver` makes the command line's own.
        relative_to: What the sweep's paths are relative to.
        resume: Go on in a directory that exists.
        command: What a subcommand's arguments are appended to.
        console: Where progress goes; standard error by default.

    Raises:
        ValueError: If the sweep or a point is wrong, or the directory is in use; nothing has run then.
        KeyboardInterrupt: When interrupted; the points' processes are stopped.
    """
    directory = Path(directory).resolve()
    console = console or Console(stderr=True)
    if directory.exists() and any(directory.iterdir()) and not resume:
        raise ValueError(f"directory: expected a new one, got {directory}, which exists; add --resume to go on in it.")
    sweep.launcher.check()
    points = plan(sweep, Path(relative_to).resolve(), resolve)
    directory.mkdir(parents=True, exist_ok=True)
    lock = take_lock(directory / "lock")
    if lock is None:
        raise ValueError(f"directory: expected one at rest, got {directory}, where a sweep is running; wait for it.")
    with lock:
        write_json(directory / "sweep.json", {"swept": sweep.swept, "points": [point.id for point in points]})
        waiting = [point for point in points if not is_finished(directory, point)]
        for point in waiting:
            _prepare(directory, point, sweep, command)
        by_folder = {directory / "points" / point.id: point for point in waiting}
        if reused := len(points) - len(waiting):
            console.print(f"{reused} of {len(points)} points are finished already", markup=False, highlight=False)
        try:
            _launch(sweep, by_folder, console)
        finally:  # also when interrupted: what is there is worth a table
            rows = gather(directory, points, sweep.swept)
            files = write_table(directory, rows)
    failed = tuple(dict.fromkeys(row["point"] for row in rows if row["status"] != "finished"))
    return SweepResult(directory=directory, rows=rows, failed=failed, num_reused=reused, files=tuple(files))


def is_finished(directory: Path, point: Point) -> bool:
    """Whether a point has a result."""
    outcome = read_json(directory / "points" / point.id / OUTCOME)
    return isinstance(outcome, dict) and outcome.get("status") == "finished"


def commands(directory: Path, point: Point, command: Sequence[str] = COMMAND) -> dict[str, list[str]]:
    """Return for each subcommand of a point the command that runs it."""
    folder = directory / "points" / point.id
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
    """Return a list of points with their state and their commands."""
    lines = []
    for number, point in enumerate(points, start=1):
        state = "finished" if is_finished(directory, point) else "to run"
        lines.append(f"[{number}/{len(points)}] {point.id} ({state}) {point.label}")
        lines += [f"    {shlex.join(arguments)}" for arguments in commands(directory, point, command).values()]
    return "\n".join(lines)


def _prepare(directory: Path, point: Point, sweep: Sweep, command: Sequence[str]) -> None:
    """Clear what a failed or cut off run left, and write what the point's process needs."""
    folder = directory / "points" / point.id
    if folder.exists():
        stop_left_over(folder)
        (folder / OUTCOME).unlink(missing_ok=True)
        shutil.rmtree(folder)
    for subcommand, config in point.configs.items():
        _write(folder / f"{subcommand}.yaml", yaml.safe_dump(config, sort_keys=False))
    values = {
        "id": point.id,
        "options": point.options,
        "seed": point.seed,
        "test_checkpoint": sweep.test_checkpoint,
        "commands": commands(directory, point, command),
    }
    write_json(folder / POINT, values)


def _launch(sweep: Sweep, points: dict[Path, Point], console: Console) -> None:
    with SweepProgress(len(points), console) as progress, closing(sweep.launcher.launch(list(points))) as ends:  # type: ignore[type-var]
        for end in ends:
            if end is None:
                progress.tick()
                continue
            folder, how = end
            outcome = read_json(folder / OUTCOME)
            if not isinstance(outcome, dict):
                error = f"{how}, without a result\n{tail(folder / LOG)}".strip()
                outcome = {"status": "failed", "seconds": None, "error": error}
                write_json(folder / OUTCOME, outcome)
            progress.ended(points[folder].label, outcome["status"], outcome["seconds"], outcome.get("error"))
