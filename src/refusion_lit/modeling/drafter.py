"""Drafter: low-rank adapters and learnt mask embeddings that let a frozen model draft several tokens ahead.

:class:`Drafter` is trained in transformers' forward; :class:`DraftMasks` runs it in the fused backbone.

The adapters act at mask positions only. Ordinary tokens go through the untouched model, so KV cache entries stay exact.
Related: gated LoRA for multi-token prediction, arXiv 2507.11851.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn import functional as F

from refusion_lit.modeling.block_drafter import (
    BlockDrafter,
    BlockDrafterOptions,
    check_base_weights,
    check_block_drafter,
    check_drafter_vocabulary,
    is_block_drafter,
    load_block_drafter,
)
from refusion_lit.modeling.stored_tensors import load_checked
from refusion_lit.modeling.transformers_forward import library_mask
from refusion_lit.modeling.visibility import AttentionMask
from refusion_lit.utils.errors import error_reason
from refusion_lit.utils.require import check_options, require

OPTIONS_FILE = "drafter.json"
WEIGHTS_FILE = "drafter.safetensors"
FORMAT = 2
"""Format 1 is refused: its digest included the embedding's number of rows, which changes when a mask token is added."""
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Linear layers of a block that are adapted."""
_FUSED_PARTS = {
    "attention": ("self_attn-q_proj", "self_attn-k_proj", "self_attn-v_proj"),
    "output": ("self_attn-o_proj",),
    "mlp": ("mlp-gate_proj", "mlp-up_proj"),
    "down": ("mlp-down_proj",),
}
"""Adapted linear layers by block part. The fused backbone computes a part's layers in one matrix product."""


@dataclass(frozen=True, kw_only=True)
class DrafterOptions:
    """Options of a drafter.

    Attributes:
        num_masks: Number of mask embeddings, K, at least 1, and of tokens drafted after the next token.
        rank: Rank of the adapters, at least 1.
        alpha: The adapters are scaled by alpha / rank, as in LoRA.
    """

    ranges = {"num_masks": 1, "rank": 1, "alpha": "(0, inf)"}
    num_masks: int = 5
    rank: int = 32
    alpha: float = 32.0

    def __post_init__(self) -> None:
        check_options(self, "backbone.drafter.")


@dataclass(frozen=True, kw_only=True)
class DrafterOrigin:
    """A drafter's options, and the model for which it was trained.

    Attributes:
        options: The options.
        base: The model's directory or hub id; ``None`` if the model's weights were random.
    """

    options: DrafterOptions | BlockDrafterOptions
    base: str | None = None

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DrafterOrigin:
        """Read an instance from its JSON values.

        Raises:
            KeyError, TypeError, ValueError: If the values are missing or wrong.
        """
        options = values["options"]
        kind = BlockDrafterOptions if "block_size" in options else DrafterOptions
        return cls(options=kind(**options), base=values["base"])

    @classmethod
    def from_drafter(cls, drafter: Drafter | BlockDrafter) -> DrafterOrigin:
        """Return a drafter's origin."""
        return cls(options=drafter.options, base=drafter.base)


class Drafter(nn.Module):
    """Adapters y = W x + scale * up (down x) for the linear layers in a body's blocks, and an embedding per mask.

    The adapters' updates start at zero. The masks' embeddings start as the mean of the model's embeddings.

    Args:
        body: The body that is adapted; it is not changed.
        options: Sizes.
        base: The model's directory or hub id; ``None`` if the model's weights were random.

    Attributes:
        options: Sizes.
        base: The model's directory or hub id.
        masks: The masks' embeddings [mask, hidden].
        down: Matrices [rank, input] by the layer's name in the body, with dashes for dots.
        up: Matrices [output, rank] by the same names.
        scale: Factor of the updates.
    """

    def __init__(self, body: nn.Module, options: DrafterOptions, base: str | None = None) -> None:
        super().__init__()
        self.options = options
        self.base = base
        self.scale = options.alpha / options.rank
        embedding: Any = body.get_input_embeddings()  # type: ignore[operator] - a transformers model
        mean = embedding.weight.detach().float().mean(0)
        self.masks = nn.Parameter(mean.repeat(options.num_masks, 1).to(embedding.weight.device))
        self.down = nn.ParameterDict()
        self.up = nn.ParameterDict()
        for name, linear in _linears(body).items():
            down = torch.empty(options.rank, linear.in_features, device=linear.weight.device)
            self.down[name] = nn.Parameter(nn.init.kaiming_uniform_(down, a=5**0.5))
            self.up[name] = nn.Parameter(torch.zeros(linear.out_features, options.rank, device=linear.weight.device))

    @property
    def num_masks(self) -> int:
        """Number of masks."""
        return self.options.num_masks

    @contextmanager
    def adapt(self, body: nn.Module) -> Iterator[None]:
        """Let the adapters act on every token inside the context. Gradients reach the adapters, not the body."""

        def hook(name: str) -> Any:  # noqa: ANN401 - a hook of torch
            def add(_module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
                update = (inputs[0] @ self.down[name].t()) @ self.up[name].t() * self.scale
                return output + update.to(output.dtype)

            return add

        with ExitStack() as hooks:
            for name, linear in _linears(body).items():
                hooks.enter_context(linear.register_forward_hook(hook(name)))
            yield


def draft_states(
    body: nn.Module,
    drafter: Drafter | None,
    input_ids: Int[Tensor, "batch token"],
    position_ids: Int[Tensor, "batch token"],
    visible: AttentionMask | None,
    length: int,
    first: int,
) -> Float[Tensor, "batch token hidden"]:
    """Return hidden states for a text and the draft masks after it. Only the drafter gets gradients.

    The text runs first, causally and without the drafter. The draft masks then see the text through the KV cache.

    Args:
        body: The model's body.
        drafter: The model's drafter.
        input_ids: The text, then draft masks.
        position_ids: The tokens' positions.
        visible: What tokens see, as a matrix or as ranges of tokens. Only the draft masks' part is read.
        length: Number of tokens in the text.
        first: Id of the first draft mask.
    """
    assert drafter is not None
    assert isinstance(visible, Tensor)
    with torch.no_grad():
        text = body(
            input_ids=input_ids[:, :length],
            position_ids=position_ids[:, :length],
            attention_mask=torch.ones_like(input_ids[:, :length]),
            use_cache=True,
        )
    masks = drafter.masks[(input_ids[:, length:] - first).clamp(min=0)]
    with drafter.adapt(body):
        drafts = body(
            inputs_embeds=masks.to(next(body.parameters()).dtype),
            position_ids=position_ids[:, length:],
            attention_mask=library_mask(body, visible[:, length:], position_ids[:, length:], input_ids.shape[1]),
            past_key_values=text.past_key_values,
            use_cache=True,
        )
    return torch.cat((text.last_hidden_state, drafts.last_hidden_state), 1)


def check_draft(directory: str | Path, target: Any, vocabulary: Mapping[str, int]) -> None:  # noqa: ANN401 - one class per architecture
    """Refuse an assistant's directory that does not fit a model, before weights are read.

    Args:
        directory: The drafter's directory.
        target: The model's config.
        vocabulary: The model tokenizer's ids by token.

    Raises:
        ValueError: Naming what does not fit.
    """
    if is_block_drafter(directory):
        check_block_drafter(directory, target)
        check_drafter_vocabulary(directory, vocabulary)


def load_drafter(body: nn.Module, directory: str | Path) -> Drafter | BlockDrafter:
    """Load a drafter that :func:`~refusion_lit.modeling.saving.save_drafter` wrote, or an assistant of transformers.

    Args:
        body: The body of the drafter's model.
        directory: The drafter's directory.

    Raises:
        ValueError: If the files are missing or damaged, or the drafter was trained for another model.
    """
    path = Path(directory)
    if is_block_drafter(path):
        return load_block_drafter(body, path)
    try:
        values = json.loads((path / OPTIONS_FILE).read_text(encoding="utf-8"))
        origin = DrafterOrigin.from_dict(values)
        options = origin.options
        is_current = values["format"] == FORMAT and isinstance(options, DrafterOptions)
        digest = values["base_weights"]
    except (OSError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise _no_drafter(path, error) from error
    try:
        weights = load_checked([path / WEIGHTS_FILE])
    except (OSError, SafetensorError) as error:
        raise _no_drafter(path, error) from error
    require(is_current, "draft", f"a drafter in format {FORMAT}", f"{path} in another format", "export it again")
    check_base_weights(body, digest, f"the model of {path} ({origin.base}; see its README)")
    assert isinstance(options, DrafterOptions)
    fix = "export the drafter again"
    numbers = {name.partition(".")[0]: weight.shape[:1] for name, weight in weights.items()}
    is_sized = (numbers.get("masks"), numbers.get("down")) == ((options.num_masks,), (options.rank,))
    require(is_sized, "draft", f"weights of {options}", "other weights", fix)  # before memory for the options is taken
    drafter = Drafter(body, options, origin.base)
    expected = {name: weight.shape for name, weight in drafter.state_dict().items()}
    require(
        {n: w.shape for n, w in weights.items()} == expected,
        "draft",
        "the weights of its options",
        "other weights",
        fix,
    )
    drafter.load_state_dict(weights)
    return drafter


def _no_drafter(path: Path, error: Exception) -> ValueError:
    return ValueError(
        f"draft: expected a directory with {OPTIONS_FILE} and {WEIGHTS_FILE}, as export writes it, got {path} "
        f"({error_reason(error)}); check the path, or export the drafter again."
    )


def _linears(body: nn.Module) -> dict[str, nn.Linear]:
    """Return the linear layers to adapt, keyed by their names in the body with dashes for dots.

    Raises:
        ValueError: If the body has no such layer.
    """
    linears = {
        name.replace(".", "-"): module
        for name, module in body.named_modules()
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in TARGETS
    }
    expected = f"a body with linear layers named {', '.join(TARGETS)}"
    require(bool(linears), "backbone.drafter", expected, type(body).__name__, "use a Llama, Qwen2 or Qwen3 model")
    return linears


class DraftMasks:
    """The weights that draft masks need in the fused backbone.

    The masks' embeddings have the type of the body's embedding. The adapters have this type, too, except on CPUs: small
    products are slow there in 16 bits, so the adapters are in float32.

    Args:
        drafter: The drafter.
        embedding: The body's embedding. The ids after its last row are draft masks.
        num_layers: Number of the body's blocks.

    Attributes:
        embedding: The body's embedding.
        first_id: The first draft mask's id.
        masks: The draft masks' embeddings.
    """

    def __init__(self, drafter: Drafter, embedding: Float[Tensor, "row hidden"], num_layers: int) -> None:
        self.embedding = embedding
        self.first_id = embedding.shape[0]
        self.masks = drafter.masks.detach().to(embedding.dtype)
        self._drafter = drafter
        self._num_layers = num_layers

    @cached_property
    def layers(self) -> list[dict[str, list[tuple[Tensor, Tensor]]]]:
        """The adapters by block and part (``_FUSED_PARTS``): pairs of matrices [input, rank] and [rank, output].

        They are made when the first draft mask is fed: making them takes as long as a forward, and many decodes have no
        draft masks.
        """
        is_low = self.embedding.device.type == "cpu" and self.embedding.dtype.itemsize < 4
        dtype = torch.float32 if is_low else self.embedding.dtype

        def adapter(name: str) -> tuple[Tensor, Tensor]:
            down, up = self._drafter.down[name], self._drafter.up[name]
            return (down.detach() * self._drafter.scale).to(dtype).t(), up.detach().to(dtype).t()

        return [
            {part: [adapter(f"layers-{number}-{name}") for name in names] for part, names in _FUSED_PARTS.items()}
            for number in range(self._num_layers)
        ]

    def gate(self, ids: Int[Tensor, " token"]) -> DraftGate | None:
        """Return where a forward's draft masks are; on CPUs, ``None`` for a forward without draft masks."""
        is_mask = ids >= self.first_id
        if ids.device.type != "cpu":  # looking for the rows would make the host wait
            return DraftGate(self, is_mask[:, None], slice(None))
        rows = is_mask.nonzero()[:, 0]
        if not len(rows):
            return None
        first = int(rows[0])
        is_run = int(rows[-1]) - first == len(rows) - 1
        return DraftGate(self, is_mask[:, None], slice(first, first + len(rows)) if is_run else rows)


@dataclass(frozen=True, slots=True)
class DraftGate:
    """The draft masks among a forward's tokens, and their weights.

    Attributes:
        drafts: The weights.
        is_mask: Whether a token is a draft mask [token, 1].
        rows: The draft masks' indices among the tokens, a slice if they are consecutive. Accelerators compute the
            adapters for all tokens, so that the host need not wait for the indices: there, all indices.
    """

    drafts: DraftMasks
    is_mask: Tensor
    rows: slice | Tensor

    def embed(self, ids: Int[Tensor, " token"]) -> Float[Tensor, "token hidden"]:
        """Return embeddings of tokens and draft masks."""
        first = self.drafts.first_id
        hidden = F.embedding(ids.clamp(max=first - 1), self.drafts.embedding)
        masks = F.embedding((ids - first).clamp(min=0), self.drafts.masks)
        return torch.where(self.is_mask, masks, hidden)

    def add(
        self, layer: int, part: str, x: Float[Tensor, "token input"], output: Float[Tensor, "token output"]
    ) -> None:
        """Add the adapters' updates to the output of linear layers, in place, for draft masks only."""
        adapters = self.drafts.layers[layer][part]
        x = x[self.rows].to(adapters[0][0].dtype)
        update = torch.cat([x @ down @ up for down, up in adapters], -1).to(output.dtype)
        if output.device.type == "cpu":
            output[self.rows] += update
        else:
            output.add_(update * self.is_mask)
