"""Training data is encoded as a whole: the tokens of the rendered conversation, with the template's end of turn."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from refusion_lit.constraints.templates import Template
from refusion_lit.data.conversations import encode_prompt, end_of_turn
from refusion_lit.data.detokenizer import Detokenizer
from refusion_lit.data.encoding import encode_text
from refusion_lit.data.evaluation import encode_given
from refusion_lit.data.examples import encode_example
from refusion_lit.data.module import InstructionDataModule
from refusion_lit.data.tokenizers import PretrainedTokenizer
from refusion_lit.modeling.vocabulary import add_eos_tokens, prompt_prefix
from refusion_lit.tasks import Example, InstructionFiles
from support.tokenizer_zoo import KINDS, TEMPLATES, ZEPHYR, make_model, make_tokenizer

# In this file, ``whole`` is a conversation with its answer as transformers' apply_chat_template encodes it.

TURNS = ({"role": "user", "content": "Where is Paris?"}, {"role": "assistant", "content": "In France."},
         {"role": "user", "content": "And Rome?\n"})  # fmt: skip
ENDS = {
    "llama2": "</s>",
    "llama3": "<|eot_id|>",
    "gpt2": "<|endoftext|>",
    "qwen": "<|im_end|>",
    "gemma": "<end_of_turn>",
}
TOKENIZERS = {(kind, template): make_tokenizer(kind, chat=True, **({"chat_template": ZEPHYR} if template else {}))
              for kind in KINDS for template in (None, ZEPHYR)}  # fmt: skip
TEXTS = st.text(st.sampled_from(" \nab世.Pi-"), min_size=1, max_size=9)


@pytest.mark.parametrize(("kind", "template"), TOKENIZERS)
@settings(max_examples=25, deadline=None)
@given(answer=TEXTS, num_turns=st.sampled_from([1, 3]))
def test_a_chat_is_trained_as_its_template_renders_it(
    kind: str, template: str | None, answer: str, num_turns: int
) -> None:
    assume(answer.strip())
    tokenizer = TOKENIZERS[kind, template]
    sample = encode_example(tokenizer, Example(id="0", query="", response=answer, messages=TURNS[:num_turns]))
    actual = [*sample.prompt_ids, *sample.response_ids]
    turns = [*TURNS[:num_turns], {"role": "assistant", "content": answer}]
    whole: Any = tokenizer.apply_chat_template(turns, return_dict=True)["input_ids"]
    assert tokenizer.decode(whole).startswith(tokenizer.decode(actual))
    prompt: Any = tokenizer.apply_chat_template(turns[:-1], add_generation_prompt=True, return_dict=True)["input_ids"]
    if whole[: len(prompt)] == prompt:  # otherwise a token of the whole holds text of both the prompt and the answer
        assert actual == whole[: len(actual)]
    end = tokenizer.convert_ids_to_tokens(actual[-1])
    assert end == (tokenizer.eos_token if template else ENDS[kind])


IN_LAST_TURN = (  # as Mistral: the system text stands before the last message of the user if nothing follows it
    "{% for m in messages %}{% if m['role'] == 'user' %}[INST]{{ messages[0]['content'] + '\n' if loop.last }}"
    "{{ m['content'] }}[/INST]{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'] + '<|im_end|>' }}{% endif %}"
    "{% endfor %}"
)
THOUGHTS_LEFT_OUT = (  # as DeepSeek-R1: the prompt opens the thoughts, and answers lose theirs
    "{% for m in messages %}{{ m['role'] + ':' + m['content'].split('</think>')[-1] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:<think>\n' }}{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "answer", "expected"),
    [
        pytest.param(
            IN_LAST_TURN,
            "In Italy.",
            "[INST]Be brief.\nAnd Rome?[/INST] In Italy.<|im_end|>",
            id="the template moves the system text",
        ),
        pytest.param(
            THOUGHTS_LEFT_OUT,
            "<think>\nHm.\n</think>\nItaly.",
            "assistant:<think>\nHm.\n</think>\nItaly.<|im_end|>",
            id="the template drops thoughts",
        ),
        pytest.param(
            THOUGHTS_LEFT_OUT,
            "Hm.\n</think>\nItaly.",
            "assistant:<think>\nHm.\n</think>\nItaly.<|im_end|>",
            id="the template drops thoughts, and the prompt opens them",
        ),
        pytest.param(
            "{{ messages[-1]['content'] | upper }}<|im_end|>",
            "Italy.",
            "AND ROME?<|im_end|>Italy.<|im_end|>",
            id="the template changes letters",
        ),
    ],
)
def test_an_answer_that_its_template_changes_is_trained_unchanged_with_the_templates_end_of_turn(
    template: str, answer: str, expected: str
) -> None:
    tokenizer = make_tokenizer("qwen", chat_template=template)
    turns = ({"role": "system", "content": "Be brief."}, *TURNS[:2], {"role": "user", "content": "And Rome?"})
    sample = encode_example(tokenizer, Example(id="0", query="", response=answer, messages=turns))
    assert tokenizer.decode([*sample.prompt_ids, *sample.response_ids]).endswith(expected)


@pytest.mark.parametrize("kind", ["llama2", "qwen", "gemma"])
@pytest.mark.parametrize("turn", ["m | tojson", "m['content'] | tojson", "m['content'] | replace('\\n', '/')"])
@pytest.mark.parametrize("opening", ["<|im_start|>", '<|im_start|>{"role": "assistant", "content": "'])
def test_an_answer_that_a_template_escapes_is_trained_escaped(kind: str, turn: str, opening: str) -> None:
    template = f"{{% for m in messages %}}{{{{ '<|im_start|>' + ({turn}) + '<|im_end|>\n' }}}}{{% endfor %}}"
    template += f"{{% if add_generation_prompt %}}{{{{ '{opening}' }}}}{{% endif %}}"
    tokenizer: Any = make_tokenizer(kind, chat=True, chat_template=template)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    for answer in ('He says "Rome".\n\té \\ 世', ' "a" ', "\n", "a"):
        turns = [*TURNS, {"role": "assistant", "content": answer}]
        sample = encode_example(tokenizer, Example(id="0", query="", response=answer, messages=TURNS))
        whole = tokenizer.apply_chat_template(turns, return_dict=True)["input_ids"]
        end = len(whole) - whole[::-1].index(tokenizer.convert_tokens_to_ids("<|im_end|>"))
        text = tokenizer.decode(whole[:end])
        ids = [*sample.prompt_ids, *sample.response_ids]
        if text.startswith(tokenizer.decode(sample.prompt_ids)):
            assert tokenizer.decode(ids) == text
        if whole[: len(sample.prompt_ids)] == [*sample.prompt_ids]:  # no token holds text of both prompt and answer
            assert ids == whole[:end]


_NAME = r"<\|[^|]+\|>|\[gMASK\]|<sop>|</?think>"
_TURN = "{% for m in messages %}{% if m['role'] == 'assistant' %}"
GLM = (  # no token ends a turn, and the prompt lacks the line break that begins an answer
    "[gMASK]<sop>{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
COHERE = (  # one token ends the answer, and the next one the turn
    _TURN
    + "<|CHATBOT|><|START_RESPONSE|>{{ m['content'] }}<|END_RESPONSE|>{% else %}<|USER|>{{ m['content'] }}{% endif %}"
    "<|END_OF_TURN|>{% endfor %}{% if add_generation_prompt %}<|CHATBOT|>{% endif %}"
)
HARMONY = (  # names of channels before the answer; another end in the last turn
    _TURN + "<|start|>assistant<|channel|>final<|message|>{{ m['content'] }}"
    "{% if loop.last and not add_generation_prompt %}<|return|>{% else %}<|end|>{% endif %}"
    "{% else %}<|start|>{{ m['role'] }}<|message|>{{ m['content'] }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
FALCON = (  # a space before the answer that the prompt lacks; answers are trimmed
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] | trim }}{% if not loop.last %}{{ '\n\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '\n\nassistant:' }}{% endif %}"
)


@pytest.mark.parametrize("kind", ["llama2", "qwen", "gemma"])
@pytest.mark.parametrize(
    ("template", "eos_token", "last"),
    [
        pytest.param(GLM, "<|user|>", None, id="glm"),
        pytest.param(COHERE, "<|END_OF_TURN|>", "<|END_OF_TURN|>", id="cohere"),
        pytest.param(COHERE, None, "<|END_RESPONSE|>", id="cohere-base"),
        pytest.param(HARMONY, "<|return|>", "<|return|>", id="harmony"),
        pytest.param(FALCON, None, None, id="falcon"),
    ],
)
def test_openings_and_ends_of_answers_are_those_of_the_template(
    kind: str, template: str, eos_token: str | None, last: str | None
) -> None:
    """Answers are encoded as the template renders them.

    Args:
        kind: The tokenizer.
        template: The chat template.
        eos_token: The tokenizer's EOS token, if it is a token of the template.
        last: The token with which training lets an answer end; ``None`` if the template ends no turn, so that EOS is
            appended.
    """
    tokenizer: Any = make_tokenizer(kind, chat=True, chat_template=template)
    names = dict.fromkeys(["<|user|>", "<|assistant|>", *re.findall(_NAME, template)])
    tokenizer.add_special_tokens({"additional_special_tokens": [*names]})
    if eos_token is not None:
        tokenizer.eos_token = eos_token
    assert end_of_turn(tokenizer) == tokenizer.convert_tokens_to_ids(last or tokenizer.eos_token)
    for answer in ("a", "final", "  In France.\n", "assistant"):
        turns = [*TURNS, {"role": "assistant", "content": answer}]
        sample = encode_example(tokenizer, Example(id="0", query="", response=answer, messages=TURNS))
        whole = tokenizer.apply_chat_template(turns, return_dict=True)["input_ids"]
        ids = [*sample.prompt_ids, *sample.response_ids]
        if last is None:
            assert ids == [*whole, tokenizer.eos_token_id]
        else:
            assert ids == whole[: len(ids)]
            assert tokenizer.convert_ids_to_tokens(ids[-1]) == last
            assert answer.strip() in tokenizer.decode(sample.response_ids)


def test_a_turn_may_end_with_an_added_token_that_is_not_special() -> None:
    """The token, added by ``add_tokens``, ends the training answer, and its name is no part of a response's text."""
    tokenizer: Any = make_tokenizer("gpt2", chat=True, chat_template=TEMPLATES["qwen"])
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"])
    turns = [TURNS[0], {"role": "assistant", "content": "In Italy."}]
    sample = encode_example(tokenizer, Example(id="0", query=TURNS[0]["content"], response="In Italy."))
    ids = [*sample.prompt_ids, *sample.response_ids]
    assert ids == tokenizer.apply_chat_template(turns, return_dict=True)["input_ids"][: len(ids)]
    assert tokenizer.convert_ids_to_tokens(ids[-1]) == "<|im_end|>"
    add_eos_tokens(tokenizer, [ids[-1]])
    assert Detokenizer(tokenizer)(sample.response_ids, sample.prompt_ids) == "In Italy."


QWEN3 = (  # the last answer always has a block of thoughts, even an empty one; earlier answers lose theirs
    _TURN + "{% set parts = m['content'].split('</think>') %}<|im_start|>assistant\n{% if loop.last %}<think>\n"
    "{{ parts[0].split('<think>')[-1].strip('\n') if parts | length > 1 }}\n</think>\n\n{% endif %}"
    "{{ parts[-1].strip() }}<|im_end|>\n{% else %}<|im_start|>user\n{{ m['content'] }}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("kind", ["qwen", "llama2", "gemma"])
def test_thoughts_that_a_template_writes_itself_are_trained_as_it_writes_them(kind: str) -> None:
    tokenizer: Any = make_tokenizer(kind, chat=True, chat_template=QWEN3)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    thought = "<think>\nHm.\n</think>\n\nIn Italy."
    for answer in (thought, thought + "\n", "In Italy.", " In Italy.\n"):
        turns = [
            TURNS[0],
            {"role": "assistant", "content": thought},
            TURNS[2],
            {"role": "assistant", "content": answer},
        ]
        sample = encode_example(tokenizer, Example(id="0", query="", response=answer, messages=tuple(turns[:3])))
        ids = [*sample.prompt_ids, *sample.response_ids]
        assert ids == tokenizer.apply_chat_template(turns, return_dict=True)["input_ids"][: len(ids)], answer
        assert tokenizer.convert_ids_to_tokens(ids[-1]) == "<|im_end|>"


def test_tags_of_thoughts_in_answers_are_special_tokens_and_in_questions_text() -> None:
    """Models write the tags as tokens, and templates look for them in earlier answers. Users cannot inject them."""
    content = "m['content'].split('</think>')[-1].lstrip('\n') if not loop.last else m['content']"
    template = _TURN + "{% set text = " + content + " %}{{ '<|im_start|>assistant\n' + text + '<|im_end|>\n' }}"
    template += "{% else %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endif %}"
    template += "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    tokenizer: Any = make_tokenizer("qwen", chat=True, chat_template=template)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    answer = "<think>\nHm.\n</think>\n\nIn Italy."
    turns = [TURNS[0], {"role": "assistant", "content": answer}] * 2
    for num_before in (1, 3):  # the first answer, and the second
        messages = tuple(turns[:num_before])
        sample = encode_example(tokenizer, Example(id="0", query="", response=answer, messages=messages))
        ids = [*sample.prompt_ids, *sample.response_ids]
        assert ids == tokenizer.apply_chat_template(turns[: num_before + 1], return_dict=True)["input_ids"][: len(ids)]
        assert ids[-1] == tokenizer.convert_tokens_to_ids("<|im_end|>")
        assert tokenizer.convert_tokens_to_ids("</think>") in sample.response_ids
    asked = encode_prompt(tokenizer, "What is </think>?")
    assert tokenizer.convert_tokens_to_ids("</think>") not in asked


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None)
@given(query=TEXTS, answer=TEXTS)
def test_plain_text_is_trained_as_a_whole(kind: str, query: str, answer: str) -> None:
    tokenizer = make_tokenizer(kind)
    template = "Q: {query}\nA:\n"
    sample = encode_example(tokenizer, Example(id="0", query=query, response=answer), template)
    actual = [*sample.prompt_ids, *sample.response_ids]
    text = template.replace("{query}", query)
    whole = [*prompt_prefix(tokenizer), *encode_text(tokenizer, text + answer)]
    if whole[: len(sample.prompt_ids)] == [*sample.prompt_ids]:
        assert actual == [*whole, tokenizer.eos_token_id]
    assert tokenizer.decode(actual, skip_special_tokens=True) == text + answer


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("template", ["{query}", "Q: {query}\nA:"])
def test_names_of_special_tokens_in_a_query_are_text_within_text(kind: str, template: str) -> None:
    tokenizer = make_tokenizer(kind)
    query = f"What is {tokenizer.eos_token} here?"
    expected = [*prompt_prefix(tokenizer), *encode_text(tokenizer, template.replace("{query}", query))]
    assert encode_prompt(tokenizer, query, template) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_given_text_of_templates_gains_no_space(kind: str) -> None:
    tokenizer = make_tokenizer(kind)
    detokenize = Detokenizer(tokenizer)
    [hash_id] = encode_text(tokenizer, "a#")[-1:]  # "#" within a text; alone, some tokenizers put a space before it
    prompt = encode_prompt(tokenizer, "Fill in:")
    for text in ("A{{1}}B", '{"name": "{{2}}", "age": {{1}}}', " A {{1}} B"):
        [tokens] = Template.parse(text).encode(tokenizer)
        filled = [hash_id if token is None else token for token in tokens]
        expected = text.replace("{{1}}", "#").replace("{{2}}", "##")
        assert detokenize(filled, prompt) == expected
    example = Example(id="0", query="", response="In France.", spans=((3, 9),))
    given_ids = encode_given(tokenizer, example)
    assert detokenize([token for token in given_ids if token is not None], prompt) == "In ."


def test_the_trained_end_of_turn_ends_answers(tmp_path: Path) -> None:
    """A base model's tokenizer may name another EOS token than its template: both end texts after loading."""
    folder = make_model("qwen", tmp_path / "model", chat=True)
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"query": "Where?", "response": "Here."}) + "\n")
    task = InstructionFiles(train=str(path), validation=str(path))
    data = InstructionDataModule(task, PretrainedTokenizer(source=str(folder)), batch_size=1)
    tokenizer = data.built_tokenizer
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert end_of_turn(tokenizer) == end
    assert end in tokenizer.init_kwargs["ends_of_sequence"]
    batch = next(iter(data.train_dataloader())).batch
    assert batch.input_ids[0, -1] == end


TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALL = [{"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}]
TOOL_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}{% for m in messages %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] or '' }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


CALLS = [*CALL, {"id": "2", "type": "function", "function": {"name": "time", "arguments": {"at": "<|im_end|> Ü"}}}]
MISTRAL = (
    "{{ bos_token or '' }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS] {{ m.content }}[/TOOL_RESULTS]{% else %}"
    "{% if m.content %} {{ m.content }}{% endif %}{% if m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}"
    "{{ c.function | tojson }}{{ ', ' if not loop.last }}{% endfor %}]{% endif %}{{ eos_token }}{% endif %}{% endfor %}"
)
LLAMA = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{% if m.tool_calls %}{% if m.tool_calls | length > 1 %}{{ raise_exception('single calls only') }}{% endif %}"
    '{% set c = m.tool_calls[0].function %}{"name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}'
    "{% else %}{{ m.content }}{% endif %}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
TOOL_TURN = {"role": "tool", "tool_call_id": "1", "content": "sunny"}
"""The result of a call."""
CALL_TURNS: dict[str, dict[str, Any]] = {
    "calls": {"content": None, "tool_calls": CALL},
    "parallel": {"content": None, "tool_calls": CALLS},
    "both": {"content": "I look.", "tool_calls": CALL},
}
"""Turns of the assistant by name: a call, two parallel calls, and a text with a call."""


def read_chat(path: Path, turns: list[dict[str, Any]], tools: object = None, **options: Any) -> Sequence[Example]:
    """Write a conversation into a JSONL file and read it as a task: an example for each trained answer."""
    path.write_text(json.dumps({"messages": turns, **({"tools": tools} if tools else {})}) + "\n")
    task = InstructionFiles(train=str(path), preset="messages", validation_fraction=0, assistant_parts="all", **options)
    return task.examples("train")


# Which turns a template can render: Mistral's has no parallel calls here, and Llama's has single calls without text.
@pytest.mark.parametrize(
    ("kind", "template", "names"),
    [
        ("qwen", TOOL_TEMPLATE, ("calls", "parallel", "both")),
        ("llama2", MISTRAL, ("calls", "both")),
        ("llama3", LLAMA, ("calls",)),
    ],
)
def test_turns_of_tool_calls_are_trained_as_the_template_renders_them(
    tmp_path: Path, kind: str, template: str, names: tuple[str, ...]
) -> None:
    turns: list[dict[str, Any]] = [TURNS[0]]
    for name in names:
        turns += [{"role": "assistant", "weight": 1, **CALL_TURNS[name]}, TOOL_TURN]
    turns.append({"role": "assistant", "content": "Sunny."})
    tokenizer = make_tokenizer(kind, chat=True, chat_template=template)
    tools = TOOLS if "tools" in template else None
    samples = [encode_example(tokenizer, example) for example in read_chat(tmp_path / "rows.jsonl", turns, tools)]
    whole: Any = tokenizer.apply_chat_template(turns, tools=TOOLS, tokenize=False)
    for sample, place in zip(samples, range(1, len(turns), 2), strict=True):  # every second turn is the assistant's
        before: Any = tokenizer.apply_chat_template(
            turns[:place], tools=TOOLS, tokenize=False, add_generation_prompt=True
        )
        assert tokenizer.decode(sample.prompt_ids) == tokenizer.decode(
            tokenizer(before, add_special_tokens=False).input_ids
        )
        text = str(tokenizer.decode([*sample.prompt_ids, *sample.response_ids]))
        assert str(tokenizer.decode(tokenizer(whole, add_special_tokens=False).input_ids)).startswith(text)
        assert tokenizer.convert_ids_to_tokens(sample.response_ids[-1]) == (
            tokenizer.eos_token if kind == "llama2" else ENDS[kind]
        )
    [last] = read_chat(tmp_path / "rows.jsonl", turns[:2], tools, assistant_turns="last")
    assert encode_example(tokenizer, last).response_ids == samples[0].response_ids


@pytest.mark.parametrize(
    ("kind", "template", "name"),
    [
        pytest.param("qwen", None, "calls", id="qwen drops a call"),
        pytest.param("gemma", None, "calls", id="gemma drops a call"),
        pytest.param("qwen", None, "both", id="qwen drops a call after a text"),
        pytest.param("llama3", LLAMA, "parallel", id="llama refuses parallel calls"),
        pytest.param("llama3", LLAMA, "both", id="llama drops a text before a call"),
    ],
)
def test_what_a_template_drops_from_a_trained_turn_is_refused_by_row_and_turn(
    tmp_path: Path, kind: str, template: str | None, name: str
) -> None:
    tokenizer = make_tokenizer(kind, chat=True, **({"chat_template": template} if template else {}))
    [example] = read_chat(tmp_path / "rows.jsonl", [TURNS[0], {"role": "assistant", **CALL_TURNS[name]}])
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: turn 2 \(assistant\)"):
        encode_example(tokenizer, example)


def test_text_parts_of_a_content_in_data_are_joined_and_other_parts_refused(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "Where is "}, {"type": "text", "text": "Paris?"}]
    answer = {"role": "assistant", "content": [{"type": "text", "text": "In France."}]}
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": parts}, answer]}))
    [example] = InstructionFiles(train=str(path), validation_fraction=0).examples("train")
    tokenizer: Any = make_tokenizer("llama2", chat=True)
    sample = encode_example(tokenizer, example)
    turns = [TURNS[0], {"role": "assistant", "content": "In France."}]
    whole = tokenizer.apply_chat_template(turns, return_dict=True)["input_ids"]
    assert [*sample.prompt_ids, *sample.response_ids] == whole
    image = [*parts, {"type": "image", "image": "a.png"}]
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: .*content in turn 1 \(user\)"):
        read_chat(path, [{"role": "user", "content": image}, answer])


def test_templates_that_read_arguments_as_text_get_the_text(tmp_path: Path) -> None:
    """DeepSeek's templates read arguments as JSON text, as rows and requests have them; other templates read values."""
    template = TOOL_TEMPLATE.replace("c.function | tojson", "c.function.name + '\\n' + c.function.arguments")
    tokenizer: Any = make_tokenizer("qwen", chat=True, chat_template=template)
    arguments = json.dumps({"city": "Rome é", "days": 2}, ensure_ascii=False)
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    turns = [TURNS[0], {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "sunny"},
             {"role": "assistant", "content": "Sunny."}]  # fmt: skip
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": turns}) + "\n")
    examples = InstructionFiles(train=str(path), validation_fraction=0, assistant_parts="all").examples("train")
    assert len(examples) == 2
    for example, num_turns in zip(examples, (2, 4), strict=True):
        sample = encode_example(tokenizer, example)
        ids = [*sample.prompt_ids, *sample.response_ids]
        assert ids == tokenizer.apply_chat_template(turns[:num_turns], return_dict=True)["input_ids"][: len(ids)]
    prompt = tokenizer.apply_chat_template(turns[:3], add_generation_prompt=True, return_dict=True)["input_ids"]
    values = {**call, "function": {"name": "weather", "arguments": json.loads(arguments)}}
    assert encode_prompt(tokenizer, "", messages=[turns[0], {**turns[1], "tool_calls": [values]}, turns[2]]) == prompt


FIRST_CALL = TOOL_TEMPLATE.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]")
ARGUMENTS_ALONE = TOOL_TEMPLATE.replace("c.function | tojson", "c.function.arguments | tojson")


@pytest.mark.parametrize(
    ("kind", "template", "name", "is_refused"),
    [
        pytest.param("qwen", None, "calls", True, id="a template without calls"),
        pytest.param("gpt2", None, "both", True, id="a template without calls, a turn with text"),
        pytest.param("qwen", FIRST_CALL, "parallel", True, id="a template that drops the second call"),
        pytest.param("qwen", FIRST_CALL, "calls", False, id="a template that would drop a second call"),
        pytest.param("qwen", TOOL_TEMPLATE, "parallel", False, id="parallel calls"),
        pytest.param("qwen", ARGUMENTS_ALONE, "calls", False, id="a template that renders arguments without the name"),
        pytest.param("llama2", MISTRAL, "calls", False, id="Mistral"),
        pytest.param("llama3", LLAMA, "calls", False, id="Llama"),
    ],
)
def test_calls_that_a_template_drops_from_the_context_are_refused_by_row_and_turn(
    tmp_path: Path, kind: str, template: str | None, name: str, is_refused: bool
) -> None:
    template = template or TEMPLATES[kind].replace("m['content']", "(m['content'] or '')")
    tokenizer = make_tokenizer(kind, chat=True, chat_template=template)
    turns = [TURNS[0], {"role": "assistant", **CALL_TURNS[name]}, {"role": "tool", "content": "sunny"}]
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": [*turns, {"role": "assistant", "content": "Sunny."}]}))
    [example] = InstructionFiles(train=str(path), validation_fraction=0).examples("train")
    if is_refused:
        with pytest.raises(ValueError, match=r"rows\.jsonl:1: messages\.1\.tool_calls: .*turn 2 \(assistant\)"):
            encode_example(tokenizer, example)
        with pytest.raises(ValueError, match=r"messages\.1\.tool_calls"):
            encode_prompt(tokenizer, "", messages=turns)
    else:
        prompt = tokenizer.decode(encode_example(tokenizer, example).prompt_ids)
        assert ("Rome" if template == ARGUMENTS_ALONE else "weather") in prompt


def test_reasoning_is_trained_where_the_template_renders_it(tmp_path: Path) -> None:
    turn = {"role": "assistant", "content": "4", "reasoning_content": "two and two"}
    [example] = read_chat(tmp_path / "rows.jsonl", [TURNS[0], turn])
    tokenizer = make_tokenizer("qwen", chat=True)
    with pytest.raises(ValueError, match="reasoning_content"):
        encode_example(tokenizer, example)
    tokenizer.chat_template = TOOL_TEMPLATE.replace(
        "{{ m['content']", "{{ m.reasoning_content or '' }}|{{ m['content']"
    )
    assert tokenizer.decode(encode_example(tokenizer, example).response_ids) == "two and two|4<|im_end|>"


def test_tools_and_calls_of_a_chat_reach_the_template(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "Rome?"}, {"role": "assistant", "content": None, "tool_calls": CALL},
             {"role": "tool", "tool_call_id": "1", "content": "sunny"},
             {"role": "assistant", "content": "Sunny."}]  # fmt: skip
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": turns, "tools": TOOLS}) + "\n")
    [example] = InstructionFiles(train=str(path), preset="messages", validation_fraction=0).examples("train")
    tokenizer = make_tokenizer("qwen", chat=True, chat_template=TOOL_TEMPLATE)
    sample = encode_example(tokenizer, example)
    actual = [*sample.prompt_ids, *sample.response_ids]
    whole: Any = tokenizer.apply_chat_template(turns, tools=TOOLS, return_dict=True)["input_ids"]
    assert actual == whole[: len(actual)]
    assert tokenizer.decode(sample.response_ids) == "Sunny.<|im_end|>"


@pytest.mark.parametrize(
    ("answer", "word"),
    [
        pytest.param({"content": "bad", "weight": 0}, "weight", id="weight 0"),
        pytest.param({"content": "4", "weight": 0.5}, "weight", id="weight 0.5"),
        pytest.param({"content": " "}, "text", id="no text"),
        pytest.param({"content": "I look.", "tool_calls": CALL}, "tool_calls", id="calls"),
        pytest.param({"content": "4", "reasoning_content": "two and two"}, "reasoning_content", id="reasoning"),
    ],
)
def test_fields_of_an_answer_that_training_would_ignore_are_refused_by_name(
    tmp_path: Path, answer: dict[str, Any], word: str
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": [TURNS[0], {"role": "assistant", **answer}]}) + "\n")
    with pytest.raises(ValueError, match=rf"rows\.jsonl:1: .*{word}"):
        InstructionFiles(train=str(path), preset="messages", validation_fraction=0).examples("train")
