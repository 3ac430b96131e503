"""The adapter for lm-evaluation-harness, run by the harness on tasks of local files."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import combinations
from math import comb
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from support.published import MODELS

pytest.importorskip("lm_eval", reason="needs lm-eval (pip install lm-eval)")
pytestmark = [pytest.mark.filterwarnings("ignore")]

from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

import refusion_lit  # noqa: E402
from refusion_lit.cli import main  # noqa: E402
from refusion_lit.data.encoding import encode_text  # noqa: E402
from refusion_lit.decoding import Autoregressive, Generation, LLaDA, ReFusion  # noqa: E402
from refusion_lit.evaluation.likelihood import autoregressive, check_likelihood, monte_carlo_masked  # noqa: E402
from refusion_lit.evaluation.lm_eval import RefusionLitModel  # noqa: E402
from refusion_lit.evaluation.lm_eval import evaluate as evaluate_all  # noqa: E402
from refusion_lit.modeling.load import BackboneConfig  # noqa: E402
from refusion_lit.modeling.saving import save_model  # noqa: E402
from refusion_lit.types import ModelTraits, SamplingParams  # noqa: E402

MODEL = Path(__file__).parents[1] / "goldens" / "models" / "additions-clean"
# The harness's own 13 000 task files are left out: reading them takes seconds.
evaluate = partial(evaluate_all, task_manager=TaskManager(include_defaults=False), bootstrap_iters=0)
QUERIES = ["12+34,56+78>", "11+22,33+44>", "50+49,10+10>"]


@pytest.fixture
def adapter() -> RefusionLitModel:
    return RefusionLitModel(refusion_lit.load(MODEL), decoder=ReFusion(slot_size=4), batch_size=2, num_draws=8)


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    rows = [{"q": q, "a": "".join(f"{s}={eval(s)};" for s in q[:-1].split(","))} for q in QUERIES]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({**row, "choices": [row["a"], "12+34=47;"]}) + "\n" for row in rows))
    return {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(path)}, "cache_dir": str(tmp_path)},
            "test_split": "test", "doc_to_text": "{{q}}"}  # fmt: skip


def _sums(data: dict[str, object], name: str = "sums", **options: object) -> dict[str, object]:
    """Return a task that asks for the sums and looks for the exact answer."""
    return {**data, "task": name, "doc_to_target": "{{a}}", "output_type": "generate_until", "target_delimiter": "",
            "metric_list": [{"metric": "exact_match"}],
            "generation_kwargs": {"until": ["\n"], "max_gen_toks": 24, "do_sample": False, **options}}  # fmt: skip


def _answers(results: dict[str, Any], name: str = "sums") -> list[str]:
    """Return the answers of a task in the order of its questions."""
    samples = sorted(results["samples"][name], key=lambda sample: sample["doc_id"])
    return [sample["resps"][0][0] for sample in samples]


def test_generate_until_with_the_harness(adapter: RefusionLitModel, data: dict[str, object]) -> None:
    results = evaluate(adapter, [_sums(data), _sums(data, "cut", until=["="], max_gen_toks=10)])
    model = refusion_lit.load(MODEL)
    for name, options in (("sums", {"max_new_tokens": 24}), ("cut", {"max_new_tokens": 10, "stop": ("=",)})):
        expected = model.generate(QUERIES, decoder=ReFusion(slot_size=4), sampling=SamplingParams(**options))
        assert _answers(results, name) == [g.text for g in expected]
        right = sum(
            output == s["target"] for output, s in zip(_answers(results, name), results["samples"][name], strict=True)
        )
        assert results["results"][name]["exact_match,none"] == pytest.approx(right / 3)
        figures = results["throughput"][name]
        assert figures["num_prompts"] == 3
        assert figures["num_tokens"] == sum(g.num_tokens for g in expected)
        assert figures["num_forwards"] == sum(g.num_forwards for g in expected)
        assert figures["tokens_per_forward"] == figures["num_tokens"] / figures["num_forwards"]
        assert figures["tokens_per_second"] == figures["num_tokens"] / figures["seconds"] > 0
    assert all(len(text) == 5 for text in _answers(results, "cut"))  # 12+34, and nothing from the stop string on
    assert results["throughput"]["cut"]["num_tokens"] < results["throughput"]["sums"]["num_tokens"]


def test_the_harness_own_model_finds_the_same_likelihoods_in_an_export(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="the harness needs it for --model hf")
    from lm_eval.models.huggingface import HFLM

    model = refusion_lit.load(MODEL)
    model.backbone.traits = ModelTraits(attention="causal", predictions=("next_token",))
    save_model(model.backbone, model.tokenizer, tmp_path / "model")
    pairs = [("12+34,56+78>", "12+34=46;"), ("1+2,3+4>", "1+2=4;3")]
    requests = [Instance("loglikelihood", {}, pair, index) for index, pair in enumerate(pairs)]
    library: Any = HFLM(pretrained=str(tmp_path / "model"), device="cpu", dtype="float32", batch_size=1)
    ours = RefusionLitModel(refusion_lit.load(tmp_path / "model")).loglikelihood(requests)
    theirs = library.loglikelihood(requests)
    assert [value for value, _ in theirs] == pytest.approx([value for value, _ in ours], rel=1e-4)
    assert [greedy for _, greedy in theirs] == [greedy for _, greedy in ours]


def test_no_more_tokens_than_asked_for(adapter: RefusionLitModel, data: dict[str, object]) -> None:
    results = evaluate(adapter, [_sums(data, max_gen_toks=9, until=[])])
    assert results["throughput"]["sums"]["num_tokens"] == 3 * 9
    assert [len(text) for text in _answers(results)] == [9, 9, 9]


def test_a_larger_batch_takes_fewer_calls_and_changes_no_answer(data: dict[str, object]) -> None:
    answers, num_calls = {}, Counter()
    for batch_size in (1, 3):
        model = refusion_lit.load(MODEL)
        body = model.backbone.model.get_decoder()
        body.register_forward_hook(lambda *_, size=batch_size: num_calls.update([size]))
        adapter = RefusionLitModel(model, decoder=ReFusion(slot_size=4), batch_size=batch_size)
        answers[batch_size] = _answers(evaluate(adapter, [_sums(data, do_sample=True, temperature=2.0)]))
    assert answers[1] == answers[3]
    assert 0 < num_calls[3] < num_calls[1]


def test_multiple_choice_with_the_harness(adapter: RefusionLitModel, data: dict[str, object]) -> None:
    task = {**data, "task": "choices", "doc_to_target": 0, "doc_to_choice": "{{choices}}",
            "output_type": "multiple_choice", "target_delimiter": "",
            "metric_list": [{"metric": "acc"}]}  # fmt: skip
    results = evaluate(adapter, [task])
    model = adapter.model
    for sample in results["samples"]["choices"]:
        for (value, _), choice in zip(sample["filtered_resps"], sample["doc"]["choices"], strict=True):
            ids = [int(i) for i in model.tokenizer(sample["doc"]["q"], add_special_tokens=False)["input_ids"]]
            total = 0.0
            for token in model.tokenizer(choice, add_special_tokens=False)["input_ids"]:
                logits = model.backbone.model(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids))).logits
                total += float(logits[0, -1, : model.backbone.special_tokens.vocab_size].log_softmax(-1)[token])
                ids.append(token)
            assert value == pytest.approx(total, abs=1e-4)


def test_the_masked_estimate_with_the_harness(adapter: RefusionLitModel, data: dict[str, object]) -> None:
    task = {**data, "task": "choices", "doc_to_target": 0, "doc_to_choice": "{{choices}}",
            "output_type": "multiple_choice", "target_delimiter": "",
            "metric_list": [{"metric": "acc"}]}  # fmt: skip
    adapter.likelihood = "monte_carlo_masked"
    results = evaluate(adapter, [task], limit=1)
    settings = results["refusion_lit"]
    assert (settings["likelihood"], settings["num_draws"], settings["decoders"]) == ("monte_carlo_masked", 8, [])
    (sample,) = results["samples"]["choices"]
    for (value, _), choice in zip(sample["filtered_resps"], sample["doc"]["choices"], strict=True):
        context, text = [encode_text(adapter.model.tokenizer, part) for part in (sample["doc"]["q"], choice)]
        expected = monte_carlo_masked(adapter.model.backbone, context, text, num_draws=8, batch_size=8)
        assert value == pytest.approx(expected, abs=1e-4)


def test_the_masked_estimate_is_the_mean_over_masks() -> None:
    path = MODEL.with_name("additions-bidirectional")
    overrides = BackboneConfig(source=str(path), attention="bidirectional")
    backbone = refusion_lit.load(path, overrides=overrides).backbone
    mask = backbone.special_tokens.mask_token_id
    context, text = [5, 6, 7], [8, 9]
    expected, length = 0.0, len(text)
    for count in (1, 2):
        for chosen in combinations(range(length), count):
            ids = [*context, *(mask if i in chosen else t for i, t in enumerate(text))]
            allowed = torch.ones(1, 5, 5, dtype=torch.bool)
            with torch.no_grad():
                hidden = backbone.hidden_states(torch.tensor([ids]), torch.arange(5)[None], allowed)
                logits = backbone.logits(hidden)[0, :, : backbone.special_tokens.vocab_size].log_softmax(-1)
            value = sum(float(logits[3 + i, text[i]]) for i in chosen)
            expected += value * length / count / comb(length, count) / length
    actual = monte_carlo_masked(backbone, context, text, num_draws=3000, batch_size=500)
    assert actual == pytest.approx(expected, rel=0.05)
    again = monte_carlo_masked(backbone, context, text, num_draws=3000, batch_size=300)
    assert again == pytest.approx(actual, abs=1e-4)


def test_a_causal_model_sees_known_tokens_before_masks() -> None:
    backbone = refusion_lit.load(MODEL).backbone
    mask = backbone.special_tokens.mask_token_id
    actual = monte_carlo_masked(backbone, [5, 6, 7], [8], num_draws=2, batch_size=2)
    with torch.no_grad():
        hidden = backbone.hidden_states(torch.tensor([[5, 6, 7, mask]]), torch.arange(4)[None], None)
        logits = backbone.logits(hidden)[0, -1, : backbone.special_tokens.vocab_size].double().log_softmax(-1)
    assert actual == pytest.approx(float(logits[8]), abs=1e-6)
    value, greedy = autoregressive(backbone, [5, 6], [7])
    assert value < 0
    assert isinstance(greedy, bool)


def test_generation_options_are_honoured_or_refused(adapter: RefusionLitModel, monkeypatch: pytest.MonkeyPatch) -> None:
    actual: list[SamplingParams] = []

    def generate_ids(prompts: list[list[int]], *, sampling: SamplingParams, **_: object) -> list[Generation]:
        actual.append(sampling)
        return [Generation(id="", token_ids=[3], num_forwards=1) for _ in prompts]

    def ask(**options: object) -> SamplingParams:
        adapter.generate_until([Instance("generate_until", {}, ("1>", options), 0, metadata=("task", 0, 1))])
        return actual[-1]

    adapter.decoder = Autoregressive()
    monkeypatch.setattr(adapter.model, "generate_ids", generate_ids)
    params = ask(until="x", max_tokens=3, do_sample=True, temperature=0.5, top_p=0.9)
    assert (params.stop, params.max_new_tokens, params.temperature, params.top_p) == (("x",), 3, 0.5, 0.9)
    assert ask(until=[], do_sample=False, temperature=0.7, max_gen_toks=8).temperature == 0
    assert ask(do_sample=True).temperature == 1
    assert ask(temperature=0.3, top_k=7, seed=5) == SamplingParams(max_new_tokens=256, temperature=0.3, top_k=7, seed=5)
    with pytest.raises(ValueError, match=r"generation_kwargs: .* got num_beams"):
        ask(num_beams=4)
    with pytest.raises(ValueError, match=r"generation_kwargs: expected options of the harness, got .*'hot'"):
        ask(temperature="hot")


def test_unknown_likelihoods_and_empty_batches_are_refused(adapter: RefusionLitModel) -> None:
    with pytest.raises(ValueError, match="likelihood: expected one of"):
        RefusionLitModel(adapter.model, likelihood="exact")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="batch_size"):
        RefusionLitModel(adapter.model, batch_size=0)


def test_several_processes_are_refused_before_the_model_is_loaded(
    adapter: RefusionLitModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each process of torchrun would run all documents, and the harness gives results to the first alone."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="WORLD_SIZE: expected one process"):
        RefusionLitModel(adapter.model)
    assert main(["evaluate", "--ckpt_path=nowhere", "--tasks=[hellaswag]"]) == 2
    assert "WORLD_SIZE: expected one process" in capsys.readouterr().err


def test_estimates_that_a_model_cannot_give_are_refused() -> None:
    backbone = refusion_lit.load(MODEL).backbone
    for name in ("autoregressive", "monte_carlo_masked"):
        check_likelihood(backbone, name)  # a model without traits
    backbone.traits = ModelTraits(attention="causal", predictions=("mask", "next_token_in_slot"))
    check_likelihood(backbone, "monte_carlo_masked")
    with pytest.raises(ValueError, match="expects a model trained for next_token, got one trained for mask, next_tok"):
        check_likelihood(backbone, "autoregressive")
    with pytest.warns(UserWarning, match="expects a model trained for next_token"):
        check_likelihood(backbone, "autoregressive", allow_mismatch=True)
    backbone.traits = ModelTraits(attention="bidirectional")
    with pytest.raises(ValueError, match="expects a causal model"):
        check_likelihood(backbone, "autoregressive", allow_mismatch=True)
    backbone.special_tokens = replace(backbone.special_tokens, mask_token_id=None)
    with pytest.raises(ValueError, match="expects a model with a mask token"):
        check_likelihood(backbone, "monte_carlo_masked", allow_mismatch=True)


def test_texts_beyond_the_context_are_refused_before_scoring_starts(
    adapter: RefusionLitModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored: list[object] = []
    adapter.model.backbone.register_forward_hook(lambda *_: scored.append(0))
    monkeypatch.setattr(adapter.cache_hook, "add_partial", lambda *_: scored.append(0))
    requests = [
        Instance("loglikelihood", {}, pair, 0, metadata=("t", i, 1))
        for i, pair in enumerate([("1+2=", "3"), ("1", "9" * 600)])
    ]
    with pytest.raises(ValueError, match=r"^prompt t/1#0: expected at most 512 tokens"):
        adapter.loglikelihood(requests)
    assert scored == []
    adapter.loglikelihood(requests[:1])
    assert len(scored) > 0


@pytest.mark.parametrize("estimate", ["autoregressive", "monte_carlo_masked"])
def test_rolling_windows_score_all_tokens_once(
    adapter: RefusionLitModel, monkeypatch: pytest.MonkeyPatch, estimate: Any
) -> None:
    windows: list[tuple[list[int], list[int]]] = []

    def record(context: list[int], text: list[int]) -> tuple[float, bool]:
        windows.append((context, text))
        return -1.0, True

    monkeypatch.setattr(adapter, "_loglikelihood", record)
    adapter.likelihood = estimate
    text = "12+34=46;" * 130  # 1170 tokens; the context has 512
    assert adapter.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, (text,), 0)]) == [-float(len(windows))]
    assert [token for _, scored in windows for token in scored] == encode_text(adapter.model.tokenizer, text)
    assert all(known for known, _ in windows)
    # The last token is predicted from the tokens before it, so next-token models do not read it.
    num_unread = 1 if estimate == "autoregressive" else 0
    num_read = [len(known) + len(scored) - num_unread for known, scored in windows]
    assert num_read == [512] * len(windows), "also the last window fills the context"


def test_a_length_that_the_decoder_cannot_have_is_refused_before_any_decoding(
    adapter: RefusionLitModel, data: dict[str, object]
) -> None:
    adapter.decoder = ReFusion(slot_size=4, num_serial_blocks=2)
    with pytest.raises(ValueError, match="num_serial_blocks: expected at most 1 "):
        evaluate(adapter, [_sums(data), _sums(data, "short", max_gen_toks=3)])
    with pytest.raises(ValueError, match=r"prompt sums/0#0: expected at most 1 tokens .* got 12; shorten it"):
        evaluate(adapter, [_sums(data, max_gen_toks=adapter.model.backbone.config.max_position_embeddings - 1)])
    with pytest.raises(ValueError, match="unsafe"):  # the harness would run programs without a sandbox
        evaluate(adapter, [{**_sums(data), "unsafe_code": True}])
    assert adapter.throughput() == {}


def test_chat_template(adapter: RefusionLitModel, data: dict[str, object]) -> None:
    tokenizer = adapter.model.tokenizer
    with pytest.raises(ValueError, match="apply_chat_template"):
        adapter.apply_chat_template([{"role": "user", "content": "1"}])
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ eos_token }}12>"
    assert adapter.chat_template(True) == tokenizer.chat_template
    turned = evaluate(adapter, [_sums(data)], apply_chat_template=True)
    end = tokenizer.eos_token_id
    prompts = [[*encode_text(tokenizer, query), end, *encode_text(tokenizer, "12>")] for query in QUERIES]
    model = refusion_lit.load(MODEL)
    expected = model.generate_ids(prompts, decoder=ReFusion(slot_size=4), max_new_tokens=24)
    assert _answers(turned) == [g.text for g in expected]
    plain = [g.text for g in model.generate(QUERIES, decoder=ReFusion(slot_size=4), max_new_tokens=24)]
    assert _answers(evaluate(adapter, [_sums(data)])) == plain != _answers(turned)


def test_the_command_writes_scores_and_throughput(
    data: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lm_eval.tasks.TaskManager", partial(TaskManager, include_defaults=False))
    (tmp_path / "local_sums.yaml").write_text(yaml.safe_dump(_sums(data, "local_sums")))
    output = tmp_path / "out.json"
    arguments = ["evaluate", f"--ckpt_path={MODEL}", f"--include_path={tmp_path}", "--decoder.slot_size=4", "--limit=2"]
    assert main([*arguments, '--tasks=["local_sums"]', f"--output={output}"]) == 0
    actual = json.loads(output.read_text())
    assert 0 <= actual["results"]["local_sums"]["exact_match,none"] <= 1
    assert actual["throughput"]["local_sums"]["num_prompts"] == 2
    (decoder,) = actual["refusion_lit"]["decoders"]
    assert "slot_size=4" in decoder
    assert capsys.readouterr().out.splitlines()[-1] == f"ReFusion: {output}"
    choice = {**data, "task": "choice", "output_type": "multiple_choice", "doc_to_target": 0,
              "doc_to_choice": "{{choices}}", "metric_list": [{"metric": "acc"}]}  # fmt: skip
    (tmp_path / "choice.yaml").write_text(yaml.safe_dump(choice))
    likelihoods = ["--likelihood=monte_carlo_masked", "--num_draws=1", f"--output={tmp_path / 'choice.json'}"]
    assert main([*arguments, "--tasks=choice", *likelihoods]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"no decoder: {tmp_path / 'choice.json'}"
    assert main([*arguments, '--tasks=["local_sums"]', f"--output={tmp_path / 'none' / 'out.json'}"]) == 2
    assert "output: expected a file in a directory that exists" in capsys.readouterr().err
    before = sorted(tmp_path.iterdir())
    for wrong in (tmp_path, ""):
        assert main([*arguments, '--tasks=["local_sums"]', f"--output={wrong}"]) == 2
        assert f"output: expected a file, got {str(Path(wrong))!r}" in capsys.readouterr().err
    assert main([*arguments, '--tasks=["local_sums"]', f"--output={output}"]) == 2
    assert f"output: expected a new file, got '{output}, " in capsys.readouterr().err
    assert json.loads(output.read_text()) == actual
    with monkeypatch.context() as context:
        context.setattr("os.access", lambda *_: False)
        assert main([*arguments, '--tasks=["local_sums"]', f"--output={output}"]) == 2
    refusal = capsys.readouterr().err
    assert "output: " in refusal
    assert "can be written" in refusal
    assert sorted(tmp_path.iterdir()) == before
    assert main([*arguments, '--tasks=["local_sum"]']) == 2
    assert "tasks: expected names of the harness's tasks" in capsys.readouterr().err


def test_tasks_whose_data_cannot_be_fetched_are_named(
    data: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise ConnectionError("Couldn't reach 'openai/gsm8k' on the Hub")

    monkeypatch.setattr("lm_eval.tasks.TaskManager", partial(TaskManager, include_defaults=False))
    monkeypatch.setattr("refusion_lit.evaluation.lm_eval.evaluate", unreachable)
    (tmp_path / "fetched.yaml").write_text(yaml.safe_dump(_sums(data, "fetched")))
    assert main(["evaluate", f"--ckpt_path={MODEL}", "--tasks=[fetched]", f"--include_path={tmp_path}"]) == 2
    assert "tasks: expected data that can be fetched, got Couldn't reach" in capsys.readouterr().err


def test_a_published_protocol_comes_from_a_folder_of_task_files(
    data: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The protocol has a description, an instruction, a stop string, and delimiters around the answer.

    The model is in LLaDA's layout.
    """
    monkeypatch.setattr("lm_eval.tasks.TaskManager", partial(TaskManager, include_defaults=False))
    source = MODELS["llada-tiny"]
    task = {**_sums(data, "protocol", until=[","], max_gen_toks=24), "description": "1+1=2; ",
            "doc_to_text": "{{q.replace('>', '')}}, 9>",
            "filter_list": [{"name": "first", "filter": [{"function": "regex", "regex_pattern": "=(\\d+);"},
                                                         {"function": "take_first"}]}]}  # fmt: skip
    (tmp_path / "protocol.yaml").write_text(yaml.safe_dump(task))
    output = tmp_path / "out.json"
    arguments = ["evaluate", f"--ckpt_path={source}", f"--include_path={tmp_path}", "--tasks=protocol"]
    assert main([*arguments, f"--output={output}"]) == 0
    actual = json.loads(output.read_text())
    assert actual["refusion_lit"]["decoders"] == [repr(LLaDA(block_length=24))], "its own, fitted to 24 tokens"
    assert "exact_match,first" in actual["results"]["protocol"]
    adapter = RefusionLitModel(refusion_lit.load(source))
    samples = evaluate(adapter, [task])["samples"]["protocol"]
    for sample in samples:
        (arguments,) = sample["arguments"].values() if isinstance(sample["arguments"], dict) else sample["arguments"]
        prompt = arguments["arg_0"] if isinstance(arguments, dict) else arguments[0]
        assert prompt == f"1+1=2; {sample['doc']['q'].replace('>', '')}, 9>"
        (answer,) = sample["resps"][0]
        (expected,) = refusion_lit.load(source).generate(
            [prompt], sampling=SamplingParams(max_new_tokens=24, stop=(",",))
        )
        assert answer == expected.text
        assert "," not in answer
