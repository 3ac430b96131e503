"""Fingerprints: what a file depends on, as JSON values that are compared before the file is used again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from refusion_lit.utils.files import read_json

Fingerprint = Mapping[str, Any]
"""Names of what a file depends on, with JSON values; ``None`` where something is unknown."""

_NUM_SHOWN = 3


def digest(values: object) -> str:
    """Hash JSON values to 16 hexadecimal digits, the same in every process."""
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def prompts_fingerprint(prompts: Iterable[tuple[str, object]]) -> dict[str, Any]:
    """Return number and digest of prompts, given with their ids; their order does not matter."""
    pairs = sorted((identity, digest(prompt)) for identity, prompt in prompts)
    return {"num_prompts": len(pairs), "digest": digest(pairs)}


def meta_path(file: Path) -> Path:
    """Return where the fingerprint of a file lies: beside it, as ``NAME.meta.json``."""
    return file.with_name(f"{file.name}.meta.json")


def read_fingerprint(file: Path) -> Fingerprint | None:
    """Return a file's fingerprint; ``None`` if there is none, which is so for every file that we did not write."""
    meta = read_json(meta_path(file))
    fingerprint = meta.get("fingerprint") if isinstance(meta, dict) else None
    return fingerprint if isinstance(fingerprint, dict) else None


def check_fingerprint(option: str, name: str, recorded: Fingerprint, current: Fingerprint, *, fix: str) -> None:
    """Refuse to use a file for something else than it was written for.

    Args:
        option: The option that asks for the file.
        name: The file.
        recorded: Its fingerprint.
        current: The fingerprint of what it is to be used for. Names that only one of them has are not compared.
        fix: What to do, as an imperative without a full stop.

    Raises:
        ValueError: Naming what differs, with both values.
    """
    shared = recorded.keys() & current.keys()
    found = list(_differences({key: recorded[key] for key in shared}, {key: current[key] for key in shared}))
    if found:
        more = f" and {len(found) - _NUM_SHOWN} more" if len(found) > _NUM_SHOWN else ""
        listed = "; ".join(f"{key} was {before!r}, is {now!r}" for key, before, now in found[:_NUM_SHOWN])
        raise ValueError(f"{option}: {name} was made for something else: {listed}{more}. {fix}.")


def _differences(recorded: object, current: object, name: str = "") -> Iterator[tuple[str, object, object]]:
    if isinstance(recorded, Mapping) and isinstance(current, Mapping):
        for key in sorted({*recorded, *current}):
            yield from _differences(recorded.get(key), current.get(key), f"{name}.{key}" if name else str(key))
        return
    is_unknown = recorded is None or current is None
    if recorded != current and (not is_unknown or "." in name):  # options may be null, top-level names are unknown then
        yield name, recorded, current
