"""``refusion-lit report RUN_OR_SWEEP...``: a page, plots and tables of finished tests."""

from __future__ import annotations

import sys

from refusion_lit.cli.parser import OneLineParser


def build_parser() -> OneLineParser:
    """Return the parser of ``report``."""
    parser = OneLineParser(prog="refusion-lit report", description="Compare the decoders of finished tests.")
    parser.add_argument("runs", nargs="+", metavar="RUN_OR_SWEEP", help="folder of a run or a sweep")
    parser.add_argument(
        "--output", type=str | None, default=None, help="folder; RUN_OR_SWEEP/report by default, ./report for several"
    )
    parser.add_argument(
        "--baseline", type=str | None, default=None, help="row or decoder with which all others are compared"
    )
    parser.add_argument(
        "--format", type=str, default="html", help="html, markdown, latex, csv, pdf, png, several as html,csv, or all"
    )
    parser.add_argument(
        "--project", type=str | None, default=None, metavar="MODEL@DEVICE",
        help="predict speeds for a model and a device from the counted calls, e.g. Qwen3-8B@H100; several with commas",
    )  # fmt: skip
    return parser


def run(args: list[str]) -> int:
    """Write the report.

    Raises:
        ValueError: If a folder holds no results, or an option is wrong.
    """
    options = build_parser().parse(args)

    from refusion_lit.reports.projection import projection_tables
    from refusion_lit.reports.write import FORMATS, write_report
    from refusion_lit.utils.files import write_atomically

    tables = None
    if options.project is not None:
        tables = projection_tables(options.runs, options.project, options.baseline)
    formats = list(FORMATS) if options.format == "all" else list(filter(None, options.format.split(",")))
    paths = write_report(options.runs, options.output, baseline=options.baseline, formats=formats)
    if tables is not None:
        sys.stdout.write(f"{tables}\n")
        paths.append(paths[-1].with_name("projection.md"))
        write_atomically(paths[-1], tables)
    for path in paths:
        sys.stdout.write(f"wrote {path}\n")
    return 0
