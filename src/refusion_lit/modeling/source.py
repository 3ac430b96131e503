"""A model directory or hub id. Config, tokenizer config and generation config are read once."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedConfig
from transformers.models.auto.tokenization_auto import get_tokenizer_config
from transformers.models.diffusion_gemma.generation_diffusion_gemma import DiffusionGemmaGenerationConfig

from refusion_lit.modeling.config import load_config
from refusion_lit.modeling.formats import CheckpointFormat, find_format
from refusion_lit.utils.errors import error_reason
from refusion_lit.utils.require import require, require_template

_SECONDS = 10.0
"""Time for the hub to answer."""
_ASSISTANT = "muse_glimmer_assistant"
"""Model type of drafters that have transformers' assistant layout."""
_RULES: dict[str, object] = {
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty", "guidance_scale", "num_beams"), 1),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_length", "min_new_tokens"), 0),
    **dict.fromkeys(
        (
            "bad_words_ids", "begin_suppress_tokens", "exponential_decay_length_penalty", "forced_bos_token_id",
            "forced_eos_token_id", "sequence_bias", "stop_strings", "suppress_tokens", "watermarking_config",
        )
    ),
}  # fmt: skip
"""Generation options that change greedy texts in transformers, with the values that change nothing."""


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """A Hugging Face directory or hub id. Loading passes this object on, so that no file is read twice.

    Attributes:
        name: The directory's path, or the hub id.
        revision: A hub id's pinned revision.
        trust_remote_code: Whether the source may run its own Python code on this machine.
        overrides: Options that replace options in the source's config.
        values: Contents of ``config.json``; empty if the source has none.
        published: The checkpoint's published format; ``None`` for transformers' format.

    >>> source = ModelSource.open("tests/goldens/models/additions-clean")
    >>> source.values["model_type"], source.config.hidden_size
    ('qwen3', 96)
    """

    name: str
    revision: str | None = None
    trust_remote_code: bool = False
    overrides: Mapping[str, Any] = field(default_factory=dict)
    values: Mapping[str, Any]
    published: CheckpointFormat | None = None

    @classmethod
    def open(
        cls,
        name: str,
        *,
        option: str = "backbone.source",
        checkpoint_format: str | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
        overrides: Mapping[str, Any] | None = None,
    ) -> ModelSource:
        """Read the config of a directory or hub id. No code runs and no weights load.

        If the hub does not answer, the process uses the local cache from then on. Otherwise the libraries would retry
        every file for a minute.

        Args:
            name: Directory or hub id.
            option: The option that named the source, for messages.
            checkpoint_format: The published format's name; ``None`` derives it from ``model_type``.
            revision: A hub id's pinned revision.
            trust_remote_code: Allow the source to run its own Python code; warns.
            overrides: Options that replace options in the source's config.

        Raises:
            ValueError: If the name is empty, ``config.json`` is no JSON object, the format does not fit, or the hub
                cannot be reached and the source is neither a directory nor in the cache.
        """
        require(name != "", option, "a directory or a hub id", name, "give one")
        if not Path(name).exists():
            _check_hub(name, option)
        values = _read_config(name, option, revision)
        model_type = values.get("model_type")
        where = f"{option}: model_type in the config of {name}"
        require(isinstance(model_type, str | None), where, "the name of an architecture", model_type, "correct it")
        expected = "a checkpoint, a Hugging Face directory or a hub id"
        fix = "give the drafter with --draft, and its base model as ckpt_path"
        is_model = values.get("model_type") != _ASSISTANT
        require(is_model, option, expected, f"{name}, which is a drafter", fix)
        if trust_remote_code:
            what = f"Python code that comes with {name} will run on this machine with all your rights."
            warnings.warn(f"trust_remote_code: {what}", stacklevel=2)
        return cls(
            name=name,
            revision=revision,
            trust_remote_code=trust_remote_code,
            overrides=overrides or {},
            values=values,
            published=find_format(values, checkpoint_format, name),
        )

    @cached_property
    def config(self) -> Any:  # noqa: ANN401 - one class per architecture
        """Transformers' config, with the overrides.

        Raises:
            ValueError: If the config cannot be loaded, or an override is no option of the architecture.
        """
        return load_config(
            self.name,
            self._format_values,
            self.overrides,
            published=self.published,
            revision=self.revision,
            trust_remote_code=self.trust_remote_code,
        )

    @cached_property
    def _format_values(self) -> Mapping[str, Any]:
        """Contents of ``config.json``; for formats that read it, with the generation config."""
        if self.published is None or not self.published.reads_generation_config:
            return self.values
        return {**self.values, "generation_config": json.loads(self.generation_config.to_json_string(use_diff=False))}

    @property
    def entry(self) -> dict[str, Any]:
        """The config's entry ``refusion_lit``: traits, default decoder, prompt template.

        Raises:
            ValueError: If the entry is no mapping, or transformers' architecture does not support the published config.
        """
        values = self.values if self.published is None else self.published.library_options(self._format_values)
        entry = values.get("refusion_lit") or {}
        require(isinstance(entry, dict), f"refusion_lit in the config of {self.name}", "a mapping", entry, "correct it")
        return entry

    @property
    def prompt_template(self) -> str:
        """The template that turns a query into a prompt if the tokenizer has no chat template.

        Raises:
            ValueError: If the entry is not a text with ``{query}`` in it.
        """
        option = f"refusion_lit.prompt_template in the config of {self.name}"
        return require_template(self.entry.get("prompt_template", "{query}"), option)

    @cached_property
    def tokenizer_values(self) -> dict[str, Any]:
        """Contents of ``tokenizer_config.json``; empty if the source has none."""
        return get_tokenizer_config(self.name, revision=self.revision)

    @cached_property
    def generation_config(self) -> GenerationConfig:
        """The generation config; without a file, the config's generation options, as in transformers.

        Raises:
            ValueError: If the file is damaged: it may name EOS tokens, and DiffusionGemma's settings.
        """
        file = Path(self.name) / "generation_config.json"
        if file.is_file():
            try:
                values = json.loads(file.read_text(encoding="utf-8"))
            except (OSError, ValueError, RecursionError) as error:
                raise _not_json("backbone.source", file, error) from error
            require(isinstance(values, dict), "backbone.source", f"a JSON object in {file}", values, "fetch it again")
        options: dict[str, Any] = {"revision": self.revision}
        if self.values.get("model_type") == "diffusion_gemma":  # has a class of its own
            try:
                return DiffusionGemmaGenerationConfig.from_pretrained(self.name, **options)
            except OSError:  # there is no file
                return DiffusionGemmaGenerationConfig()
            except (ValueError, TypeError) as error:
                raise ValueError(
                    f"backbone.source: expected the settings of DiffusionGemma in {self.name}/generation_config.json, "
                    f"got some that cannot be read ({error_reason(error)}); fetch it again."
                ) from error
        try:
            return GenerationConfig.from_pretrained(self.name, **options)
        except (OSError, ValueError, TypeError):
            return GenerationConfig.from_model_config(dict(self.values))  # type: ignore[arg-type] - takes both

    @property
    def ignored_rules(self) -> dict[str, Any]:
        """Generation options that change greedy texts in transformers. No decoder here follows them."""
        values = {name: getattr(self.generation_config, name, None) for name in _RULES}
        return {name: value for name, value in values.items() if value not in (None, [], _RULES[name])}


def _read_config(name: str, option: str, revision: str | None) -> dict[str, Any]:
    """Return the contents of ``config.json``, or nothing if there is no such file."""
    file = Path(name) / "config.json"
    try:
        values, _ = PreTrainedConfig.get_config_dict(name, revision=revision)
    except (OSError, ValueError, TypeError, RecursionError) as error:
        if not file.is_file():
            return {}
        reason = error.__context__ if isinstance(error.__context__, ValueError) else error
        raise _not_json(option, file, reason) from error
    require(isinstance(values, dict), option, f"a JSON object in {file}", values, "fetch it again")
    return values


def _not_json(option: str, file: Path, error: Exception) -> ValueError:
    return ValueError(f"{option}: {file} is not JSON, or no JSON object ({error_reason(error)}); fetch it again.")


def _check_hub(name: str, option: str) -> None:
    """Check that a source can be read from the hub or, if the hub does not answer, from the local cache.

    In the second case, the process uses only the cache from then on, so that later reads do not wait for the hub.

    Raises:
        ValueError: If the name cannot be a hub id, or the source is not cached and the hub cannot be reached.
    """
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.utils import HFValidationError, get_session

    problem = f"{option}: expected a directory or a hub id, got {name!r}: there is no such directory, and"
    try:
        is_cached = isinstance(try_to_load_from_cache(name, "config.json"), str)
    except HFValidationError:
        raise ValueError(f"{problem} a hub id has the form OWNER/NAME. Check the path.") from None
    reason = "offline mode is on"
    if not constants.HF_HUB_OFFLINE:
        try:
            get_session().head(constants.ENDPOINT, timeout=_SECONDS)
            return
        except Exception as error:  # any error of the library's HTTP client
            constants.HF_HUB_OFFLINE = is_cached  # a source that is missing must not put the process offline
            reason = error_reason(error)
    if not is_cached:
        raise ValueError(f"{problem} the hub cannot be reached ({reason}). Check the path, or the network.")
