"""Every way to use a model has the tokens of transformers, for tokenizers of many kinds.

The ways are the Python API, the commands, the server, the harness, training and exports. Prompts are compared with
``tokenizer(text)`` or ``tokenizer.apply_chat_template``, answers with greedy ``generate``, and training data with the
rendered conversation. `nox -s parity` runs all; two tokenizers run with the other tests (``tests/contract``).
"""

from __future__ import annotations

import io
import json
import urllib.request
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from refusion_lit import SlotDiffusionModule, load
from refusion_lit.cli import main
from refusion_lit.cli.chat import Chat
from refusion_lit.cli.export import name_decoder
from refusion_lit.cli.model_options import Setup
from refusion_lit.contrib.rl import GroupPolicy, Reward
from refusion_lit.data.detokenizer import Detokenizer
from refusion_lit.data.examples import encode_example
from refusion_lit.data.module import InstructionDataModule
from refusion_lit.data.tokenizers import PretrainedTokenizer
from refusion_lit.decoding import Autoregressive, ReFusion
from refusion_lit.modeling.load import BackboneConfig
from refusion_lit.modeling.prompt_code import prompt_code
from refusion_lit.modeling.saving import save_model
from refusion_lit.tasks import Example, InstructionFiles
from refusion_lit.text_model import TextModel
from refusion_lit.traces.document import read_trace
from refusion_lit.types import DecodingOptions, ModelTraits, Prompt, SamplingParams
from support.servers import address, serving
from support.tokenizer_zoo import KINDS, LEGACY, REAL, ZEPHYR, make_model, make_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore")

QUERY = "The capital of France"
NUM_TOKENS = 8
CONVERSATION = [
    {"role": "user", "content": "Where is Paris?"},
    {"role": "assistant", "content": "In France."},
    {"role": "user", "content": "And  Rome?\n"},
    {"role": "assistant", "content": "It is in Italy,\n    é 世."},
]
FORMS = ("plain", "family", "zephyr")
"""Without chat template, with the family's, and with a template that writes no BOS."""


@dataclass
class Reference:
    """What transformers gives for a model's directory."""

    folder: Path
    prompt: list[int]
    answer: list[int]
    has_template: bool

    @property
    def tokenizer(self) -> Any:
        return AutoTokenizer.from_pretrained(self.folder)

    @property
    def text(self) -> str:
        """The text that continues the prompt."""
        whole = str(self.tokenizer.decode([*self.prompt, *self.answer], skip_special_tokens=True))
        return whole[len(str(self.tokenizer.decode(self.prompt, skip_special_tokens=True))) :]


@pytest.fixture(scope="module", params=product((*KINDS, *LEGACY, *REAL), FORMS), ids="-".join)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    kind, form = request.param
    names = {"chat_template": ZEPHYR} if form == "zephyr" and kind not in REAL else {}
    folder = make_model(kind, tmp_path_factory.mktemp("model"), chat=form != "plain", **names)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    if form == "zephyr" and kind in REAL:
        tokenizer.chat_template = ZEPHYR
        tokenizer.save_pretrained(folder)
    prompt = tokenizer(QUERY)["input_ids"]
    if form != "plain":
        turns = [{"role": "user", "content": QUERY}]
        prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)["input_ids"]
    return Reference(folder, prompt, generate_with_transformers(folder, prompt), form != "plain")


def generate_with_transformers(folder: Path, prompt: list[int]) -> list[int]:
    """Return the tokens of transformers' greedy ``generate``."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = torch.tensor([prompt])
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": NUM_TOKENS, "pad_token_id": 0}
    # Without a mask, generate takes tokens with the padding's id for padding.
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()


@pytest.fixture(scope="module")
def model(reference: Reference) -> TextModel:
    return load(reference.folder, device="cpu")


def test_python_and_commands_answer_as_transformers(
    reference: Reference, model: TextModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert model.encode(QUERY) == reference.prompt
    [row] = model.generate([QUERY], decoder=Autoregressive(), max_new_tokens=NUM_TOKENS)
    assert row.token_ids == reference.answer
    text = row.text
    # The texts may differ only in a character whose bytes are not all generated.
    if "\N{REPLACEMENT CHARACTER}" not in reference.text + text:
        assert text == reference.text
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": QUERY}) + "\n")
    options = [f"--ckpt_path={reference.folder}", "--decoder=Autoregressive", f"--max_new_tokens={NUM_TOKENS}"]
    assert main(["generate", *options, f"--prompts={prompts}"]) == 0
    assert json.loads(capsys.readouterr().out)["response"] == text
    assert main(["generate", *options, f"--prompt={QUERY}"]) == 0
    assert capsys.readouterr().out == text + "\n"
    assert main(["trace", *options, f"--prompt={QUERY}", f"--output={tmp_path / 'trace.json'}"]) == 0
    trace = read_trace(tmp_path / "trace.json")
    assert (trace.prompt_length, [*trace.token_ids], trace.response) == (len(reference.prompt), reference.answer, text)


def test_the_command_for_tests_answers_as_transformers(
    reference: Reference, model: TextModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"query": QUERY, "response": "Paris"}) + "\n")
    asked: list[tuple[int, ...]] = []
    decode = TextModel.decode

    def record(self: TextModel, prompts: Any, *args: Any, **options: Any) -> Any:
        asked.extend(prompt.token_ids for prompt in prompts)
        return decode(self, prompts, *args, **options)

    monkeypatch.setattr(TextModel, "decode", record)
    files = [f"--data.task.{split}={path}" for split in ("train", "validation", "test")]
    options = ["--model.decoders={ar: Autoregressive}", f"--model.sampling.max_new_tokens={NUM_TOKENS}"]
    options += [f"--ckpt_path={reference.folder}", f"--runs_dir={tmp_path}", "--trainer.accelerator=cpu"]
    assert main(["test", "--data.task=InstructionFiles", *files, *options]) == 0
    assert {*asked} == {tuple(reference.prompt)}
    [predictions] = tmp_path.rglob("predictions_ar.jsonl")
    [row] = map(json.loads, predictions.read_text().splitlines())
    assert row["response"] == Detokenizer(model.tokenizer)(reference.answer, reference.prompt)


def test_a_chat_answers_as_transformers(reference: Reference, model: TextModel) -> None:
    sampling = SamplingParams(max_new_tokens=NUM_TOKENS)
    chat = Chat(Setup(model, Autoregressive(), sampling, DecodingOptions()), None, Console(file=io.StringIO()))
    first = chat.ask(QUERY)
    assert first == Detokenizer(model.tokenizer)(reference.answer, reference.prompt)
    question = "And  Rome?"
    turns = [{"role": "user", "content": QUERY}, {"role": "assistant", "content": first}]
    turns += [{"role": "user", "content": question}]
    tokenizer = reference.tokenizer
    prompt = tokenizer(question)["input_ids"]
    if reference.has_template:
        prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)["input_ids"]
    answer = generate_with_transformers(reference.folder, prompt)
    assert chat.ask(question) == Detokenizer(model.tokenizer)(answer, prompt)


def test_stop_strings_cut_the_text_in_python_server_and_command(
    reference: Reference, model: TextModel, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("fastapi")
    text = Detokenizer(model.tokenizer)(reference.answer, reference.prompt)
    if "\N{REPLACEMENT CHARACTER}" in text or len(text) < 2:
        return  # a stop string would be half a character
    options = [f"--ckpt_path={reference.folder}", "--decoder=Autoregressive", f"--max_new_tokens={NUM_TOKENS}"]
    stops = (text[0], text[1:3], text[-1])
    with serving(model, Autoregressive()) as server:
        for stop in stops:
            expected = text[: text.index(stop)]
            sampling = SamplingParams(max_new_tokens=NUM_TOKENS, stop=(stop,))
            [row] = model.generate([QUERY], decoder=Autoregressive(), sampling=sampling)
            assert (row.text, row.finish_reason) == (expected, "stop")
            for stream in (False, True):
                assert ask_server(address(server), reference, stream=stream, stop=[stop])[0] == expected
    assert main(["generate", *options, f"--prompt={QUERY}", "--stop", json.dumps([stops[1]])]) == 0
    assert capsys.readouterr().out == text[: text.index(stops[1])] + "\n"


def ask_server(url: str, reference: Reference, endpoint: str | None = None, **fields: Any) -> tuple[str, int | None]:
    """Send ``QUERY`` to an endpoint, by default to chats if the model has a template.

    Returns:
        The text, and the number of prompt tokens; ``None`` in place of the number for a stream.
    """
    endpoint = endpoint or ("chat/completions" if reference.has_template else "completions")
    query: dict[str, Any] = {
        "completions": {"prompt": QUERY, "max_tokens": NUM_TOKENS},
        "chat/completions": {"messages": [{"role": "user", "content": QUERY}], "max_tokens": NUM_TOKENS},
        "responses": {"input": QUERY, "max_output_tokens": NUM_TOKENS},
    }[endpoint]
    body = {"model": "additions", **query, **fields}
    head = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/{endpoint}", json.dumps(body).encode(), head)
    with urllib.request.urlopen(request, timeout=60) as response:
        received = response.read().decode()
    if endpoint == "responses":
        answer = json.loads(received)
        return answer["output"][0]["content"][0]["text"], answer["usage"]["input_tokens"]
    if fields.get("stream"):
        events = [json.loads(line[6:]) for line in received.splitlines() if line.startswith("data: {")]
        choices = [event["choices"][0] for event in events if event["choices"]]
        return "".join(read_text(choice.get("delta", choice)) for choice in choices), None
    answer = json.loads(received)
    [choice] = answer["choices"]
    return read_text(choice.get("message", choice)), answer["usage"]["prompt_tokens"]


def read_text(part: dict[str, Any]) -> str:
    """Return the text of a chat's message or delta, or of a completion."""
    return part.get("content", part.get("text")) or ""


def test_the_server_answers_as_transformers(reference: Reference, model: TextModel) -> None:
    pytest.importorskip("fastapi")
    text = Detokenizer(model.tokenizer)(reference.answer, reference.prompt)
    with serving(model, Autoregressive()) as server:
        assert ask_server(address(server), reference) == (text, len(reference.prompt))
        assert ask_server(address(server), reference, stream=True) == (text, None)
        assert ask_server(address(server), reference, "responses") == (text, len(reference.prompt))
        prompt = reference.tokenizer(QUERY)["input_ids"]  # completions have no template
        text = Detokenizer(model.tokenizer)(generate_with_transformers(reference.folder, prompt), prompt)
        assert ask_server(address(server), reference, "completions") == (text, len(prompt))


def test_the_harness_asks_as_transformers(reference: Reference, model: TextModel) -> None:
    pytest.importorskip("lm_eval", reason="needs lm-eval (pip install lm-eval)")
    from lm_eval.api.instance import Instance

    from refusion_lit.evaluation.lm_eval import RefusionLitModel

    adapter = RefusionLitModel(model, decoder=Autoregressive())
    prompts: list[list[int]] = []
    generate = model.generate_ids

    def record(asked: Any, **options: Any) -> Any:
        prompts.extend(asked)
        rows = generate(asked, **options)
        assert [row.token_ids for row in rows] == [answer]
        return rows

    context, expected, answer = QUERY, reference.prompt, reference.answer
    if reference.has_template:
        context = adapter.apply_chat_template([{"role": "user", "content": QUERY}])
        if expected[0] != model.tokenizer.bos_token_id:  # the harness adds BOS where a template writes none
            expected = reference.tokenizer(context)["input_ids"]
            answer = generate_with_transformers(reference.folder, expected)
    adapter.model.generate_ids = record  # type: ignore[method-assign]
    try:
        options = {"until": [], "max_gen_toks": NUM_TOKENS, "do_sample": False}
        adapter.generate_until([Instance("generate_until", {}, (context, options), 0, metadata=("task", 0, 1))])
    finally:
        del adapter.model.generate_ids
    assert prompts == [expected]


class LengthReward(Reward):
    """Rewards long responses."""

    def rewards(self, examples: Any, responses: Any) -> list[float]:
        return [float(len(response)) for response in responses]


def test_data_of_training_and_rollouts_has_the_prompts_of_transformers(
    reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"query": QUERY, "response": f"Paris {i}"}) + "\n" for i in range(2)))
    task = InstructionFiles(train=str(path), validation=str(path), test=str(path))
    data = InstructionDataModule(task, PretrainedTokenizer(source=str(reference.folder)), batch_size=1)
    for loader in (data.train_dataloader(), data.val_dataloader()):
        batch: Any = next(iter(loader))
        batch = getattr(batch, "batch", batch)
        assert batch.input_ids[0, : batch.prompt_lengths[0]].tolist() == reference.prompt
    assert [*data.training_prompt().token_ids] == reference.prompt
    assert [[*prompt.token_ids] for prompt, _ in data.test_prompts()] == [reference.prompt] * 2

    asked: list[Prompt] = []
    decode = TextModel.decode

    def record(self: TextModel, prompts: Any, *args: Any, **options: Any) -> Any:
        asked.extend(prompts)
        return decode(self, prompts, *args, **options)

    monkeypatch.setattr(TextModel, "decode", record)
    objective = GroupPolicy(group_size=2, max_new_tokens=4, rewards=[LengthReward()])
    module = SlotDiffusionModule(
        backbone=BackboneConfig(source=str(reference.folder)), objective=objective,
        decoders={"a": Autoregressive()}, sampling=SamplingParams(max_new_tokens=4),
    )  # fmt: skip
    trainer = L.Trainer(
        accelerator="cpu", max_steps=1, logger=False, limit_val_batches=0, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(module, InstructionDataModule(task, PretrainedTokenizer(source=str(reference.folder)), batch_size=1))
    assert asked
    assert all([*prompt.token_ids] == reference.prompt for prompt in asked)


def test_an_export_asks_and_answers_as_transformers(reference: Reference, tmp_path: Path) -> None:
    assert main(["export", f"--ckpt_path={reference.folder}", f"--output={tmp_path / 'out'}"]) == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    scope: dict[str, Any] = {"tokenizer": tokenizer}
    exec(prompt_code(tokenizer, "{query}").replace('"..."', json.dumps(QUERY)), scope)
    assert scope["input_ids"].tolist() == [reference.prompt]
    assert generate_with_transformers(tmp_path / "out", reference.prompt) == reference.answer
    assert load(tmp_path / "out", device="cpu").encode(QUERY) == reference.prompt


def test_every_assistant_turn_is_trained_as_the_template_renders_it(reference: Reference, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    tokenizer = reference.tokenizer
    data = [{"messages": CONVERSATION}] if reference.has_template else [{"query": QUERY, "response": " is\n  Paris é"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in data))
    task = InstructionFiles(train=str(path), validation=str(path))
    encoder = PretrainedTokenizer(source=str(reference.folder))
    module = InstructionDataModule(task, encoder, batch_size=1, max_length=512)
    rows = []
    for loaded in module.train_dataloader():
        batch = loaded.batch
        length = int(batch.prompt_lengths[0] + batch.response_lengths[0])
        rows.append((batch.input_ids[0, :length].tolist(), int(batch.prompt_lengths[0])))
    if not reference.has_template:
        [(ids, length)] = rows
        assert ids == [*tokenizer(QUERY + " is\n  Paris é")["input_ids"], tokenizer.eos_token_id]
        assert ids[:length] == reference.prompt
        return
    whole = tokenizer.apply_chat_template(CONVERSATION, return_dict=True)["input_ids"]
    ends = []
    for ids, length in sorted(rows, key=lambda row: len(row[0])):
        assert ids == whole[: len(ids)]
        assert ids[-1] in tokenizer.all_special_ids or ids[-1] in tokenizer.added_tokens_decoder
        ends.append(len(ids))
        turns = CONVERSATION[: 2 * len(ends) - 1]
        prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)["input_ids"]
        assert ids[:length] == prompt
    assert len(ends) == 2


def test_names_of_special_tokens_in_a_query_are_text(reference: Reference) -> None:
    tokenizer = load(reference.folder, device="cpu").tokenizer
    name = str(tokenizer.eos_token)
    named, plain = (
        [*encode_example(tokenizer, Example(id="0", query=f"What is {word} here?", response="A token.")).prompt_ids]
        for word in (name, "it")
    )
    assert named.count(tokenizer.eos_token_id) == plain.count(tokenizer.eos_token_id)
    assert str(tokenizer.decode(named)) == str(tokenizer.decode(plain)).replace("is it here", f"is {name} here")


TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"city": {"type": "string"}}}}]
CALL = [{"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}]
WITH_TOOLS = [
    {"role": "user", "content": "Rome? "},
    {"role": "assistant", "content": None, "tool_calls": CALL},
    {"role": "tool", "tool_call_id": "1", "content": " sunny\n  é"},
    {"role": "assistant", "content": "  Sunny."},
    {"role": "user", "content": "And Paris?"},
    {"role": "assistant", "content": "世 it rains."},
]
TOOL_TEMPLATE = (
    "{{ bos_token or '' }}{% if tools %}{{ 'tools: ' + (tools | tojson) + eos_token + '\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + (m['content'] or '') }}"
    "{% for call in m['tool_calls'] or [] %}{{ call['function'] | tojson }}{% endfor %}{{ eos_token + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)


@pytest.mark.parametrize("kind", [*KINDS, *LEGACY, *REAL])
def test_a_conversation_with_tools_is_trained_as_its_template_renders_it(kind: str, tmp_path: Path) -> None:
    tokenizer: Any = make_tokenizer(kind, chat=True)
    tokenizer.chat_template = TOOL_TEMPLATE
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": WITH_TOOLS, "tools": TOOLS}) + "\n")
    samples = [
        encode_example(tokenizer, example)
        for example in InstructionFiles(train=str(path), validation_fraction=0, assistant_parts="all").examples("train")
    ]
    assert len(samples) == 3
    whole = tokenizer.apply_chat_template(WITH_TOOLS, tools=TOOLS, return_dict=True)["input_ids"]
    if tokenizer.bos_token_id not in (None, tokenizer.eos_token_id):
        assert whole.count(tokenizer.bos_token_id) == 1
    for sample, num_turns in zip(samples, (1, 3, 5), strict=True):
        ids = [*sample.prompt_ids, *sample.response_ids]
        options = {"tools": TOOLS, "add_generation_prompt": True, "return_dict": True}
        assert [*sample.prompt_ids] == tokenizer.apply_chat_template(WITH_TOOLS[:num_turns], **options)["input_ids"]
        assert ids == whole[: len(ids)]
        assert ids[-1] == tokenizer.eos_token_id


@pytest.mark.parametrize("kind", [*KINDS, *REAL])
def test_an_exported_program_decodes_as_we_do(kind: str, tmp_path: Path) -> None:
    """The ReFusion program in an export, run by transformers, on a real tokenizer's prompt and ids."""
    model = load(make_model(kind, tmp_path / "base"), device="cpu")
    model.backbone.traits = ModelTraits(attention="causal", predictions=("mask", "next_token_in_slot"))
    decoder = ReFusion(slot_size=4, slot_threshold=0.3, token_threshold=0.3)
    name_decoder(model, decoder)
    save_model(model.backbone, model.tokenizer, tmp_path / "export")
    library: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "export").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "export")
    options = {"custom_generate": str(tmp_path / "export"), "trust_remote_code": True, "do_sample": False}
    named = f"What is {tokenizer.eos_token} here?"  # text, not the token
    for query in (QUERY, "é 世", "def f(x):\n    return x", named):
        scope: dict[str, Any] = {"tokenizer": tokenizer}
        exec(prompt_code(tokenizer, "{query}").replace('"..."', json.dumps(query)), scope)
        prompt = scope["input_ids"]
        assert prompt.tolist() == [model.encode(query)]
        output = library.generate(prompt, max_new_tokens=24, **options)
        [row] = model.generate([query], decoder=decoder, max_new_tokens=24)
        assert output[0, prompt.shape[1] :].tolist() == row.token_ids
