"""Steps that the slow reference decoders of several tests share, written without the package's code."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import cache

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from refusion_lit.modeling.backbone import Backbone
from refusion_lit.types import ModelTraits
from support.fakes import SPECIAL, VOCAB

BANNED = [token for token in SPECIAL.banned_token_ids if token < VOCAB]


@cache
def random_backbone(seed: int, scale: float, traits: ModelTraits) -> Backbone:
    """Return a random model for which tokens that no decoder draws are improbable.

    Args:
        seed: Seed of the weights.
        scale: Factor of the logits: the larger, the surer the model.
        traits: Traits of the model.
    """
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = AutoConfig.for_model("llama", vocab_size=VOCAB, **sizes, initializer_range=0.5)
        library = AutoModelForCausalLM.from_config(config, dtype=torch.float64, attn_implementation="sdpa").eval()
    penalty = torch.zeros(VOCAB, dtype=torch.float64)
    penalty[BANNED] = -200
    library.lm_head.register_forward_hook(lambda _module, _inputs, logits: logits * scale + penalty)
    return Backbone(library, traits, SPECIAL)


def compute(model: Backbone, tokens: list[int], positions: list[int], visible: Tensor) -> Tensor:
    """Return log-probabilities of transformers' model, without a cache."""
    ids, places = torch.tensor([tokens]), torch.tensor([positions])
    logits = model.model(ids, attention_mask=visible[None, None], position_ids=places, use_cache=False).logits
    return logits[0].log_softmax(-1)


def best_allowed(logits: Tensor, banned: Iterable[int], vocab_size: int) -> int:
    """Return the most probable token below ``vocab_size`` that is not banned, given one place's logits."""
    allowed = logits.clone()
    allowed[[token for token in banned if token < len(logits)]] = -torch.inf
    allowed[vocab_size:] = -torch.inf
    return int(allowed.argmax())


def cut(tokens: list[int], ends: Collection[int]) -> list[int]:
    """Return the tokens up to and including the first EOS token."""
    end = next((i for i, token in enumerate(tokens) if token in ends), None)
    return tokens if end is None else tokens[: end + 1]
