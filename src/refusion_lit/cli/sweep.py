"""``refusion-lit sweep``: many runs that differ in some options, and one table of their results."""

from __future__ import annotations

import json
import shlex
import signal
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from refusion_lit.cli.parser import OneLineParser
from refusion_lit.sweeps.launchers import Launcher
from refusion_lit.sweeps.points import Resolve, Sweep, plan
from refusion_lit.sweeps.running import list_points, locate_points
from refusion_lit.sweeps.running import run as run_sweep
from refusion_lit.utils.files import read_yaml
from refusion_lit.utils.require import require


def build_parser() -> OneLineParser:
    """Return the parser of ``sweep``."""
    about = "Run points that differ in some options. --NAME VALUE replaces an option of the file; a list is a grid."
    parser = OneLineParser(prog="refusion-lit sweep", description=about)
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
    arguments, overrides = split_overrides(args)
    options = build_parser().parse(arguments)
    file = Path(options.config)
    sweep = read_sweep(file).override(overrides)
    if not options.dry_run:
        sweep.launcher.preload("refusion_lit.cli.lightning")  # while this process imports the same libraries
    directory = Path(options.directory or sweep.directory or f"runs/sweep_{file.resolve().parent.name}").resolve()
    if options.dry_run:
        print(list_points(locate_points(directory, plan(sweep, file.parent.resolve(), make_resolver()))))
        print("dry run: the sweep writes these configs when it runs")
        return 0
    again = shlex.join([*args, *([] if "--resume" in args else ["--resume"])])
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    try:
        rows = run_sweep(
            sweep, directory=directory, resolve=make_resolver(), relative_to=file.parent, resume=options.resume
        )
    except KeyboardInterrupt:
        print(f"interrupted; resume with: refusion-lit sweep {again}", file=sys.stderr)
        return 130
    finally:
        signal.signal(signal.SIGTERM, previous)
    if any(row["status"] == "finished" for row in rows):
        from refusion_lit.reports.write import report_results  # and the libraries of plots

        report_results(directory, directory.name)
    if sweep.latency is not None:
        from refusion_lit.sweeps.latency import summary_sentence

        if sentence := summary_sentence(rows):
            print(sentence)
    print(f"results in {directory}/results.csv")
    failed = list(dict.fromkeys(row["point"] for row in rows if row["status"] != "finished"))
    if failed:
        num_points = len({row["point"] for row in rows})
        print(
            f"{len(failed)} of {num_points} points failed: {', '.join(failed)}; their logs are in "
            f"{directory}/points/ID/log.txt. To run them again: refusion-lit sweep {again}",
            file=sys.stderr,
        )
    return 1 if failed else 0


def split_overrides(args: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Separate the options of ``sweep`` from the options of its points: dotted names, and the seed.

    Returns:
        ``sweep``'s arguments, and the other options' values by name.

    Raises:
        ValueError: If a value is missing or is not YAML.
    """
    rest, overrides = [], {}
    arguments = iter(args)
    for argument in arguments:
        name, has_value, value = argument.partition("=")
        if not name.startswith("--") or ("." not in name and name != "--seed_everything"):
            rest.append(argument)
            continue
        name = name.removeprefix("--")
        text = value if has_value else next(arguments, None)
        require(text is not None, name, "a value", None, f"write it as --{name} VALUE")
        try:
            overrides[name] = yaml.safe_load(str(text))
        except yaml.YAMLError as error:
            raise ValueError(f"{name}: expected a value or a list, got {text!r}; write a list as [A, B].") from error
    return rest, overrides


def read_sweep(file: Path) -> Sweep:
    """Read a sweep's YAML file.

    Raises:
        ValueError: If it is missing or wrong.
    """
    values = {name: value for name, value in read_yaml(file, "config").items() if value is not None}
    parser = OneLineParser(prog="refusion-lit sweep")
    parser.add_class_arguments(Sweep, skip={"launcher"})
    parser.add_argument("--launcher", type=Launcher | None)  # without the options of the default launcher
    try:
        parsed = parser.parse_values(values)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    # The other values stay as they are written: the parser would read a text such as '8' as a number.
    return Sweep(**{**values, **{name: parsed[name] for name in ("launcher", "latency") if name in values}})


def make_resolver() -> Resolve:
    """Return a function that parses a config and options with the subcommand's parser, defaults included."""
    from refusion_lit.cli.lightning import parse_only
    from refusion_lit.cli.resume import list_dirpaths
    from refusion_lit.decoding import Decoder
    from refusion_lit.evaluation.loop import Evaluation, EvaluationOptions
    from refusion_lit.objectives import Objective
    from refusion_lit.types import SamplingParams

    command_line = cache(parse_only)
    # Creating the strategies refuses values that their types allow, such as a slot size of 0.
    kinds: dict[str, Any] = {"decoders": dict[str, Decoder | None], "objective": Objective}
    kinds |= {"sampling": SamplingParams, "decoding": EvaluationOptions}
    strategies = OneLineParser(prog="refusion-lit sweep")
    for name, kind in kinds.items():
        strategies.add_argument(f"--{name}", type=kind)

    def resolve(subcommand: str, config: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
        texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in options.items()}
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "config.yaml"
            file.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
            cli = command_line(subcommand)
            try:
                parsed = cli.parse([subcommand, f"--config={file}", *(f"--{n}={text}" for n, text in texts.items())])
            except ValueError as error:
                raise ValueError(str(error).removeprefix(f"{file}: ")) from error
        parsed[subcommand].pop("config", None)
        resolved = yaml.safe_load(cli.parser.dump(parsed, skip_none=False, skip_validation=True))[subcommand]
        logger = resolved["trainer"].get("logger")
        expected = "the default loggers, because a sweep finds its results in their directory"
        require(logger in (None, True), "trainer.logger", expected, logger, "leave the option out")
        folders = list(map(str, list_dirpaths(resolved["trainer"].get("callbacks")))) if subcommand == "fit" else []
        fix = "leave it out: each point has a directory of its own"
        require(not folders, "trainer.callbacks", "no dirpath, which all points would share", folders, fix)
        source = str(resolved.get("ckpt_path") or "")
        is_here = Path(source).exists() or not (source.endswith(".ckpt") or Path(source).is_absolute())
        require(is_here, "ckpt_path", "a checkpoint or directory that exists, or a hub id", source, "correct the path")
        model: Any = strategies.parse_values({name: resolved["model"][name] for name in kinds})
        Evaluation(model.decoders or {}, model.sampling, model.decoding)  # refuses options that do not fit together
        return resolved

    return resolve
