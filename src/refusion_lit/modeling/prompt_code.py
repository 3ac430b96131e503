"""Writes a model card's program, which encodes a prompt with transformers as this package does."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from refusion_lit.modeling.chat_template import get_chat_options
from refusion_lit.modeling.vocabulary import get_add_bos, prompt_prefix, starts_with_bos


def prompt_code(tokenizer: PreTrainedTokenizerBase, prompt_template: str) -> str:
    """Return a program that encodes a prompt with transformers as ``data.conversations.encode_prompt`` does.

    In the program, too, names of special tokens in the query are text. The exception are templates that write special
    tokens by name: with them, transformers reads names in the query as tokens.
    """
    if tokenizer.chat_template:
        return _chat_program(tokenizer)
    return _template_program(tokenizer, prompt_template.replace("{query}", "..."))


def _chat_program(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a program that renders a user's message with the chat template."""
    turns = [{"role": "user", "content": "..."}]
    arguments = ["messages", "add_generation_prompt=True", "return_dict=True"]
    arguments += [f"{name}={value!r}" for name, value in get_chat_options(tokenizer).items()]
    is_complete = get_add_bos(tokenizer) == "auto" or _template_writes_bos(tokenizer, turns)
    prefix = [] if is_complete else prompt_prefix(tokenizer)
    messages = f"messages = {json.dumps(turns)}\n"
    return _program("tokenizer.apply_chat_template", arguments, prefix, setup=messages)


def _template_program(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """Return a program that encodes a text without a chat template."""
    ids: Any = tokenizer(text, add_special_tokens=False, split_special_tokens=False)["input_ids"]
    # If the template names no special token, the program can treat all names as text, the query's names included.
    splits = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"] == ids
    splits_by_default = bool(getattr(tokenizer, "split_special_tokens", False))
    options = [f"split_special_tokens={splits}"] if splits or splits_by_default else []
    quoted = json.dumps(text, ensure_ascii=False)
    prefix = [] if starts_with_bos(ids, tokenizer) else prompt_prefix(tokenizer)
    if prefix and tokenizer(text, split_special_tokens=splits)["input_ids"] == [*prefix, *ids]:
        return f"{_program('tokenizer', [quoted, *options])}  # begins with BOS"  # the tokenizer adds the prefix
    return _program("tokenizer", [quoted, "add_special_tokens=False", *options], prefix)


def _program(function: str, arguments: Sequence[str], prefix: Sequence[int] = (), setup: str = "") -> str:
    """Return a program that sets ``input_ids``, a tensor [1, token].

    Args:
        function: The tokenizer's function.
        arguments: The function's arguments as code.
        prefix: Tokens that the program puts before the function's tokens.
        setup: Code before the call.
    """
    if not prefix:
        call = ", ".join([*arguments, 'return_tensors="pt"'])
        return f"{setup}input_ids = {function}({call}).input_ids"
    ids = ", ".join([*map(str, prefix), f"*{function}({', '.join(arguments)}).input_ids"])
    return f"import torch\n\n{setup}input_ids = torch.tensor([[{ids}]])  # begins with BOS"


def _template_writes_bos(tokenizer: PreTrainedTokenizerBase, turns: list[dict[str, str]]) -> bool:
    """Return whether a chat template's prompt begins with BOS."""
    try:
        options = get_chat_options(tokenizer)
        rendered: Any = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True, **options)
    except Exception:  # a template may refuse the turn with any error
        return False
    return starts_with_bos(rendered["input_ids"], tokenizer)
