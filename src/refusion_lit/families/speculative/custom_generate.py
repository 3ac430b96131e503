# ruff: noqa: ANN401 - transformers' classes
"""Self-speculative decoding for transformers' ``generate``: one prompt, greedy, the model's own text in fewer forwards.

refusion-lit copies this program into exported directories of drafters, as ``custom_generate/generate.py``, so that they
decode without refusion-lit:

    model.generate(ids, custom_generate=DIRECTORY, trust_remote_code=True, draft=DIRECTORY, max_new_tokens=128)

``draft`` is the drafter's directory or hub id; by default the model's directory. A drafter consists of mask embeddings,
and of adapters for the linear layers that act at masks only. Masks at the end of the text draft the tokens after the
next token. In the next forward, the model's next-token predictions verify the drafts.
"""

from __future__ import annotations

import hashlib  # noqa: F401 - for weights_digest in the exported file
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import DynamicCache
from transformers.utils import cached_file

from refusion_lit.modeling.custom_generate import read_options, read_request, respond
from refusion_lit.modeling.weights import weights_digest


def generate(
    inputs: Any = None, generation_config: Any = None, *, model: Any, draft: str | None = None, **kwargs: Any
) -> torch.Tensor:
    """Return the prompt and the response [1, token].

    Args:
        inputs: The prompt's tokens [1, token]; ``input_ids`` in ``kwargs`` has the same meaning.
        generation_config: Options that are not in ``kwargs``; by default the model's generation config.
        model: The causal model that the drafter was trained for.
        draft: Directory or hub id of the drafter; ``None``: the model's directory.
        kwargs: ``input_ids``, ``max_new_tokens``, ``max_length``, ``eos_token_id``, an ``attention_mask`` without
            zeros, and a ``streamer``, which receives the final tokens after every forward.

    Raises:
        ValueError: If there is a second prompt, prompt and response exceed the context, an option is unknown, or the
            drafter is missing or was trained for another model.
    """
    values = read_options(model, generation_config, kwargs)
    ids, limit, eos = read_request(model, inputs, values, kwargs)
    drafter = _Drafter(model, str(draft or model.config._name_or_path))
    try:
        return respond(ids, _Decoding(model, drafter, ids[0].tolist(), limit, eos).run, kwargs.get("streamer"))
    finally:
        drafter.detach()


class _Drafter:
    """Masks and adapters. ``num_masks`` counts the masks at the end of the next forward's tokens."""

    def __init__(self, model: Any, directory: str) -> None:
        files = [cached_file(directory, name, _raise_exceptions_for_missing_entries=False)
                 for name in ("drafter.json", "drafter.safetensors")]  # fmt: skip
        if None in files:
            raise ValueError(f"draft: expected a drafter, got {directory}, which has none; pass draft=DIRECTORY.")
        description = json.loads(Path(str(files[0])).read_text(encoding="utf-8"))
        options = description["options"]
        self.vocab_size = description.get("vocab_size", model.config.vocab_size)
        self.unused_token_ids = description.get("unused_token_ids", [])
        digest = description["base_weights"]
        is_rounded = model.dtype == torch.float16  # the digest of rounded weights differs
        if digest is not None and not is_rounded and digest != weights_digest(model.get_decoder().layers):
            raise ValueError(
                f"draft: expected a drafter of this model, got {directory}, which is another model's; give its own."
            )
        weights = {name: weight.to(model.device, model.dtype) for name, weight in load_file(str(files[1])).items()}
        self.masks = weights["masks"]
        self.scale = options["alpha"] / options["rank"]
        self.num_masks = 0
        self.hooks = [
            module.register_forward_hook(self.hook(weights[f"down.{name}"], weights[f"up.{name}"]))
            for name, module in ((n.replace(".", "-"), m) for n, m in model.get_decoder().named_modules())
            if f"down.{name}" in weights
        ]
        if 2 * len(self.hooks) + 1 != len(weights):
            self.detach()
            raise ValueError(
                f"draft: expected a drafter of this model, got {directory}, whose layers are others; give its own."
            )

    def hook(self, down: torch.Tensor, up: torch.Tensor) -> Any:
        def add(_module: Any, inputs: Any, output: torch.Tensor) -> None:
            if self.num_masks:
                output[:, -self.num_masks :] += inputs[0][:, -self.num_masks :] @ down.t() @ up.t() * self.scale

        return add

    def detach(self) -> None:
        for hook in self.hooks:
            hook.remove()


class _Decoding:
    """A prompt in flight. The cache contains all tokens but the last token."""

    def __init__(self, model: Any, drafter: _Drafter, prompt: list[int], limit: int, eos: set[int]) -> None:
        self.model = model
        self.drafter = drafter
        self.text = list(prompt)
        self.cache = DynamicCache(config=model.config)
        self.limit = limit
        self.eos = eos
        never = {model.config.pad_token_id, getattr(model.config, "mask_token_id", None), *drafter.unused_token_ids}
        self.banned = [token for token in never - self.eos if token is not None]

    def run(self, streamer: Any = None) -> list[int]:
        """Draft and verify in turn. Every forward gives the model's own next token and all accepted drafts."""
        length = len(self.text)
        drafts = []
        while len(self.text) - length < self.limit:
            room = self.limit - (len(self.text) - length) - 1
            drafts = drafts[:room]
            exact, drafted = self.forward(drafts, num_masks=0 if drafts else min(len(self.drafter.masks), room))
            accepted = next((i for i, token in enumerate(drafts) if token != exact[i]), len(drafts))
            final = exact[: accepted + 1]
            end = next((i for i, token in enumerate(final) if token in self.eos), None)
            final = final if end is None else final[: end + 1]
            self.text += final
            if streamer is not None:
                streamer.put(torch.tensor(final))
            if end is not None:
                break
            num_wrong = self.cache.get_seq_length() - (len(self.text) - 1)
            if num_wrong:
                self.cache.crop(-num_wrong)
            drafts = drafted
        return self.text[length:]

    def forward(self, drafts: list[int], num_masks: int) -> tuple[list[int], list[int]]:
        """Feed the last token, drafts and masks. Return the next token after each of them.

        Args:
            drafts: Drafts to verify.
            num_masks: Number of masks that draft further tokens.

        Returns:
            The model's tokens after the last token and after every draft, and the masks' drafts.
        """
        length = self.cache.get_seq_length()
        device = self.model.device
        tokens = [*self.text[length:], *drafts]
        embedded = self.model.get_input_embeddings()(torch.tensor([tokens], device=device))
        num_new = len(tokens) + num_masks
        self.drafter.num_masks = num_masks
        output = self.model(
            inputs_embeds=torch.cat((embedded, self.drafter.masks[None, :num_masks]), 1),
            position_ids=torch.arange(length, length + num_new, device=device)[None],
            attention_mask=torch.ones(1, length + num_new, dtype=torch.long, device=device),
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=len(drafts) + 1 + num_masks,
        )
        logits = output.logits[0].float()
        logits[:, self.banned] = -torch.inf
        logits[:, self.drafter.vocab_size :] = -torch.inf  # rows without a token
        best = logits.argmax(-1).tolist()
        return best[: len(drafts) + 1], best[len(drafts) + 1 :]
