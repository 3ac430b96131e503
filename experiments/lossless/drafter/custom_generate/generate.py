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


def read_options(model: Any, config: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a call: arguments replace options of the generation config.

    Args:
        model: The model.
        config: The call's generation config; ``None``: the model's generation config.
        kwargs: The arguments of the call.

    Raises:
        ValueError: If the decoder would have to ignore an option.
    """
    known = {"input_ids", "attention_mask", "max_new_tokens", "max_length", "eos_token_id", "bos_token_id", "use_cache",
             "pad_token_id", "tokenizer", "streamer", "transformers_version", "refusion"}  # fmt: skip
    sampling = {"temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"}
    neutral: dict[str, Any] = {
        "num_beams": 1, "num_beam_groups": 1, "num_return_sequences": 1, "repetition_penalty": 1.0, "min_length": 0,
        "encoder_repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0,
        "min_new_tokens": 0, "diversity_penalty": 0.0, "guidance_scale": 1.0, "length_penalty": 1.0,
        "temperature": 0, "top_p": 1.0, "custom_generate": model.config._name_or_path, "trust_remote_code": True,
    }  # fmt: skip
    stored = vars(config or model.generation_config)
    options = {name: value for name, value in {**stored, **kwargs}.items() if not name.startswith("_")}
    # Sampling options in the model's own config are no request, unless the call asks to sample.
    defaults = {} if options.get("do_sample") else vars(model.generation_config)
    unused = {name for name in sampling - {*kwargs} if options.get(name) == defaults.get(name)}
    # A server copies the model's do_sample into its requests, so do_sample does not show whether a request set a
    # temperature.
    is_greedy = options.get("do_sample") is False and ("do_sample" in kwargs or defaults.get("do_sample") is not False)
    unused |= {"temperature"} if is_greedy and options.get("temperature") == 1 else set()
    for name, value in options.items():
        is_neutral = value is None or value is False or neutral.get(name) == value
        if not is_neutral and name not in known | unused:
            where = "in the call" if name in kwargs else "in the generation config"
            fix = f"pass {name}={neutral.get(name, False if value is True else None)!r}"
            raise ValueError(f"{name}: expected none, got {value!r} {where}: this decoder is greedy; {fix}.")
    return options


def read_request(
    model: Any, inputs: torch.Tensor | None, options: dict[str, Any], kwargs: dict[str, Any]
) -> tuple[torch.Tensor, int, set[int]]:
    """Return the prompt [1, token], the maximum number of new tokens, and the EOS tokens.

    Args:
        model: The model.
        inputs: The prompt's tokens [1, token]; ``None``: ``input_ids`` in ``kwargs``.
        options: The options of the call, from :func:`read_options`.
        kwargs: The arguments of the call.

    Raises:
        ValueError: If there is not exactly one prompt, the prompt is padded, or the limit does not fit the context.
    """
    ids = kwargs.get("input_ids") if inputs is None else inputs
    if ids is None or ids.shape[0] != 1 or ids.shape[1] == 0:
        got = "none" if ids is None else tuple(ids.shape)
        raise ValueError(f"input_ids: expected the shape [1, token] of one prompt, got {got}; pass prompts one by one.")
    if not bool(torch.as_tensor(kwargs.get("attention_mask", 1)).all()):
        raise ValueError("attention_mask: expected ones, got zeros; give the prompt without padding.")
    limit = 128
    if options.get("max_new_tokens") is not None:
        limit = int(options["max_new_tokens"])
    elif options.get("max_length") is not None:
        limit = int(options["max_length"]) - ids.shape[1]
    room = (getattr(model.config, "max_position_embeddings", None) or float("inf")) - ids.shape[1]
    if not 1 <= limit <= room:
        raise ValueError(f"max_new_tokens: expected 1 to {room} beyond the prompt, got {limit}; set it in that range.")
    eos = options.get("eos_token_id")
    eos = model.config.eos_token_id if eos is None else eos
    return ids, limit, set(eos if isinstance(eos, list) else [eos]) - {None}


def respond(ids: torch.Tensor, decode: Any, streamer: Any) -> torch.Tensor:
    """Decode a prompt and return it with the response [1, token].

    Args:
        ids: The prompt [1, token].
        decode: Takes a streamer, sends the response's tokens to it, and returns them.
        streamer: A streamer of transformers; ``None`` for none.
    """
    if streamer is not None:
        streamer.put(ids.cpu())
    with torch.no_grad():
        response = decode(streamer)
    if streamer is not None:
        streamer.end()
    return torch.cat((ids, torch.tensor([response], dtype=ids.dtype, device=ids.device)), 1)


@torch.no_grad()
def weights_digest(model: torch.nn.Module) -> str | None:
    """Return a digest of a model's weights, 16 hexadecimal digits.

    The digest covers names and shapes of all parameters and 64 values per parameter, so it is fast for large models.
    Values are rounded to bfloat16, so that loading in float32 or bfloat16 gives the same digest.

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
