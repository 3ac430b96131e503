"""Encoded examples: kept in flat arrays, and on disk between runs."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int
from torch.utils.data import Dataset

from refusion_lit.data.collate import EncodedExample
from refusion_lit.types import Example

_VERSION = 1
"""Part of every key; to be raised when the same example comes to be encoded or written differently."""


@dataclass(frozen=True, kw_only=True)
class EncodedStore(Dataset[EncodedExample]):
    """Encoded examples, one after the other in flat arrays: a few bytes a token, however many examples.

    Attributes:
        tokens: All tokens; of each example the prompt, then the response.
        ends: Where each example ends in ``tokens``.
        prompt_lengths: Number of prompt tokens of each example.
        ids: The examples' ids.
        num_too_long: Examples that were dropped as too long.
        num_malformed: Examples that were skipped because they cannot be encoded.
    """

    tokens: Int[np.ndarray, " token"]
    ends: Int[np.ndarray, " example"]
    prompt_lengths: Int[np.ndarray, " example"]
    ids: list[str]
    num_too_long: int = 0
    num_malformed: int = 0

    def __len__(self) -> int:
        """Return the number of examples."""
        return len(self.ids)

    def __getitem__(self, index: int) -> EncodedExample:
        """Return an example."""
        tokens = self.tokens[self._start(index) : int(self.ends[index])].tolist()
        num_prompt = int(self.prompt_lengths[index])
        return EncodedExample(self.ids[index], tokens[:num_prompt], tokens[num_prompt:])

    def length(self, index: int) -> int:
        """Return an example's number of tokens."""
        return int(self.ends[index]) - self._start(index)

    def _start(self, index: int) -> int:
        return int(self.ends[index - 1]) if index else 0

    def save(self, directory: Path) -> None:
        """Write the store so that it is there whole or not at all; one that is there already stays."""
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory.parent, prefix=".unfinished-") as folder:
            unfinished = Path(folder) / "store"
            unfinished.mkdir()
            for name in ("tokens", "ends", "prompt_lengths"):
                np.save(unfinished / f"{name}.npy", getattr(self, name))
            about = {"ids": self.ids, "num_too_long": self.num_too_long, "num_malformed": self.num_malformed}
            (unfinished / "about.json").write_text(json.dumps(about), encoding="utf-8")
            with suppress(OSError):  # another process was faster
                unfinished.rename(directory)

    @classmethod
    def load(cls, directory: Path) -> EncodedStore:
        """Read what :meth:`save` wrote; tokens stay on disk until they are read.

        Raises:
            OSError: If it is not there.
            ValueError: If it is damaged.
        """
        about: dict[str, Any] = json.loads((directory / "about.json").read_text(encoding="utf-8"))
        ends, prompt_lengths = (np.load(directory / f"{name}.npy") for name in ("ends", "prompt_lengths"))
        tokens = np.load(directory / "tokens.npy", mmap_mode="r")
        if not len(about["ids"]) == len(ends) == len(prompt_lengths) or len(tokens) != (ends[-1] if len(ends) else 0):
            raise ValueError(f"{directory}: expected arrays of one length, got others; delete it.")
        return cls(tokens=tokens, ends=ends, prompt_lengths=prompt_lengths, **about)


def encode_all(
    examples: Sequence[Example],
    encode: Callable[[Example], tuple[list[int], list[int]]],
    *,
    max_length: int,
    skip_malformed: bool,
) -> EncodedStore:
    """Encode examples.

    Args:
        examples: What to encode.
        encode: Returns an example's prompt and response; a ``ValueError`` says that it is malformed.
        max_length: Examples of more tokens are dropped and counted.
        skip_malformed: Skip and count malformed examples instead of raising.

    Raises:
        ValueError: If an example is malformed and those are not skipped.
    """
    chunks: list[Int[np.ndarray, " token"]] = []
    lengths: list[int] = []
    prompt_lengths: list[int] = []
    ids: list[str] = []
    num_too_long = num_malformed = 0
    for example in examples:
        try:
            prompt, response = encode(example)
        except ValueError:
            if not skip_malformed:
                raise
            num_malformed += 1
            continue
        length = len(prompt) + len(response)
        if length > max_length:
            num_too_long += 1
            continue
        chunks.append(np.array(prompt + response, dtype=np.int32))
        lengths.append(length)
        prompt_lengths.append(len(prompt))
        ids.append(example.id)
    return EncodedStore(
        tokens=np.concatenate(chunks) if chunks else np.empty(0, dtype=np.int32),
        ends=np.cumsum(lengths, dtype=np.int64),
        prompt_lengths=np.array(prompt_lengths, dtype=np.int32),
        ids=ids,
        num_too_long=num_too_long,
        num_malformed=num_malformed,
    )


def store_key(examples: Iterable[Example], settings: Sequence[object]) -> str:
    """Return a name for the encoding of examples: another text, another setting, another name.

    Args:
        examples: What is encoded.
        settings: All else that decides the result, as JSON values.
    """
    digest = hashlib.blake2b(digest_size=16)
    digest.update(json.dumps([_VERSION, *settings], sort_keys=True).encode())
    for example in examples:
        messages = [dict(message) for message in example.messages]
        digest.update(json.dumps([example.id, example.query, example.response, messages], sort_keys=True).encode())
    return digest.hexdigest()
