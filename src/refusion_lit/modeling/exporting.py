# ruff: noqa: ANN401 - transformers' classes
"""Programs of transformers with exported models: decoders for ``generate``, what they share, and prompts."""

from __future__ import annotations

import inspect
import json
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase


def write_program(program: Path, directory: Path) -> None:
    """Write a decoder into an exported directory, as ``custom_generate/generate.py``."""
    (directory / "custom_generate").mkdir(parents=True)
    (directory / "custom_generate" / "generate.py").write_text(program_text(program), encoding="utf-8")


def program_text(program: Path) -> str:
    """Return a decoder's program as one file without this package: the functions that it imports are written out."""
    text = program.read_text(encoding="utf-8")
    imports = re.findall(r"^from (refusion_lit\.\S+) import (.+)\n", text, re.M)
    functions = [getattr(import_module(module), name) for module, names in imports for name in names.split(", ")]
    head, *_, body = re.split(r"^from refusion_lit\..+\n", text, flags=re.M)
    shared = "\n\n".join(map(inspect.getsource, functions))
    return f"{head}\n{shared}{body}"


def request(
    model: Any, inputs: torch.Tensor | None, asked: dict[str, Any], kwargs: dict[str, Any]
) -> tuple[torch.Tensor, int, set[int]]:
    """Return the prompt [1, token], the maximum number of new tokens, and the tokens that end a response."""
    ids = kwargs.get("input_ids") if inputs is None else inputs
    if ids is None or ids.shape[0] != 1 or ids.shape[1] == 0:
        got = "none" if ids is None else tuple(ids.shape)
        raise ValueError(f"input_ids: expected the shape [1, token] of one prompt, got {got}; pass prompts one by one.")
    if not bool(torch.as_tensor(kwargs.get("attention_mask", 1)).all()):
        raise ValueError("attention_mask: expected ones, got zeros; give the prompt without padding.")
    limit = 128
    if asked.get("max_new_tokens") is not None:
        limit = int(asked["max_new_tokens"])
    elif asked.get("max_length") is not None:
        limit = int(asked["max_length"]) - ids.shape[1]
    room = (getattr(model.config, "max_position_embeddings", None) or float("inf")) - ids.shape[1]
    if not 1 <= limit <= room:
        raise ValueError(f"max_new_tokens: expected 1 to {room} beyond the prompt, got {limit}; set it in that range.")
    eos = asked.get("eos_token_id")
    eos = model.config.eos_token_id if eos is None else eos
    return ids, limit, set(eos if isinstance(eos, list) else [eos]) - {None}


def settings(model: Any, config: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a call: its arguments, then the generation config, by default the model's.

    Raises:
        ValueError: If one asks for what this decoder would have to ignore.
    """
    taken = {"input_ids", "attention_mask", "max_new_tokens", "max_length", "eos_token_id", "bos_token_id", "use_cache",
             "pad_token_id", "tokenizer", "streamer", "transformers_version", "refusion"}  # fmt: skip
    of_sampling = {"temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"}
    neutral: dict[str, Any] = {
        "num_beams": 1, "num_beam_groups": 1, "num_return_sequences": 1, "repetition_penalty": 1.0, "min_length": 0,
        "encoder_repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0,
        "min_new_tokens": 0, "diversity_penalty": 0.0, "guidance_scale": 1.0, "length_penalty": 1.0,
        "temperature": 0, "top_p": 1.0, "custom_generate": model.config._name_or_path, "trust_remote_code": True,
    }  # fmt: skip
    stored = vars(config or model.generation_config)
    asked = {name: value for name, value in {**stored, **kwargs}.items() if not name.startswith("_")}
    own = {} if asked.get("do_sample") else vars(model.generation_config)  # what the model brings along is no request
    unused = {name for name in of_sampling - {*kwargs} if asked.get(name) == own.get(name)}
    # A server copies the model's do_sample: it says nothing about a temperature that a request sets beside it.
    is_greedy = asked.get("do_sample") is False and ("do_sample" in kwargs or own.get("do_sample") is not False)
    unused |= {"temperature"} if is_greedy and asked.get("temperature") == 1 else set()
    for name, value in asked.items():
        is_neutral = value is None or value is False or neutral.get(name) == value
        if not is_neutral and name not in taken | unused:
            where = "in the call" if name in kwargs else "in the generation config"
            fix = f"pass {name}={neutral.get(name, False if value is True else None)!r}"
            raise ValueError(f"{name}: expected none, got {value!r} {where}: this decoder is greedy; {fix}.")
    return asked


def respond(ids: torch.Tensor, decode: Any, streamer: Any) -> torch.Tensor:
    """Return the prompt and the response [1, token], which ``decode`` returns and gives a streamer, if there is one."""
    if streamer is not None:
        streamer.put(ids.cpu())
    with torch.no_grad():
        response = decode(streamer)
    if streamer is not None:
        streamer.end()
    return torch.cat((ids, torch.tensor([response], dtype=ids.dtype, device=ids.device)), 1)


def prompt_code(tokenizer: PreTrainedTokenizerBase, prompt_template: str) -> str:
    """Return a program of transformers that encodes a prompt as ``data.encoding.encode_prompt`` does."""
    if tokenizer.chat_template:
        turns = 'messages = [{"role": "user", "content": "..."}]'
        options = 'add_generation_prompt=True, return_dict=True, return_tensors="pt"'
        return f"{turns}\ninput_ids = tokenizer.apply_chat_template(messages, {options}).input_ids"
    text = json.dumps(prompt_template.replace("{query}", "..."), ensure_ascii=False)
    return f'input_ids = tokenizer({text}, add_special_tokens=False, return_tensors="pt").input_ids'
