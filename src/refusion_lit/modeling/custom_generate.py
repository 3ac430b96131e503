# ruff: noqa: ANN401 - transformers' classes
"""Decoders as programs for transformers' ``generate(custom_generate=...)``, which run without this package.

The programs are ``refusion/custom_generate.py`` and ``families/speculative/custom_generate.py``. An exported directory
gets a program as a single file. Functions that the program imports from this package are written out in the file. The
programs share :func:`read_options`, :func:`read_request` and :func:`respond`.
"""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch


def write_program(package: str, directory: Path) -> None:
    """Write a package's program into an exported directory, as ``custom_generate/generate.py``.

    Args:
        package: The package, for example ``refusion``.
        directory: The exported directory.
    """
    folder = directory / "custom_generate"
    folder.mkdir(parents=True)
    (folder / "generate.py").write_text(program_text(package), encoding="utf-8")


def program_text(package: str) -> str:
    """Return a package's program as a single file; functions imported from this package are written out in it."""
    spec = find_spec(f"refusion_lit.{package}.custom_generate")
    assert spec is not None
    text = Path(str(spec.origin)).read_text(encoding="utf-8")
    imports = re.findall(r"^from (refusion_lit\.\S+) import (.+)\n", text, re.M)
    functions = [getattr(import_module(module), name) for module, names in imports for name in names.split(", ")]
    head, *_, body = re.split(r"^from refusion_lit\..+\n", text, flags=re.M)
    shared = "\n\n".join(map(inspect.getsource, functions))
    return f"{head}\n{shared}{body}"


def read_request(
    model: Any, inputs: torch.Tensor | None, options: dict[str, Any], kwargs: dict[str, Any]
) -> tuple[torch.Tensor, int, set[int]]:
    """Return the prompt [1, token], the maximum number of new tokens, and the EOS tokens.

    Args:
        model: The model.
        inputs: The prompt's tokens [1, token]; ``None``: ``input_ids`` in ``kwargs``.
        options: The options of the call, from :func:`read_options`.
        kwargs: The arguments of the call.

    Raises:
        ValueError: If there is not exactly one prompt, the prompt is padded, or the limit does not fit the context.
    """
    ids = kwargs.get("input_ids") if inputs is None else inputs
    if ids is None or ids.shape[0] != 1 or ids.shape[1] == 0:
        got = "none" if ids is None else tuple(ids.shape)
        raise ValueError(f"input_ids: expected the shape [1, token] of one prompt, got {got}; pass prompts one by one.")
    if not bool(torch.as_tensor(kwargs.get("attention_mask", 1)).all()):
        raise ValueError("attention_mask: expected ones, got zeros; give the prompt without padding.")
    limit = 128
    if options.get("max_new_tokens") is not None:
        limit = int(options["max_new_tokens"])
    elif options.get("max_length") is not None:
        limit = int(options["max_length"]) - ids.shape[1]
    room = (getattr(model.config, "max_position_embeddings", None) or float("inf")) - ids.shape[1]
    if not 1 <= limit <= room:
        raise ValueError(f"max_new_tokens: expected 1 to {room} beyond the prompt, got {limit}; set it in that range.")
    eos = options.get("eos_token_id")
    eos = model.config.eos_token_id if eos is None else eos
    return ids, limit, set(eos if isinstance(eos, list) else [eos]) - {None}


def read_options(model: Any, config: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a call: arguments replace options of the generation config.

    Args:
        model: The model.
        config: The call's generation config; ``None``: the model's generation config.
        kwargs: The arguments of the call.

    Raises:
        ValueError: If the decoder would have to ignore an option.
    """
    known = {"input_ids", "attention_mask", "max_new_tokens", "max_length", "eos_token_id", "bos_token_id", "use_cache",
             "pad_token_id", "tokenizer", "streamer", "transformers_version", "refusion"}  # fmt: skip
    sampling = {"temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"}
    neutral: dict[str, Any] = {
        "num_beams": 1, "num_beam_groups": 1, "num_return_sequences": 1, "repetition_penalty": 1.0, "min_length": 0,
        "encoder_repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0,
        "min_new_tokens": 0, "diversity_penalty": 0.0, "guidance_scale": 1.0, "length_penalty": 1.0,
        "temperature": 0, "top_p": 1.0, "custom_generate": model.config._name_or_path, "trust_remote_code": True,
    }  # fmt: skip
    stored = vars(config or model.generation_config)
    options = {name: value for name, value in {**stored, **kwargs}.items() if not name.startswith("_")}
    # Sampling options in the model's own config are no request, unless the call asks to sample.
    defaults = {} if options.get("do_sample") else vars(model.generation_config)
    unused = {name for name in sampling - {*kwargs} if options.get(name) == defaults.get(name)}
    # A server copies the model's do_sample into its requests, so do_sample does not show whether a request set a
    # temperature.
    is_greedy = options.get("do_sample") is False and ("do_sample" in kwargs or defaults.get("do_sample") is not False)
    unused |= {"temperature"} if is_greedy and options.get("temperature") == 1 else set()
    for name, value in options.items():
        is_neutral = value is None or value is False or neutral.get(name) == value
        if not is_neutral and name not in known | unused:
            where = "in the call" if name in kwargs else "in the generation config"
            fix = f"pass {name}={neutral.get(name, False if value is True else None)!r}"
            raise ValueError(f"{name}: expected none, got {value!r} {where}: this decoder is greedy; {fix}.")
    return options


def respond(ids: torch.Tensor, decode: Any, streamer: Any) -> torch.Tensor:
    """Decode a prompt and return it with the response [1, token].

    Args:
        ids: The prompt [1, token].
        decode: Takes a streamer, sends the response's tokens to it, and returns them.
        streamer: A streamer of transformers; ``None`` for none.
    """
    if streamer is not None:
        streamer.put(ids.cpu())
    with torch.no_grad():
        response = decode(streamer)
    if streamer is not None:
        streamer.end()
    return torch.cat((ids, torch.tensor([response], dtype=ids.dtype, device=ids.device)), 1)
