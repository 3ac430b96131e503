"""``refusion-lit serve``: serve a model over HTTP, with OpenAI's API and a page."""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import fields
from pathlib import Path

from refusion_lit.cli.parser import OneLineParser, add_decoding_options, add_model_options, setup_of
from refusion_lit.utils.require import require, require_at_least


def build_parser() -> OneLineParser:
    """Return the parser of ``serve``."""
    parser = OneLineParser(prog="refusion-lit serve", description="Serve a model over HTTP: OpenAI's API, and a page.")
    parser.add_argument("--ckpt_path", type=str, required=True, help="checkpoint, Hugging Face directory or hub id")
    host = "address to bind; any other than 127.0.0.1 needs a key in the environment variable REFUSION_LIT_API_KEY"
    parser.add_argument("--host", type=str, default="127.0.0.1", help=host)
    parser.add_argument("--port", type=int, default=8000, help="port to bind; 0 for any free one")
    name = "name of the model in the API; by default that of the directory"
    parser.add_argument("--name", type=str | None, default=None, help=name)
    prompt = "maximum number of tokens of a prompt"
    parser.add_argument("--max_prompt_tokens", type=int, default=4096, help=prompt)
    answer = "maximum number of tokens of an answer; --max_new_tokens is what a request gets that names none"
    parser.add_argument("--max_answer_tokens", type=int, default=1024, help=answer)
    parser.add_argument("--max_seconds", type=float, default=300.0, help="maximum time of a request")
    waiting = "maximum number of answers that wait for a row; further requests get 429"
    parser.add_argument("--max_waiting", type=int, default=64, help=waiting)
    parser.add_argument("--max_body_bytes", type=int, default=1_000_000, help="maximum size of a request")
    drain = "how long answers in flight may still take after SIGTERM or Ctrl-C"
    parser.add_argument("--drain_seconds", type=float, default=30.0, help=drain)
    parser.add_argument("--log_prompts", type=bool, default=False, help="write prompts and answers into the log")
    add_model_options(parser, max_new_tokens=256)
    add_decoding_options(parser, "batch_size", "max_tokens_per_forward", "share_prefixes", "allow_mismatch")
    return parser


def run(args: list[str]) -> int:
    """Serve until SIGTERM or Ctrl-C.

    Raises:
        ValueError: If an option is wrong, the extra is not installed, the model cannot be loaded, or the port is taken.
    """
    options = build_parser().parse(args)
    try:
        from refusion_lit.serving.app import Server, build_app
        from refusion_lit.serving.guard import API_KEY, LOCAL
        from refusion_lit.serving.service import Limits, Service
        from refusion_lit.serving.worker import Worker
    except ImportError as error:
        missing = error.name or "a package"
        raise ValueError(f"serve: needs {missing}; pip install 'refusion-lit[serve]'.") from error
    for name in ("max_prompt_tokens", "max_answer_tokens", "max_waiting", "max_body_bytes"):
        require_at_least(name, options[name], 0 if name == "max_waiting" else 1)
    for name in ("max_seconds", "drain_seconds"):
        require_at_least(name, options[name], 0.0)
    require(0 <= options.port < 65536, "port", "a number below 65536", options.port, "use 8000, say")
    key = os.environ.get(API_KEY) or None
    holds = key is not None or options.host in LOCAL
    fix = f"set {API_KEY} to a secret that clients send, or use 127.0.0.1"
    require(holds, "host", f"127.0.0.1 where {API_KEY} is not set", options.host, fix)
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(asctime)s %(message)s")
    logging.getLogger("refusion_lit.serving").setLevel(logging.INFO)
    setup = setup_of(options)
    if not options.allow_mismatch:
        setup.model.check_decoder(setup.decoder)
    limits = Limits(**{field.name: options[field.name] for field in fields(Limits)})
    worker = Worker(setup.model, setup.decoder, setup.decoding, options.max_waiting)
    name = options.name or Path(options.ckpt_path).resolve().name
    service = Service(worker, name, setup.sampling, limits, log_prompts=options.log_prompts)
    server = Server(build_app(service, key=key), service, options.host, options.port, options.drain_seconds)
    server.announce = f"{name} with {type(setup.decoder).__name__}"
    try:
        server.run()
    except SystemExit as error:  # uvicorn has told why, such as a port that is taken
        return int(error.code or 0) and 2
    return 0
