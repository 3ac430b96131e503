"""The Python interface: load a model, generate text or token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from refusion_lit.checkpoints.metadata import load_model
from refusion_lit.data.encoding import encode_prompt
from refusion_lit.decoding import Decoder, DecodingOutput, GenerationCallback, ReFusion, RowOutput, decode
from refusion_lit.modeling.backbone import Backbone
from refusion_lit.modeling.loading import BackboneConfig, DType, reason_of
from refusion_lit.types import Prompt, SamplingParams


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One generated response.

    Attributes:
        text: The response, without special tokens, cut before the first stop string.
        token_ids: Its tokens up to and including the end of sequence.
        num_tokens: Their number.
        num_forwards: Forwards in which the prompt took part.
        finish_reason: ``eos``, ``length``, ``stop`` or ``unfinished``.
        output: Everything the engine counted.
    """

    text: str
    token_ids: list[int]
    num_tokens: int
    num_forwards: int
    finish_reason: str
    output: RowOutput


class TextModel:
    """A backbone with its tokenizer, ready to generate.

    Args:
        backbone: The model; put into evaluation mode.
        tokenizer: Its tokenizer.
        prompt_template: How a query becomes a prompt where the tokenizer has no chat template.
    """

    def __init__(
        self, backbone: Backbone, tokenizer: PreTrainedTokenizerBase, prompt_template: str = "{query}"
    ) -> None:
        self.backbone = backbone.eval()
        self.tokenizer = tokenizer
        self.prompt_template = prompt_template

    def to(self, device: str | torch.device) -> TextModel:
        """Move the weights to a device."""
        self.backbone.to(device)
        return self

    def detokenize(self, token_ids: list[int]) -> str:
        """Turn tokens into text without special tokens."""
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))

    def generate(
        self,
        queries: Sequence[str],
        *,
        decoder: Decoder | None = None,
        max_new_tokens: int = 128,
        sampling: SamplingParams | None = None,
        batch_size: int = 1,
        max_tokens_per_forward: int | None = None,
        ids: Sequence[str] | None = None,
        callbacks: Sequence[GenerationCallback] = (),
        allow_mismatch: bool = False,
    ) -> list[Generation]:
        """Answer queries.

        Args:
            queries: Texts; the tokenizer's chat template or ``prompt_template`` is applied.
            decoder: The strategy; ``ReFusion()`` by default.
            max_new_tokens: At most so many tokens a response, at least 1; ignored if ``sampling`` is given.
            sampling: Temperature, seed, stop strings and so on.
            batch_size: Prompts that share a forward. Changes no token.
            max_tokens_per_forward: Positions that a forward computes at most, padding included; ``None`` for no bound.
                Changes no token.
            ids: Names of the prompts, which key their sampling noise; their indices by default.
            callbacks: Told of tokens as they become final.
            allow_mismatch: Only warn where the model was not trained for the decoder.

        Raises:
            ValueError: If an option is impossible or a query is empty.
        """
        encoded = [encode_prompt(self.tokenizer, query, self.prompt_template) for query in queries]
        return self.generate_ids(
            encoded,
            decoder=decoder,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            batch_size=batch_size,
            max_tokens_per_forward=max_tokens_per_forward,
            ids=ids,
            callbacks=callbacks,
            allow_mismatch=allow_mismatch,
        )

    def generate_ids(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        decoder: Decoder | None = None,
        max_new_tokens: int = 128,
        sampling: SamplingParams | None = None,
        batch_size: int = 1,
        max_tokens_per_forward: int | None = None,
        ids: Sequence[str] | None = None,
        callbacks: Sequence[GenerationCallback] = (),
        allow_mismatch: bool = False,
    ) -> list[Generation]:
        """Continue prompts given as token ids; for arguments see :meth:`generate`."""
        sampling = sampling or SamplingParams(max_new_tokens=max_new_tokens)
        names = list(ids) if ids is not None else [str(i) for i in range(len(prompts))]
        check_context(self.backbone, dict(zip(names, map(len, prompts), strict=True)), sampling.max_new_tokens)
        output: DecodingOutput = decode(
            self.backbone,
            decoder or ReFusion(),
            [Prompt(token_ids=tuple(p), id=name) for p, name in zip(prompts, names, strict=True)],
            sampling,
            max_batch_size=batch_size,
            max_tokens_per_forward=max_tokens_per_forward,
            callbacks=callbacks,
            detokenize=self.detokenize,
            allow_mismatch=allow_mismatch,
        )
        return [self._generation(row, sampling) for row in output.rows]

    def _generation(self, row: RowOutput, sampling: SamplingParams) -> Generation:
        return Generation(
            text=cut_at_stop(self.detokenize(row.token_ids), sampling.stop),
            token_ids=row.token_ids,
            num_tokens=row.num_tokens,
            num_forwards=row.num_forwards,
            finish_reason=row.finish_reason,
            output=row,
        )


def check_context(backbone: Backbone, lengths: Mapping[str, int], max_new_tokens: int) -> None:
    """Refuse prompts that leave no room for the response in the positions that the model knows.

    Args:
        backbone: The model.
        lengths: Number of tokens of each prompt by its id.
        max_new_tokens: Room for the response.

    Raises:
        ValueError: Naming the longest prompt.
    """
    context = getattr(backbone.config, "max_position_embeddings", None)
    longest = max(lengths, key=lambda name: lengths[name], default=None)
    if context is not None and longest is not None and lengths[longest] + max_new_tokens > context:
        raise ValueError(
            f"prompt {longest}: expected at most {max(context - max_new_tokens, 0)} tokens (a context of {context} "
            f"less max_new_tokens {max_new_tokens}), got {lengths[longest]}; shorten it or lower max_new_tokens."
        )


def cut_at_stop(text: str, stop: Sequence[str]) -> str:
    """Cut a text before the first stop string in it."""
    ends = [index for index in (text.find(string) for string in stop) if index >= 0]
    return text[: min(ends)] if ends else text


def load(
    source: str | Path,
    *,
    dtype: DType | None = None,
    device: str | torch.device | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    overrides: BackboneConfig | None = None,
) -> TextModel:
    """Load a model from a checkpoint, a Hugging Face directory or a hub id.

    Args:
        source: Where it is.
        dtype: Type of the weights; float32 by default.
        device: Where to put it; the CPU by default.
        revision: Pinned revision of a hub id.
        trust_remote_code: Let a directory or hub repository run Python code of its own on this machine.
        overrides: Attention pattern and implementation, for directories that do not name theirs.

    Raises:
        ValueError: If it cannot be loaded.
    """
    backbone, tokenizer, template = load_model(
        source, dtype=dtype, revision=revision, trust_remote_code=trust_remote_code, overrides=overrides
    )
    if device is not None:
        try:
            backbone.to(device)
        except (RuntimeError, AssertionError) as error:  # torch says the one or the other of a device that is not there
            raise ValueError(
                f"device: expected one that this machine has, got {device!r} ({reason_of(error)})."
            ) from error
    return TextModel(backbone, tokenizer, template)
