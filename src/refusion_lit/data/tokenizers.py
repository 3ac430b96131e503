"""Where a tokenizer comes from: the backbone's own, trained on the data, plain characters, or a checkpoint."""

from __future__ import annotations

import json
import tempfile
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from refusion_lit.modeling.loading import ensure_mask_token
from refusion_lit.tasks.base import Task

_PAD, _EOS, _MASK = "<|pad|>", "<|eos|>", "<|mask|>"
_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


class TokenizerSource(ABC):
    """Makes a tokenizer that has padding, end-of-sequence and mask tokens."""

    @abstractmethod
    def build(self, task: Task | None) -> PreTrainedTokenizerBase:
        """Return the tokenizer.

        Args:
            task: What it is for; sources that learn from data need it.

        Raises:
            ValueError: If it cannot be made.
        """


@dataclass(frozen=True, kw_only=True)
class CharacterTokenizer(TokenizerSource):
    """One token a character: 0 pads, 1 ends, 2 masks, then the characters in order.

    Attributes:
        characters: The alphabet; ``None`` takes the task's.
    """

    characters: str | None = None

    def build(self, task: Task | None) -> PreTrainedTokenizerBase:
        """Return the tokenizer."""
        characters = self.characters if self.characters is not None else task and task.characters()
        if not characters:
            raise ValueError(
                "tokenizer.characters: expected an alphabet, got none, and the task names none of its own. "
                "List the characters, or use TrainedBPE."
            )
        vocabulary = {token: i for i, token in enumerate((_PAD, _EOS, _MASK, *dict.fromkeys(characters)))}
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=_PAD))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")  # type: ignore[assignment]
        tokenizer.decoder = decoders.Fuse()  # type: ignore[assignment]
        return _wrap(tokenizer)


@dataclass(frozen=True, kw_only=True)
class TrainedBPE(TokenizerSource):
    """Byte-level BPE trained on the task's training split; every text round-trips.

    Attributes:
        vocab_size: Number of tokens, special ones included; at least 260.
        min_frequency: Merges rarer than this are not learnt.
        max_examples: Training examples it learns from at most; ``None`` for all.
        chat_template: Jinja template of a chat; ``None`` for none.
    """

    vocab_size: int = 4096
    min_frequency: int = 2
    max_examples: int | None = 100_000
    chat_template: str | None = None

    def __post_init__(self) -> None:
        """Refuse a vocabulary that cannot hold all bytes."""
        if self.vocab_size < 260:
            raise ValueError(
                f"tokenizer.vocab_size: expected at least 260 (256 bytes and special tokens), got {self.vocab_size}."
            )

    def build(self, task: Task | None) -> PreTrainedTokenizerBase:
        """Train it."""
        if task is None:
            raise ValueError("tokenizer: TrainedBPE needs a task to learn from; give one, or use StoredTokenizer.")
        examples = task.examples("train")
        count = len(examples) if self.max_examples is None else min(len(examples), self.max_examples)
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
        tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
        trainer = trainers.BpeTrainer(
            vocab_size=self.vocab_size,
            min_frequency=self.min_frequency,
            special_tokens=[_PAD, _EOS, _MASK],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        texts = (text for i in range(count) for text in (examples[i].query, examples[i].response))
        tokenizer.train_from_iterator(texts, trainer, length=2 * count)
        wrapped = _wrap(tokenizer)
        if self.chat_template is not None:
            wrapped.chat_template = self.chat_template
        return wrapped


@dataclass(frozen=True, kw_only=True)
class PretrainedTokenizer(TokenizerSource):
    """The tokenizer of a Hugging Face directory or hub id; a mask token is added if it has none.

    Attributes:
        source: Directory or hub id.
        revision: Pinned revision of a hub id.
        trust_remote_code: Let the source run Python code of its own on this machine.
    """

    source: str
    revision: str | None = None
    trust_remote_code: bool = False

    def build(self, task: Task | None) -> PreTrainedTokenizerBase:  # noqa: ARG002
        """Load it; the mask id that the directory's config names is respected."""
        options: dict[str, Any] = {"revision": self.revision, "trust_remote_code": self.trust_remote_code}
        try:
            tokenizer = AutoTokenizer.from_pretrained(self.source, **options)
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ValueError(
                f"tokenizer.source: no tokenizer can be loaded from {self.source!r} ({reason}). "
                "Check the path, or the id and the network; a model directory needs tokenizer.json."
            ) from error
        ensure_mask_token(tokenizer, _configured_mask_id(self.source, options))
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        return tokenizer


@dataclass(frozen=True, kw_only=True)
class StoredTokenizer(TokenizerSource):
    """The tokenizer that a checkpoint carries.

    Attributes:
        files: Its files' texts, by name.
    """

    files: dict[str, str]

    def build(self, task: Task | None) -> PreTrainedTokenizerBase:  # noqa: ARG002
        """Rebuild it."""
        return tokenizer_from_files(self.files)


def tokenizer_files(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Return a tokenizer's files as texts, enough for :func:`tokenizer_from_files`."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        paths = [Path(folder) / name for name in _FILES]
        return {path.name: path.read_text(encoding="utf-8") for path in paths if path.is_file()}


def tokenizer_from_files(files: dict[str, str]) -> PreTrainedTokenizerBase:
    """Rebuild a tokenizer.

    Raises:
        ValueError: If the files are not a tokenizer's.
    """
    with tempfile.TemporaryDirectory() as folder:
        for name in _FILES:
            if name in files:
                (Path(folder) / name).write_text(files[name], encoding="utf-8")
        try:
            return AutoTokenizer.from_pretrained(folder)
        except (OSError, ValueError, KeyError) as error:
            raise ValueError("tokenizer: the checkpoint's tokenizer files cannot be read; it may be damaged.") from error


def _wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=_PAD,
        eos_token=_EOS,
        mask_token=_MASK,
        clean_up_tokenization_spaces=False,
    )


def _configured_mask_id(source: str, options: dict[str, Any]) -> int | None:
    path = Path(source) / "config.json"
    if path.is_file():
        return json.loads(path.read_text(encoding="utf-8")).get("mask_token_id")
    if Path(source).exists():
        return None
    from transformers import AutoConfig

    return getattr(AutoConfig.from_pretrained(source, **options), "mask_token_id", None)
