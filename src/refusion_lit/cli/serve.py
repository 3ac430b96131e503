"""``refusion-lit serve``: serve a model over HTTP, with OpenAI's API and a page."""

from __future__ import annotations

import gc
import logging
import os
import re
import sys
from pathlib import Path
from typing import Literal

from refusion_lit.cli.model_options import (
    ModelParser,
    add_decoding_options,
    add_model_options,
    build_options,
    load_setup,
)
from refusion_lit.constraints.tool_calls import FORMATS
from refusion_lit.serving import Limits
from refusion_lit.utils.require import require

_CUT = 3
"""Exit status of a server that stopped before all answers in flight were complete."""


def build_parser() -> ModelParser:
    """Return the parser of ``serve``."""
    parser = ModelParser(prog="refusion-lit serve", description="Serve a model over HTTP: OpenAI's API, and a page.")
    parser.add_argument("--ckpt_path", type=str, required=True, help="checkpoint, Hugging Face directory or hub id")
    host = "address to bind; any but 127.0.0.1, ::1 and localhost needs the environment variable REFUSION_LIT_API_KEY"
    parser.add_argument("--host", type=str, default="127.0.0.1", help=host)
    parser.add_argument("--port", type=int, default=8000, help="port to bind; 0 for any free port")
    parser.add_argument(
        "--name",
        type=str | None,
        default=None,
        help="name of the model in the API; by default the name of its directory",
    )
    parser.add_argument("--log_prompts", type=bool, default=False, help="write prompts and answers into the log")
    formats = "how the model writes calls of tools; auto: as its chat template does"
    parser.add_argument("--tool_format", type=Literal["auto", *FORMATS], default="auto", help=formats)
    separate = "return thoughts (<think>...</think>) as reasoning_content instead of in the text"
    parser.add_argument("--separate_reasoning", type=bool, default=False, help=separate)
    parser.add_class_arguments(Limits)
    add_model_options(parser, max_new_tokens=256, with_seed=False)
    add_decoding_options(parser, "batch_size", "max_tokens_per_forward", "share_prefixes", "allow_mismatch")
    return parser


def run(args: list[str]) -> int:
    """Serve until SIGTERM or Ctrl-C.

    Raises:
        ValueError: If an option is wrong, the extra is not installed, or the model cannot be loaded.
    """
    options = build_parser().parse(args)
    limits = build_options(Limits, options)
    require(0 <= options.port < 65536, "port", "a number below 65536", options.port, "use 8000, say")
    try:
        from refusion_lit.serving.app import API_KEY, LOCAL_HOSTS, Server, build_app
        from refusion_lit.serving.service import Service
        from refusion_lit.serving.worker import Worker
    except ImportError as error:
        packages = "fastapi llguidance prometheus-client uvicorn"
        raise ValueError(f"serve: needs {error.name}; run pip install {packages}.") from error
    key = os.environ.get(API_KEY) or None
    is_sendable = key is None or bool(re.fullmatch("[!-~]+", key))
    fix = "set another key; a key from a file may end with a line break"
    require(
        is_sendable,
        API_KEY,
        "printable ASCII characters without blanks",
        "other characters, which clients cannot send",
        fix,
    )
    fix = f"set {API_KEY} to a secret that clients send, or use 127.0.0.1"
    is_safe = key is not None or options.host in LOCAL_HOSTS
    require(is_safe, "host", f"127.0.0.1, ::1 or localhost where {API_KEY} is not set", options.host, fix)
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(asctime)s %(message)s")
    logging.getLogger("refusion_lit.serving").setLevel(logging.DEBUG if options.log_prompts else logging.INFO)
    options.max_new_tokens = min(options.max_new_tokens, limits.max_answer_tokens)
    setup = load_setup(options)
    setup.check()
    worker = Worker(setup.model, setup.decoder, setup.sampling, setup.decoding, limits)
    name = options.name or Path(options.ckpt_path).resolve().name
    service = Service(worker, name, options.tool_format, separate_reasoning=options.separate_reasoning)
    sys.stderr.write(f"serving {service.name} with {type(setup.decoder).__name__}\n")
    server = Server(build_app(service, key=key), service, options.host, options.port)
    gc.freeze()  # at exit, collecting the libraries' objects takes a second
    try:
        server.run()
    except SystemExit as error:  # uvicorn has told why, such as a port that is taken
        return int(error.code or 0) and 2
    if worker.failure is not None:
        return 1  # so that a supervisor starts it again
    if server.num_cut:
        sys.stderr.write(f"stopped before {server.num_cut} answers were complete\n")
    return _CUT if server.num_cut else 0
