"""The described options of ``fit``, ``validate``, ``test`` and ``predict``.

Their parser needs Lightning and transformers, which take seconds to import. The description is a file of the package,
so that help and usage errors do not wait. Write it again with ``python -m refusion_lit.cli.trainer_options``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from refusion_lit.cli.description import Description, Option, Options, concrete_classes, describe

COMMANDS = ("fit", "validate", "test", "predict")
FILE = Path(__file__).with_name("trainer_options.json")


def read_description(command: str) -> Description:
    """Read the description of a command.

    Options of the Trainer are not checked if they come from another version of Lightning than the one installed.
    """
    values = json.loads(FILE.read_text(encoding="utf-8"))
    options = {**_read(values["shared"]), **_read(values["commands"][command])}
    if values["lightning"] != version("lightning"):
        options = {name: option for name, option in options.items() if not name.startswith("trainer.")}
        options["trainer"] = Option()
    return Description(options, {base: _components(base, each) for base, each in values["components"].items()})


def _components(base: str, values: Mapping[str, Any]) -> Mapping[str, Options | None]:
    """Read the components of a base class, and add those that the process has imported from elsewhere."""
    known = {name: _read(options) for name, options in values["classes"].items()}
    cls = getattr(sys.modules.get(values["module"]), base, None)
    return {cls.__name__: None for cls in (concrete_classes(cls) if cls else ())} | known


def _read(values: Mapping[str, Any]) -> dict[str, Option]:
    tuples = ("kinds", "choices")
    found = {}
    for name, fields in values.items():
        arguments: dict[str, Any] = {key: tuple(value) if key in tuples else value for key, value in fields.items()}
        found[name] = Option(**arguments)
    return found


def current_description() -> dict[str, Any]:
    """Describe the parsers as they are now, as JSON values; classes of other packages are left unchecked."""
    from refusion_lit.cli.lightning import parse_only

    parsers = parse_only().parsers
    components: dict[str, Any] = {}
    plain = {}
    for command in COMMANDS:
        description = describe(parsers[command])
        plain[command] = _plain(description.options, description.components, components)
    first, *others = plain.values()
    shared = {name: option for name, option in first.items() if all(each.get(name) == option for each in others)}
    own = {
        command: {name: option for name, option in options.items() if name not in shared}
        for command, options in plain.items()
    }
    return {"lightning": version("lightning"), "shared": shared, "commands": own, "components": components}


def _plain(options: Options, bases: Any, components: dict[str, Any]) -> dict[str, Any]:  # noqa: ANN401
    """Return options as JSON values, and add the components that they take."""
    found = {}
    for name, option in options.items():
        values = {key: value for key, value in asdict(option).items() if value != getattr(Option(), key)}
        if option.base is not None:
            module = bases.known[option.base].__module__
            if not _is_own(module):
                values = {key: value for key, value in values.items() if key not in ("kinds", "choices", "base")}
            elif option.base not in components:
                components[option.base] = {"module": module, "classes": {}}
                own = {cls.__name__ for cls in concrete_classes(bases.known[option.base]) if _is_own(cls.__module__)}
                components[option.base]["classes"] = {
                    cls: _plain(inner or {}, bases, components)
                    for cls, inner in bases[option.base].items()
                    if cls in own
                }
        found[name] = values
    return json.loads(json.dumps(found))


def _is_own(module: str) -> bool:
    return module.partition(".")[0] == "refusion_lit"


if __name__ == "__main__":
    FILE.write_text(json.dumps(current_description(), indent=1) + "\n", encoding="utf-8")
