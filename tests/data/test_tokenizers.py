"""Tokenizers round-trip, know their special tokens, and never take them from a user's text."""

from __future__ import annotations

import json
import warnings
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from refusion_lit.data.conversations import encode_prompt
from refusion_lit.data.encoding import encode_plain_prompt, encode_text
from refusion_lit.data.examples import encode_example
from refusion_lit.data.tokenizers import (
    CharacterTokenizer,
    PretrainedTokenizer,
    StoredTokenizer,
    TrainedBPE,
    tokenizer_files,
    tokenizer_from_files,
)
from refusion_lit.modeling.vocabulary import read_special_tokens
from refusion_lit.tasks import Additions, Example
from refusion_lit.tasks.base import Task

TEMPLATE = (
    "{% for m in messages %}<|turn|>{{ m['role'] }}\n{{ m['content'] }}<|eos|>{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)


class Words(Task):
    """A little text to learn merges from."""

    def examples(self, split: str) -> list[Example]:
        return [Example(id=f"{split}{i}", query="the cat sat on the mat", response="naïve café") for i in range(20)]

    def score(self, example: Example, response: str) -> float:
        return float(example.response == response)


@pytest.fixture(scope="module")
def bpe():
    tokenizer = TrainedBPE(vocab_size=300).build(Words())
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture(scope="module")
def characters():
    return CharacterTokenizer(characters="abc \n<|mask>").build(None)


@given(st.text())
def test_bpe_round_trips_any_text(bpe, text: str) -> None:
    ids = encode_text(bpe, text)
    assert bpe.decode(ids) == text
    special = read_special_tokens(bpe)
    assert not {special.mask_token_id, special.pad_token_id, *special.eos_token_ids} & set(ids)


@given(st.text(alphabet="abc \n"))
def test_characters_round_trip(characters, text: str) -> None:
    ids = encode_text(characters, text)
    assert len(ids) == len(text)
    assert characters.decode(ids) == text


def test_special_ids_come_first() -> None:
    tokenizer = CharacterTokenizer().build(Additions(num_train=10, num_validation=2, num_test=2))
    special = read_special_tokens(tokenizer)
    assert (special.pad_token_id, special.eos_token_ids, special.mask_token_id) == (0, (1,), 2)
    assert special.vocab_size == len(tokenizer)
    assert min(encode_text(tokenizer, "0123456789+=;,>")) == 3


def test_an_alphabet_is_taken_from_the_training_data_and_the_template() -> None:
    tokenizer = CharacterTokenizer().build(Words(), "{query}>")
    text = "the cat sat on the matnaïve café>"
    assert sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)[3:] == sorted(set(text))
    rebuilt = tokenizer_from_files(tokenizer_files(tokenizer))
    assert rebuilt.get_vocab() == tokenizer.get_vocab()
    with pytest.raises(ValueError, match="no token for 'z'"):
        encode_text(rebuilt, "zoo")


def test_names_of_special_tokens_in_text_stay_text(bpe, characters) -> None:
    for tokenizer in (bpe, characters):
        ids = encode_text(tokenizer, "a<|mask|>a")
        assert tokenizer.mask_token_id not in ids
        assert tokenizer.decode(ids) == "a<|mask|>a"


def test_names_that_are_words_of_a_vocabulary_are_spelled() -> None:
    """A Unigram model's vocabulary has special tokens beside other pieces."""
    special = ["<unk>", "</s>", "<|user|>"]
    pieces = [*((name, 0.0) for name in special), *((letter, -9.0) for letter in "▁a<|/>user")]
    backend: Any = Tokenizer(models.Unigram(pieces, 0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(special)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="</s>", unk_token="<unk>", clean_up_tokenization_spaces=False
    )
    for text in ("use </s> us", "<|user|>", "user<|user|>user</s>"):
        ids = encode_text(tokenizer, text)
        assert {1, 2}.isdisjoint(ids)
        assert tokenizer.decode(ids) == text


def test_an_unknown_character_is_named(characters) -> None:
    with pytest.raises(ValueError, match="no token for 'z'"):
        encode_text(characters, "abz")


@pytest.fixture
def words() -> PreTrainedTokenizerFast:
    """Return a tokenizer of two words."""
    vocabulary = {"<pad>": 0, "</s>": 1, "<unk>": 2, "cats": 3, "sleep": 4}
    backend: Any = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", mask_token="<mask>"
    )


def test_unknown_words_are_refused_in_text(words: PreTrainedTokenizerFast) -> None:
    assert encode_text(words, "cats sleep") == [3, 4]
    with pytest.raises(ValueError, match="no token for 'dogs'"):
        encode_text(words, "dogs sleep")


def test_unknown_words_are_unk_in_prompts_with_one_warning(words: PreTrainedTokenizerFast) -> None:
    """Prompts have the tokens that transformers gives."""
    assert encode_prompt(words, "cats", "<unk> {query}") == [2, 3]  # a template that names UNK means the token
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for query in ("dogs", "dogs sleep", "cows </s>"):
            assert encode_prompt(words, query, "cats {query}")[:2] == words("cats dogs")["input_ids"] == [3, 2]
        assert encode_plain_prompt(words, "cats dogs sleep") == [3, 2, 4]
    assert len({str(warning.message) for warning in caught}) == 1
    assert "<unk>" in str(caught[0].message)


def test_unknown_words_are_refused_in_responses_alone(words: PreTrainedTokenizerFast) -> None:
    """A response with an unknown word would train the model to write UNK."""
    with pytest.warns(UserWarning, match="<unk>"):
        sample = encode_example(words, Example(id="7", query="dogs", response=" sleep"))
    assert [*sample.prompt_ids, *sample.response_ids] == [2, 4, 1]
    for template in (None, "{% for m in messages %}{{ m.content }} {% endfor %}"):
        words.chat_template = template
        for query in ("cats", "dogs"):
            with (
                warnings.catch_warnings(action="ignore"),
                pytest.raises(ValueError, match=r"example 7: .*no token for 'dogs'"),
            ):
                encode_example(words, Example(id="7", query=query, response=" dogs sleep"))


def test_a_chat_template_goes_around_the_text(bpe) -> None:
    ids = encode_prompt(bpe, "hi <|eos|> there")
    assert bpe.decode(ids) == "<|turn|>user\nhi <|eos|> there<|eos|><|turn|>assistant\n"
    assert ids.count(bpe.eos_token_id) == 1
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1"}]
    text = bpe.decode(encode_prompt(bpe, "", messages=messages))
    assert text == "<|turn|>system\nbe brief<|eos|><|turn|>user\n1<|eos|><|turn|>assistant\n"


def test_a_prompt_template_goes_around_the_query(characters) -> None:
    assert characters.decode(encode_prompt(characters, "b", "a{query}c")) == "abc"


def test_an_example_ends_with_its_end_of_sequence(characters) -> None:
    sample = encode_example(characters, Example(id="1", query="ab", response="c"))
    assert characters.decode(list(sample.prompt_ids)) == "ab"
    assert list(sample.response_ids) == [*encode_text(characters, "c"), characters.eos_token_id]
    with pytest.raises(ValueError, match=r"example 1: .*response"):
        encode_example(characters, Example(id="1", query="ab", response=""))
    with pytest.raises(ValueError, match="empty prompt"):
        encode_prompt(characters, "")


@pytest.mark.parametrize("name", ["bpe", "characters"])
def test_stored_files_rebuild_the_tokenizer(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(name)
    rebuilt = StoredTokenizer(files=tokenizer_files(tokenizer)).build(None)
    assert read_special_tokens(rebuilt) == read_special_tokens(tokenizer)
    assert rebuilt.get_vocab() == tokenizer.get_vocab()
    assert rebuilt.chat_template == tokenizer.chat_template
    assert encode_text(rebuilt, "abc a<|mask|>") == encode_text(tokenizer, "abc a<|mask|>")


def test_stored_files_have_all_chat_templates(bpe) -> None:
    """transformers takes the template ``tool_use`` where tools are given."""
    tokenizer = StoredTokenizer(files=tokenizer_files(bpe)).build(None)
    templates = {"default": "{{ messages[0]['content'] }}", "tool_use": "{{ messages[0]['content'] ~ tools | length }}"}
    tokenizer.chat_template = templates
    rebuilt = StoredTokenizer(files=tokenizer_files(tokenizer)).build(None)
    assert rebuilt.chat_template == templates
    without_tools, with_a_tool = (encode_prompt(rebuilt, "12", tools=tools) for tools in ((), [{"name": "add"}]))
    assert without_tools == encode_text(rebuilt, "12")
    assert with_a_tool == encode_text(rebuilt, "12" + "1")  # the template writes the number of tools


def test_a_directory_without_mask_token_gets_one(tmp_path, bpe) -> None:
    bpe_without = StoredTokenizer(files=tokenizer_files(bpe)).build(None)
    bpe_without.mask_token = None
    bpe_without.save_pretrained(tmp_path)
    loaded = PretrainedTokenizer(source=str(tmp_path)).build(None)
    assert loaded.mask_token_id is not None
    assert loaded.mask_token_id not in (loaded.eos_token_id, loaded.pad_token_id)


def test_errors_name_the_option(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.characters: .*alphabet"):
        CharacterTokenizer().build(None)
    with pytest.raises(ValueError, match=r"vocab_size: .*at least 260"):
        TrainedBPE(vocab_size=100)
    with pytest.raises(ValueError, match=r"tokenizer\.source"):
        PretrainedTokenizer(source=str(tmp_path)).build(None)
    with pytest.raises(ValueError, match=r"tokenizer: .*task"):
        TrainedBPE().build(None)


@pytest.mark.parametrize("mask_name", ["<|mask|>", None])  # the tokenizer names it, or the config alone
def test_the_mask_id_of_a_directory_is_respected(tmp_path, bpe, mask_name: str | None) -> None:
    tokenizer = StoredTokenizer(files=tokenizer_files(bpe)).build(None)
    mask_id = tokenizer.mask_token_id
    tokenizer.mask_token = mask_name
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "mask_token_id": mask_id}))
    loaded = PretrainedTokenizer(source=str(tmp_path)).build(None)
    assert loaded.mask_token_id == mask_id
    assert len(loaded) == len(bpe)


@pytest.mark.parametrize("mask_id", [5, 100_000])  # another token's, or no token's
def test_a_mask_id_that_the_tokenizer_contradicts_is_refused(tmp_path, bpe, mask_id: int) -> None:
    bpe.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "mask_token_id": mask_id}))
    with pytest.raises(ValueError, match=f"which is {mask_id}, got {bpe.mask_token_id}"):
        PretrainedTokenizer(source=str(tmp_path)).build(None)


def test_a_directory_without_padding_pads_with_its_end(tmp_path, bpe) -> None:
    tokenizer = StoredTokenizer(files=tokenizer_files(bpe)).build(None)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    loaded = PretrainedTokenizer(source=str(tmp_path)).build(None)
    assert loaded.pad_token_id == loaded.eos_token_id == bpe.eos_token_id
    rebuilt = StoredTokenizer(files=tokenizer_files(loaded)).build(None)
    assert read_special_tokens(rebuilt) == read_special_tokens(loaded)


def test_a_directory_without_end_of_sequence_is_refused(tmp_path, bpe) -> None:
    tokenizer = StoredTokenizer(files=tokenizer_files(bpe)).build(None)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"tokenizer\.source: .*end-of-sequence token"):
        PretrainedTokenizer(source=str(tmp_path)).build(None)


def test_an_empty_name_of_a_special_token_is_none(tmp_path, bpe) -> None:
    bpe.save_pretrained(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    names = dict.fromkeys(("unk_token", "bos_token", "mask_token"), "")
    path.write_text(json.dumps({**json.loads(path.read_text()), **names}))
    tokenizer = PretrainedTokenizer(source=str(tmp_path)).build(None)
    assert (tokenizer.unk_token_id, tokenizer.bos_token_id) == (None, None)
    assert tokenizer.mask_token == "<|mask|>"
    for built in (tokenizer, StoredTokenizer(files=tokenizer_files(tokenizer)).build(None)):
        assert encode_prompt(built, "the cat") == encode_prompt(bpe, "the cat")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("[]", r"generation_config\.json"),
        ("{", r"generation_config\.json"),
        ('{"eos_token_id": "x"}', "eos_token_id"),
        ('{"eos_token_id": [1.5]}', "eos_token_id"),
    ],
)
def test_a_damaged_generation_config_is_refused(tmp_path, bpe, content: str, expected: str) -> None:
    """Without the file's EOS tokens, responses would not end."""
    bpe.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ValueError, match=rf"^backbone\.source: .*{expected}"):
        PretrainedTokenizer(source=str(tmp_path)).build(None)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("add_bos", "yes"), ("add_bos", True), ("draws_padding", "no"), ("chat_template_kwargs", "x"),
        ("ends_of_sequence", "x"), ("ends_of_sequence", [99_999]),
    ],
)  # fmt: skip
def test_entries_of_another_type_are_refused_by_name(tmp_path, bpe, name: str, value: Any) -> None:
    bpe.save_pretrained(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))
    with pytest.raises(ValueError, match=rf"tokenizer_config\.json of .*: {name}: expected"):
        PretrainedTokenizer(source=str(tmp_path)).build(None)


def test_a_model_without_a_tokenizer_is_refused(tmp_path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}')
    with pytest.raises(ValueError, match=r"^tokenizer\.source: .*files in .*, got None"):
        PretrainedTokenizer(source=str(tmp_path)).build(None)


def test_stored_truncation_and_padding_are_undone(tmp_path, bpe) -> None:
    tokenizer = StoredTokenizer(files=tokenizer_files(bpe)).build(None)
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.backend_tokenizer.enable_padding(length=9)
    tokenizer.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    for name, text in tokenizer_files(bpe).items():
        if name != "tokenizer.json":
            (tmp_path / name).write_text(text)
    files = {path.name: path.read_text() for path in tmp_path.iterdir()}
    for loaded in (PretrainedTokenizer(source=str(tmp_path)).build(None), StoredTokenizer(files=files).build(None)):
        for text in ("a", "the cat sat on the mat"):
            assert encode_text(loaded, text) == encode_text(bpe, text)


def test_training_sees_all_turns_and_gives_the_same_every_time() -> None:
    class Chats(Words):
        def examples(self, split: str) -> list[Example]:
            turns = ({"role": "system", "content": "xyzzyx"}, {"role": "user", "content": "plughp"})
            return [Example(id=f"{split}{i}", query="plughp", response="foobaf", messages=turns) for i in range(3)]

    one, other = (TrainedBPE(vocab_size=300).build(Chats()) for _ in range(2))
    assert one.get_vocab() == other.get_vocab()
    assert {"xyzzyx", "plughp", "foobaf"} <= one.get_vocab().keys()


class Calls(Words):
    """Conversations in which an assistant turn calls a tool, without text."""

    def examples(self, split: str) -> list[Example]:
        turns = [
            {"role": "user", "content": "three?"},
            {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
            {"role": "tool", "content": "3"},
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
        ]
        return [Example(id="a", query="", messages=tuple(turns), response="3!")]


@pytest.mark.parametrize("source", [CharacterTokenizer(), TrainedBPE(vocab_size=260)], ids=["characters", "bpe"])
def test_a_turn_without_text_is_no_training_text(source) -> None:
    tokenizer = source.build(Calls())
    assert tokenizer.decode(encode_text(tokenizer, "three!")) == "three!"


def test_files_of_a_newer_library_are_refused(tmp_path, bpe) -> None:
    bpe.save_pretrained(tmp_path)
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "model": {"type": "New"}}))
    with pytest.raises(ValueError, match=r"^tokenizer\.source: .*did not match any"):
        PretrainedTokenizer(source=str(tmp_path)).build(None)
    with pytest.raises(ValueError, match="tokenizer files in the checkpoint"):
        StoredTokenizer(files={path.name: path.read_text() for path in tmp_path.iterdir()}).build(None)


def test_damaged_files_of_a_checkpoint_are_refused() -> None:
    for files in ({"tokenizer.json": "{"}, {}):
        with pytest.raises(ValueError, match="tokenizer files in the checkpoint"):
            StoredTokenizer(files=files).build(None)
    with pytest.raises(ValueError, match=r"tokenizer files in a/last\.ckpt"):
        tokenizer_from_files({}, "a/last.ckpt")
