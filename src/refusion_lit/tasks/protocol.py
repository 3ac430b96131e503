"""Evaluation protocols from files: the prompt's template and the extraction of the answer, for published prompts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from refusion_lit.utils.require import require
from refusion_lit.utils.yaml_files import read_yaml

_KEYS = ("template", "answer")


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """How a benchmark's problems are asked and its answers are found.

    Attributes:
        template: The query, with the task's fields in braces; ``None`` for the task's own template.
        answer: Regular expression (dot matches newlines, ``^`` and ``$`` match at lines). The last match in a response,
            or its first group if there is one, is the answer; a response without a match is scored as it is. ``None``
            takes the whole response.
    """

    template: str | None = None
    answer: str | None = None

    def query(self, template: str, fields: Mapping[str, str]) -> str:
        """Fill the template, or the task's own one; braces that name no field stay as they are."""
        pattern = "|".join(re.escape(f"{{{name}}}") for name in fields)
        return re.sub(pattern, lambda match: fields[match[0][1:-1]], self.template or template)

    def answer_in(self, response: str) -> str:
        """Return the answer in a response."""
        if self.answer is None:
            return response
        matches = [*re.finditer(self.answer, response, re.DOTALL | re.MULTILINE)]
        if not matches:
            return response
        found = matches[-1]
        return str(found[1] if found.re.groups else found[0])


@cache
def read_protocol(file: str | None, fields: tuple[str, ...]) -> Protocol:
    """Read a protocol from a YAML file with ``template`` and ``answer``.

    Args:
        file: Path of the file; ``None`` for the task's own template and the whole response.
        fields: Names that a template may use; the first one is required.

    Raises:
        ValueError: If the file cannot be read, has other keys, or is no protocol of the task.
    """
    if file is None:
        return Protocol()
    values = read_yaml(Path(file), "task.protocol")
    strange = [name for name in values if name not in _KEYS]
    require(not strange, "task.protocol", f"a file with {' and '.join(_KEYS)}", ", ".join(strange), f"change {file}")
    texts = {name: value for name, value in values.items() if value is not None}
    wrong = [name for name, value in texts.items() if not isinstance(value, str)]
    require(not wrong, "task.protocol", "text in every option", ", ".join(wrong), f"quote it in {file}")
    template = texts.get("template")
    answer = texts.get("answer")
    if template is not None:
        holds = f"{{{fields[0]}}}" in template
        require(holds, "task.protocol", f"a template with {{{fields[0]}}} in it", template, f"add it in {file}")
    try:
        re.compile(answer or "")
    except re.error as error:
        raise ValueError(
            f"task.protocol: expected a regular expression as answer in {file}, got {answer!r} ({error}); correct it."
        ) from error
    return Protocol(template=template, answer=answer)
