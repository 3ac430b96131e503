"""Prompts begin with one BOS token where transformers' prompts do, in all ways to use a model; answers never do."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from refusion_lit import load
from refusion_lit.cli import main
from refusion_lit.data.examples import encode_example
from refusion_lit.data.module import InstructionDataModule
from refusion_lit.data.tokenizers import PretrainedTokenizer, tokenizer_files, tokenizer_from_files
from refusion_lit.decoding import Autoregressive
from refusion_lit.modeling.prompt_code import prompt_code
from refusion_lit.modeling.saving import save_model
from refusion_lit.modeling.vocabulary import prompt_prefix, set_add_bos
from refusion_lit.tasks import Example, InstructionFiles
from refusion_lit.types import Prompt, SamplingParams
from support.servers import address, serving
from support.tokenizer_zoo import KINDS, WITH_BOS, ZEPHYR, make_model, make_tokenizer

PROMPT = "The capital of France"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: make_model(kind, tmp_path_factory.mktemp(kind)) for kind in KINDS}


def reference_ids(folder: Path, text: str = PROMPT) -> list[int]:
    """Return the ids of transformers' tokenizer for a model's directory."""
    ids: Any = AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
    return ids


@pytest.mark.parametrize("kind", KINDS)
def test_python_and_training_data_have_the_prompts_of_transformers(kind: str, folders: dict[str, Path]) -> None:
    model = load(folders[kind], device="cpu")
    expected = reference_ids(folders[kind])
    assert model.encode(PROMPT) == expected
    assert (expected[0] == model.tokenizer.bos_token_id) == (kind in WITH_BOS)
    base = AutoModelForCausalLM.from_pretrained(folders[kind]).eval()
    output = base.generate(torch.tensor([expected]), do_sample=False, max_new_tokens=8)[0, len(expected) :].tolist()
    [row] = model.generate([PROMPT], decoder=Autoregressive(), max_new_tokens=8)
    assert row.token_ids == output
    sample = encode_example(model.tokenizer, Example(id="0", query=PROMPT, response="Paris"))
    assert [*sample.prompt_ids] == expected
    # An answer has no BOS token. Its last token is EOS, which for gpt2 is the same token.
    assert model.tokenizer.bos_token_id is None or model.tokenizer.bos_token_id not in [*sample.response_ids][:-1]


@pytest.mark.parametrize("kind", KINDS)
def test_commands_and_server_have_the_prompts_of_python(
    kind: str, folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("fastapi")
    model = load(folders[kind], device="cpu")
    [expected] = model.generate([PROMPT], decoder=Autoregressive(), max_new_tokens=8)
    options = ["--decoder", "Autoregressive", "--max_new_tokens", "8"]
    assert main(["generate", "--ckpt_path", str(folders[kind]), "--prompt", PROMPT, *options]) == 0
    out, err = capsys.readouterr()
    assert out.rstrip("\n") == expected.text.rstrip("\n")
    assert err.count("add_bos") == (kind in WITH_BOS), "a note says that prompts begin with a BOS token"
    with serving(model, Autoregressive()) as server:
        body = {"model": "additions", "prompt": PROMPT, "max_tokens": 8}
        head = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{address(server)}/v1/completions", json.dumps(body).encode(), head)
        with urllib.request.urlopen(request, timeout=60) as answer:
            actual = json.loads(answer.read())
    assert actual["choices"][0]["text"] == expected.text
    assert actual["usage"]["prompt_tokens"] == len(reference_ids(folders[kind]))


@pytest.mark.parametrize("kind", KINDS)
def test_chat_templates_write_bos_themselves(kind: str) -> None:
    tokenizer = make_tokenizer(kind, chat=True)
    turns = [{"role": "user", "content": "Where is Paris?"}]
    expected: Any = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)["input_ids"]
    sample = encode_example(tokenizer, Example(id="0", query="Where is Paris?", response="Paris"))
    assert [*sample.prompt_ids] == expected
    tokenizer.chat_template = ZEPHYR
    expected = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert [*encode_example(tokenizer, Example(id="0", query="Where is Paris?", response="a")).prompt_ids] == expected


@pytest.mark.parametrize("kind", ["llama2", "llama3", "gemma", "gpt2"])
@pytest.mark.parametrize("template", [None, "chat", ZEPHYR])
def test_the_option_add_bos_adds_one_bos_or_none_or_follows_the_tokenizer(kind: str, template: str | None) -> None:
    tokenizer = make_tokenizer(kind, chat=template == "chat")
    tokenizer.chat_template = template if template == ZEPHYR else tokenizer.chat_template
    bos = tokenizer.bos_token_id

    def prompt() -> list[int]:
        return [*encode_example(tokenizer, Example(id="0", query=PROMPT, response="a")).prompt_ids]

    by_default = prompt()
    set_add_bos(tokenizer, True)
    assert prompt()[0] == bos
    assert prompt()[1] != bos
    set_add_bos(tokenizer, False)
    # A chat template writes its BOS token itself, whatever the option says.
    has_removable_bos = template is None and by_default[0] == bos
    assert prompt() == (by_default[1:] if has_removable_bos else by_default)
    set_add_bos(tokenizer, "auto")
    assert prompt() == by_default


@pytest.mark.parametrize("kind", WITH_BOS)
def test_a_prompt_template_that_names_bos_gets_no_second(kind: str) -> None:
    tokenizer = make_tokenizer(kind)
    template = f"{tokenizer.bos_token}Q: {{query}}"
    for add_bos in ("auto", True, False):
        set_add_bos(tokenizer, add_bos)  # type: ignore[arg-type]
        ids = [*encode_example(tokenizer, Example(id="0", query=PROMPT, response="a"), template).prompt_ids]
        assert ids[0] == tokenizer.bos_token_id
        assert ids.count(tokenizer.bos_token_id) == 1


@pytest.mark.parametrize("add_bos", [True, False])
def test_the_option_is_stored_with_the_model(tmp_path: Path, folders: dict[str, Path], add_bos: bool) -> None:
    kind = "gpt2" if add_bos else "llama3"  # a tokenizer whose default is the opposite
    model = load(folders[kind], device="cpu", add_bos=add_bos)
    expected = model.encode(PROMPT)
    assert expected != reference_ids(folders[kind])
    assert (expected[0] == model.tokenizer.bos_token_id) is add_bos
    save_model(model.backbone, model.tokenizer, tmp_path / "exported")
    exported = load(tmp_path / "exported", device="cpu")
    assert exported.encode(PROMPT) == expected
    assert load(tmp_path / "exported", device="cpu", add_bos="auto").encode(PROMPT) == reference_ids(folders[kind])
    assert prompt_prefix(tokenizer_from_files(tokenizer_files(model.tokenizer))) == prompt_prefix(model.tokenizer)


def test_bos_needs_a_token(folders: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match=r"add_bos: .*no BOS token"):
        load(folders["qwen"], device="cpu", add_bos=True)
    with pytest.raises(ValueError, match=r"add_bos: .*'yes'"):
        load(folders["qwen"], device="cpu", add_bos="yes")  # type: ignore[arg-type]


@pytest.mark.parametrize("add_bos", [None, "auto", True, False])
def test_the_data_module_has_the_option(tmp_path: Path, folders: dict[str, Path], add_bos: Any) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"query": PROMPT, "response": "Paris"}) + "\n")
    task = InstructionFiles(train=str(path), validation=str(path), test=str(path))
    source = PretrainedTokenizer(source=str(folders["llama2"]))
    data = InstructionDataModule(task, source, batch_size=1, add_bos=add_bos)
    expected = reference_ids(folders["llama2"])
    if add_bos is False:
        expected = expected[1:]
    batch = next(iter(data.train_dataloader())).batch
    assert batch.input_ids[0, : batch.prompt_lengths[0]].tolist() == expected
    assert [*data.training_prompt().token_ids] == expected  # rollouts begin with it
    [(prompt, _)] = data.test_prompts()
    assert [*prompt.token_ids] == expected


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("add_bos", ["auto", True, False])
@pytest.mark.parametrize("template", [None, "chat", ZEPHYR])
def test_the_program_on_the_card_encodes_likewise(kind: str, add_bos: Any, template: str | None) -> None:
    """The card of an exported model shows a program for transformers; its prompt is the prompt of the training."""
    tokenizer = make_tokenizer(kind, chat=template == "chat")
    tokenizer.chat_template = template if template == ZEPHYR else tokenizer.chat_template
    if add_bos is True and tokenizer.bos_token_id is None:
        return
    set_add_bos(tokenizer, add_bos)
    scope: dict[str, Any] = {"tokenizer": tokenizer}
    exec(prompt_code(tokenizer, "Q: {query}"), scope)
    expected = encode_example(tokenizer, Example(id="0", query="...", response="a"), "Q: {query}").prompt_ids
    assert scope["input_ids"].tolist() == [[*expected]]


@pytest.mark.parametrize("kind", KINDS)
def test_the_program_reads_names_in_a_template_though_the_tokenizer_splits_names(kind: str) -> None:
    tokenizer = make_tokenizer(kind, split_special_tokens=True)
    template = f"{tokenizer.bos_token or tokenizer.eos_token}[INST] {{query}} [/INST]"
    scope: dict[str, Any] = {"tokenizer": tokenizer}
    exec(prompt_code(tokenizer, template), scope)
    expected = encode_example(tokenizer, Example(id="0", query="...", response="a"), template).prompt_ids
    assert scope["input_ids"].tolist() == [[*expected]]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_the_harness_conditions_on_bos_once(kind: str, folders: dict[str, Path]) -> None:
    pytest.importorskip("lm_eval", reason="needs lm-eval (pip install lm-eval)")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from refusion_lit.evaluation.lm_eval import RefusionLitModel

    model = load(folders[kind], device="cpu")
    ours = RefusionLitModel(model, decoder=Autoregressive())
    theirs = HFLM(pretrained=str(folders[kind]), device="cpu", batch_size=1)

    def ask(kind_of_request: str, *args: Any) -> list[Instance]:
        return [Instance(kind_of_request, {}, args, 0, metadata=("task", 0, 1))]

    for context, text in ((PROMPT, " is Paris."), ("", PROMPT)):
        actual = ours.loglikelihood(ask("loglikelihood", context, text))[0]
        expected = theirs.loglikelihood(ask("loglikelihood", context, text))[0]
        # The mask token that loading has added shares the probabilities.
        assert actual[0] == pytest.approx(expected[0], abs=0.05), (context, text)
    [alone] = ours.loglikelihood(ask("loglikelihood", "", PROMPT))
    assert ours.loglikelihood_rolling(ask("loglikelihood_rolling", PROMPT)) == [alone[0]]
    options = {"until": ["\n\n"], "max_gen_toks": 8, "do_sample": False}
    request = ask("generate_until", PROMPT, options)
    prompt = Prompt(token_ids=tuple(reference_ids(folders[kind])), id="0")
    [row] = model.decode([prompt], Autoregressive(), SamplingParams(max_new_tokens=8, stop=("\n\n",))).rows
    assert ours.generate_until(request) == [row.text]
