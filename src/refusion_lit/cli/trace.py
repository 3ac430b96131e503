"""``refusion-lit trace``: watch a decode in the terminal, and write it as an HTML page or as JSON."""

from __future__ import annotations

import sys
from pathlib import Path

from jsonargparse import Namespace
from rich.console import Console
from rich.text import Text

from refusion_lit.cli.model_options import ModelParser, add_decoding_options, add_model_options, load_setup
from refusion_lit.traces.display import animate, page, print_statistics
from refusion_lit.traces.document import FORMAT, read_trace, record_trace, show_controls, write_trace
from refusion_lit.utils.files import require_free, write_atomically
from refusion_lit.utils.require import require


def build_parser() -> ModelParser:
    """Return the parser of ``trace``."""
    parser = ModelParser(prog="refusion-lit trace", description="Watch a decode, forward by forward.")
    parser.add_argument("--ckpt_path", type=str | None, default=None, help="checkpoint, directory or hub id")
    parser.add_argument("--prompt", type=str | None, default=None, help="what is decoded")
    parser.add_argument("--trace_file", type=str | None, default=None, help="JSON trace to show; decodes nothing")
    output = "file to write: a page, or the trace itself if the name ends in .json"
    parser.add_argument("--output", type=str, default="trace.html", help=output)
    add_model_options(parser)
    add_decoding_options(parser, "allow_mismatch")
    return parser


def run(args: list[str]) -> int:
    """Show and write a trace.

    Raises:
        ValueError: If an option, the model or the saved trace is wrong.
    """
    options = build_parser().parse(args)
    output = Path(options.output)
    _check_trace_options(options, output)
    if options.trace_file is not None:
        trace = read_trace(options.trace_file)
    else:
        setup = load_setup(options, {"0": options.prompt})
        _, trace = record_trace(setup.model, options.prompt, setup.decoder, setup.sampling, **vars(setup.decoding))
    console = Console()
    console.print(Text(f"decoder: {show_controls(trace.decoder)}"))
    animate(trace, console=console)
    print_statistics(trace, console=console)
    if output.suffix == ".json":
        write_trace(trace, output)
    else:
        write_atomically(output, page(trace))
    sys.stderr.write(f"wrote {output}\n")
    return 0


def _check_trace_options(options: Namespace, output: Path) -> None:
    """Refuse options that exclude each other, and output files with other contents. No model is loaded yet."""
    if options.trace_file is not None:
        if options.ckpt_path is not None or options.prompt is not None:
            raise ValueError("trace_file: expected --trace_file alone, got --ckpt_path or --prompt, too; drop them.")
    elif options.ckpt_path is None or options.prompt is None:
        raise ValueError("prompt: expected --ckpt_path and --prompt, or --trace_file; give the missing option.")
    elif not options.prompt:
        raise ValueError("prompt: expected some text, got an empty prompt; give it some text.")

    is_known = output.suffix in (".html", ".json")
    require(is_known, "output", "a name that ends in .html or .json", str(output), "rename it")
    is_trace = output.is_file() and FORMAT.encode() in output.read_bytes()
    require_free(output, "a trace", is_kind=is_trace, source=options.trace_file)
