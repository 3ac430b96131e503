"""Tools, and chat templates that render them, for tests of the server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from refusion_lit import load
from refusion_lit.text_model import TextModel
from support.tiny import make_bytes_base

HERMES = """\
{%- if tools %}<s>system
Tools:{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
Call them as <tool_call>
{"name": NAME, "arguments": ARGUMENTS}
</tool_call></s>
{% endif %}
{%- for message in messages %}
{%- if message.role == "tool" %}<s>tool
{{ message.content }}</s>
{% else %}<s>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}</s>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<s>assistant
{% endif %}"""
"""A template in the manner of Hermes and Qwen."""

TEMPLATES = {
    "hermes": HERMES,
    "llama": HERMES.replace('"arguments": ', '"parameters": ').replace("<tool_call>", "").replace("</tool_call>", ""),
    "mistral": HERMES.replace("<tool_call>\n", "[TOOL_CALLS][").replace("\n</tool_call>", "]"),
    "mistral_args": HERMES.replace("<tool_call>\n", "[TOOL_CALLS]NAME[ARGS]").replace("\n</tool_call>", ""),
}

CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}, "required": ["city"]}
SUM = {
    "type": "object",
    "properties": {name: {"type": "integer", "minimum": 0, "maximum": 99} for name in ("a", "b")},
    "required": ["a", "b"],
}
SCHEMAS: dict[str, Any] = {"get_weather": CITY, "add": SUM}


def tool(name: str, parameters: Any, **more: Any) -> dict[str, Any]:
    """Return a function as clients describe it."""
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


TOOLS: list[Any] = [tool(name, schema, description=f"{name} it") for name, schema in SCHEMAS.items()]


def make_tool_model(path: Path, template: str = "hermes", *, mask: bool = False, has_markers: bool = True) -> TextModel:
    """Return a random model whose chat template renders tools; by default, markers of calls are tokens."""
    special = ["[TOOL_CALLS]", "[ARGS]"] if template.startswith("mistral") and has_markers else []
    added = ["<tool_call>", "</tool_call>"] if template == "hermes" and has_markers else []
    make_bytes_base(path, mask=mask, max_positions=4096, special=special, added=added)
    tokenizer_file = path / "tokenizer_config.json"
    config = json.loads(tokenizer_file.read_text())
    tokenizer_file.write_text(json.dumps(config | {"chat_template": TEMPLATES[template]}))
    return load(path, device="cpu")
