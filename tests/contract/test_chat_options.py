"""Options of a chat template reach the prompt at every door, are stored with the model, and are refused if unread."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from refusion_lit import load
from refusion_lit.cli import main
from refusion_lit.data.conversations import encode_prompt, encode_response
from refusion_lit.data.module import InstructionDataModule
from refusion_lit.data.tokenizers import PretrainedTokenizer, tokenizer_files, tokenizer_from_files
from refusion_lit.decoding import Autoregressive
from refusion_lit.modeling.chat_template import get_chat_options, set_chat_options
from refusion_lit.modeling.prompt_code import prompt_code
from refusion_lit.modeling.saving import save_model
from refusion_lit.tasks import InstructionFiles
from support.servers import address, serving
from support.tokenizer_zoo import make_model, make_tokenizer

QUERY = "Where is Paris?"
# The template reads the options "enable_thinking" (if it is false, the prompt ends with "no") and "known" (the roles
# whose turns are rendered), and sets the variable "marks".
TEMPLATE = (
    "{%- set marks = namespace(last=messages | length) %}"
    "{%- for m in messages %}{%- if m.role not in known | default(['system', 'user', 'assistant', 'tool']) %}"
    "{%- else %}{{ '<|im_start|>' + m.role + '\n' + (m.content or '') }}"
    "{%- for call in m.tool_calls or [] %}{{ '\ncall ' + (call.function.arguments | tojson) }}{%- endfor %}"
    "{{ '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{ 'no\n\n' }}{%- endif %}{%- endif %}"
)
OFF: dict[str, Any] = {"enable_thinking": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_model("qwen", tmp_path_factory.mktemp("qwen"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def reference(folder: Path, turns: list[dict[str, Any]] | None = None, **options: Any) -> list[int]:
    turns = turns or [{"role": "user", "content": QUERY}]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rendered: Any = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True, **options)
    return rendered["input_ids"]


def test_python_and_files_keep_the_options(folder: Path, tmp_path: Path) -> None:
    assert load(folder, device="cpu").encode(QUERY) == reference(folder)
    model = load(folder, device="cpu", chat_template_kwargs=OFF)
    expected = reference(folder, **OFF)
    assert model.encode(QUERY) == expected != reference(folder)
    assert model.encode(QUERY, chat_options={"enable_thinking": True}) == reference(folder)
    save_model(model.backbone, model.tokenizer, tmp_path / "exported")
    assert load(tmp_path / "exported", device="cpu").encode(QUERY) == expected
    assert load(tmp_path / "exported", device="cpu", chat_template_kwargs={}).encode(QUERY) == reference(folder)
    assert get_chat_options(tokenizer_from_files(tokenizer_files(model.tokenizer))) == OFF
    names: dict[str, Any] = {"tokenizer": model.tokenizer}
    program = prompt_code(model.tokenizer, "{query}").replace('"..."', json.dumps(QUERY))
    exec(program, names)
    ids = names["input_ids"]
    assert (ids["input_ids"] if isinstance(ids, dict) else ids)[0].tolist() == expected


def test_commands_and_training_data_have_the_options(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = load(folder, device="cpu", chat_template_kwargs=OFF)
    [expected] = model.generate([QUERY], decoder=Autoregressive(), max_new_tokens=8)
    options = ["--decoder=Autoregressive", "--max_new_tokens=8", f"--chat_template_kwargs={json.dumps(OFF)}"]
    assert main(["generate", f"--ckpt_path={folder}", f"--prompt={QUERY}", *options]) == 0
    assert capsys.readouterr().out.rstrip("\n") == expected.text.rstrip("\n")
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"query": QUERY, "response": "Paris"}) + "\n")
    task = InstructionFiles(train=str(path), validation=str(path), test=str(path))
    data = InstructionDataModule(task, PretrainedTokenizer(source=str(folder)), 1, chat_template_kwargs=OFF)
    batch = next(iter(data.train_dataloader())).batch
    assert batch.input_ids[0, : batch.prompt_lengths[0]].tolist() == reference(folder, **OFF)


def test_the_server_has_the_options_of_each_request(folder: Path) -> None:
    pytest.importorskip("fastapi")
    model = load(folder, device="cpu")
    with serving(model, Autoregressive()) as server:
        choices: list[dict[str, Any]] = [{}, OFF, {"enable_thinking": True}]
        for options in choices:
            answer = ask(address(server), chat_template_kwargs=options)
            assert answer["usage"]["prompt_tokens"] == len(reference(folder, **options))
        with pytest.raises(urllib.error.HTTPError) as error:
            ask(address(server), chat_template_kwargs={"thinking": False})
        refused = json.loads(error.value.read())["error"]
        assert (error.value.code, refused["param"]) == (400, "chat_template_kwargs")
        assert "enable_thinking" in refused["message"]


def test_turns_of_tools_reach_the_template_and_dropped_roles_are_refused(folder: Path) -> None:
    pytest.importorskip("fastapi")
    call = {"id": "1", "type": "function", "function": {"name": "where", "arguments": '{"city": "Paris"}'}}
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": QUERY},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "France", "tool_call_id": "1"},
    ]
    # What the server gives to the template: arguments as values instead of JSON text.
    rendered = [*turns]
    rendered[1] = {"role": "assistant", "content": "", "tool_calls": [{"function": {"arguments": {"city": "Paris"}}}]}
    model = load(folder, device="cpu")
    with serving(model, Autoregressive()) as server:
        answer = ask(address(server), messages=turns)
        assert answer["usage"]["prompt_tokens"] == len(reference(folder, rendered))
        dropped_turn, turn_without_content = {"role": "developer", "content": "Be brief."}, {"role": "user"}
        for number, turn in ((0, dropped_turn), (2, turn_without_content)):
            with pytest.raises(urllib.error.HTTPError) as error:
                ask(address(server), messages=[*turns[:number], turn, *turns[number + 1 :]])
            refused = json.loads(error.value.read())["error"]
            assert error.value.code == 400
            assert refused["param"].startswith(f"messages.{number}")


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"thinking": False}, id="the template does not read it"),
        pytest.param({"messages": []}, id="the conversation itself"),
        pytest.param({"role": "user"}, id="a field of a turn"),
        pytest.param({"marks": 1}, id="a variable that the template sets"),
        pytest.param([1], id="a list"),
        pytest.param("x", id="a text"),
    ],
)
def test_options_that_the_template_does_not_read_are_refused(folder: Path, options: Any) -> None:
    with pytest.raises(ValueError, match=r"^chat_template_kwargs: .*"):
        load(folder, device="cpu", chat_template_kwargs=options)


def test_a_template_that_inspects_the_results_of_tools_keeps_them() -> None:
    tokenizer = make_tokenizer("qwen", chat=True)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'tool' and m.content[0] != '{' %}{{ raise_exception('no JSON') }}"
        "{% endif %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    )
    turns = [{"role": "user", "content": QUERY}, {"role": "tool", "content": '{"in": "France"}'}]
    assert "France" in str(tokenizer.decode(encode_prompt(tokenizer, QUERY, messages=turns)))
    with pytest.raises(ValueError, match=r"^messages: .*no JSON"):
        encode_prompt(tokenizer, QUERY, messages=[turns[0], {"role": "tool", "content": "France"}])


def test_a_tokenizer_without_template_takes_no_options() -> None:
    with pytest.raises(ValueError, match=r"^chat_template_kwargs: .*no chat template"):
        set_chat_options(make_tokenizer("qwen"), OFF)


def test_a_response_after_an_opening_that_history_lacks_ends_as_the_template_ends_turns() -> None:
    """The generation prompt adds "no" before the answer, which no earlier turn of the assistant has."""
    tokenizer = make_tokenizer("qwen", chat=True)
    tokenizer.chat_template = TEMPLATE
    set_chat_options(tokenizer, OFF)
    prompt = encode_prompt(tokenizer, QUERY)
    response = encode_response(tokenizer, "Paris", prompt, QUERY)
    assert tokenizer.decode(response) == "Paris<|im_end|>"


def ask(address: str, **fields: Any) -> dict[str, Any]:
    body = {"model": "additions", "messages": [{"role": "user", "content": QUERY}], "max_tokens": 4, **fields}
    head = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{address}/v1/chat/completions", json.dumps(body).encode(), head)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())
