"""A model with its tokenizer; every command decodes through this class."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from operator import index
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from refusion_lit.constraints.schemas import Schemas
from refusion_lit.constraints.templates import fill_templates
from refusion_lit.data.conversations import encode_prompt
from refusion_lit.data.detokenizer import Detokenizer
from refusion_lit.decoding import (
    Decoder,
    DecodingOutput,
    Generation,
    KeptCache,
    ModelMismatchError,
    check_context,
    check_model,
    decode,
    default_decoder,
    named_decoder,
)
from refusion_lit.engine.checks import check_arguments, check_drafter, check_traits, read_decoding_options
from refusion_lit.engine.output import GenerationCallback
from refusion_lit.modeling.backbone import Backbone
from refusion_lit.modeling.interface import LanguageModel
from refusion_lit.modeling.load import ModelPlan
from refusion_lit.modeling.vocabulary import vocabulary_size
from refusion_lit.types import ModelTraits, Prompt, SamplingParams
from refusion_lit.utils.require import require, require_template

_BYTES = {character: value for value, character in bytes_to_unicode().items()}
"""Bytes by their characters in the names of byte-level tokens."""


def check_plan(
    plan: ModelPlan,
    decoder: Decoder | None,
    lengths: Sequence[tuple[int, str]],
    sampling: SamplingParams,
    *,
    allow_mismatch: bool = False,
) -> None:
    """Before weights are read, refuse a decoder that does not fit a model, and prompts that are too long.

    Args:
        plan: The model's tokenizer, traits and length limits.
        decoder: The decoder; ``None``: the model's default decoder. A decoder with a verifier is checked later.
        lengths: Pairs: a prompt's number of tokens, its id.
        sampling: Gives the response's maximum length.
        allow_mismatch: Allow a decoder for which the model was not trained; decoding then warns.

    Raises:
        ModelMismatchError: If the model was not trained for the decoder.
        ValueError: If the model lacks a drafter that the decoder needs, or if prompts leave no room for the response in
            the context. The error names the longest prompt.
    """
    if decoder is None:
        decoder = default_decoder(plan.traits, plan.entry.get("decoder"), drafts=plan.has_drafter).adapt_to(sampling)
    if "verifier" in decoder.requirements().predictions:
        return
    if not allow_mismatch:
        with _named_alternative(plan.traits, decoder):
            check_traits(plan.traits, decoder)
    check_drafter(decoder, has_drafter=plan.has_drafter)
    check_context(plan, lengths, sampling.max_new_tokens, decoder)


@contextmanager
def _named_alternative(traits: ModelTraits, decoder: Decoder) -> Iterator[None]:
    """If a decoder does not fit a model, add the name of a fitting decoder to the error."""
    try:
        yield
    except ModelMismatchError as error:
        other = default_decoder(traits)
        if type(other) is type(decoder) or other.requirements().mismatches(traits):
            raise
        raise ModelMismatchError(f"{error} {type(other).__name__} fits.") from None


class TextModel:
    """A backbone with its tokenizer, which :func:`refusion_lit.load` returns.

    Args:
        backbone: The model.
        tokenizer: Its tokenizer.
        prompt_template: Turns a query into a prompt if the tokenizer has no chat template.
    """

    def __init__(
        self, backbone: Backbone, tokenizer: PreTrainedTokenizerBase, prompt_template: str = "{query}"
    ) -> None:
        self.backbone = backbone
        self.tokenizer = tokenizer
        self.prompt_template = require_template(prompt_template)
        self.verifier: Backbone | None = None

    def __repr__(self) -> str:
        size = sum(parameter.numel() for parameter in self.backbone.parameters())
        dtype = str(self.backbone.head.weight.dtype).removeprefix("torch.")
        return f"TextModel({self.backbone.config.model_type}, {size:,} parameters, {dtype} on {self.backbone.device})"

    @property
    def default_decoder(self) -> Decoder:
        """The decoder named in the model's config, else a decoder that fits the model's training.

        Warns if the config says neither; see :func:`~refusion_lit.families.defaults.named_decoder`.
        """
        entry = getattr(self.backbone.config, "refusion_lit", None) or {}
        return named_decoder(self.backbone.traits, entry, has_drafter=self.backbone.drafter is not None)

    @cached_property
    def schemas(self) -> Schemas:
        """Constrains responses to JSON schemas; built on first use, because reading a vocabulary takes a second."""
        return Schemas(self.tokenizer, self.backbone.special_tokens)

    def encode(
        self,
        query: str,
        messages: Sequence[Mapping[str, Any]] = (),
        tools: Sequence[Mapping[str, Any]] = (),
        chat_options: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return a query's prompt tokens, chat template or ``prompt_template`` included.

        Args:
            query: The text.
            messages: Chat turns in place of the query, for tokenizers with a chat template.
            tools: Descriptions of tools, for templates that render tools.
            chat_options: Options of the chat template besides the options that are kept with the model.

        Raises:
            ValueError: If the query is empty or cannot be encoded, or the chat template does not read an option.
        """
        return encode_prompt(self.tokenizer, query, self.prompt_template, messages, tools, chat_options)

    def detokenize(
        self,
        token_ids: Sequence[int],
        after: Sequence[int] = (),
        stop: Sequence[str] = (),
        keep: Sequence[str] = (),
        *,
        is_growing: bool = False,
    ) -> str:
        """Return the text of tokens without special tokens.

        Args:
            token_ids: The tokens of a response.
            after: The tokens of the prompt. A tokenizer may drop a space at the beginning of a text, and a response is
                a part of the whole text.
            stop: Stop strings, which are found in names of special tokens, too.
            keep: Texts. Special tokens whose names occur in them are kept as text.
            is_growing: Whether further tokens may follow, for :class:`~refusion_lit.decoding.TextStream`.
        """
        return self._detokenizer(token_ids, after, stop, keep, is_growing=is_growing)

    def _detokenize_alone(self, token_ids: Sequence[int], after: Sequence[int], stop: Sequence[str]) -> str:  # noqa: ARG002
        return self.detokenize(token_ids, stop=stop)

    @cached_property
    def _detokenizer(self) -> Detokenizer:
        return Detokenizer(self.tokenizer)

    def token_text(self, token_id: int) -> str:
        """Return the text of a single token; special tokens by name."""
        name = self.tokenizer.convert_ids_to_tokens(token_id)
        text = str(self.tokenizer.decode([token_id], skip_special_tokens=False))
        # Tokenizers that mark the beginning of a word drop the space from a text's first token.
        return f" {text}" if isinstance(name, str) and name.startswith("\u2581") and text[:1] != " " else text

    def token_bytes(self, token_id: int) -> bytes | None:
        """Return the bytes of a single token, which may be a part of a character; ``None`` if they are unknown."""
        text = self.token_text(token_id)
        if "\N{REPLACEMENT CHARACTER}" not in text:
            return text.encode()
        name = str(self.tokenizer.convert_ids_to_tokens(token_id))
        if name.startswith("<0x"):  # SentencePiece
            return bytes([int(name[3:5], 16)])
        return bytes(_BYTES[character] for character in name) if _BYTES.keys() >= {*name} else None

    def decode(
        self,
        prompts: Sequence[Prompt],
        decoder: Decoder,
        sampling: SamplingParams,
        *,
        callbacks: Sequence[GenerationCallback] = (),
        trace: bool = False,
        num_top_logprobs: int | None = None,
        kept: KeptCache | None = None,
        continues_text: bool = True,
        checked: bool = False,
        **options: Any,  # noqa: ANN401 - fields of DecodingOptions
    ) -> DecodingOutput:
        """Decode prompts in evaluation mode; for further arguments see :func:`refusion_lit.decoding.decode`.

        Args:
            prompts: The prompts.
            decoder: The decoder.
            sampling: Length limit and sampling options.
            callbacks: Notified when tokens are committed and prompts finish.
            trace: Record a trace of every forward pass.
            num_top_logprobs: Record the tokens' log-probabilities, and this number of alternatives per token.
            kept: Keeps the cache of a call for the next call.
            continues_text: Whether a response's text continues the prompt's text. Otherwise, the response's tokens are
                decoded alone, and the text may lack a space at its beginning.
            checked: Whether the caller has checked model and prompts; see :func:`refusion_lit.decoding.decode`.
            options: Fields of :class:`~refusion_lit.types.DecodingOptions`.

        Raises:
            TypeError: If an option is unknown.
            ValueError: If an option is impossible, a prompt is empty or too long, or the model does not fit.
        """
        check_arguments(decoder, sampling, callbacks, kept)
        read_decoding_options(options, TextModel.generate_ids, TextModel.decode)  # suggests arguments of both
        for prompt in prompts:
            _check_ids(prompt, self.tokenizer)
        model = self.model_for(decoder)
        was_training = self.backbone.training
        self.backbone.eval()
        detokenize = self.detokenize if continues_text else self._detokenize_alone
        watch: dict[str, Any] = {"callbacks": callbacks, "trace": trace, "kept": kept, "detokenize": detokenize}
        watch |= {"num_top_logprobs": num_top_logprobs, "checked": checked}
        try:
            return decode(model, decoder, prompts, sampling, **watch, **options)
        except ModelMismatchError:
            self.check_decoder(decoder)  # raises the error with the name of a decoder that fits
            raise
        finally:
            self.backbone.train(was_training)

    def check_decoder(self, decoder: Decoder, *, allow_mismatch: bool = False) -> list[str]:
        """Run :func:`~refusion_lit.decoding.check_model`; its error names a decoder that fits the model."""
        with _named_alternative(self.backbone.traits, decoder):
            return check_model(self.model_for(decoder), decoder, allow_mismatch=allow_mismatch)

    def model_for(self, decoder: Decoder) -> LanguageModel:
        """Return the backbone, paired with the verifier for decoders that need two models.

        Raises:
            ValueError: If the decoder needs a verifier and the model has none.
        """
        if "verifier" not in decoder.requirements().predictions:
            return self.backbone
        fix = "load one with --verifier, model.decoding.verifier, or load(..., verifier=...)"
        if self.verifier is None:
            raise ValueError(f"verifier: expected a second model for this decoder, got None; {fix}.")
        return decoder.pair(self.backbone, self.verifier)

    def generate(
        self,
        queries: Sequence[str],
        *,
        decoder: Decoder | None = None,
        max_new_tokens: int = 128,
        **options: Any,  # noqa: ANN401 - options of generate_ids
    ) -> list[Generation]:
        """Generate a response for every query.

        Args:
            queries: Texts; the tokenizer's chat template or ``prompt_template`` turns them into prompts.
            decoder: The strategy; by default :attr:`default_decoder`.
            max_new_tokens: Maximum number of tokens per response; ignored if ``sampling`` is given.
            options: ``sampling``, ``ids``, ``templates``, ``json_schema``, ``batch_size``, and the other options of
                :func:`refusion_lit.decoding.decode`.

                ``ids`` are names of the prompts, which key their sampling noise; by default their indices.
                A template is a response's given text, with spans to fill: ``{{5}}`` for five tokens, ``{{1-6}}`` for
                the most probable filling of one to six tokens, and ``{{...}}`` at the end to continue freely. ``None``
                gives no text. ``max_new_tokens`` does not count given tokens. With ``num_top_logprobs: n``, a response
                has the log-probabilities of its tokens and of n alternatives. With ``json_schema``, every response
                parses and keeps the schema; schemas that cannot be guaranteed are refused.

        Raises:
            TypeError: If an option is unknown.
            ValueError: If a template is wrong or the decoder cannot keep given tokens in place, and as for
                :meth:`decode`.

        >>> import refusion_lit
        >>> model = refusion_lit.load("tests/goldens/models/additions-clean", device="cpu")
        >>> [answer] = model.generate(["12+34,56+78>"], max_new_tokens=32)
        >>> answer.text, answer.num_tokens, answer.num_forwards
        ('12+34=46;56+78=134;', 20, 3)
        """
        queries = queries if isinstance(queries, str) or not isinstance(queries, Iterable) else list(queries)
        is_list = isinstance(queries, list) and all(isinstance(query, str) for query in queries)
        require(is_list, "queries", "a list of texts", queries, "put a single text in a list, as in [text]")
        prompts = [self.encode(query) for query in queries]
        options = {"continues_text": True} | options
        return self.generate_ids(prompts, decoder=decoder, max_new_tokens=max_new_tokens, **options)

    def generate_ids(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        decoder: Decoder | None = None,
        max_new_tokens: int = 128,
        sampling: SamplingParams | None = None,
        ids: Sequence[str] | None = None,
        templates: Sequence[str | None] | None = None,
        json_schema: Mapping[str, Any] | bool | None = None,
        continues_text: bool = False,
        **options: Any,  # noqa: ANN401 - options of decode
    ) -> list[Generation]:
        """Continue prompts given as token ids; for arguments see :meth:`generate`.

        The text of a response is by default the text of its tokens alone, as ``tokenizer.decode`` gives it. With
        ``continues_text``, it continues the prompt's text, as in :meth:`generate`: SentencePiece tokenizers then keep
        the space before the first word.

        Raises:
            TypeError: If an option is unknown.
            ValueError: If the tokenizer does not know an id, and as for :meth:`decode`.
        """
        sampling = sampling or SamplingParams(max_new_tokens=max_new_tokens)
        prompts = list(prompts)
        names = [str(name) for name in (range(len(prompts)) if ids is None else ids)]
        require(len(names) == len(prompts), "ids", f"one for each of {len(prompts)} prompts", len(names), "match them")
        try:
            tokens = [tuple(map(index, prompt)) for prompt in prompts]
        except TypeError as error:
            got = f"{prompts!r:.60}"
            raise ValueError(f"prompts: expected lists of token ids, got {got}; use generate for texts.") from error
        named = [Prompt(token_ids=prompt, id=name) for prompt, name in zip(tokens, names, strict=True)]
        decoder = decoder or self.default_decoder.adapt_to(sampling)
        if json_schema is not None:
            is_free = not any(templates or ())
            require(is_free, "json_schema", "prompts without templates", templates, "give one of the two")
            named = self.schemas.constrain(named, json_schema, decoder, sampling)
        if templates is None:
            return self.decode(named, decoder, sampling, continues_text=continues_text, **options).rows
        decode = partial(self.decode, decoder=decoder, continues_text=continues_text)
        return fill_templates(decode, named, templates, sampling, self.tokenizer, **options)


def _check_ids(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse objects that are no prompts, and ids (given tokens included) that the tokenizer does not know."""
    require(isinstance(prompt, Prompt), "prompts", "a list of Prompt", prompt, "use generate for texts")
    for token in {*prompt.token_ids, *prompt.given} - {None}:
        if not 0 <= token < 1 << 31 or tokenizer.convert_ids_to_tokens(token) is None:
            size = vocabulary_size(tokenizer)
            is_gap = 0 <= token < size
            expected = (
                "the id of a token of the tokenizer" if is_gap else f"token ids below {size}, the tokenizer's size"
            )
            require(False, f"prompt {prompt.id}", expected, token, "encode with its tokenizer")
