"""Reading a model directory: each file once, and wrong configs are refused before weights are read."""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

import refusion_lit
from refusion_lit.checkpoints.models import read_default_decoder
from refusion_lit.cli import main
from refusion_lit.data.tokenizers import PretrainedTokenizer
from refusion_lit.decoding import ReFusion
from refusion_lit.modeling.config import load_config
from refusion_lit.modeling.formats import FORMATS
from refusion_lit.modeling.source import ModelSource
from support.forks import fork, wait
from support.tiny import make_base

MODEL = Path(__file__).parents[1] / "goldens" / "models" / "additions-clean"
NAMES = ("config.json", "tokenizer_config.json")


def check_each_is_read_once(work: Callable[[], object]) -> None:
    """Count how often a function opens the two files, in a process of its own, because an audit hook stays for good."""

    def count() -> None:
        opened: Counter[str] = Counter()
        sys.addaudithook(lambda event, args: opened.update([Path(str(args[0])).name] if event == "open" else []))
        work()
        assert {name: opened[name] for name in NAMES} == dict.fromkeys(NAMES, 1)

    assert wait(fork(count)) == 0


def test_loading_reads_each_file_once() -> None:
    check_each_is_read_once(lambda: refusion_lit.load(MODEL))


def test_generating_reads_each_file_once(capfd: pytest.CaptureFixture[str]) -> None:
    command = ["generate", f"--ckpt_path={MODEL}", "--prompt=1+2>", "--max_new_tokens=4"]
    check_each_is_read_once(lambda: main(command))
    assert "forwards" in capfd.readouterr().err


def test_a_tokenizer_is_the_one_that_transformers_reads(tmp_path: Path) -> None:
    make_base(tmp_path, "abc")
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    for source in (tmp_path, MODEL):
        ours = PretrainedTokenizer(source=str(source)).build(None)
        theirs = PreTrainedTokenizerFast.from_pretrained(source)
        assert ours.get_vocab().items() >= theirs.get_vocab().items()
        assert ours.special_tokens_map.items() >= theirs.special_tokens_map.items()
        assert ours.chat_template == theirs.chat_template
        assert ours.name_or_path == theirs.name_or_path
        assert ours.model_max_length == theirs.model_max_length


@pytest.mark.parametrize("content", ["{", "[]", "1", "null"])
def test_a_config_that_is_no_json_object_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"^ckpt_path: .*config\.json"):
        ModelSource.open(str(tmp_path), option="ckpt_path")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_hidden_layers": 10**4, "layer_types": None}, "do not fit its config"),
        ({"num_hidden_layers": 10**6, "layer_types": None}, "num_hidden_layers: expected"),
        ({"vocab_size": 10**9}, "do not fit its config"),
        ({"intermediate_size": 10**8}, "do not fit its config"),
        ({"num_attention_heads": 10**7}, "do not fit its config"),
    ],
)
def test_a_config_that_asks_for_much_more_than_the_weights_is_refused_at_once(
    values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    stored = json.loads((MODEL / "config.json").read_text())
    check_config_is_refused({**stored, **values}, message, tmp_path / "model")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "got model_type None"),
        ({"model_type": "qwen3"}, "do not fit its config"),
        ({"model_type": "no such"}, "got model_type 'no such'"),
    ],
)
def test_a_config_without_sizes_is_refused(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    check_config_is_refused(config, message, tmp_path / "model")


def check_config_is_refused(config: dict[str, Any], message: str, source: Path) -> None:
    """Assert that a model with this config is refused in one line."""
    shutil.copytree(MODEL, source)
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=rf"^backbone\.source: .*{message}") as refused:
        refusion_lit.load(source)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", [name for name, published in FORMATS.items() if published.model_type])
@pytest.mark.parametrize("option", ["hidden_size", "num_hidden_layers", "rms_norm_eps", "max_position_embeddings"])
def test_explicit_nulls_in_published_configs_are_refused_or_loaded(name: str, option: str) -> None:
    """Any error but the ValueError of a refusal fails the test."""
    published = FORMATS[name]
    theirs = published.config_names.get(option, option)
    values = {"model_type": published.model_type, theirs: None}
    with suppress(ValueError):
        load_config("somewhere", values, {}, published=published)
    with suppress(ValueError):
        load_config("somewhere", {"model_type": published.model_type}, {option: None}, published=published)


@pytest.mark.parametrize(
    ("class_path", "expected"),
    [
        pytest.param("ReFusion", ReFusion(slot_size=4), id="a short name"),
        pytest.param("refusion_lit.decoding.ReFusion", ReFusion(slot_size=4), id="a path"),
        pytest.param("RecomputeKV", None, id="a decoder that is only a reference"),
        pytest.param("os.system", None, id="a function of another package"),
        pytest.param("os.ReFusion", None, id="a decoder's name in another package"),
        pytest.param(None, None, id="null"),
        pytest.param({"class_path": "ReFusion", "slot_size": 4}, None, id="options outside init_args"),
    ],
)
def test_a_decoder_that_a_config_names_is_that_one_or_refused(
    class_path: Any, expected: ReFusion | None, tmp_path: Path
) -> None:
    source = tmp_path / "model"
    shutil.copytree(MODEL, source)
    values = json.loads((MODEL / "config.json").read_text())
    entry = class_path if isinstance(class_path, dict) else {"class_path": class_path, "init_args": {"slot_size": 4}}
    values["refusion_lit"] = {"decoder": entry}
    (source / "config.json").write_text(json.dumps(values))
    model = refusion_lit.load(source)
    if expected is None:
        with pytest.raises(ValueError, match=r"^refusion_lit\.decoder: expected"):
            _ = model.default_decoder
    else:
        assert model.default_decoder == expected == read_default_decoder(source)


def test_a_named_decoder_that_does_not_fit_the_model_is_replaced_with_a_warning(tmp_path: Path) -> None:
    _write_entry(tmp_path, {"decoder": {"class_path": "LLaDA"}})
    with pytest.warns(UserWarning, match=r"LLaDA.*ReFusion"):
        assert refusion_lit.load(tmp_path).default_decoder == ReFusion()


@pytest.mark.parametrize("template", [5, ["{query}"], None, True, {"a": 1}, "", "no place for it"])
def test_a_prompt_template_without_text_or_query_is_refused_by_every_door(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], template: object
) -> None:
    _write_entry(tmp_path, {"prompt_template": template})
    with pytest.raises(ValueError, match=r"prompt_template.*\{query\}"):
        refusion_lit.load(tmp_path)
    data = ["--data.task=Additions", "--data.task.num_test=1"]
    for command in (["generate", "--prompt=1+1>"], ["test", *data], ["export", f"--output={tmp_path / 'out'}"]):
        assert main([*command, f"--ckpt_path={tmp_path}"]) == 2
        assert "prompt_template" in capsys.readouterr().err


@pytest.mark.parametrize("entry", [5, "abc", ["a"], True])
def test_an_entry_that_is_no_mapping_is_refused(tmp_path: Path, entry: object) -> None:
    _write_entry(tmp_path, entry)
    with pytest.raises(ValueError, match=r"refusion_lit.*mapping"):
        refusion_lit.load(tmp_path)


@pytest.mark.parametrize("shard", ["../outside/model.safetensors", "{parent}/outside/model.safetensors"])
def test_shards_outside_the_directory_are_not_read(tmp_path: Path, shard: str) -> None:
    model, outside = tmp_path / "model", tmp_path / "outside"
    shutil.copytree(MODEL, model)
    outside.mkdir()
    shutil.move(model / "model.safetensors", outside / "model.safetensors")
    weight_map = {"model.norm.weight": shard.format(parent=tmp_path)}
    (model / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    with pytest.raises(ValueError, match=r"index\.json.*outside"):
        refusion_lit.load(model)


def _write_entry(directory: Path, entry: object) -> None:
    shutil.copytree(MODEL, directory, dirs_exist_ok=True)
    config = json.loads((MODEL / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "refusion_lit": entry}))
