"""``refusion-lit sweep``: many runs that differ in some options, and one table of their results."""

from __future__ import annotations

import copy
import shlex
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import Namespace

from refusion_lit.cli.given import PARSER_ERRORS
from refusion_lit.cli.parser import OneLineParser
from refusion_lit.cli.usage_errors import brief, explained
from refusion_lit.reports.results import short, with_class
from refusion_lit.sweeps.points import Sweep, plan
from refusion_lit.sweeps.running import TableRow, describe
from refusion_lit.sweeps.running import run as run_sweep
from refusion_lit.utils.files import read_yaml
from refusion_lit.utils.require import require


def build_parser() -> OneLineParser:
    """Return the parser of ``sweep``."""
    parser = OneLineParser(prog="refusion-lit sweep", description="Run points that differ in some options.")
    parser.add_argument("-c", "--config", type=str, required=True, help="the sweep's YAML file")
    parser.add_argument("--directory", type=str | None, default=None, help="for points, logs and results.csv")
    parser.add_argument("--resume", type=bool, default=False, help="resume after a kill, or with further points")
    parser.add_argument("--dry_run", type=bool, default=False, help="list the points with their commands, run nothing")
    return parser


def run(args: list[str]) -> int:
    """Run a sweep.

    Returns:
        0 if all points finished, 1 if some failed, 130 when interrupted.

    Raises:
        ValueError: If the sweep is wrong; nothing has run then.
    """
    options = build_parser().parse(args)
    file = Path(options.config)
    sweep = read_sweep(file)
    directory = Path(options.directory or sweep.directory or f"runs/sweep_{file.resolve().parent.name}").resolve()
    if options.dry_run:
        points = plan(sweep, file.parent.resolve(), resolver())
        print(describe(directory, points))
        print("dry run: the sweep writes these configs when it runs")
        return 0
    again = shlex.join([*args, *([] if "--resume" in args else ["--resume"])])
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    try:
        rows = run_sweep(sweep, directory=directory, resolve=resolver(), relative_to=file.parent, resume=options.resume)
    except KeyboardInterrupt:
        print(f"interrupted; resume with: refusion-lit sweep {again}", file=sys.stderr)
        return 130
    finally:
        signal.signal(signal.SIGTERM, previous)
    from refusion_lit.reports.write import report_results  # and the libraries of plots

    _print_results(directory.name, rows, sweep.swept)
    print(f"results in {directory}/results.csv")
    if any(row["status"] == "finished" for row in rows):
        report_results(directory)
    failed = list(dict.fromkeys(row["point"] for row in rows if row["status"] != "finished"))
    if failed:
        num_points = len({row["point"] for row in rows})
        print(
            f"{len(failed)} of {num_points} points failed: {', '.join(failed)}; their logs are in "
            f"{directory}/points/ID/log.txt. To run them again: refusion-lit sweep {again}",
            file=sys.stderr,
        )
    return 1 if failed else 0


def _print_results(name: str, found: Sequence[TableRow], swept: Sequence[str]) -> None:
    """Print a line for each point and decoder: what was swept, and its most important figures."""
    from refusion_lit.reports.comparison import short_names
    from refusion_lit.reports.tables import MISMATCH, PRINTED, cells, print_table

    swept = [option for option in swept if option != "model.decoders"]  # the column of decoders shows them
    head = [*short_names(swept).values(), "decoder", *(title for _, title, _ in PRINTED)]
    rows = []
    for row in found:
        shown = with_class(row["decoder"], row["class"]) if row["decoder"] else row["status"]
        decoder = f"{shown}{' *' if row['mismatch'] else ''}"
        rows.append([*(short(row[option]) for option in swept), decoder, *cells(row, PRINTED)])
    note = f"* {MISMATCH}" if any(row["mismatch"] for row in found) else None
    print_table(f"{name}: {len(rows)} rows", head, rows, num_texts=len(swept) + 1, note=note)


def read_sweep(file: Path) -> Sweep:
    """Read a sweep's YAML file.

    Raises:
        ValueError: If it is missing or wrong.
    """
    parser = OneLineParser(prog="refusion-lit sweep")
    parser.add_class_arguments(Sweep)
    values = {name: value for name, value in read_yaml(file, "config").items() if value is not None}
    try:
        parsed = parser.parse_object(copy.deepcopy(values))
        launcher = parser.instantiate_classes(Namespace(launcher=parsed.launcher))["launcher"]
    except PARSER_ERRORS as error:
        raise explained(parser, [f"--config={file}"], error, "sweep") from error
    # As written: jsonargparse would create the components that the points' options name by an import path.
    return Sweep(**{**vars(parsed), **values, "launcher": launcher})


def resolver() -> Callable[[str, dict[str, Any]], dict[str, Any]]:
    """Return a function that parses a config with the subcommand's own parser and fills in every default."""
    from refusion_lit.cli.lightning import parse_only
    from refusion_lit.decoding import Decoder
    from refusion_lit.evaluation.loop import Evaluation, EvaluationOptions
    from refusion_lit.objectives import Objective
    from refusion_lit.types import SamplingParams

    command_line = cache(parse_only)
    # Values that a type cannot refuse, such as a slot size of 0, are refused by the strategies themselves.
    kinds: dict[str, Any] = {"decoders": dict[str, Decoder | None], "objective": Objective}
    kinds |= {"sampling": SamplingParams, "decoding": EvaluationOptions}
    strategies = OneLineParser(prog="refusion-lit sweep")
    for name, kind in kinds.items():
        strategies.add_argument(f"--{name}", type=kind)

    def resolve(subcommand: str, config: dict[str, Any]) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "config.yaml"
            file.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
            cli = command_line(subcommand)
            try:
                parsed = cli.parse(cli.parser, [subcommand, f"--config={file}"])
            except ValueError as error:
                raise ValueError(str(error).removeprefix(f"{file}: ")) from error
        parsed[subcommand].pop("config", None)
        resolved = yaml.safe_load(cli.parser.dump(parsed, skip_none=False, skip_validation=True))[subcommand]
        logger = resolved["trainer"].get("logger")
        expected = "the default in a sweep, which finds results by it"
        require(logger in (None, True), "trainer.logger", expected, logger, "leave the option out")
        own = resolved["trainer"].get("callbacks") or []
        options = [each.get("init_args") or {} for each in (own if isinstance(own, list) else [own])]
        shared = [each["dirpath"] for each in options if subcommand == "fit" and each.get("dirpath")]
        fix = "leave it out: each point has a directory of its own"
        require(not shared, "trainer.callbacks", "no dirpath, which all points would share", shared, fix)
        source = str(resolved.get("ckpt_path") or "")
        is_here = Path(source).exists() or not (source.endswith(".ckpt") or Path(source).is_absolute())
        require(is_here, "ckpt_path", "a checkpoint or directory that exists, or a hub id", source, "correct the path")
        try:
            made: Any = strategies.instantiate_classes(
                strategies.parse_object({n: resolved["model"][n] for n in kinds})
            )
        except ValueError as error:
            raise ValueError(brief(str(error))) from error
        Evaluation(made.decoders or {}, made.sampling, made.decoding)  # refuses what does not fit together
        return resolved

    return resolve
