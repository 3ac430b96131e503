"""The harness's adapter, with the harness's own task machinery on local files."""

from __future__ import annotations

import json
from itertools import combinations
from math import comb
from pathlib import Path

import pytest
import torch

pytest.importorskip("lm_eval", reason="needs lm-eval (pip install refusion-lit[eval])")
pytestmark = [pytest.mark.filterwarnings("ignore")]

import refusion_lit  # noqa: E402
from refusion_lit.decoding import ReFusion  # noqa: E402
from refusion_lit.evaluation.likelihood import autoregressive, monte_carlo_masked  # noqa: E402
from refusion_lit.evaluation.lm_eval import RefusionLitModel, evaluate  # noqa: E402
from refusion_lit.modeling.loading import BackboneConfig  # noqa: E402

MODEL = Path(__file__).parents[1] / "goldens" / "models" / "additions-clean"
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


def test_generate_until_with_the_harness(adapter: RefusionLitModel, data: dict[str, object]) -> None:
    task = {**data, "task": "sums", "doc_to_target": "{{a}}", "output_type": "generate_until",
            "target_delimiter": "", "metric_list": [{"metric": "exact_match"}],
            "generation_kwargs": {"until": ["\n"], "max_gen_toks": 24, "do_sample": False}}  # fmt: skip
    results = evaluate(adapter, [task], bootstrap_iters=0)
    model = refusion_lit.load(MODEL)
    expected = model.generate(QUERIES, decoder=ReFusion(slot_size=4), max_new_tokens=24)
    said = {s["doc_id"]: s["resps"][0][0] for s in results["samples"]["sums"]}
    assert [said[i] for i in range(3)] == [g.text for g in expected]
    right = sum(said[s["doc_id"]] == s["target"] for s in results["samples"]["sums"])
    assert results["results"]["sums"]["exact_match,none"] == pytest.approx(right / 3)
    figures = results["throughput"]
    assert figures["num_tokens"] == sum(g.num_tokens for g in expected)
    assert figures["num_forwards"] == sum(g.num_forwards for g in expected)
    assert figures["tokens_per_forward"] == figures["num_tokens"] / figures["num_forwards"]
    assert figures["num_prompts"] == 3


def test_multiple_choice_with_the_harness(adapter: RefusionLitModel, data: dict[str, object]) -> None:
    task = {**data, "task": "choices", "doc_to_target": 0, "doc_to_choice": "{{choices}}",
            "output_type": "multiple_choice", "target_delimiter": "",
            "metric_list": [{"metric": "acc"}]}  # fmt: skip
    results = evaluate(adapter, [task], bootstrap_iters=0)
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
    found, _ = monte_carlo_masked(backbone, context, text, num_draws=3000, batch_size=500)
    assert found == pytest.approx(expected, rel=0.05)
    again, _ = monte_carlo_masked(backbone, context, text, num_draws=3000, batch_size=300)
    assert again == pytest.approx(found, abs=1e-4)


def test_a_causal_model_sees_known_tokens_before_masks() -> None:
    backbone = refusion_lit.load(MODEL).backbone
    mask = backbone.special_tokens.mask_token_id
    found, _ = monte_carlo_masked(backbone, [5, 6, 7], [8], num_draws=2, batch_size=2)
    with torch.no_grad():
        hidden = backbone.hidden_states(torch.tensor([[5, 6, 7, mask]]), torch.arange(4)[None], None)
        logits = backbone.logits(hidden)[0, -1, : backbone.special_tokens.vocab_size].double().log_softmax(-1)
    assert found == pytest.approx(float(logits[8]), abs=1e-6)
    value, greedy = autoregressive(backbone, [5, 6], [7])
    assert value < 0
    assert isinstance(greedy, bool)


def test_generation_options_are_honoured_or_refused(adapter: RefusionLitModel) -> None:
    params = adapter._sampling({"until": "x", "max_tokens": 3, "do_sample": True, "temperature": 0.5, "top_p": 0.9})
    assert (params.stop, params.max_new_tokens, params.temperature, params.top_p) == (("x",), 3, 0.5, 0.9)
    assert adapter._sampling({"until": [], "do_sample": False, "temperature": 0.7}).temperature == 0
    assert adapter._sampling({}).max_new_tokens == 256
    with pytest.raises(ValueError, match=r"generation_kwargs: .* got num_beams"):
        adapter._sampling({"num_beams": 4})


def test_bad_options(adapter: RefusionLitModel) -> None:
    with pytest.raises(ValueError, match="likelihood: expected one of"):
        RefusionLitModel(adapter.model, likelihood="exact")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"model_args: .* got slot"):
        RefusionLitModel(adapter.model, slot=3)
    with pytest.raises(ValueError, match="batch_size"):
        RefusionLitModel(adapter.model, batch_size="auto")


def test_chat_template(adapter: RefusionLitModel) -> None:
    tokenizer = adapter.model.tokenizer
    with pytest.raises(ValueError, match="apply_chat_template"):
        adapter.apply_chat_template([{"role": "user", "content": "1"}])
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}>"
    assert adapter.apply_chat_template([{"role": "user", "content": "12+34"}]) == "12+34>"
    assert adapter.chat_template(True) == tokenizer.chat_template
    assert adapter._encode("12+34>") == tokenizer("12+34>", add_special_tokens=False)["input_ids"]


def test_the_command_writes_scores_and_throughput(data: dict[str, object], tmp_path: Path) -> None:
    import yaml

    from refusion_lit.cli import main

    task = {**data, "task": "local_sums", "doc_to_target": "{{a}}", "output_type": "generate_until",
            "metric_list": [{"metric": "exact_match"}],
            "generation_kwargs": {"until": ["\n"], "max_gen_toks": 24}}  # fmt: skip
    (tmp_path / "local_sums.yaml").write_text(yaml.safe_dump(task))
    output = tmp_path / "out.json"
    arguments = ["evaluate", f"--ckpt_path={MODEL}", '--tasks=["local_sums"]', f"--include_path={tmp_path}"]
    assert main([*arguments, "--decoder.slot_size=4", f"--output={output}", "--limit=2"]) == 0
    found = json.loads(output.read_text())
    assert 0 <= found["results"]["local_sums"]["exact_match,none"] <= 1
    assert found["throughput"]["num_prompts"] == 2
