"""Added tokens: their names are found in text, also names that the tokenizer gets later."""

from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from refusion_lit.data.added_tokens import read_added_tokens
from refusion_lit.data.conversations import encode_prompt, encode_response
from refusion_lit.data.tokenizers import CharacterTokenizer


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    return CharacterTokenizer(characters="abc <>|").build(None)


def test_a_longer_name_comes_before_a_shorter_name_that_begins_alike(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.add_tokens(["<a", "<ab>"])

    assert read_added_tokens(tokenizer).names.split("c<ab>c") == ["c", "<ab>", "c"]


@pytest.mark.parametrize("special", [True, False])
def test_a_name_that_the_tokenizer_gets_later_is_found(tokenizer: PreTrainedTokenizerBase, special: bool) -> None:
    before = read_added_tokens(tokenizer)
    tokenizer.add_tokens(["<c>"], special_tokens=special)
    after = read_added_tokens(tokenizer)

    assert before.names.search("a<c>") is None
    assert after.names.search("a<c>") is not None
    assert (after.special_names.search("a<c>") is not None) == special
    assert after.by_name["<c>"].special == special


@pytest.mark.parametrize("special", [{"sep_token": "<c>"}, {"additional_special_tokens": ["<c>"]}])
def test_a_named_token_that_becomes_special_is_found_among_special_names(
    tokenizer: PreTrainedTokenizerBase, special: dict[str, Any]
) -> None:
    tokenizer.add_tokens(["<c>"])
    assert read_added_tokens(tokenizer).special_names.search("a<c>") is None

    tokenizer.add_special_tokens(special)

    assert read_added_tokens(tokenizer).special_names.search("a<c>") is not None


def test_a_special_name_that_comes_between_two_prompts_stays_text_in_the_second(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    characters = encode_prompt(tokenizer, "a<c>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<c>"]})

    assert encode_prompt(tokenizer, "a<c>") == characters
    assert encode_prompt(tokenizer, "b", "{query}<c>")[-1] == tokenizer.convert_tokens_to_ids("<c>")


def test_samples_do_not_read_the_added_tokens_again(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[Any] = []

    def read(self: Any) -> dict[int, Any]:
        reads.append(self)
        added: dict[int, Any] = self.backend_tokenizer.get_added_tokens_decoder()
        return added

    monkeypatch.setattr(type(tokenizer), "added_tokens_decoder", property(read))

    for query in ("a", "ab", "abc"):
        encode_response(tokenizer, "cab", encode_prompt(tokenizer, query), query)

    assert len(reads) == 1
