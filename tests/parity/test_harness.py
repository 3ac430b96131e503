"""The adapter gives the numbers and texts of the harness's own model class, HFLM, for next-token decoding.

Both work in double precision. HFLM scores a second BOS token in rolling texts, so it is compared with
``add_bos_token=False`` there.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from refusion_lit import load
from refusion_lit.decoding import Autoregressive
from refusion_lit.modeling.vocabulary import prompt_prefix
from support.tokenizer_zoo import KINDS, LEGACY, TEXT, ZEPHYR, make_model, make_tokenizer, write_model

pytest.importorskip("lm_eval", reason="needs lm-eval (pip install lm-eval)")
pytest.importorskip("accelerate", reason="the harness needs it for --model hf")
pytestmark = pytest.mark.filterwarnings("ignore")

from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.evaluator import simple_evaluate  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from refusion_lit.evaluation.lm_eval import RefusionLitModel, evaluate  # noqa: E402

PAIRS = [
    ("The capital of France", " is Paris."),
    ("The capital of France ", "is Paris."),
    ("The capital of France\n", "Paris is in France."),
    ("Question: Where is Paris?\nAnswer:", " Paris is in France."),
    ("The capit", "al of Italy is Rome."),  # a token may reach over the border
    ("def add(a, b):\n", "    return a + b\n"),
    ("A 世", "界 é"),
    ("", "The capital of France is Paris."),
    ("", " is"),
]


def ask(kind: str, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [Instance(kind, {}, args, i, metadata=("task", i, 1)) for i, args in enumerate(arguments)]  # type: ignore[arg-type]


@pytest.fixture(scope="module", params=[*KINDS, *LEGACY, "mistral-v1", "mistral-v3", "deepseek"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return without_bytes(make_model(request.param, tmp_path_factory.mktemp("model")))


def without_bytes(folder: Path) -> Path:
    """Let a model write no single bytes: HFLM shows a run of them as several broken characters, we as one."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    names = AutoTokenizer.from_pretrained(folder).get_vocab()
    with torch.no_grad():
        model.lm_head.weight[[token for name, token in names.items() if name.startswith("<0x")]] = 0
    model.save_pretrained(folder)
    return folder


def ours(folder: Path, **options: Any) -> RefusionLitModel:
    return RefusionLitModel(load(folder, device="cpu", dtype="float64", **options), decoder=Autoregressive())


def theirs(folder: Path, **options: Any) -> HFLM:
    return HFLM(pretrained=str(folder), device="cpu", dtype="float64", batch_size=1, **options)


@pytest.mark.parametrize("add_bos", [None, True, False])
def test_log_likelihoods(folder: Path, add_bos: bool | None) -> None:
    if add_bos is True and AutoTokenizer.from_pretrained(folder).bos_token_id is None:
        return
    library = theirs(folder, add_bos_token=add_bos)
    pairs = [pair for pair in PAIRS if not pair[0] or library._encode_pair(*pair)[1]]  # else HFLM has nothing to score
    requests = ask("loglikelihood", *pairs)
    # One by one: HFLM takes pairs that are the same tokens, split at different places, for each other.
    expected = [library.loglikelihood([request], disable_tqdm=True)[0] for request in requests]
    actual = ours(folder, **({} if add_bos is None else {"add_bos": add_bos})).loglikelihood(requests)
    assert [value for value, _ in actual] == pytest.approx([value for value, _ in expected], rel=1e-10)
    assert [greedy for _, greedy in actual] == [greedy for _, greedy in expected]


def test_rolling_log_likelihoods_of_short_and_long_texts(folder: Path) -> None:
    requests = ask("loglikelihood_rolling", ("The capital of France",), (TEXT * 3,), (TEXT * 5,))
    model = ours(folder)
    assert len(model._windows(model.model.tokenizer(TEXT * 5)["input_ids"])) > 1  # type: ignore[arg-type]
    actual = model.loglikelihood_rolling(requests)
    expected = theirs(folder, add_bos_token=False).loglikelihood_rolling(requests, disable_tqdm=True)
    assert actual == pytest.approx(expected, rel=1e-10)


def test_generated_texts(folder: Path) -> None:
    model, library = ours(folder), theirs(folder)
    base = {"max_gen_toks": 12, "do_sample": False}
    contexts = [context for context, _ in PAIRS if context]
    requests = ask("generate_until", *((context, {**base, "until": []}) for context in contexts))
    free = library.generate_until(requests, disable_tqdm=True)
    # Stop strings within the texts, at their beginning, and names of special tokens.
    names = [str(name) for name in AutoTokenizer.from_pretrained(folder).all_special_tokens]
    stops = [["\n\n"], [free[0][2:4] or "x"], [free[1][:1] or "x", free[1][3:6] or "y"], names]
    for until in ([], *stops):
        requests = ask("generate_until", *((context, {**base, "until": until}) for context in contexts))
        assert model.generate_until(requests) == library.generate_until(requests, disable_tqdm=True), until


def make_ending(kind: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer that puts EOS after texts, and BOS before texts if it has one."""
    tokenizer = make_tokenizer(kind)
    names = {str(name): int(tokenizer.convert_tokens_to_ids(name)) for name in tokenizer.all_special_tokens}  # type: ignore[arg-type]
    form = f"{tokenizer.bos_token or ''} $A {tokenizer.eos_token}".strip()
    template = processors.TemplateProcessing(single=form, pair=f"{form} $B", special_tokens=[*names.items()])
    tokenizer.backend_tokenizer.post_processor = template  # type: ignore[assignment]
    return tokenizer


def make_words() -> PreTrainedTokenizerFast:
    """Return a tokenizer of whole words, in which other words are ``<unk>``."""
    words = ["<unk>", "</s>", *TEXT.replace(".", " . ").replace(":", " : ").split()]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(dict.fromkeys(words))}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")


@pytest.mark.parametrize("kind", ["llama2", "qwen", "words"])
def test_tokenizers_that_end_texts_or_know_few_words(kind: str, tmp_path: Path) -> None:
    tokenizer: Any = make_words() if kind == "words" else make_ending(kind)
    folder = without_bytes(write_model(tokenizer, tmp_path / "model"))
    model, library = ours(folder), theirs(folder)
    contexts = [context for context, _ in PAIRS if context]
    assert [model._encode(context) for context in contexts] == [library.tok_encode(context) for context in contexts]
    known = {tokenizer.unk_token_id, tokenizer.eos_token_id}
    assert any(known & {*model._encode(context)} for context in contexts)
    requests = ask("loglikelihood", *(pair for pair in PAIRS if not pair[0] or library._encode_pair(*pair)[1]))
    expected = [library.loglikelihood([request], disable_tqdm=True)[0] for request in requests]
    assert [value for value, _ in model.loglikelihood(requests)] == pytest.approx([value for value, _ in expected])
    if tokenizer.bos_token_id is None:  # HFLM scores a second BOS
        requests = ask("loglikelihood_rolling", ("The capital of 世",), (TEXT * 5,))
        values = library.loglikelihood_rolling(requests, disable_tqdm=True)
        assert model.loglikelihood_rolling(requests) == pytest.approx(values, rel=1e-10)
    options = {"max_gen_toks": 8, "do_sample": False, "until": []}
    requests = ask("generate_until", *((context, options) for context in contexts))
    assert model.generate_until(requests) == library.generate_until(requests, disable_tqdm=True)
    model.model.tokenizer.chat_template = library.tokenizer.chat_template = ZEPHYR
    context = library.apply_chat_template([{"role": "user", "content": "Where is Paris?"}])
    assert model.apply_chat_template([{"role": "user", "content": "Where is Paris?"}]) == context
    assert model._encode(context) == library.tok_encode(context)
    assert model._split(context, "In 世 .") == library._encode_pair(context, "In 世 .")


def test_names_of_special_tokens_in_documents_stay_text(folder: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = ZEPHYR
    tokenizer.save_pretrained(folder)
    try:
        model = ours(folder)
        name = str(tokenizer.eos_token)
        query = f"What does {name} mean, and {model.model.tokenizer.mask_token}?"
        plain = model._encode(query)
        assert tokenizer.eos_token_id not in plain[1:]
        assert model.model.tokenizer.mask_token_id not in plain
        context = model.apply_chat_template([{"role": "user", "content": query}])
        assert query in context
        expected = model.model.encode(query)
        # The harness adds BOS where a template writes none, which chats elsewhere do not.
        assert model._encode(context) == [*prompt_prefix(model.model.tokenizer), *expected]
        known, scored = model._split(context, f"It ends {name}.")
        assert scored.count(tokenizer.eos_token_id) == 0
        assert known.count(tokenizer.eos_token_id) == expected.count(tokenizer.eos_token_id)
        # Without such names, chats have the tokens that the harness gives.
        library = theirs(folder)
        turns = [{"role": "user", "content": "Where is Paris?"}]
        for opened in (True, False):
            context = library.apply_chat_template(turns, add_generation_prompt=opened)
            assert model.apply_chat_template(turns, add_generation_prompt=opened) == context
            assert model._encode(context) == library.tok_encode(context)
            assert model._split(context, "In France.") == library._encode_pair(context, "In France.")
    finally:
        tokenizer.chat_template = None
        tokenizer.save_pretrained(folder)
        (folder / "chat_template.jinja").unlink(missing_ok=True)


@pytest.mark.parametrize("kind", ["llama2", "gemma"])
def test_system_turns_that_a_template_refuses_are_left_out(kind: str, tmp_path: Path) -> None:
    template = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}" + ZEPHYR
    folder = make_model(kind, tmp_path / "model", chat=True, chat_template=template)
    model, library = ours(folder), theirs(folder)
    turns = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Where is Paris?"}]
    for opened in (True, False):
        context = library.apply_chat_template(turns, add_generation_prompt=opened)
        assert model.apply_chat_template(turns, add_generation_prompt=opened) == context
        assert model._encode(context) == library.tok_encode(context)
    model.model.tokenizer.chat_template = "{{ raise_exception('no chat') }}"
    with pytest.raises(ValueError, match="no chat"):  # without a system turn to leave out
        model.apply_chat_template(turns[1:])


ROWS = [
    {"q": "Where is Paris?", "a": "In France.", "choices": ["In Italy.", "In France."]},
    {"q": "Where is Rome? ", "a": "In Italy.", "choices": ["In Italy.", " In France."]},
    {"q": "What is é 世?\n", "a": "The capital.", "choices": ["the  capital", "The capital."]},
]
CHATS = {
    "plain": {},
    "examples as text": {"num_fewshot": 2},
    "chat": {"apply_chat_template": True, "system_instruction": "You are the assistant."},
    "examples as turns": {"apply_chat_template": True, "num_fewshot": 2, "fewshot_as_multiturn": True},
    "examples in a turn": {"apply_chat_template": True, "num_fewshot": 1, "fewshot_as_multiturn": False},
}


@pytest.mark.parametrize("template", ["family", "zephyr"])
@pytest.mark.parametrize("kind", [*KINDS, "llama2-always", "mistral-v3"])
def test_whole_tasks(kind: str, template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers and scores of tasks with examples, chats, system turns and openings of answers."""
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    folder = make_model(kind, tmp_path / "model", chat=True)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        unwritten = [token for name, token in tokenizer.get_vocab().items() if name.startswith("<0x")]
        unwritten += [] if tokenizer.pad_token_id is None else [tokenizer.pad_token_id]  # our decoders never write it
        model.lm_head.weight[unwritten] = 0
    model.config.max_position_embeddings = 2048
    model.save_pretrained(folder)
    if template == "zephyr":
        tokenizer.chat_template = ZEPHYR
        tokenizer.save_pretrained(folder)
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    data = {
        "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(path)}, "cache_dir": str(tmp_path)},
        "test_split": "test", "fewshot_split": "test", "doc_to_text": "Question: {{q}}\nAnswer:",
    }  # fmt: skip
    answers = {
        "output_type": "generate_until", "doc_to_target": "{{a}}", "metric_list": [{"metric": "exact_match"}],
        "generation_kwargs": {"until": ["\n\n", "Question:"], "max_gen_toks": 8, "do_sample": False},
    }  # fmt: skip
    choice = {"output_type": "multiple_choice", "doc_to_target": 0, "doc_to_choice": "{{choices}}",
              "metric_list": [{"metric": "acc"}]}  # fmt: skip
    tasks = [
        {**data, **answers, "task": "answers"}, {**data, **answers, "task": "opened", "gen_prefix": "It is"},
        {**data, **choice, "task": "choice"}, {**data, **choice, "task": "opened_choice", "gen_prefix": "It is"},
    ]  # fmt: skip
    adapter, library = ours(folder), theirs(folder)
    for name, chat in CHATS.items():
        options: dict[str, Any] = {"task_manager": TaskManager(include_defaults=False), "bootstrap_iters": 0, **chat}
        actual: Any = evaluate(adapter, tasks, **options)
        expected: Any = simple_evaluate(model=library, tasks=list(tasks), **options)
        for task in expected["samples"]:
            rows = zip(actual["samples"][task], expected["samples"][task], strict=True)
            for our_row, their_row in rows:
                assert our_row["arguments"] == their_row["arguments"]
                for our_answer, their_answer in zip(our_row["resps"], their_row["resps"], strict=True):
                    if "choice" in task:
                        assert our_answer[0][0] == pytest.approx(their_answer[0][0], rel=1e-10), (name, task)
                        assert our_answer[0][1] == their_answer[0][1]
                    else:
                        assert our_answer == their_answer, (name, task)
