"""Decoders in arguments that are given by a file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from refusion_lit.utils.yaml_files import read_yaml


def with_component_files(args: Sequence[str], group: str) -> list[str]:
    """Replace ``--GROUP.NAME FILE.yaml`` by the file's content, which jsonargparse does for options but not in dicts.

    Args:
        args: Arguments of a command.
        group: Option whose value is a dict of components, such as ``model.decoders``.

    Returns:
        The arguments, with JSON in place of the files.

    Raises:
        ValueError: If a file is missing or holds no component.
    """
    expanded, rest = [], list(args)
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        is_component = name.startswith(f"--{group}.") and name.count(".") == group.count(".") + 1
        if is_component and not equals and rest:
            equals, value = "=", rest.pop(0)
        if is_component and value.endswith((".yaml", ".yml")):
            value = json.dumps(_read_component(Path(value), name))
        expanded.append(f"{name}{equals}{value}")
    return expanded


def _read_component(path: Path, name: str) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"{name}: expected the YAML file of a component, got {path}, which does not exist; check it.")
    values = read_yaml(path, name)
    if "class_path" not in values:
        raise ValueError(
            f"{name}: expected a component (class_path and init_args) in {path}, got something else; add class_path."
        )
    return values
