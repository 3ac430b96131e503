"""The lean body's decode step, compiled for static shapes; on GPUs the steps become CUDA graphs.

A decode step of a model that is small for its device is bound by kernel launches. A compiled forward is a single
launch. In return, forwards are padded to a few shapes: rows, tokens per row and keys are rounded up to powers of two.
Padding is computed like real tokens; its keys and values go to a dummy entry of the cache, so it changes no result.

The whole stack is one program instead of one program a layer: only then is a forward one launch. Compiling one shape
took 3.4 s for 2 layers on a CPU, 7 s for 12 and 12 s for 28.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from refusion_lit.modeling.checks import check_compilable
from refusion_lit.modeling.fused.architectures import is_known
from refusion_lit.modeling.fused.body import FusedBody
from refusion_lit.modeling.fused.rows import additive_of, attend_rows
from refusion_lit.modeling.kv_cache import KVCache
from refusion_lit.modeling.visibility import Visibility, as_mask

_TOKENS = (8, 16, 32, 64, 128)
"""Tokens a row of a compiled forward; longer ones (prompts) are bound by arithmetic and run uncompiled."""

_MIN_KEYS = 128
_MIN_CAPACITY = 512

_MAX_SHAPES = 1 << 10
"""Limit on torch's recompilations, which it counts for all models together; each new shape is one."""

_BACKEND: str | Callable[..., Any] = "inductor"

_bodies: WeakKeyDictionary[nn.Module, CompiledBody] = WeakKeyDictionary()


class StaticKVCache(KVCache):
    """A cache whose storage rarely changes: it starts with 512 entries a row and doubles.

    The last entry of every row is reserved as a dummy write target for padding.
    """

    def __init__(self, num_layers: int, num_rows: int) -> None:
        super().__init__(num_layers, num_rows, _MIN_CAPACITY)

    def _capacity_for(self, num_keys: int) -> int:
        return self.capacity if num_keys < self.capacity else 1 << num_keys.bit_length()

    def all_storage(self, like: Float[Tensor, "token head dim"]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the tensors that store keys and values, one a layer, for a program that writes them itself."""
        stored = [self.storage(layer, like, like) for layer in range(len(self._stored))]
        return [keys for keys, _ in stored], [values for _, values in stored]

    def adopt(self, keys: list[Tensor], values: list[Tensor]) -> None:
        """Reuse the storage of a released cache with the same number of rows; nothing has been stored yet."""
        self.capacity = keys[0].shape[1]
        self._stored = [[states.zero_() for states in pair] for pair in zip(keys, values, strict=True)]


class CompiledBody:
    """A :class:`~refusion_lit.modeling.fused.body.FusedBody` whose decode steps are compiled.

    Forwards without a cache, and those with more tokens a row than a step has, run uncompiled. The storage of the last
    cache is reused by the next one, since CUDA graphs record the addresses they write to.

    Args:
        lean: The body; its attention implementation is ``sdpa``.

    Attributes:
        lean: The uncompiled body.
        shapes: The compiled shapes: rows, tokens per row, keys, and all other values that a program depends on.
    """

    def __init__(self, lean: FusedBody) -> None:
        self.lean = lean
        self.shapes: set[tuple[object, ...]] = set()
        self._on_gpu = lean.device.type == "cuda"
        mode = "reduce-overhead" if self._on_gpu else None
        self._run = torch.compile(_run, backend=_BACKEND, mode=mode, dynamic=False, fullgraph=True)
        self._stored: tuple[list[Tensor], list[Tensor]] = ([], [])
        self._user: ref[KVCache] | None = None
        _keep_addresses(lean.weights() + lean.copies())

    @torch.no_grad()
    def __call__(
        self,
        input_ids: Int[Tensor, "batch token"],
        position_ids: Int[Tensor, "batch token"],
        attention_mask: Visibility | Bool[Tensor, "batch token key"] | Int[Tensor, "batch token range 2"] | None,
        cache: KVCache | None = None,
    ) -> Float[Tensor, "batch token hidden"]:
        """Run the body; see :meth:`~refusion_lit.modeling.interface.LanguageModel.hidden_states`."""
        length = input_ids.shape[1]
        num_tokens = next((size for size in _TOKENS if size >= length), None)
        if cache is None or attention_mask is None or num_tokens is None:
            return self.lean(input_ids, position_ids, attention_mask, cache)
        assert isinstance(cache, StaticKVCache)
        shape = _Shape(cache, length, num_tokens)
        like = torch.empty(0, *self.lean.entry_shape, dtype=self.lean.dtype, device=input_ids.device)
        stored = cache.all_storage(like)
        key = (*shape.key, torch.is_inference_mode_enabled(), torch.get_num_threads())
        mask = shape.mask(as_mask(attention_mask, input_ids.device))
        arguments = (
            self.lean, shape.tokens(input_ids), shape.tokens(position_ids), mask, shape.stored_rows,
            shape.write_index(), *stored,
        )  # fmt: skip
        if self._user is None or self._user() is not cache or self._stored[0][0] is not stored[0][0]:
            self._stored, self._user = stored, ref(cache)
            _keep_addresses(stored[0] + stored[1])
        if self._on_gpu:
            torch.compiler.cudagraph_mark_step_begin()
        if key in self.shapes:
            hidden = self._run(*arguments)
        else:
            with torch._dynamo.config.patch(recompile_limit=_MAX_SHAPES, accumulated_recompile_limit=_MAX_SHAPES):
                hidden = self._run(*arguments)
            self.shapes.add(key)
        # A copy: the next run of a CUDA graph overwrites this one's output.
        return hidden.unflatten(0, (-1, num_tokens))[:, :length].index_select(0, shape.places)

    def lend_storage(self, cache: StaticKVCache) -> None:
        """Let a new cache reuse the storage of the last cache, if that was released."""
        keys = self._stored[0]
        if keys and self._user is not None and self._user() is None:
            same_mode = keys[0].is_inference() == torch.is_inference_mode_enabled()
            if same_mode and keys[0].shape[0] == cache.num_rows:
                cache.adopt(*self._stored)
                self._user = ref(cache)

    def refresh(self, lean: FusedBody) -> bool:
        """Take over the copies that another lean body made of the same modules; return whether that is possible."""
        mine, others = self.lean.weights(), lean.weights()
        if len(mine) != len(others) or any(one is not other for one, other in zip(mine, others, strict=True)):
            return False
        for one, other in zip(self.lean.copies(), lean.copies(), strict=True):
            one.copy_(other)
        return True


class _Shape:
    """Layout of a forward in a static shape.

    Attributes:
        key: Identifies the shape.
        places: Row of the static batch that holds each sequence.
        stored_rows: Storage row of each row of the static batch; ``None`` if these are all rows in order, so that
            nothing needs to be gathered.
    """

    def __init__(self, cache: KVCache, length: int, num_tokens: int) -> None:
        plan = cache.prepared
        number = len(plan.sequences)
        num_rows = 1 << (number - 1).bit_length()
        in_place = num_rows >= cache.num_rows and len(set(plan.sequences)) == number
        device = plan.write_index.device
        own = torch.arange(number, device=device)
        rows = own if plan.rows is None else plan.rows
        if in_place:
            num_rows = cache.num_rows
        self._num_keys = min(max(_MIN_KEYS, 1 << (plan.num_keys - 1).bit_length()), cache.capacity)
        self.key = (num_rows, num_tokens, self._num_keys, in_place, cache.num_rows, cache.capacity)
        self.places = rows if in_place else own
        self.stored_rows = None if in_place else nn.functional.pad(rows, (0, num_rows - number))
        self._plan, self._length, self._size = plan, length, (num_rows, num_tokens)
        self._dummy = cache.num_rows * cache.capacity - 1

    def tokens(self, values: Tensor) -> Tensor:
        """Lay [sequence, token] values out as [token of all rows]; zeros at padding."""
        padded = values.new_zeros(self._size)
        padded[:, : self._length].index_copy_(0, self.places, values)
        return padded.flatten()

    def mask(self, mask: Tensor) -> Tensor:
        """Lay a mask [sequence, token, key] out over the static shape; padding sees the first entry."""
        padded = mask.new_zeros(*self._size, self._num_keys)
        padded[:, :, 0] = True
        padded[:, : self._length, : mask.shape[2]].index_copy_(0, self.places, mask)
        return padded

    def write_index(self) -> Tensor:
        """Return where in storage, laid end to end, each token is written."""
        given, source = self._plan.write_index, self._plan.source_index
        if source is None:
            source = torch.arange(len(given), device=given.device)
        place = self.places[source // self._length] * self._size[1] + source % self._length
        padded = given.new_full((self._size[0] * self._size[1],), self._dummy)
        return padded.index_copy_(0, place, given)


def compiled_cache(body: Any, config: Any, num_rows: int, *, lean: bool) -> StaticKVCache:  # noqa: ANN401
    """Create a cache whose forwards run by a body's compiled decode steps.

    Args:
        body: A transformers body.
        config: Its config.
        num_rows: Rows of the cache.
        lean: Whether the lean body is switched on.

    Raises:
        ValueError: If the body, as it is now, is not one that the lean body knows.
    """
    check_compilable(lean=lean, attn_implementation=config._attn_implementation)
    if not is_known(body):
        raise ValueError(
            "backbone.compile: expected a model that the lean body knows (Qwen2, Qwen3 or Llama, its weights "
            f"neither adapted nor quantised nor sharded), got {type(body).__name__} as it is now; decode with "
            "compile: false."
        )
    cache, compiled = StaticKVCache(config.num_hidden_layers, num_rows), compiled_body(body)
    compiled.lend_storage(cache)
    cache.body = compiled
    return cache


def compiled_body(body: Any) -> CompiledBody:  # noqa: ANN401 - a transformers model
    """Return a body's compiled form, the same one as long as its weights are the same tensors."""
    with torch.inference_mode(False), torch.no_grad():  # it serves in either mode
        lean, known = FusedBody(body), _bodies.get(body)
        if known is None or not known.refresh(lean):
            known = _bodies[body] = CompiledBody(lean)
    return known


def _run(
    lean: FusedBody,
    ids: Tensor,
    positions: Tensor,
    mask: Tensor,
    stored_rows: Tensor | None,
    write_index: Tensor,
    stored_keys: list[Tensor],
    stored_values: list[Tensor],
) -> Tensor:
    """Compute hidden states [token of all rows, hidden], writing to the stored tensors."""
    added = additive_of(mask, lean.dtype)

    def attention(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = stored_keys[layer], stored_values[layer]
        for stored, states in ((keys, key), (values, value)):
            stored.view(-1, *stored.shape[2:]).index_copy_(0, write_index, states)
        keys, values = keys[:, : mask.shape[2]], values[:, : mask.shape[2]]
        if stored_rows is not None:
            keys, values = keys[stored_rows], values[stored_rows]
        return attend_rows(query.unflatten(0, mask.shape[:2]), keys, values, added).flatten(0, 1)

    return lean.run(ids, lean.angles(positions), attention)


def _keep_addresses(tensors: list[Tensor]) -> None:
    """Mark tensors as static, so that CUDA graphs do not copy them."""
    for tensor in tensors:
        torch._dynamo.mark_static_address(tensor, guard=False)
