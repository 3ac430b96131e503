"""Whether a tokenizer fits the weights that a training starts from."""

from __future__ import annotations

import warnings

from transformers import PreTrainedTokenizerBase

from refusion_lit.data.tokenizers import PretrainedTokenizer
from refusion_lit.modeling.vocabulary import mask_is_new


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, source: PretrainedTokenizer) -> None:
    """Refuse a tokenizer whose ids mean something else to the weights of a directory or hub id.

    The tokenizer may have more tokens than the source's. A source without a tokenizer is warned about.

    Args:
        tokenizer: The tokenizer that encodes the data.
        source: The tokenizer of the weights.

    Raises:
        ValueError: Naming the first token with another id.
    """
    if tokenizer.name_or_path == source.source:
        return
    try:
        own = source.build(None)
    except ValueError as error:
        warnings.warn(f"data.tokenizer cannot be compared with that of the weights: {error}", stacklevel=2)
        return
    expected, found = own.get_vocab(), tokenizer.get_vocab()
    if mask_is_new(own) and own.mask_token is not None:
        del expected[str(own.mask_token)]  # unknown to the weights
    for token, identity in sorted(expected.items(), key=lambda pair: pair[1]):
        if found.get(token) != identity:
            raise ValueError(
                f"data.tokenizer: expected the {len(expected)} tokens of {source.source!r}, which its weights are for, "
                f"got {len(found)} tokens in which {token!r} has the id {found.get(token)}, not {identity}. Set "
                f"data.tokenizer to PretrainedTokenizer with source: {source.source}."
            )
