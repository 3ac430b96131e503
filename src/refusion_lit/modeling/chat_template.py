"""Options of chat templates, such as Qwen3's ``enable_thinking``, stored with the tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from jinja2 import TemplateError
from jinja2.meta import find_undeclared_variables
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import _compile_jinja_template

from refusion_lit.utils.require import require

CHAT_OPTIONS = "chat_template_kwargs"
"""Entry of ``tokenizer_config.json`` with the options; it is saved with the tokenizer."""
_RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message")


def get_chat_options(tokenizer: Any) -> dict[str, Any]:  # noqa: ANN401 - a tokenizer of transformers
    """Return the options for rendering a tokenizer's chat template."""
    return dict(tokenizer.init_kwargs.get(CHAT_OPTIONS) or {})


def set_chat_options(tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any]) -> None:
    """Set the options of a tokenizer's chat template, which are saved with the tokenizer.

    Args:
        tokenizer: Changed in place.
        options: Values by name; an empty mapping removes all options.

    Raises:
        ValueError: If the chat template does not read an option.
    """
    check_chat_options(tokenizer, options)
    tokenizer.init_kwargs.pop(CHAT_OPTIONS, None)
    if options:
        tokenizer.init_kwargs[CHAT_OPTIONS] = dict(options)


def check_chat_options(tokenizer: Any, options: object) -> None:  # noqa: ANN401 - a tokenizer of transformers
    """Refuse options that the chat template does not read, because they would have no effect.

    Raises:
        ValueError: If the options are no mapping, the tokenizer has no chat template, the template does not read an
            option, or an option is a part of the conversation.
    """
    require(isinstance(options, Mapping), CHAT_OPTIONS, "a mapping of names to values", options, "write {NAME: VALUE}")
    assert isinstance(options, Mapping)
    template = tokenizer.chat_template
    has_template = bool(template) or not options
    require(has_template, CHAT_OPTIONS, "none, as the tokenizer has no chat template", dict(options), "leave it out")
    known = _names_in(template) - {*_RESERVED} if options else set()
    for name in options:
        fix = f"choose some of {', '.join(sorted(known))}" if known else "leave it out"
        require(name in known, CHAT_OPTIONS, "options that the chat template reads", name, fix)


def effort_options(tokenizer: Any, effort: str | None) -> dict[str, Any]:  # noqa: ANN401 - a tokenizer of transformers
    """Return the chat template options that express a reasoning effort, as vLLM and SGLang do.

    ``reasoning_effort`` has the effort. ``enable_thinking`` and ``thinking`` are false for the effort ``none`` and true
    otherwise. Options that the template does not read are left out.

    Args:
        tokenizer: The tokenizer.
        effort: The effort; ``None`` returns no options.

    >>> from types import SimpleNamespace
    >>> effort_options(SimpleNamespace(chat_template="{% if enable_thinking %}<think>{% endif %}"), "low")
    {'enable_thinking': True}
    """
    if effort is None or not tokenizer.chat_template:
        return {}
    known = _names_in(tokenizer.chat_template)
    is_thinking = effort != "none"
    options = {"reasoning_effort": effort, "enable_thinking": is_thinking, "thinking": is_thinking}
    return {name: value for name, value in options.items() if name in known}


def find_thought_tags(chat_template: object) -> tuple[str, str]:
    """Return the tags around a model's thoughts: Mistral's tags if the chat template has them, else ``<think>``.

    Args:
        chat_template: The template, or templates by name, as tokenizers have them.
    """
    return ("[THINK]", "[/THINK]") if "[THINK]" in join_templates(chat_template) else ("<think>", "</think>")


def join_templates(chat_template: object) -> str:
    """Return a template's text, or all templates' text."""
    return "\n".join(map(str, chat_template.values())) if isinstance(chat_template, Mapping) else str(chat_template)


def _names_in(template: str | Mapping[str, str]) -> set[str]:
    """Return the names that a chat template reads from outside, without the names that transformers always sets."""
    sources = [template] if isinstance(template, str) else [*template.values()]
    return set().union(*map(_names_in_source, sources)) - {*PreTrainedTokenizerBase.SPECIAL_TOKENS_ATTRIBUTES}


@cache
def _names_in_source(source: str) -> frozenset[str]:
    try:
        environment = _compile_jinja_template(source).environment  # with transformers' tags and functions
        names = find_undeclared_variables(environment.parse(source))
    except TemplateError:  # which rendering reports
        return frozenset()
    return frozenset(names - environment.globals.keys())
