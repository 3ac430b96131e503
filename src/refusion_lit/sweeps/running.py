"""Runs a sweep: plans its points, runs the unfinished points and collects their results in a table."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.progress import Progress

from refusion_lit.reports.results import RESULTS, read_latency, read_results
from refusion_lit.sweeps.launchers import LOCK, LOG, OUTCOME, POINT, Launcher, tail
from refusion_lit.sweeps.points import Point, Resolve, Sweep, plan
from refusion_lit.utils.files import (
    acquire_lock,
    read_object,
    require_writable,
    write_atomically,
    write_json_atomically,
)
from refusion_lit.utils.nested import get_nested
from refusion_lit.utils.require import require
from refusion_lit.utils.rows import format_csv

TableRow = dict[str, Any]
MODULE = "refusion_lit.cli"
_WEIGHTS = {".ckpt", ".safetensors", ".bin", ".pt", ".distcp"}
"""Suffixes of weight files. Other files beside them, such as a report or a model card, change no result."""


def run(
    sweep: Sweep,
    *,
    directory: str | Path,
    resolve: Resolve,
    relative_to: str | Path = ".",
    resume: bool = False,
    module: str = MODULE,
    console: Console | None = None,
) -> list[TableRow]:
    """Run a sweep's points in separate processes and directories (``DIRECTORY/points/ID``).

    Finished points are never run again. With ``resume``, failed and interrupted points start again.

    Args:
        sweep: The sweep.
        directory: The sweep's directory; replaces ``sweep.directory``.
        resolve: Validates and completes a config without building anything;
            :func:`refusion_lit.cli.sweep.make_resolver` does it with the command line's parser.
        relative_to: Directory to which the sweep's paths are relative.
        resume: Whether the directory may exist already.
        module: Module that takes a subcommand and its options, as in ``python -m MODULE``.
        console: Where to show progress; standard error by default.

    Returns:
        The rows in ``results.csv``; see :func:`collect_rows`.

    Raises:
        ValueError: If the sweep or a point is invalid or the directory is in use; nothing has run then.
        KeyboardInterrupt: If interrupted, after the points' processes have been stopped.
    """
    directory = Path(directory).resolve()
    console = console or Console(stderr=True)
    require_writable(directory, "directory")
    if directory.exists() and any(directory.iterdir()) and not resume:
        raise ValueError(f"directory: expected a new directory, got {directory}, which exists; add --resume.")
    sweep.launcher.check()
    varies_threads = any(name.rpartition(".")[2] == "num_threads" for name in sweep.option_names)
    variable = os.environ.get("OMP_NUM_THREADS") if varies_threads else None
    require(
        variable is None, "num_threads", "no OMP_NUM_THREADS, which replaces the points' values", variable, "unset it"
    )
    if sweep.description:
        _print_line(console, sweep.description)
    points = locate_points(directory, plan(sweep, Path(relative_to).resolve(), resolve))
    lock = acquire_lock(directory / LOCK, "directory", f"other sweep in {directory}", "wait for it to end")
    try:
        names = [point.id for point in points.values()]
        write_json_atomically(directory / "sweep.json", {"swept": sweep.option_names, "points": names})
        unfinished = {folder: point for folder, point in points.items() if not is_finished(folder, point)}
        for folder, point in unfinished.items():
            _prepare(folder, point, commands(folder, point, module))
        outcomes = [path for path in (directory / "points").glob(f"*/{OUTCOME}") if path.parent.name not in names]
        if outcomes:
            text = f"{len(outcomes)} points of other options stay in {directory / 'points'}, but not in the table"
            _print_line(console, text)
        if num_finished := len(points) - len(unfinished):
            _print_line(console, f"{num_finished} of {len(points)} points are already finished")
        try:
            _launch(sweep.launcher, unfinished, console)
            if sweep.latency is not None:
                from refusion_lit.sweeps.latency import measure_points

                finished = {folder: point for folder, point in points.items() if is_finished(folder, point)}
                with _Bar(console, "speeds, one decoder at a time") as bar:
                    measure_points(finished, sweep.latency, bar.show)
        finally:  # write the table of the finished points even if interrupted
            rows = collect_rows(points, sweep.option_names)
            write_atomically(directory / "results.csv", format_csv(rows))
    finally:
        lock.release()
    return rows


def locate_points(directory: Path, points: Sequence[Point]) -> dict[Path, Point]:
    """Return the points of a sweep by their directories."""
    return {directory / "points" / point.id: point for point in points}


def is_finished(folder: Path, point: Point) -> bool:
    """Return whether a point has readable results, and its input files are unchanged or missing."""
    is_current = _input_states(point).items() <= read_object(folder / POINT).get("inputs", {}).items()
    return is_current and bool(_read_point_results(folder))


def _read_point_results(folder: Path) -> dict[str, Any]:
    """Return the ``results.json`` of a finished point; an empty mapping if the file is missing or damaged."""
    if read_object(folder / OUTCOME).get("status") != "finished":
        return {}
    try:
        return read_results(folder / "test" / RESULTS) or {}
    except ValueError:
        return {}


def _input_states(point: Point) -> dict[str, list[int]]:
    """Return size and time of every input file of a point: initial weights and data."""
    files: set[Path] = set()
    for config in point.configs.values():
        names = ("ckpt_path", "model.backbone.source", "model.backbone.draft", "model.decoding.verifier")
        for path in map(Path, filter(None, (get_nested(config, name) for name in names))):
            files |= {path} if path.is_file() else {file for file in path.rglob("*") if file.suffix in _WEIGHTS}
        files |= _list_named_files(config.get("data"))
    return {str(file): [file.stat().st_size, file.stat().st_mtime_ns] for file in sorted(files)}


def _list_named_files(values: object) -> set[Path]:
    """Return the files that nested options name."""
    if isinstance(values, str):
        return {Path(values)} if os.path.isfile(values) else set()
    children = values.values() if isinstance(values, dict) else values if isinstance(values, list) else ()
    return set().union(*map(_list_named_files, children))


def commands(folder: Path, point: Point, module: str = MODULE) -> dict[str, list[str]]:
    """Return the arguments of ``python -m`` that run a directory's point, by subcommand."""
    place = [f"--runs_dir={folder.parent}", f"--run_name={folder.name}"]
    lines = {
        name: [module, name, f"--config={folder / name}.yaml", *place, f"--run_version={name}"]
        for name in point.configs
    }
    if "fit" in lines:
        lines["test"].append("--ckpt_path=last")
    return lines


def list_points(points: Mapping[Path, Point], module: str = MODULE) -> str:
    """List points with their states and command lines."""
    lines = []
    for number, (folder, point) in enumerate(points.items(), start=1):
        state = "finished" if is_finished(folder, point) else "to run"
        lines.append(f"[{number}/{len(points)}] {point.id} ({state}) {point.label}")
        for command in commands(folder, point, module).values():
            lines += [f"    {shlex.join([sys.executable, '-m', *command])}"]
    return "\n".join(lines)


def _prepare(folder: Path, point: Point, command_lines: dict[str, list[str]]) -> None:
    """Remove a point's earlier results, and write the files that its process reads."""
    if folder.exists():
        fix = "wait for its end or kill it (or cancel its SLURM job), then resume"
        acquire_lock(folder / LOCK, "resume", f"process of an earlier sweep in {folder}", fix).release()
        (folder / OUTCOME).unlink(missing_ok=True)
        shutil.rmtree(folder)
    for subcommand, config in point.configs.items():
        write_atomically(folder / f"{subcommand}.yaml", yaml.safe_dump(config, sort_keys=False))
    values = {"id": point.id, "options": point.options, "seed": point.seed, "commands": command_lines}
    write_json_atomically(folder / POINT, {**values, "inputs": _input_states(point)})


class _Bar(Progress):
    """A bar in a terminal. Elsewhere, a line after every tenth of the work, with the time left."""

    def __init__(self, console: Console, name: str) -> None:
        super().__init__(console=console, disable=not console.is_terminal)
        self.add_task(name, total=None)

    def show(self, num_done: float, total: float) -> None:
        """Show how much is done."""
        (bar,) = self.tasks
        num_done = max(num_done, bar.completed)  # a file that is being rewritten shows no steps
        before, tenth = int(10 * bar.completed / total), int(10 * num_done / total)
        self.update(bar.id, completed=num_done, total=total)
        if not self.console.is_terminal and before < tenth < 10:
            left = (bar.elapsed or 0.0) * (total - num_done) / num_done
            _print_line(self.console, f"{bar.description}: {10 * tenth} % done, about {left:.0f} s left")


def _launch(launcher: Launcher, points: dict[Path, Point], console: Console) -> None:
    """Run points; print a line when a point ends, and show how far the points are."""
    num_ended = 0
    with _Bar(console, "points") as bar, closing(launcher.launch(list(points))) as polls:
        for ends in polls:
            for folder, end in ends.items():
                num_ended += 1
                outcome = read_object(folder / OUTCOME)
                if not outcome:
                    error = f"{end}, without a result\n{tail(folder / LOG)}".strip()
                    outcome = {"status": "failed", "seconds": None, "error": error}
                    write_json_atomically(folder / OUTCOME, outcome)
                duration = "" if outcome["seconds"] is None else f" in {outcome['seconds']:.1f} s"
                line = f"[{num_ended}/{len(points)}] {outcome['status']}{duration}: {points[folder].label}"
                _print_line(console, f"{line}\n{outcome['error']}" if outcome["error"] else line)
            bar.show(sum(_share_done(folder, point) for folder, point in points.items()), len(points))


def _share_done(folder: Path, point: Point) -> float:
    """Return the finished share of a point's training steps, or 1 if the point has ended."""
    if (folder / OUTCOME).exists():
        return 1.0
    num_steps = get_nested(point.configs, "fit.trainer.max_steps") or 0
    metrics = folder / "fit" / "metrics.csv"
    try:
        with metrics.open(encoding="utf-8") as lines:
            column = next(lines).strip().split(",").index("step")
        # The file grows, so only its end is read. The last line may be incomplete.
        step = int(tail(metrics).splitlines()[-2].split(",")[column])
    except (OSError, ValueError, LookupError, StopIteration):  # no step yet
        return 0.0
    return 0.95 * min(step / num_steps, 1) if num_steps > 0 else 0.0


def _print_line(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def collect_rows(points: Mapping[Path, Point], option_names: Sequence[str]) -> list[TableRow]:
    """Return table rows: a point, its status and options, and a decoder's figures.

    Args:
        points: The sweep's points by directory. A point without an outcome has the status ``pending``.
        option_names: The varying options, which are columns.

    Returns:
        Rows with the same keys in the same order. ``class`` is the decoder's class. ``mismatch`` has the reasons why
        the model does not fit the decoder; empty if it fits. ``point_seconds`` is the duration of the point's
        processes, ``seconds`` the duration of decoding. Speeds are ``None`` if points ran concurrently. All figures are
        ``None`` for an unfinished point.
    """
    rows = []
    for folder, point in points.items():
        outcome, results = read_object(folder / OUTCOME), _read_point_results(folder)
        common = {
            "point": point.id,
            "status": outcome.get("status", "pending"),
            "seed": point.seed,
            "point_seconds": outcome.get("seconds"),
            "folder": str(folder),
            "error": outcome.get("error"),
            **{name: point.options.get(name) for name in option_names},
        }
        for decoder, figures in results.get("results", {None: {}}).items():
            mismatch = "; ".join(results["mismatches"].get(decoder, [])) if figures else None
            about = {
                "decoder": decoder,
                "class": get_nested(results, f"decoders.{decoder}.class"),
                "mismatch": mismatch,
            }
            speeds = read_latency(results).get(decoder)
            rows.append({**common, **about, **figures, **({"latency": speeds} if speeds else {})})
    columns = dict.fromkeys(name for row in rows for name in row)
    return [{**columns, **row} for row in rows]
