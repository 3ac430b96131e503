# ruff: noqa: ANN401 - transformers' classes
"""Self-speculative decoding for transformers' ``generate``: one prompt, greedy, the model's own text in fewer forwards.

    model.generate(ids, custom_generate=DIRECTORY, trust_remote_code=True, draft=DIRECTORY, max_new_tokens=128)

``draft`` is the directory or hub id of a drafter, by default that of the model: mask embeddings, and adapters of the
linear layers that act at masks alone. Masks after the last token draft the tokens after the next one; the model's
next-token predictions verify them.
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


def request(
    model: Any, inputs: torch.Tensor | None, asked: dict[str, Any], kwargs: dict[str, Any]
) -> tuple[torch.Tensor, int, set[int]]:
    """Return the prompt [1, token], the maximum number of new tokens, and the tokens that end a response."""
    ids = kwargs.get("input_ids") if inputs is None else inputs
    if ids is None or ids.shape[0] != 1 or ids.shape[1] == 0:
        got = "none" if ids is None else tuple(ids.shape)
        raise ValueError(f"input_ids: expected the shape [1, token] of one prompt, got {got}; pass prompts one by one.")
    if not bool(torch.as_tensor(kwargs.get("attention_mask", 1)).all()):
        raise ValueError("attention_mask: expected ones, got zeros; give the prompt without padding.")
    limit = 128
    if asked.get("max_new_tokens") is not None:
        limit = int(asked["max_new_tokens"])
    elif asked.get("max_length") is not None:
        limit = int(asked["max_length"]) - ids.shape[1]
    room = (getattr(model.config, "max_position_embeddings", None) or float("inf")) - ids.shape[1]
    if not 1 <= limit <= room:
        raise ValueError(f"max_new_tokens: expected 1 to {room} beyond the prompt, got {limit}; set it in that range.")
    eos = asked.get("eos_token_id")
    eos = model.config.eos_token_id if eos is None else eos
    return ids, limit, set(eos if isinstance(eos, list) else [eos]) - {None}


def respond(ids: torch.Tensor, decode: Any, streamer: Any) -> torch.Tensor:
    """Return the prompt with the response [1, token]. ``decode`` returns the response and passes it to a streamer."""
    if streamer is not None:
        streamer.put(ids.cpu())
    with torch.no_grad():
        response = decode(streamer)
    if streamer is not None:
        streamer.end()
    return torch.cat((ids, torch.tensor([response], dtype=ids.dtype, device=ids.device)), 1)


def settings(model: Any, config: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a call: its arguments, then the generation config, by default the model's.

    Raises:
        ValueError: If an option asks for something that this decoder would have to ignore.
    """
    taken = {"input_ids", "attention_mask", "max_new_tokens", "max_length", "eos_token_id", "bos_token_id", "use_cache",
             "pad_token_id", "tokenizer", "streamer", "transformers_version", "refusion"}  # fmt: skip
    of_sampling = {"temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"}
    neutral: dict[str, Any] = {
        "num_beams": 1, "num_beam_groups": 1, "num_return_sequences": 1, "repetition_penalty": 1.0, "min_length": 0,
        "encoder_repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0,
        "min_new_tokens": 0, "diversity_penalty": 0.0, "guidance_scale": 1.0, "length_penalty": 1.0,
        "temperature": 0, "top_p": 1.0, "custom_generate": model.config._name_or_path, "trust_remote_code": True,
    }  # fmt: skip
    stored = vars(config or model.generation_config)
    asked = {name: value for name, value in {**stored, **kwargs}.items() if not name.startswith("_")}
    kept = {} if asked.get("do_sample") else vars(model.generation_config)  # what the model brings along is no request
    unused = {name for name in of_sampling - {*kwargs} if asked.get(name) == kept.get(name)}
    # A server copies the model's do_sample: it says nothing about a temperature that a request sets beside it.
    is_greedy = asked.get("do_sample") is False and ("do_sample" in kwargs or kept.get("do_sample") is not False)
    unused |= {"temperature"} if is_greedy and asked.get("temperature") == 1 else set()
    for name, value in asked.items():
        is_neutral = value is None or value is False or neutral.get(name) == value
        if not is_neutral and name not in taken | unused:
            where = "in the call" if name in kwargs else "in the generation config"
            fix = f"pass {name}={neutral.get(name, False if value is True else None)!r}"
            raise ValueError(f"{name}: expected none, got {value!r} {where}: this decoder is greedy; {fix}.")
    return asked


@torch.no_grad()
def weights_digest(model: torch.nn.Module) -> str | None:
    """Return a digest of a model's weights, 16 hexadecimal digits.

    The digest covers the names and shapes of all parameters and 64 values per parameter, which is fast for large
    models. Values are rounded to bfloat16, so that loading in float32 or bfloat16 gives the same digest.

    Args:
        model: A model; tied weights count once.

    Returns:
        The digest; ``None`` if this process does not hold all weights.
    """
    state = hashlib.sha256()
    for name, weight in sorted(model.named_parameters()):
        if type(weight.data) is not torch.Tensor:  # sharded
            return None
        flat = weight.detach().flatten()
        count = min(len(flat), 64)
        # In integers: float32 has no room for the indices of a large embedding.
        index = torch.arange(count, device=flat.device) * (len(flat) - 1) // max(count - 1, 1)
        values = flat[index].to(torch.bfloat16).view(torch.int16).cpu().numpy()
        state.update(f"{name}{tuple(weight.shape)}".encode() + values.tobytes())
    return state.hexdigest()[:16]


def generate(
    inputs: Any = None, generation_config: Any = None, *, model: Any, draft: str | None = None, **kwargs: Any
) -> torch.Tensor:
    """Return the prompt and the response [1, token].

    Args:
        inputs: The prompt's tokens [1, token]; ``input_ids`` in ``kwargs`` is taken as well.
        generation_config: Where options come from that are not in ``kwargs``; by default the model's.
        model: The causal model that the drafter was trained for.
        draft: Directory or hub id of the drafter; ``None``: the model's own.
        kwargs: ``input_ids``, ``max_new_tokens``, ``max_length``, ``eos_token_id``, an ``attention_mask`` of ones, and
            a ``streamer``, which is given the tokens of each forward.

    Raises:
        ValueError: If there is more than one prompt, it is too long, an option is one that this decoder lacks, or there
            is no drafter, or another model's.
    """
    asked = settings(model, generation_config, kwargs)
    ids, limit, eos = request(model, inputs, asked, kwargs)
    drafter = _Drafter(model, str(draft or model.config._name_or_path))
    try:
        return respond(ids, _Decoding(model, drafter, ids[0].tolist(), limit, eos).run, kwargs.get("streamer"))
    finally:
        drafter.detach()


class _Drafter:
    """Masks and adapters; ``num_masks`` says how many of the last tokens of the running forward are masks."""

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
        is_rounded = model.dtype == torch.float16  # whose values, rounded to bfloat16, are others
        if digest is not None and not is_rounded and digest != weights_digest(model.get_decoder().layers):
            raise ValueError(
                f"draft: expected a drafter of this model, got {directory}, which is another model's; give its own."
            )
        weights = {name: one.to(model.device, model.dtype) for name, one in load_file(str(files[1])).items()}
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
    """One prompt. The cache holds all tokens but the last one."""

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
        """Draft and verify in turn; every forward gives the model's own next token, and all accepted drafts."""
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
        """Return the tokens after the last one and after each draft, and those that masks after them draft."""
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
        logits[:, self.drafter.vocab_size :] = -torch.inf  # rows of no token
        best = logits.argmax(-1).tolist()
        return best[: len(drafts) + 1], best[len(drafts) + 1 :]
