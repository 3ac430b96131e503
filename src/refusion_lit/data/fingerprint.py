"""Fingerprints of training and validation samples: a resumed training detects changed data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any

import numpy as np

from refusion_lit.data.datasets import LazyDataset
from refusion_lit.data.examples import EncodedExample

_NUM_DIGESTS = 64
"""Maximum number of digests in a fingerprint. More digests show more exactly where samples differ."""


@dataclass(frozen=True)
class SplitSamples:
    """The samples of a split, with their fingerprint.

    Attributes:
        samples: The samples, in order.
        option: The option that names their source.
        source: The source in words, such as names of files.
    """

    samples: LazyDataset | Sequence[EncodedExample]
    option: str
    source: str

    @cached_property
    def fingerprint(self) -> dict[str, Any]:
        """The number of samples, and digests of groups of consecutive samples.

        Generating the samples of a :class:`~refusion_lit.data.datasets.LazyDataset` takes long, so the fingerprint
        holds only the first sample of each group there.
        """
        size, num_samples = self._group_size, len(self.samples)
        num_hashed = 1 if isinstance(self.samples, LazyDataset) else size
        starts = range(0, num_samples, size)
        digests = [self._digest(range(first, min(first + num_hashed, num_samples))) for first in starts]
        return {"num_samples": num_samples, "digests": digests}

    def describe_change(self, before: Mapping[str, Any]) -> str:
        """Return in words how the samples differ from samples with another fingerprint.

        Args:
            before: The fingerprint of the earlier samples.

        Returns:
            The difference; an empty text if the fingerprints are equal.
        """
        now, size = self.fingerprint, self._group_size
        if now["num_samples"] != before["num_samples"]:
            return f"{now['num_samples']} samples in place of {before['num_samples']} in {self.source}"
        pairs = enumerate(zip(before["digests"], now["digests"], strict=True))
        first = next((number * size for number, (old, new) in pairs if old != new), None)
        if first is None:
            return ""
        last = min(first + size, len(self.samples)) - 1
        names = [self._example(index).id for index in sorted({first, last})]
        return f"other samples or another order in {self.source}, first at {' to '.join(names)}"

    @property
    def _group_size(self) -> int:
        return max(-(-len(self.samples) // _NUM_DIGESTS), 1)

    def _example(self, index: int) -> Any:  # noqa: ANN401 - an Example or an EncodedExample
        samples = self.samples
        return samples.examples[index] if isinstance(samples, LazyDataset) else samples[index]

    def _digest(self, indices: range) -> str:
        """Hash ids and contents of samples."""
        hashed = blake2b(digest_size=8)
        for index in indices:
            example = self._example(index)
            if isinstance(example, EncodedExample):
                contents = [np.asarray(ids, np.int64).tobytes() for ids in (example.prompt_ids, example.response_ids)]
            else:
                contents = [text.encode("utf-8", "surrogatepass") for text in (example.query, example.response)]
            for content in (example.id.encode("utf-8", "surrogatepass"), *contents):
                hashed.update(len(content).to_bytes(8, "little") + content)
        return hashed.hexdigest()
