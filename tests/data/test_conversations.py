"""Prompts: what a chat template gives as a whole, with special tokens from the template alone."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import example as also
from hypothesis import strategies as st
from transformers import AddedToken, PreTrainedTokenizerBase

from refusion_lit.data.conversations import encode_prompt
from refusion_lit.data.encoding import encode_text
from refusion_lit.data.examples import encode_example
from refusion_lit.data.tokenizers import CharacterTokenizer, TrainedBPE
from refusion_lit.tasks import Example
from refusion_lit.tasks.base import Task

TEMPLATE = (
    "{% for m in messages %}<|turn|>{{ m['role'] }}\n{{ m['content'] | trim }}<|eos|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
NAMES = ["<|turn|>", "<|turn|>x", "<|eos|>", "<|mask|>", "<|pad|>"]
# Pieces that make up names of special tokens, so that texts are full of them, whole, nested and half.
TEXTS = st.lists(
    st.sampled_from([*NAMES, "<|", "|>", "<", "mask", "eos", "a", " ", "\n", "é", "\ufdd0", "\ufdd1"])
).map("".join)
ROLES = st.sampled_from(["user", "system", "assistant"])
TURNS = st.lists(st.fixed_dictionaries({"role": ROLES, "content": TEXTS}), min_size=1, max_size=3)


class Words(Task):
    """A little text to learn merges from, across turns and their contents."""

    def examples(self, split: str) -> list[Example]:
        turns = ({"role": "user", "content": "user\n\nthe cat\n"},)
        return [Example(id=f"{split}{i}", query="", response="\n\nassistant\n", messages=turns) for i in range(20)]

    def score(self, example: Example, response: str) -> float:
        return float(example.response == response)


@pytest.fixture(scope="module")
def chat() -> PreTrainedTokenizerBase:
    tokenizer = TrainedBPE(vocab_size=320).build(Words())
    tokenizer.chat_template = TEMPLATE
    tokenizer.add_tokens(NAMES[:2], special_tokens=True)
    return tokenizer


@pytest.fixture(scope="module")
def plain() -> PreTrainedTokenizerBase:
    tokenizer = TrainedBPE(vocab_size=320).build(Words())
    tokenizer.add_tokens(NAMES[:2], special_tokens=True)
    return tokenizer


@given(turns=st.lists(st.fixed_dictionaries({"role": ROLES, "content": st.text()}), min_size=1, max_size=3))
@also(turns=[{"role": "user", "content": "\n\nthe cat\n"}])
def test_text_without_names_gives_the_tokens_of_the_whole(
    chat: PreTrainedTokenizerBase, turns: list[dict[str, str]]
) -> None:
    whole = chat.apply_chat_template(turns, add_generation_prompt=True)["input_ids"]
    assert encode_prompt(chat, "", messages=turns) == whole


@given(turns=TURNS)
def test_special_ids_come_from_the_template_alone(chat: PreTrainedTokenizerBase, turns: list[dict[str, str]]) -> None:
    ids = encode_prompt(chat, "", messages=turns)
    assert chat.decode(ids) == chat.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    turn, eos = chat.convert_tokens_to_ids("<|turn|>"), chat.eos_token_id
    special = [token for token in ids if token in chat.all_special_ids or token >= turn]
    assert special == [turn, eos] * len(turns) + [turn]


def test_tokens_that_include_white_space_do_so_beside_names_in_texts() -> None:
    """Phi-3's tokens strip the line feed after them: a query that names a special token changes nothing there."""
    tokenizer = TrainedBPE(vocab_size=320).build(Words())
    tokenizer.add_tokens([AddedToken("<|turn|>", rstrip=True, special=True)])
    tokenizer.add_tokens([AddedToken("<|end|>", lstrip=True, special=True)])
    tokenizer.chat_template = (
        "{% for m in messages %}<|turn|>\n{{ m['content'] }} <|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|turn|>\n{% endif %}"
    )
    for query in ("the @@ cat", "\n the @@ cat \n", "@@"):
        plain, named = (encode_prompt(tokenizer, query.replace("@@", name)) for name in ("@@", "<|mask|>"))
        # Apart from the name or @@ itself, the tokens are the same.
        for text, ids in (("@@", plain), ("<|mask|>", named)):
            place = tokenizer.convert_ids_to_tokens(ids).index(text[0])
            names = encode_text(tokenizer, text)
            assert ids[place : place + len(names)] == names
            ids[place : place + len(names)] = [-1]
        assert named == plain


@given(text=TEXTS, template=st.sampled_from(["{query}", "<|turn|>{query}<|eos|>{query}", "the {query}"]))
def test_special_ids_of_a_prompt_template_come_from_it_alone(
    plain: PreTrainedTokenizerBase, text: str, template: str
) -> None:
    assume(text or template != "{query}")
    ids = encode_prompt(plain, text, template)
    assert plain.decode(ids) == template.replace("{query}", text)
    named = [token for token in ids if token in plain.added_tokens_decoder]
    assert named == ([plain.convert_tokens_to_ids("<|turn|>"), plain.eos_token_id] if "<|" in template else [])
    if not any(name in text for name in NAMES):
        assert ids == plain.encode(template.replace("{query}", text), add_special_tokens=False)


def test_a_query_is_one_user_turn(chat: PreTrainedTokenizerBase) -> None:
    assert encode_prompt(chat, "hi") == encode_prompt(chat, "", messages=[{"role": "user", "content": "hi"}])


def test_text_parts_are_joined_and_images_are_refused(chat: PreTrainedTokenizerBase) -> None:
    """A template might write a list of parts as Python does, or an image's token."""
    whole = encode_prompt(chat, "", messages=[{"role": "user", "content": "1+2"}])
    parts = [{"type": "text", "text": "1+"}, {"type": "text", "text": "2"}]
    assert encode_prompt(chat, "", messages=[{"role": "user", "content": parts}]) == whole
    for image in ({"type": "image", "image": "a.png"}, {"type": "image_url", "image_url": {"url": "a.png"}}, "a.png"):
        with pytest.raises(ValueError, match=r"^messages\.0\.content\.2\.type: expected 'text'.*(image|a\.png)"):
            encode_prompt(chat, "", messages=[{"role": "user", "content": [*parts, image]}])


def test_a_single_turn_is_the_prompt_without_a_chat_template_too(plain: PreTrainedTokenizerBase) -> None:
    turn = {"role": "user", "content": [{"type": "text", "text": "the "}, {"type": "text", "text": "cat"}]}
    assert encode_prompt(plain, "", messages=[turn]) == encode_prompt(plain, "the cat")


@pytest.mark.parametrize(
    ("messages", "option"),
    [("hi", "messages"), ({"role": "user"}, "messages"), (["hi"], "messages.0"), ([{"content": "a"}], "messages.0")],
)
def test_messages_of_another_form_are_refused_by_name(
    chat: PreTrainedTokenizerBase, messages: Any, option: str
) -> None:
    with pytest.raises(ValueError, match=rf"^{re.escape(option)}: expected .*role"):
        encode_prompt(chat, "", messages=messages)
    with pytest.raises(ValueError, match=r"^query: expected a text"):
        encode_prompt(chat, [messages])  # type: ignore[arg-type] - the test's point


def test_a_template_that_refuses_the_turns_is_named() -> None:
    strict = TrainedBPE(vocab_size=260).build(Words())
    strict.chat_template = "{{ raise_exception('no system turn') }}"
    turns = ({"role": "system", "content": "a"}, {"role": "user", "content": "b"})
    with pytest.raises(ValueError, match=r"example 7: messages: .*system, user \(no system turn\)"):
        encode_example(strict, Example(id="7", query="", response="c", messages=turns))
    strict.chat_template = "{{ messages[0]['content'] + 1 }}"
    with pytest.raises(ValueError, match=r"^messages: .*chat template.* user \(.*chat_template\.jinja"):
        encode_prompt(strict, "a")


@pytest.mark.parametrize(
    "template", ["{% for m in messages %}{{ m['content'] }}", "{{ messages | no_filter }}", "{{ messages }"]
)
def test_a_template_that_is_no_template_is_named(template: str) -> None:
    broken = TrainedBPE(vocab_size=260).build(Words())
    broken.chat_template = template
    with pytest.raises(ValueError, match=r"^tokenizer: .*chat_template\.jinja"):
        encode_prompt(broken, "a")


def test_a_template_that_drops_the_query_is_refused() -> None:
    careless = TrainedBPE(vocab_size=260).build(Words())
    careless.chat_template = "{% for m in messages %}{{ m['role'] + m['value'] | default('') }}{% endfor %}"
    with pytest.raises(ValueError, match=r"^messages\.0\.role: .*chat_template\.jinja"):
        encode_prompt(careless, "a query")
    assert encode_prompt(careless, "user")


@pytest.mark.parametrize("answer", ["c", 'a "c"\n'])
@pytest.mark.parametrize(
    ("template", "is_refused"),
    [
        ("{{ messages | tojson }}", True),
        ("{{ messages | map(attribute='content') | list }}", True),
        ("{% for m in messages %}{{ m['content'] + '\n' }}{% endfor %}{{ eos_token }}", True),
        ("{% for m in messages %}{{ m['content'] }}{{ eos_token if m['role'] == 'assistant' }}{% endfor %}", False),
        (  # the instruction is in the last turn of the user alone, as in Mistral's templates
            "{% for m in messages %}{{ 'I' if loop.last and m['role'] == 'user' }}[{{ m['content'] }}]{% endfor %}",
            False,
        ),
        (TEMPLATE, False),
    ],
)
def test_a_template_that_writes_no_answer_after_the_prompt_is_refused(
    chat: PreTrainedTokenizerBase, template: str, is_refused: bool, answer: str
) -> None:
    tokenizer = copy.deepcopy(chat)
    tokenizer.chat_template = template
    example = Example(id="7", query="the 'cat'", response=answer)
    if is_refused:
        with pytest.raises(ValueError, match=r"example 7: chat_template: expected .*, got .*; "):
            encode_example(tokenizer, example)
        if "tojson" in template:  # which renders calls, too
            call = {"role": "assistant", "content": answer, "tool_calls": [{"function": {"name": "f"}}]}
            with pytest.raises(ValueError, match=r"example 7: chat_template: expected .*, got .*; "):
                encode_example(tokenizer, replace(example, answer=call))
        return
    encoded = encode_example(tokenizer, example)
    assert answer.strip() in tokenizer.decode(encoded.response_ids)


@pytest.mark.parametrize("query", ["abz", "a<|mask|>", "a\ud800"])
def test_what_cannot_be_encoded_names_the_example(query: str) -> None:
    tokenizer = CharacterTokenizer(characters="abc").build(None)
    with pytest.raises(ValueError, match="example 7: text: "):
        encode_example(tokenizer, Example(id="7", query=query, response="a"))
    with pytest.raises(ValueError, match="example 7: text: "):
        encode_example(tokenizer, Example(id="7", query="a", response=query))


def test_half_a_surrogate_pair_is_refused(chat: PreTrainedTokenizerBase) -> None:
    with pytest.raises(ValueError, match="lone surrogate"):
        encode_text(chat, "a\ud800")


def test_turns_without_a_chat_template_are_not_dropped(plain: PreTrainedTokenizerBase) -> None:
    turns = [{"role": "system", "content": "a"}, {"role": "user", "content": "the cat"}]
    with pytest.raises(ValueError, match=r"messages: .*one turn.* got '.*system, user'"):
        encode_prompt(plain, "the cat", messages=turns)
    assert encode_prompt(plain, "the cat", messages=turns[1:]) == encode_prompt(plain, "the cat")


def test_tools_that_no_template_renders_are_refused(
    plain: PreTrainedTokenizerBase, chat: PreTrainedTokenizerBase
) -> None:
    tools: list[Any] = [{"type": "function", "function": {"name": "f"}}]
    for tokenizer in (plain, chat):
        with pytest.raises(ValueError, match=r"^tools: expected "):
            encode_prompt(tokenizer, "the cat", tools=tools)
    both = copy.deepcopy(chat)
    both.chat_template = "{% for tool in tools or [] %}{{ tool['function']['name'] }}\n{% endfor %}" + TEMPLATE
    assert encode_prompt(both, "the cat", tools=tools) != encode_prompt(both, "the cat")


def test_unknown_characters_of_a_template_are_named() -> None:
    tokenizer = CharacterTokenizer(characters="abc").build(None)
    with pytest.raises(ValueError, match="no token for ':', 'Q'"):
        encode_prompt(tokenizer, "a", "Q:{query}")
