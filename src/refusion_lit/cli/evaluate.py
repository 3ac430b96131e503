"""``refusion-lit evaluate``: run tasks from the lm-evaluation-harness; print scores and throughput."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Literal

from refusion_lit.cli.model_options import (
    ModelParser,
    add_decoder_option,
    add_decoding_options,
    add_loading_options,
    build_options,
    load_model,
)
from refusion_lit.cli.parser import as_list
from refusion_lit.types import DecodingOptions
from refusion_lit.utils.files import require_free, write_atomically
from refusion_lit.utils.require import require, require_at_least


def build_parser() -> ModelParser:
    """Return the parser of ``evaluate``."""
    parser = ModelParser(prog="refusion-lit evaluate", description="Run tasks of the lm-evaluation-harness.")
    parser.add_argument("--ckpt_path", type=str, required=True, help="checkpoint, Hugging Face directory or hub id")
    parser.add_argument("--tasks", type=list[str] | str, required=True, help="task of the harness; several as [A, B]")
    parser.add_argument("--include_path", type=str | None, default=None, help="folder with further task files")
    add_decoder_option(parser)
    parser.add_argument("--likelihood", type=Literal["autoregressive", "monte_carlo_masked"], default="autoregressive",
                        help="exact for next-token models; an estimated bound for masked models")  # fmt: skip
    parser.add_argument("--num_draws", type=int, default=128, help="states drawn for monte_carlo_masked")
    add_decoding_options(parser, "batch_size", "allow_mismatch")
    parser.add_argument("--num_fewshot", type=int | None, default=None, help="examples in the prompt")
    parser.add_argument("--limit", type=int | None, default=None, help="only the first N documents of a task")
    parser.add_argument("--gen_kwargs", type=dict[str, Any], default={},
                        help="generation options that replace the tasks' own, as in {max_gen_toks: 512}")  # fmt: skip
    parser.add_argument("--apply_chat_template", type=bool, default=False, help="prompts as turns of a chat")
    parser.add_argument("--seed", type=int, default=0, help="seed of sampling and draws")
    add_loading_options(parser)
    parser.add_argument("--output", type=str | None, default=None, help="JSON file for scores and throughput")
    return parser


def run(args: list[str]) -> int:
    """Evaluate.

    Raises:
        ValueError: If an option is wrong, or the harness is not installed.
    """
    options = build_parser().parse(args)
    try:
        from lm_eval.tasks import TaskManager

        from refusion_lit.evaluation.lm_eval import RefusionLitModel, evaluate, require_one_process
    except ImportError as error:
        raise ValueError("evaluate: needs the package lm-eval; run pip install lm-eval.") from error
    require_one_process()
    if options.output is not None:
        require_free(Path(options.output))
    for name, least in (("limit", 1), ("num_fewshot", 0)):
        if options[name] is not None:
            require_at_least(name, options[name], least)
    manager = TaskManager(include_path=options.include_path)
    tasks = as_list(options.tasks)
    unknown = [task for task in tasks if task not in manager.all_tasks]
    expected = "names of the harness's tasks or of tasks below --include_path"
    require(bool(tasks) and not unknown, "tasks", expected, unknown, "`lm-eval ls tasks` lists the harness's own")
    names = ("likelihood", "num_draws", "seed", "batch_size", "allow_mismatch")
    build_options(DecodingOptions, options)  # refuses impossible ones before the model is loaded
    loaded = load_model(options)
    model = RefusionLitModel(loaded, decoder=options.decoder, **{name: options[name] for name in names})
    try:
        results = evaluate(
            model,
            tasks,
            task_manager=manager,
            num_fewshot=options.num_fewshot,
            limit=options.limit,
            gen_kwargs=options.gen_kwargs or None,
            apply_chat_template=options.apply_chat_template,
        )
    except ConnectionError as error:
        fix = "check the network, or name tasks with data_files of this machine below --include_path"
        raise ValueError(f"tasks: expected data that can be fetched, got {error}; {fix}.") from error
    kept = {name: results[name] for name in ("results", "n-samples", "throughput", "refusion_lit")}
    text = json.dumps(kept, indent=2, default=str) + "\n"
    if options.output is None:
        sys.stdout.write(text)
    else:
        write_atomically(options.output, text)
        names = dict.fromkeys(type(decoder).__name__ for decoder in model.used_decoders)
        sys.stdout.write(f"{', '.join(names) or 'no decoder'}: {options.output}\n")
    return 0
