"""A cache of encoded examples on disk, kept between runs."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from shutil import rmtree
from typing import Any

import numpy as np

from refusion_lit.data.store import EncodedStore
from refusion_lit.types import Example

_VERSION = 1
"""Part of every key; raise it when the encoding or the file format changes."""


def load_or_encode(directory: Path, encode: Callable[[], EncodedStore]) -> EncodedStore:
    """Load a store from the cache; encode and save it if it is missing or damaged.

    Args:
        directory: The store's directory in the cache.
        encode: Encodes the examples.
    """
    try:
        return load_store(directory)
    except (OSError, ValueError, KeyError, TypeError, EOFError):
        rmtree(directory, ignore_errors=True)
        store = encode()
        save_store(store, directory)
        return store


def store_key(examples: Iterable[Example], settings: Sequence[object]) -> str:
    """Return a hash of all that determines an encoding.

    Args:
        examples: The encoded examples.
        settings: Everything else that the result depends on, as JSON values.
    """
    digest = hashlib.blake2b(digest_size=16)
    digest.update(json.dumps([_VERSION, *settings], sort_keys=True).encode())
    for example in examples:
        messages = [dict(message) for message in example.messages]
        digest.update(json.dumps([example.id, example.query, example.response, messages], sort_keys=True).encode())
    return digest.hexdigest()


def save_store(store: EncodedStore, directory: Path) -> None:
    """Write a store atomically; keep one that exists."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=".unfinished-") as folder:
        unfinished = Path(folder) / "store"
        unfinished.mkdir()
        for name in ("tokens", "ends", "prompt_lengths"):
            np.save(unfinished / f"{name}.npy", getattr(store, name))
        about = {"ids": store.ids, "num_too_long": store.num_too_long, "num_malformed": store.num_malformed}
        (unfinished / "about.json").write_text(json.dumps(about), encoding="utf-8")
        for path in unfinished.iterdir():
            with path.open("rb+") as file:  # the name must not reach the disk before what it names
                os.fsync(file.fileno())
        with suppress(OSError):  # another process was faster
            unfinished.rename(directory)


def load_store(directory: Path) -> EncodedStore:
    """Read what :func:`save_store` wrote; the tokens are memory-mapped.

    Raises:
        OSError: If there is none.
        ValueError: If it is damaged.
    """
    about: dict[str, Any] = json.loads((directory / "about.json").read_text(encoding="utf-8"))
    ends, prompt_lengths = (np.load(directory / f"{name}.npy") for name in ("ends", "prompt_lengths"))
    tokens = np.load(directory / "tokens.npy", mmap_mode="r")
    if not len(about["ids"]) == len(ends) == len(prompt_lengths) or len(tokens) != (ends[-1] if len(ends) else 0):
        raise ValueError(f"{directory}: expected arrays of equal length, got others; delete it.")
    return EncodedStore(tokens=tokens, ends=ends, prompt_lengths=prompt_lengths, **about)
