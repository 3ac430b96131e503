"""Tokenizers: pretrained, trained on the task's data, with a token per character, or stored in a checkpoint."""

from __future__ import annotations

import tempfile
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Set
from copy import deepcopy
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import transformers
from tokenizers import ByteLevelBPETokenizer, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from refusion_lit.modeling.chat_template import CHAT_OPTIONS
from refusion_lit.modeling.load import BackboneConfig
from refusion_lit.modeling.source import ModelSource
from refusion_lit.modeling.vocabulary import (
    ADD_BOS,
    DRAWS_PADDING,
    EOS_IDS,
    add_eos_tokens,
    ensure_mask_token,
    mask_is_new,
    read_special_tokens,
)
from refusion_lit.tasks.base import Example, Task
from refusion_lit.utils.errors import error_reason
from refusion_lit.utils.require import is_number, require, require_at_least, require_choice

_PAD = "<|pad|>"
_EOS = "<|eos|>"
_MASK = "<|mask|>"
_MAX_BPE_EXAMPLES = 100_000
"""Maximum number of examples that train BPE."""
_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


class TokenizerSource(ABC):
    """Builds a tokenizer with padding, EOS and mask tokens."""

    @abstractmethod
    def build(self, task: Task | None, prompt_template: str = "{query}") -> PreTrainedTokenizerBase:
        """Return the tokenizer.

        Args:
            task: The task to encode; sources that learn from data need it.
            prompt_template: How a query becomes a prompt; its characters must be encoded, too.

        Raises:
            ValueError: If the tokenizer cannot be built.
        """


@dataclass(frozen=True, kw_only=True)
class CharacterTokenizer(TokenizerSource):
    """A token per character: ids 0, 1 and 2 are padding, EOS and mask, followed by the characters in order.

    Attributes:
        characters: The alphabet; ``None`` takes the task's alphabet or, if the task has none, the sorted characters in
            training examples and prompt template.

    >>> tokenizer = CharacterTokenizer(characters="01+").build(None)
    >>> tokenizer.encode("1+0")
    [4, 5, 3]
    >>> tokenizer.convert_ids_to_tokens([0, 1, 2])
    ['<|pad|>', '<|eos|>', '<|mask|>']
    """

    characters: str | None = None

    def build(self, task: Task | None, prompt_template: str = "{query}") -> PreTrainedTokenizerBase:
        """Return the tokenizer.

        Raises:
            ValueError: If there is no alphabet.
        """
        characters = self.characters if self.characters is not None else task and task.characters()
        if characters is None and task is not None:
            alphabet = set(prompt_template.replace("{query}", "")).union(*_texts(task.examples("train")))
            characters = "".join(sorted(alphabet))
        if not characters:
            raise ValueError(
                "tokenizer.characters: expected an alphabet, got none, and there are no training examples to take it "
                "from. List the characters, or use TrainedBPE."
            )
        vocabulary = {token: i for i, token in enumerate((_PAD, _EOS, _MASK, *dict.fromkeys(characters)))}
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=_PAD))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")  # type: ignore[assignment]
        tokenizer.decoder = decoders.Fuse()  # type: ignore[assignment]
        return _wrap(tokenizer)


@dataclass(frozen=True, kw_only=True)
class TrainedBPE(TokenizerSource):
    """Byte-level BPE trained on the task's training split; encodes every text without loss.

    Attributes:
        vocab_size: Maximum vocabulary size, including special tokens; at least 260.
    """

    vocab_size: int = 4096

    def __post_init__(self) -> None:
        """Refuse a vocabulary that cannot hold all bytes."""
        expected = "at least 260 (256 bytes and special tokens)"
        require(self.vocab_size >= 260, "tokenizer.vocab_size", expected, self.vocab_size, "set it to 260 or more")

    def build(self, task: Task | None, prompt_template: str = "{query}") -> PreTrainedTokenizerBase:  # noqa: ARG002
        """Train the tokenizer.

        Raises:
            ValueError: If there is no task to learn from.
        """
        if task is None:
            raise ValueError("tokenizer: expected a task for TrainedBPE to learn from, got none; set data.task.")
        texts = _texts(islice(task.examples("train"), _MAX_BPE_EXAMPLES))
        tokenizer = ByteLevelBPETokenizer()
        special = [_PAD, _EOS, _MASK]
        tokenizer.train_from_iterator(texts, self.vocab_size, show_progress=False, special_tokens=special)
        return _wrap(Tokenizer.from_str(tokenizer.to_str()))


_GENERIC_CLASSES = {"TokenizersBackend", "PreTrainedTokenizerFast"}
"""Tokenizer classes that ``tokenizer.json`` describes completely, as named by transformers 5 and 4."""


@dataclass(frozen=True, kw_only=True)
class PretrainedTokenizer(TokenizerSource):
    """A Hugging Face directory's or hub id's tokenizer; a mask token is added if the tokenizer has none.

    Attributes:
        source: Directory or hub id.
        revision: A hub id's pinned revision.
        checkpoint_format: The source's published format, if its config does not name it; see
            :class:`~refusion_lit.BackboneConfig`.
        trust_remote_code: Let a source in an unknown format run its Python code on this machine.
    """

    source: str
    revision: str | None = None
    checkpoint_format: str | None = None
    trust_remote_code: bool = False

    def build(self, task: Task | None, prompt_template: str = "{query}") -> PreTrainedTokenizerBase:  # noqa: ARG002
        """Load the tokenizer.

        Raises:
            ValueError: If the tokenizer cannot be loaded, has no EOS token or no ``tokenizer.json``, or if its mask
                token is not the ``mask_token_id`` of the source's config.
        """
        is_pinned = self.revision is not None and Path(self.source).exists()
        expected = "none for what is on this machine"
        require(
            not is_pinned, "tokenizer.revision", expected, self.revision, "leave it out, or give a hub id as source"
        )
        source = ModelSource.open(
            self.source,
            option="tokenizer.source",
            checkpoint_format=self.checkpoint_format,
            revision=self.revision,
            trust_remote_code=self.trust_remote_code,
        )
        return load_tokenizer(source)


def load_tokenizer(source: ModelSource) -> PreTrainedTokenizerBase:
    """Load a Hugging Face directory's or hub id's tokenizer; add a mask token if the tokenizer has none.

    Args:
        source: The directory or hub id.

    Raises:
        ValueError: If the tokenizer cannot be loaded, has no EOS token or no ``tokenizer.json``, or if its
            mask token is not the ``mask_token_id`` of the source's config.
    """
    published = source.published
    try:
        tokenizer = _read_tokenizer(source)
    except Exception as error:  # the tokenizers library raises this very class
        raise ValueError(
            f"tokenizer.source: no tokenizer can be loaded from {source.name!r} ({error_reason(error)}). "
            "Check the path, or the id and the network; a model directory needs tokenizer.json."
        ) from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ValueError(
            f"tokenizer.source: expected a tokenizer of the tokenizers library, got {type(tokenizer).__name__} in "
            f"{source.name!r}. Convert it to a tokenizer.json, or take another one."
        )
    has_tokens = len(tokenizer) > len(tokenizer.get_added_vocab())  # without files, the tokenizer is empty
    fix = "copy tokenizer.json and tokenizer_config.json there, or name another source"
    require(has_tokens, "tokenizer.source", f"a tokenizer's files in {source.name}", None, fix)
    for name in tokenizer.SPECIAL_TOKENS_ATTRIBUTES:
        if getattr(tokenizer, name, None) == "":  # some files write "" for a missing token, which has no id
            setattr(tokenizer, name, None)
    vocabulary = tokenizer.get_vocab()
    _check_entries(tokenizer, {*vocabulary.values()}, source.name)
    ends = _configured_eos_ids(source, {*vocabulary.values()})
    if not tokenizer.eos_token and ends:
        tokenizer.add_special_tokens({"eos_token": str(tokenizer.convert_ids_to_tokens(ends[0]))})
    expected = f"an end-of-sequence token in {source.name}"
    fix = "set eos_token in its tokenizer_config.json"
    require(bool(tokenizer.eos_token), "tokenizer.source", expected, None, fix)
    mask_token_id = source.values.get("mask_token_id")
    if mask_token_id is not None:
        require_at_least(f"backbone.source: mask_token_id in the config of {source.name}", mask_token_id, 0)
    if published is None or published.has_mask:
        ensure_mask_token(tokenizer, mask_token_id, () if published is None else published.mask_tokens)
    if published is not None and published.draws_padding:
        tokenizer.init_kwargs[DRAWS_PADDING] = True
    is_equal = mask_token_id in (None, tokenizer.mask_token_id)
    expected = f"the mask_token_id of the config of {source.name}, which is {mask_token_id}"
    require(is_equal, "tokenizer.source", expected, tokenizer.mask_token_id, "make them equal")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    named = [vocabulary[text] for text in (published.end_tokens if published else ()) if text in vocabulary]
    add_eos_tokens(tokenizer, [*ends, *named])
    ends = read_special_tokens(tokenizer).eos_token_ids
    is_apart = published is None or tokenizer.mask_token_id not in ends  # other models' masks count as untrained
    expected = f"a mask_token_id that ends no text in {source.name}, unlike {', '.join(map(str, ends))}"
    fix = "correct config.json, tokenizer_config.json or the EOS tokens of generation_config.json"
    require(is_apart, "backbone.source", expected, tokenizer.mask_token_id, fix)
    return _without_truncation(tokenizer)


def _read_tokenizer(source: ModelSource) -> PreTrainedTokenizerBase:
    """Read the tokenizer's files, for a published format without the Python code that comes with the tokenizer."""
    values = source.tokenizer_values
    published = source.published
    # AutoTokenizer uses Qwen's tokenizer class for any Qwen model, and ignores how tokenizer.json treats spaces.
    is_generic = values.get("tokenizer_class") in _GENERIC_CLASSES and "auto_map" not in values
    if published is None and not is_generic:
        # transformers reads tokenizer_config.json three times more: to choose the class, and twice to fill it.
        options: dict[str, Any] = {"revision": source.revision, "trust_remote_code": source.trust_remote_code}
        config = source.config if source.values else None
        return AutoTokenizer.from_pretrained(source.name, config=config, **options)
    if published is not None and "auto_map" in values and published.slow_tokenizer is not None:
        # The authors' class is derived from this class, and reads the same files (vocabulary and merges).
        tokenizer_class: Any = getattr(transformers, published.slow_tokenizer)
        return tokenizer_class.from_pretrained(source.name, revision=source.revision)
    tokenizer = _read_generic(Path(source.name), values)
    if tokenizer is None:
        revision: dict[str, Any] = {"revision": source.revision}
        return PreTrainedTokenizerFast.from_pretrained(source.name, **revision)
    return tokenizer


def _read_generic(folder: Path, values: Mapping[str, Any]) -> PreTrainedTokenizerBase | None:
    """Read a directory's ``tokenizer.json``; ``None`` if the tokenizer is not in a directory with this file.

    ``from_pretrained`` opens ``tokenizer_config.json`` twice and does not accept a parsed file; the method that it
    calls last does. For vocabularies above 100 000 tokens, it reads ``config.json`` again to recognise Mistral models.

    Args:
        folder: The directory, or a hub id.
        values: The content of ``tokenizer_config.json``.
    """
    if not (folder / "tokenizer.json").is_file() or "fast_tokenizer_files" in values:
        return None
    names = {
        "tokenizer_file": "tokenizer.json",
        "special_tokens_map_file": "special_tokens_map.json",
        "added_tokens_file": "added_tokens.json",
        "chat_template_file": "chat_template.jinja",
    }
    files = {key: str(folder / name) for key, name in names.items() if (folder / name).is_file()}
    for template in (folder / "additional_chat_templates").glob("*.jinja"):
        files[f"chat_template_{template.stem}"] = str(template)
    options = {name: value for name, value in values.items() if name not in ("tokenizer_class", "init_inputs")}
    return PreTrainedTokenizerFast._from_pretrained(files, str(folder), deepcopy(options), _is_local=True)


@dataclass(frozen=True, kw_only=True)
class StoredTokenizer(TokenizerSource):
    """The tokenizer stored in a checkpoint.

    Attributes:
        files: The tokenizer's files: content by name.
    """

    files: dict[str, str]

    def build(self, task: Task | None, prompt_template: str = "{query}") -> PreTrainedTokenizerBase:  # noqa: ARG002
        """Rebuild the tokenizer.

        Raises:
            ValueError: If the files are not a tokenizer's.
        """
        return tokenizer_from_files(self.files)


def tokenizer_files(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Return a tokenizer's files, content by name, for :func:`tokenizer_from_files`."""
    with tempfile.TemporaryDirectory() as folder:
        # Named templates, such as one for tools, then are in tokenizer_config.json instead of a file each.
        is_single = not isinstance(tokenizer.chat_template, dict)
        tokenizer.save_pretrained(folder, save_jinja_files=is_single)
        paths = [Path(folder) / name for name in _FILES]
        return {path.name: path.read_text(encoding="utf-8") for path in paths if path.is_file()}


def tokenizer_from_files(files: dict[str, str], source: str | Path = "the checkpoint") -> PreTrainedTokenizerBase:
    """Rebuild a tokenizer from its files' contents.

    Args:
        files: Contents by name.
        source: The checkpoint with the files, for messages.

    Raises:
        ValueError: If the files are not a tokenizer's.
    """
    with tempfile.TemporaryDirectory() as folder:
        for name in _FILES:
            if name in files:
                (Path(folder) / name).write_text(files[name], encoding="utf-8")
        try:
            return _without_truncation(AutoTokenizer.from_pretrained(folder, trust_remote_code=False))
        except Exception as error:  # the tokenizers library raises this very class
            raise ValueError(f"tokenizer: the tokenizer files in {source} cannot be read; fetch them again.") from error


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, backbone: BackboneConfig) -> None:
    """Refuse a tokenizer whose ids differ from the ids that the initial weights were trained with.

    The tokenizer may have more tokens than the weights' tokenizer. If the weights come without a tokenizer, the check
    warns.

    Args:
        tokenizer: The tokenizer that encodes the data.
        backbone: Where the weights come from.

    Raises:
        ValueError: Naming the first token with another id.
    """
    if backbone.source is None or tokenizer.name_or_path == backbone.source:
        return
    try:
        original = load_tokenizer(backbone.open_source())
    except ValueError as error:
        warnings.warn(f"data.tokenizer cannot be compared with the weights' tokenizer: {error}", stacklevel=2)
        return
    expected = original.get_vocab()
    vocabulary = tokenizer.get_vocab()
    if mask_is_new(original) and original.mask_token is not None:
        del expected[str(original.mask_token)]  # unknown to the weights
    for token, identity in sorted(expected.items(), key=lambda pair: pair[1]):
        if vocabulary.get(token) != identity:
            raise ValueError(
                f"data.tokenizer: expected the {len(expected)} tokens of {backbone.source!r}, which its weights know, "
                f"got {len(vocabulary)} tokens in which {token!r} has the id {vocabulary.get(token)}, not {identity}. "
                f"Set data.tokenizer to PretrainedTokenizer with source: {backbone.source}."
            )


def alphabet(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return the alphabet of a tokenizer with a token per character; ``None`` for other tokenizers.

    >>> alphabet(CharacterTokenizer(characters="01+").build(None))
    '01+'
    """
    backend: Any = tokenizer.backend_tokenizer  # type: ignore[attr-defined] - all our tokenizers are fast tokenizers
    names = tokenizer.convert_ids_to_tokens([*range(len(tokenizer))])
    characters = [name for name in names if name is not None and name not in tokenizer.all_special_tokens]
    is_alphabet = type(backend.model).__name__ == "WordLevel" and all(len(name) == 1 for name in characters)
    return "".join(characters) if is_alphabet else None


def unknown_text(backend: Any, text: str, token: int | None) -> ValueError:  # noqa: ANN401 - a class of tokenizers
    """Return the error for a text that cannot be encoded without a special token."""
    if type(backend.model).__name__ == "WordLevel":
        pieces = (
            [text] if backend.pre_tokenizer is None else [p for p, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
        )
        missing = sorted(set(pieces) - set(backend.get_vocab()))
        return ValueError(
            f"text: the tokenizer has no token for {', '.join(map(repr, missing))} (in {text[:60]!r}). "
            "Leave it out, or train with a tokenizer that knows it: add it to CharacterTokenizer's characters, or use "
            "TrainedBPE."
        )
    return ValueError(
        f"text: expected {text[:60]!r} to be encoded as plain text, got the special token "
        f"{backend.id_to_token(token)!r} in it. Change the text, or use another tokenizer."
    )


def _texts(examples: Iterable[Example]) -> Iterator[str]:
    for example in examples:
        # Assistant turns with calls of tools may have no content.
        yield from [turn.get("content") or "" for turn in example.messages] or [example.query]
        yield example.response


def _wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=_PAD,
        eos_token=_EOS,
        mask_token=_MASK,
        clean_up_tokenization_spaces=False,
    )


def _without_truncation(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Switch off truncation and padding, which a ``tokenizer.json`` may switch on."""
    tokenizer.backend_tokenizer.no_truncation()  # type: ignore[attr-defined]
    tokenizer.backend_tokenizer.no_padding()  # type: ignore[attr-defined]
    return tokenizer


def _check_entries(tokenizer: PreTrainedTokenizerBase, known: Set[int], name: str) -> None:
    """Refuse impossible values in our entries of a source's ``tokenizer_config.json``.

    Args:
        tokenizer: The tokenizer, which has the file's contents.
        known: All ids of the tokenizer.
        name: The directory or hub id.
    """
    where, fix = f"tokenizer_config.json of {name}: ", "correct or remove it"
    values = tokenizer.init_kwargs
    choices = ("auto", False) if tokenizer.bos_token is None else ("auto", True, False)
    require_choice(where + ADD_BOS, values.get(ADD_BOS, "auto"), choices)
    draws = values.get(DRAWS_PADDING, False)
    require(isinstance(draws, bool), where + DRAWS_PADDING, "true or false", draws, fix)
    options = values.get(CHAT_OPTIONS) or {}
    require(isinstance(options, Mapping), where + CHAT_OPTIONS, "a mapping of names to values", options, fix)
    ends = values.get(EOS_IDS, [])
    are_ids = isinstance(ends, list) and all(is_number(token, int) and token in known for token in ends)
    require(are_ids, where + EOS_IDS, "a list of ids of the tokenizer", ends, fix)


def _configured_eos_ids(source: ModelSource, known: Set[int]) -> list[int]:
    """Return the EOS tokens that end a text in transformers' ``generate``: generation_config.json's or config.json's.

    Args:
        source: The directory or hub id.
        known: All ids of the tokenizer. Other ids are left out with a warning.
    """
    value = source.generation_config.eos_token_id
    ids = [token for token in (value if isinstance(value, list) else [value]) if token is not None]
    option = "backbone.source: eos_token_id"
    for token in ids:
        expected = f"integers in config.json and generation_config.json of {source.name}"
        require(is_number(token, int), option, expected, token, "fetch the two files again")
    unknown = [token for token in ids if token not in known]
    if unknown:
        message = f"{option}: expected ids of the tokenizer in {source.name}, got {unknown}, which end no response; "
        warnings.warn(f"{message}correct generation_config.json or config.json.", stacklevel=2)
    return [token for token in ids if token in known]
