"""Model cards generated from the files of a run."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
import yaml
from huggingface_hub import ModelCardData
from huggingface_hub.repocard_data import model_index_to_eval_results

from refusion_lit.modeling.drafter import DrafterOptions, DrafterOrigin
from refusion_lit.modeling.prompt_code import prompt_code
from refusion_lit.reports.model_card import drafter_card
from refusion_lit.types import AttentionKind, ModelTraits, Prediction
from reports.samples import model_card, predictions, write_run
from support.tokenizer_zoo import make_tokenizer

CONFIG = {
    "seed_everything": 7,
    "model": {
        "backbone": {"source": "Qwen/Qwen3-0.6B"},
        "objective": {"class_path": "a.b.Masked", "init_args": {"eps": 0.1}},
    },
    "data": {"task": {"class_path": "a.Files", "init_args": {"train": "x|y"}}, "batch_size": 4},
    "trainer": {"max_steps": 10},
    "tokenizer": "long" * 1000,
}
ENVIRONMENT = {"python": "3.11", "packages": {"torch": "2"}, "hardware": {"num_cpus": 2, "machine": "m"}}


def test_a_card_has_the_base_model_the_config_and_the_environment(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    (tmp_path / "environment.json").write_text(json.dumps(ENVIRONMENT))
    card = model_card("out", ModelTraits(), tmp_path)
    front = yaml.safe_load(card.split("---")[1])
    assert front["base_model"] == "Qwen/Qwen3-0.6B"
    assert front["library_name"] == "refusion-lit"
    assert "class_path: a.b.Masked" in card
    assert "seed_everything: 7" in card
    assert "| packages | torch 2 |" in card
    assert "tokenizer: longlong" in card
    assert len(card) < 3000


def test_a_card_says_what_works_without_this_package() -> None:
    exact, hybrid = ModelTraits(predictions=("next_token",)), ModelTraits(predictions=("mask", "next_token_in_slot"))
    assert "lm_eval --model hf --model_args pretrained=out` finds likelihoods" in model_card("out", exact)
    assert "`lm_eval --model hf` gives wrong ones" in model_card("out", hybrid)
    bidirectional = ModelTraits(attention="bidirectional", predictions=("mask",))
    assert "Without refusion-lit" not in model_card("out", bidirectional)


def test_the_program_of_a_card_prints_the_text_that_continues_the_prompt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """SentencePiece drops the space at the beginning of a text, and a response is a part of a text."""
    tokenizer = make_tokenizer("llama2")
    whole = tokenizer("The capital of France is Paris.", return_tensors="pt").input_ids
    model = SimpleNamespace(generate=lambda *_, **__: whole)
    for name, part in (("PreTrainedTokenizerFast", tokenizer), ("AutoModelForCausalLM", model)):
        monkeypatch.setattr(f"transformers.{name}.from_pretrained", lambda *_, part=part: part)
    traits = ModelTraits(predictions=("next_token",))
    prompt = prompt_code(tokenizer, "The capital of France")
    origin = DrafterOrigin(options=DrafterOptions(), base="base")
    for card in (model_card("out", traits, None, prompt=prompt), drafter_card("out", origin, prompt=prompt)):
        [program] = [part for part in re.findall(r"```python\n(.*?)```", card, re.S) if "from transformers" in part]
        exec(program, {})
        assert capsys.readouterr().out == " is Paris.\n"


def test_the_commands_of_a_card_quote_its_path() -> None:
    card = model_card("my models/it's", ModelTraits(predictions=("next_token",)))
    (line,) = [line for line in card.splitlines() if line.startswith("or `")]
    assert shlex.split(line.split("`")[1])[:4] == ["refusion-lit", "generate", "--ckpt_path", "my models/it's"]
    quoted = shlex.quote("pretrained=my models/it's")
    assert f"--model_args {quoted}`" in card
    card = drafter_card("my drafter", DrafterOrigin(options=DrafterOptions(), base="base model"), "ids")
    assert "generate --ckpt_path 'base model' --draft 'my drafter' --prompt" in card


def test_a_card_has_the_results_of_tests(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {"a": predictions([1.0]), "b": predictions([0.5])}, mismatches={"b": ["why"]})
    results = json.loads((run / "results.json").read_text())
    results["decoders"] = {"a": {"class": "ReFusion", "slot_size": 4, "k": None}, "b": {"class": "LLaDA"}}
    (run / "results.json").write_text(json.dumps(results))
    card = model_card("out", ModelTraits(), None, [run])
    assert "decoder=ReFusion(slot_size=4)" in card
    assert "| `a` | 1.000 | 5.00 | 123 |" in card
    assert r"| `b` \* | 0.500 |" in card
    assert r"\* the model was not trained for this decoder" in card
    assert "On 1 prompt of the test split, decoded" in card
    results["tested"] = "validation examples held out of the training files"
    (run / "results.json").write_text(json.dumps(results))
    card = model_card("out", ModelTraits(), None, [run])
    assert "On 1 prompt of the validation examples held out of the training files, decoded" in card
    assert "max_new_tokens 8, temperature 0.0; `a` is ReFusion(slot_size=4), `b` is LLaDA():" in card


def test_a_card_writes_options_that_are_off_as_the_command_line_takes_them() -> None:
    decoder = {"class_path": "FastDLLM", "init_args": {"threshold": None, "factor": 1.0}}
    card = model_card("out", ModelTraits(attention="bidirectional"), decoder=decoder)
    assert "--decoder FastDLLM --decoder.threshold null --decoder.factor 1.0" in card
    assert "FastDLLM(threshold=None, factor=1.0)" in card


def test_a_card_has_the_results_where_the_hub_looks_for_them(tmp_path: Path) -> None:
    decoders = {"a": predictions([1.0, 0.0]), "b": predictions([0.5]), "c": predictions([0.0])}
    run = write_run(tmp_path / "run", decoders, mismatches={"c": ["the model was not trained for it"]})
    results = json.loads((run / "results.json").read_text())
    results["config"]["data"] = {"task": {"class_path": "x.Gsm8k", "init_args": {"dataset": "openai/gsm8k"}}}
    (run / "results.json").write_text(json.dumps(results))
    front = ModelCardData(**yaml.safe_load(model_card("me/out", ModelTraits(), None, [run]).split("---")[1]))
    name, actual = model_index_to_eval_results(front.to_dict()["model-index"])
    assert name == "out"
    shown = [(r.dataset_name, r.dataset_type, r.metric_type, r.metric_name, r.metric_value) for r in actual]
    assert shown == [
        ("Gsm8k, test split", "openai/gsm8k", "score", "score with a", 0.5),
        ("Gsm8k, test split", "openai/gsm8k", "tokens_per_forward", "tokens per forward with a", 5.0),
        ("Gsm8k, test split", "openai/gsm8k", "score", "score with b", 0.5),
        ("Gsm8k, test split", "openai/gsm8k", "tokens_per_forward", "tokens per forward with b", 5.0),
    ]
    unfit = write_run(tmp_path / "unfit", {"c": predictions([0.0])}, mismatches={"c": ["not trained for it"]})
    for runs in ([], [unfit]):
        assert "model-index" not in model_card("me/out", ModelTraits(), None, runs)


def test_the_config_of_a_card_leaves_out_what_is_unset(tmp_path: Path) -> None:
    trainer = {"max_steps": 7, "min_steps": None}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({**CONFIG, "trainer": trainer}))
    card = model_card("out", ModelTraits(), tmp_path)
    assert "max_steps: 7" in card
    assert "None" not in card
    assert "null" not in card


@pytest.mark.parametrize("prediction", get_args(Prediction))
@pytest.mark.parametrize("attention", get_args(AttentionKind))
def test_a_card_says_what_the_model_predicts(attention: AttentionKind, prediction: Prediction) -> None:
    traits = ModelTraits(
        attention=attention, block_size=4 if attention == "block_causal" else None, predictions=(prediction,)
    )
    assert "It predicts the token" in model_card("out", traits)
    unknown = ModelTraits(attention=attention, block_size=traits.block_size)
    assert "What it predicts is not recorded." in model_card("out", unknown)


def test_all_programs_of_a_card_decode_as_the_test_did_or_say_so(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {"a": predictions([1.0])})
    results = json.loads((run / "results.json").read_text())
    hybrid = ModelTraits(predictions=("mask", "next_token_in_slot"))
    for options, lacks in (({}, False), ({"fused": False}, False), ({"infill": "bonus"}, True)):
        results["decoders"] = {"a": {"class": "ReFusion", "slot_size": 4, **options}}
        (run / "results.json").write_text(json.dumps(results))
        card = model_card("out", hybrid, None, [run])
        assert "--ckpt_path out --decoder ReFusion --decoder.slot_size 4 " in card
        assert "|= {'slot_size': 4," in card
        assert ("It lacks `infill`, which the decoder above sets" in card) == lacks
    limit = results["sampling"]["max_new_tokens"]
    assert f"--decoder.infill bonus --max_new_tokens {limit} --prompt" in card
    assert card.count(f"max_new_tokens={limit})") == 2
    named = model_card("out", hybrid, None, [run], decoder={"class_path": "ReFusion", "init_args": {"slot_size": 16}})
    assert "--ckpt_path out --decoder ReFusion --decoder.slot_size 16 --max" in named  # whatever was tested
    assert "--ckpt_path out --max_new_tokens 64 --prompt" in model_card("out", hybrid)


@pytest.mark.parametrize(
    ("traits", "decoder"),
    [
        (ModelTraits(predictions=("mask", "next_token_in_slot")), "ReFusion()"),
        (ModelTraits(predictions=("next_token",)), "Autoregressive()"),
        (ModelTraits(predictions=("mask", "next_token")), "WeDLM()"),
        (ModelTraits(attention="bidirectional", predictions=("mask",)), "LLaDA()"),
        (ModelTraits(attention="bidirectional", predictions=("mask_shifted",)), "LLaDA(shifted=True)"),
        (ModelTraits(attention="block_causal", block_size=4, predictions=("mask",)), "BlockDiffusion(block_size=4)"),
    ],
)
def test_the_example_uses_a_decoder_that_fits(traits: ModelTraits, decoder: str) -> None:
    card = model_card("out", traits)
    assert f"decoder={decoder}" in card
    assert "Training config" not in card


@pytest.mark.parametrize("has_drafter", [True, False])
def test_only_models_with_masks_are_tagged_as_diffusion_models(has_drafter: bool) -> None:
    for predicted, is_diffusion in ((("next_token",), False), (("mask", "next_token_in_slot"), not has_drafter)):
        card = model_card("out", ModelTraits(predictions=predicted), drafter=object() if has_drafter else None)
        assert ("- diffusion-language-model\n" in card) == is_diffusion


def test_damaged_and_missing_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"results\.json: cannot be read"):
        model_card("out", ModelTraits(), None, [tmp_path])
    (tmp_path / "results.json").write_text("[1]")
    with pytest.raises(ValueError, match="expected the results of `refusion-lit test`"):
        model_card("out", ModelTraits(), None, [tmp_path])
    for content, message in (
        ("[1]", r"expected a mapping of options in .*, got list"),
        ("a: [", r"config\.yaml is not YAML"),
    ):
        (tmp_path / "config.yaml").write_text(content)
        with pytest.raises(ValueError, match=message):
            model_card("out", ModelTraits(), tmp_path)
