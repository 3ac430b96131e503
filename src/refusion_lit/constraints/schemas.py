"""Responses that match a JSON schema by construction.

A decoder that samples from left to right follows a grammar, which llguidance compiles from the schema. Every sampled
token leaves a completion within the length limit; a token that does not is replaced. A decoder that samples in any
order fills in a template instead (:mod:`~refusion_lit.constraints.schema_templates`): the text on the left may be
unknown, so the allowed tokens cannot depend on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from refusion_lit.constraints.grammars import MAX_COMPLETION, GrammarCompiler, GrammarState
from refusion_lit.constraints.schema_structure import OPTION
from refusion_lit.constraints.schema_templates import TemplateCompiler
from refusion_lit.constraints.strict_schemas import make_strict
from refusion_lit.constraints.tool_calls import ToolFormat
from refusion_lit.engine.decoder import Decoder
from refusion_lit.types import Constraint, Prompt, SamplingParams, SpecialTokens
from refusion_lit.utils.require import OptionError, require


class Schemas:
    """Constrains prompts by JSON schemas.

    Args:
        tokenizer: The model's tokenizer.
        special: The model's special ids.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, special: SpecialTokens) -> None:
        self._tokenizer = tokenizer
        self._special = special

    def constrain(
        self, prompts: Sequence[Prompt], schema: object, decoder: Decoder, sampling: SamplingParams
    ) -> list[Prompt]:
        """Return prompts whose responses parse as JSON and match a schema.

        Args:
            prompts: The prompts.
            schema: The schema, an object or a boolean.
            decoder: Samples from left to right, or keeps given text in place.
            sampling: Length limit and sampling options; stop strings are refused.

        Raises:
            ValueError: If the schema is wrong or cannot be guaranteed, the length limit is too low, or llguidance is
                needed and not installed.
        """
        _refuse_stop_strings(sampling)
        strict_schema = self._tighten(schema)
        if not decoder.is_left_to_right:
            return _fill(prompts, *self._template_compiler.compile(schema))
        return self._follow(prompts, self._grammar_compiler.compile(strict_schema), [strict_schema], sampling)

    def constrain_calls(
        self,
        prompts: Sequence[Prompt],
        functions: Mapping[str, object],
        tool_format: ToolFormat,
        decoder: Decoder,
        sampling: SamplingParams,
        *,
        is_parallel: bool = False,
    ) -> list[Prompt]:
        """Return prompts whose responses are function calls.

        Args:
            prompts: The prompts.
            functions: Argument schemas by function name.
            tool_format: How the model writes calls.
            decoder: Samples from left to right, or keeps given text in place.
            sampling: Length limit and sampling options; stop strings are refused.
            is_parallel: Whether a response may have several calls. Decoders in any order make one call.

        Raises:
            ValueError: As for :meth:`constrain`; an error about a function's schema names the function.
        """
        _refuse_stop_strings(sampling)
        grammars: dict[str, object] = {}
        for name, schema in functions.items():
            try:
                strict_schema = self._tighten(schema)
                if decoder.is_left_to_right:
                    self._grammar_compiler.compile(strict_schema)  # checks the function's schema alone
                grammars[name] = strict_schema
            except OptionError as error:
                if error.option != OPTION:
                    raise
                raise OptionError(error.rename(f"{OPTION}: {name}"), OPTION) from error
        if not decoder.is_left_to_right:
            return _fill(prompts, *self._template_compiler.compile_call(functions, tool_format))
        grammar = self._grammar_compiler.compile_calls(grammars, tool_format, is_parallel=is_parallel)
        return self._follow(prompts, grammar, [*grammars.values()], sampling)

    @cached_property
    def _grammar_compiler(self) -> GrammarCompiler:
        return GrammarCompiler(self._tokenizer, self._special)

    @cached_property
    def _template_compiler(self) -> TemplateCompiler:
        return TemplateCompiler(self._tokenizer, self._special.vocab_size)

    def _tighten(self, schema: object) -> Any:  # noqa: ANN401 - any JSON value
        """Return a strict schema that implies the given schema."""
        require(isinstance(schema, Mapping | bool), OPTION, "an object or a boolean", schema, "write a JSON schema")
        try:
            return make_strict(schema)
        except RecursionError as error:
            raise OptionError(f"{OPTION}: this schema is nested too deeply; simplify it.", OPTION) from error

    def _follow(
        self, prompts: Sequence[Prompt], grammar: str, strict_schemas: Sequence[object], sampling: SamplingParams
    ) -> list[Prompt]:
        """Return prompts whose responses follow a grammar, which was compiled from strict schemas."""
        begin = partial(GrammarState, self._grammar_compiler, grammar, schemas=strict_schemas)
        completion = begin(MAX_COMPLETION).find_completion(MAX_COMPLETION)
        fix = "simplify the schema, or bound its values"
        expected = f"an answer of at most {MAX_COMPLETION} tokens"
        require(completion is not None, OPTION, expected, "a schema that has none", fix)
        num_tokens = len(completion or ())
        expected = f"at least {num_tokens}, the length of an answer that keeps the schema"
        require(num_tokens <= sampling.max_new_tokens, "max_new_tokens", expected, sampling.max_new_tokens, "raise it")
        constraint = Constraint(begin=begin, left_to_right=True)
        return [replace(prompt, constraint=constraint) for prompt in prompts]


def _refuse_stop_strings(sampling: SamplingParams) -> None:
    require(not sampling.stop, OPTION, "no stop strings, which cut a text", sampling.stop, "leave them out")


def _fill(prompts: Sequence[Prompt], given: tuple[int | None, ...], constraint: Constraint) -> list[Prompt]:
    """Return prompts whose responses fill a template."""
    return [replace(prompt, given=given, constraint=constraint) for prompt in prompts]
