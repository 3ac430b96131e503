"""Special tokens, the BOS policy, and embedding and head rows for new tokens."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from refusion_lit.types import SpecialTokens
from refusion_lit.utils.require import require

AddBos = Literal["auto"] | bool
"""Whether prompts begin with the BOS token; ``auto``: as the tokenizer itself does."""
ADD_BOS = "add_bos"
"""Entry of ``tokenizer_config.json`` with the BOS policy, unless it is ``auto``; it is saved with the tokenizer."""
EOS_IDS = "ends_of_sequence"
"""Entry of ``tokenizer_config.json`` with further EOS ids; it is saved with the tokenizer."""
DRAWS_PADDING = "draws_padding"
"""Entry of ``tokenizer_config.json`` for models that predict padding; see ``SpecialTokens.draws_padding``."""

_NEW_MASK = "mask_token_is_new"


def read_special_tokens(tokenizer: Any) -> SpecialTokens:  # noqa: ANN401 - a tokenizer of transformers
    """Read a tokenizer's special ids. Its end-of-sequence token comes first in ``eos_token_ids``.

    Raises:
        ValueError: If the tokenizer has no end-of-sequence token.
    """
    eos = tokenizer.eos_token_id
    mask = tokenizer.mask_token_id
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else eos
    if pad is None or eos is None:
        raise ValueError(
            "tokenizer: expected an end-of-sequence token, got none. Set eos_token in its tokenizer_config.json."
        )
    ends = tuple(dict.fromkeys((int(eos), *tokenizer.init_kwargs.get(EOS_IDS, ()))))
    known = set(tokenizer.get_vocab().values())
    size = max(known) + 1
    unused = tuple(sorted(set(range(size)) - known)) if len(known) < size else ()
    return SpecialTokens(
        mask_token_id=mask,
        eos_token_ids=ends,
        pad_token_id=int(pad),
        vocab_size=size,
        draws_padding=bool(tokenizer.init_kwargs.get(DRAWS_PADDING, False)),
        unused_token_ids=unused,
    )


def vocabulary_size(tokenizer: Any) -> int:  # noqa: ANN401 - a tokenizer of transformers
    """Return a tokenizer's highest id plus 1: more than its number of tokens if there are gaps between the ids."""
    return max(tokenizer.get_vocab().values()) + 1


def set_add_bos(tokenizer: PreTrainedTokenizerBase, add_bos: AddBos) -> None:
    """Set a tokenizer's BOS policy, which is saved with the tokenizer.

    Args:
        tokenizer: Changed in place.
        add_bos: ``True``: prompts begin with the BOS token. ``False``: no token is added. ``auto``: the tokenizer's
            default, as in transformers' ``tokenizer(text)``.

    Raises:
        ValueError: If the value is unknown, or the tokenizer has no BOS token to add.
    """
    require(add_bos in ("auto", True, False), "add_bos", "auto, true or false", add_bos, "choose one of them")
    has_bos = tokenizer.bos_token_id is not None or add_bos is not True
    require(has_bos, "add_bos", "auto or false, as the tokenizer has no BOS token", add_bos, "set it to auto")
    if add_bos == "auto":
        tokenizer.init_kwargs.pop(ADD_BOS, None)
    else:
        tokenizer.init_kwargs[ADD_BOS] = bool(add_bos)


def get_add_bos(tokenizer: Any) -> AddBos:  # noqa: ANN401 - a tokenizer of transformers
    """Return a tokenizer's BOS policy."""
    return tokenizer.init_kwargs.get(ADD_BOS, "auto")


def prompt_prefix(tokenizer: Any) -> list[int]:  # noqa: ANN401 - a tokenizer of transformers
    """Return the tokens that begin a plain prompt: BOS, or none.

    With ``add_bos: auto``, the tokens are all special tokens that the tokenizer puts before a text.
    """
    return find_added_tokens(tokenizer)[0]


def find_added_tokens(tokenizer: Any) -> tuple[list[int], list[int]]:  # noqa: ANN401 - a tokenizer of transformers
    """Return the special tokens before and after a text, by the BOS policy or, with ``auto``, by the tokenizer."""
    add_bos = get_add_bos(tokenizer)
    if add_bos != "auto":
        return [int(tokenizer.bos_token_id)] if add_bos else [], []
    try:
        encoding = tokenizer.backend_tokenizer.encode("0", add_special_tokens=True)
    except Exception:  # the tokenizers library raises this class where the vocabulary lacks the text
        return [], []
    ids, is_added = encoding.ids, encoding.special_tokens_mask
    if all(is_added):
        num_before = int(ids[:1] == [tokenizer.bos_token_id])
        return ids[:num_before], ids[num_before:]
    return ids[: is_added.index(0)], ids[len(ids) - is_added[::-1].index(0) :]


def starts_with_bos(token_ids: Sequence[int], tokenizer: Any) -> bool:  # noqa: ANN401 - a tokenizer of transformers
    """Return whether tokens begin with the BOS token or with :func:`prompt_prefix`."""
    prefix = prompt_prefix(tokenizer)
    bos = tokenizer.bos_token_id
    return (bos is not None and [*token_ids[:1]] == [bos]) or [*token_ids[: len(prefix)]] == prefix != []


def describe_bos(tokenizer: Any) -> str:  # noqa: ANN401 - a tokenizer of transformers
    """Describe the tokens that prompts begin with, for messages; empty without BOS, or if a chat template decides."""
    if tokenizer.chat_template and get_add_bos(tokenizer) == "auto":
        return ""
    names = " ".join(tokenizer.convert_ids_to_tokens(prompt_prefix(tokenizer)))
    return f"prompts begin with {names} (add_bos: {str(get_add_bos(tokenizer)).lower()})" if names else ""


def add_eos_tokens(tokenizer: PreTrainedTokenizerBase, token_ids: Iterable[int]) -> None:
    """Add end-of-sequence tokens to a tokenizer.

    Args:
        tokenizer: Changed in place; the ids are saved with it.
        token_ids: The ids.
    """
    further = [*dict.fromkeys((*tokenizer.init_kwargs.get(EOS_IDS, ()), *token_ids))]
    if any(token != tokenizer.eos_token_id for token in further):
        tokenizer.init_kwargs[EOS_IDS] = further


def ensure_mask_token(
    tokenizer: PreTrainedTokenizerBase, mask_token_id: int | None = None, texts: Sequence[str] = ()
) -> None:
    """Give a tokenizer a mask token if it has none.

    Args:
        tokenizer: Changed in place.
        mask_token_id: Id in the model's config. Its token becomes the mask token unless the tokenizer names a mask
            token.
        texts: The mask token's possible texts in the model's published format. If given, no token is added.

    Raises:
        ValueError: If a published format's mask token is missing.
    """
    if tokenizer.mask_token_id is not None:
        return
    named = tokenizer.convert_ids_to_tokens(mask_token_id) if mask_token_id is not None else None
    vocabulary = tokenizer.get_vocab() if texts else {}
    named = named or next((text for text in texts if text in vocabulary), None)
    if texts and named is None:
        raise ValueError(
            f"tokenizer.source: expected the mask token {' or '.join(texts)}, which the model was trained with, got a "
            "tokenizer without it; fetch the tokenizer's files again."
        )
    num_tokens = len(tokenizer)
    taken = set(tokenizer.get_vocab().values())
    tokenizer.add_special_tokens({"mask_token": named or "<|mask|>"})
    if len(tokenizer) > num_tokens:  # otherwise the token, and its trained row, existed without the name
        # The tokenizers library numbers new tokens by the number of tokens, which a vocabulary with gaps uses already.
        expected = "a mask token in a vocabulary with gaps between its ids"
        fix = "add <|mask|> to its tokenizer.json with a free id, and name it mask_token in tokenizer_config.json"
        require(tokenizer.mask_token_id not in taken, "tokenizer.source", expected, "none", fix)
        setattr(tokenizer, _NEW_MASK, True)


def mask_is_new(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether :func:`ensure_mask_token` has added a token to the tokenizer."""
    return bool(getattr(tokenizer, _NEW_MASK, False))


def mask_is_untrained(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the mask token cannot have been trained as a mask, because it is new, or begins or ends texts."""
    others = (tokenizer.eos_token_id, tokenizer.bos_token_id)
    return mask_is_new(tokenizer) or (tokenizer.mask_token_id is not None and tokenizer.mask_token_id in others)


def fit_vocabulary(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, pretrained: bool) -> tuple[int, ...]:
    """Give embedding and head a row for every token. New rows start as the mean of the earlier rows.

    Many models have spare, untrained rows beyond their tokenizer's vocabulary. If a new mask token gets a spare row,
    the row starts like an added row.

    Args:
        model: Changed in place; its config gets the tokenizer's ``mask_token_id``.
        tokenizer: The tokenizer, with its mask token.
        pretrained: Whether the weights are trained; random spare rows stay as they are.

    Returns:
        Tokens whose rows are new.
    """
    num_rows = _rows(model)[0].shape[0]
    num_tokens = vocabulary_size(tokenizer)
    new: list[int] = []
    if num_tokens > num_rows:
        model.resize_token_embeddings(num_tokens, mean_resizing=False)
        _initialise_as_mean(model, num_rows, num_tokens)
        new += range(num_rows, num_tokens)
    mask = read_special_tokens(tokenizer).mask_token_id
    others = [token for token in new if token != mask and tokenizer.convert_ids_to_tokens(token) is not None]
    if pretrained and others:
        names = ", ".join(map(repr, tokenizer.convert_ids_to_tokens(others[:3])))
        warnings.warn(
            f"tokenizer: expected at most {num_rows} tokens, the rows of the model's embedding, got {num_tokens}: the "
            f"rows of {len(others)} tokens ({names}{', ...' if len(others) > 3 else ''}) are new and untrained. Check "
            "that the tokenizer belongs to the model.",
            stacklevel=2,
        )
    if pretrained and mask_is_new(tokenizer) and mask is not None:
        _initialise_as_mean(model, mask, mask + 1)
        new.append(mask)
    model.config.mask_token_id = mask
    return tuple(sorted(set(new)))


def _initialise_as_mean(model: PreTrainedModel, start: int, stop: int) -> None:
    """Set rows ``start`` to ``stop`` in embedding and head to the mean of the rows before ``start``."""
    with torch.no_grad():
        for weight in _rows(model):
            weight[start:stop] = weight[:start].mean(0, keepdim=True)


def _rows(model: PreTrainedModel) -> list[torch.Tensor]:
    """Return the embedding's and the head's weights; the same tensor twice if they are tied."""
    layers: list[Any] = [model.get_input_embeddings(), model.get_output_embeddings()]
    return [layer.weight for layer in layers]
