"""An exported model decodes with transformers alone, in a process that cannot import this package."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.streamers import BaseStreamer

import refusion_lit
from refusion_lit.cli.export import name_decoder
from refusion_lit.decoding import ReFusion, SelfSpeculative
from refusion_lit.families.speculative import custom_generate as self_speculative
from refusion_lit.modeling.drafter import Drafter, DrafterOptions
from refusion_lit.modeling.load import attach
from refusion_lit.modeling.prompt_code import prompt_code
from refusion_lit.modeling.saving import PROGRAM_OPTIONS, save_drafter, save_model
from refusion_lit.refusion import custom_generate as refusion
from refusion_lit.reports.model_card import model_card
from refusion_lit.types import ModelTraits
from support.forks import run_without_us

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "tests" / "goldens" / "models" / "additions-clean"
PROGRAMS = ROOT / "experiments" / "hard_tests"
QUERIES = {"plain": "12+34,56+78>", "prompt template": "12+34,56+78", "chat template": "12+34,56+78"}
"""Kinds of exports, with a query that each of them answers alike."""

# Decodes the reference outputs, runs the programs of the cards, and prints all results.
PROGRAM = """
import contextlib, io, json, sys, warnings
from pathlib import Path
warnings.simplefilter("ignore")
sys.path.insert(0, {programs!r})
import standalone
folder = Path({folder!r})
printed = {{"reference": standalone.compared(folder, stride=10)}}
for kind, program in json.loads((folder / "programs.json").read_text()).items():
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        exec(program, {{"__name__": "__main__"}})
    printed[kind] = shown.getvalue()
print(json.dumps(printed))
"""


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with an export of every kind."""
    folder = tmp_path_factory.mktemp("exported")
    for kind in QUERIES:
        model = refusion_lit.load(MODEL)
        model.backbone.traits = ModelTraits(attention="causal", predictions=("mask", "next_token_in_slot"))
        if kind == "prompt template":
            model.prompt_template = "{query}>"
        elif kind == "chat template":
            model.tokenizer.chat_template = "{{ messages[-1]['content'] }}>"
        save_model(model.backbone, model.tokenizer, folder / kind, prompt_template=model.prompt_template)
    return folder


def test_a_saved_directory_has_the_options_of_its_own_decoder(tmp_path: Path) -> None:
    model = refusion_lit.load(MODEL)
    options = {"slot_size": 4, "num_serial_blocks": 1, "slot_threshold": 0.5, "token_threshold": 0.75}
    model.backbone.traits = ModelTraits(attention="causal", predictions=("mask", "next_token_in_slot"))
    decoder = ReFusion(**options, infill="bonus")
    name_decoder(model, decoder)
    # The program refuses a penalty, which Qwen2.5's Instruct models ask for.
    model.backbone.model.generation_config.update(repetition_penalty=1.05)
    save_model(model.backbone, model.tokenizer, tmp_path)
    library = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert set(PROGRAM_OPTIONS) == refusion.OPTIONS.keys()
    assert library.generation_config.refusion == {"vocab_size": len(model.tokenizer), **options}
    prompt = torch.tensor([model.encode("12+34,56+78>")])
    output = library.generate(prompt, custom_generate=str(tmp_path), trust_remote_code=True, max_new_tokens=24)
    [row] = model.generate(["12+34,56+78>"], decoder=replace(decoder, infill="mask"), max_new_tokens=24)
    assert output[0, prompt.shape[1] :].tolist() == row.token_ids


@pytest.fixture(scope="module")
def printed(exported: Path) -> dict[str, Any]:
    """Return what a process with transformers alone prints: its comparison with references, and the cards' programs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(PROGRAMS))
        import standalone  # pyright: ignore[reportMissingImports]

        sys.modules.pop("standalone")
    standalone.write(exported)
    programs = {}
    for kind, query in QUERIES.items():
        model = refusion_lit.load(exported / kind)
        prompt = prompt_code(model.tokenizer, model.prompt_template)
        card = model_card(str(exported / kind), model.backbone, prompt)
        (program,) = re.findall(r"```python\n(from transformers .*?)```", card, re.DOTALL)
        programs[kind] = program.replace("...", query)
    (exported / "programs.json").write_text(json.dumps(programs))
    program = PROGRAM.format(programs=str(PROGRAMS), folder=str(exported))
    return json.loads(run_without_us(program, exported).splitlines()[-1])


def test_reference_outputs_and_drafted_texts_come_out(printed: dict[str, Any]) -> None:
    """The program compares every tenth text of three references; it prints the number of equal texts and of all."""
    expected = {"goldens clean": [12, 12], "goldens mid": [13, 13], "drafter": [10, 10]}
    assert printed["reference"] == expected


@pytest.mark.parametrize("kind", QUERIES)
def test_the_cards_program_runs_with_transformers_alone(exported: Path, printed: dict[str, Any], kind: str) -> None:
    decoder = ReFusion(slot_size=8, slot_threshold=0.9, token_threshold=0.9)
    expected = refusion_lit.load(exported / kind).generate([QUERIES[kind]], decoder=decoder, max_new_tokens=64)[0].text
    assert expected == "12+34=46;56+78=134;"
    assert "".join(printed[kind].split()) == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [  # the model's context has 512 tokens, and the prompt 2
        ({"temperature": 0.7}, "temperature: expected none, got 0.7 in the call: this decoder is greedy; pass temp"),
        ({"do_sample": True}, "do_sample: expected none, got True in the call: this decoder is greedy; pass do_s"),
        ({"num_beams": 3}, "num_beams: expected none, got 3"),
        ({"stop_strings": ["a"]}, "stop_strings: expected none"),
        ({"slot_sizes": 4}, "slot_sizes: expected none"),
        ({"attention_mask": torch.tensor([[0, 1]])}, "attention_mask: expected ones, got zeros"),
        ({"max_new_tokens": 600}, "max_new_tokens: expected 1 to 510 beyond the prompt, got 600"),
        ({"max_new_tokens": 0}, "max_new_tokens: expected 1 to 510 beyond the prompt, got 0"),
        ({"max_new_tokens": None, "max_length": 2}, "max_new_tokens: expected 1 to 510 beyond the prompt, got 0"),
        ({"custom_generate": "elsewhere"}, "custom_generate: expected none, got 'elsewhere' in the call"),
        ({"inputs": torch.zeros(1, 0, dtype=torch.long)}, "input_ids: expected the shape \\[1, token\\] of one prompt"),
        ({"inputs": torch.zeros(2, 3, dtype=torch.long)}, "input_ids: expected the shape \\[1, token\\] of one prompt"),
    ],
)
@pytest.mark.parametrize("decoder", [refusion, self_speculative])
def test_what_an_exported_decoder_would_ignore_is_refused(
    decoder: ModuleType, change: dict[str, Any], message: str
) -> None:
    library = refusion_lit.load(MODEL).backbone.model
    extra = {"draft": "nowhere"} if decoder is self_speculative else {}
    options = {"inputs": torch.tensor([[4, 5]]), "max_new_tokens": 8, "num_beams": 1, "do_sample": False, **extra}
    with pytest.raises(ValueError, match=f"^{message}"):
        decoder.generate(model=library, **{**options, **change})


@pytest.mark.parametrize(
    "asked",
    [
        {"do_sample": True, "temperature": 5.0},
        {"num_beams": 3},
        {"stop_strings": ["-"]},
        {"repetition_penalty": 9.0},
        {"num_return_sequences": 2, "num_beams": 2},
        {"min_new_tokens": 3},
        {"return_dict_in_generate": True},
    ],
)
@pytest.mark.parametrize("decoder", [refusion, self_speculative])
@pytest.mark.parametrize("is_own", [False, True])
def test_a_generation_config_is_honoured_or_refused(decoder: ModuleType, asked: dict[str, Any], is_own: bool) -> None:
    library = refusion_lit.load(MODEL).backbone.model
    options = {"draft": "nowhere"} if decoder is self_speculative else {}
    config = GenerationConfig(max_new_tokens=8, **asked)
    if is_own:
        library.generation_config = config
    given = None if is_own else config
    names = "|".join(asked)
    with pytest.raises(ValueError, match=rf"^({names}): expected none, got .* in the generation config"):
        decoder.generate(torch.tensor([[4, 5]]), model=library, generation_config=given, **options)


@pytest.mark.filterwarnings("ignore:.*generation flags:UserWarning")
@pytest.mark.parametrize("asked", [{"temperature": 0.7}, {"temperature": 1.0}, {"top_p": 0.5}, {"top_k": 7}], ids=str)
@pytest.mark.parametrize("decoder", [refusion, self_speculative])
def test_a_temperature_is_refused_but_where_the_model_brings_it_along(
    decoder: ModuleType, asked: dict[str, Any]
) -> None:
    """``transformers serve`` sets a request's temperature without ``do_sample``."""
    library = refusion_lit.load(MODEL).backbone.model
    prompt = torch.tensor([[4, 5]])
    config = GenerationConfig(max_new_tokens=8, **asked)
    [name] = asked
    with pytest.raises(ValueError, match=rf"^{name}: expected none, got .* in the generation config"):
        decoder.read_options(library, config, {})
    library.generation_config = config
    assert decoder.read_options(library, config, {})[name] == asked[name]
    assert decoder.read_options(library, GenerationConfig(temperature=0.0), {"input_ids": prompt})["temperature"] == 0


@pytest.mark.parametrize("decoder", [refusion, self_speculative])
def test_a_temperature_of_one_is_refused_unless_the_request_is_greedy(decoder: ModuleType) -> None:
    library = refusion_lit.load(MODEL).backbone.model
    warm = GenerationConfig(temperature=1.0)
    with pytest.raises(ValueError, match=r"^temperature: expected none, got 1.0 in the call"):
        decoder.read_options(library, None, {"temperature": 1.0})
    assert decoder.read_options(library, None, {"temperature": 1.0, "do_sample": False})["temperature"] == 1
    assert decoder.read_options(library, warm, {"do_sample": False})["temperature"] == 1
    greedy = GenerationConfig(temperature=1.0, do_sample=False)
    assert decoder.read_options(library, greedy, {})["temperature"] == 1
    # A server sets the temperature in a copy of the model's config, and keeps its do_sample.
    library.generation_config = GenerationConfig(do_sample=False)
    with pytest.raises(ValueError, match=r"^temperature: expected none, got 1.0 in the generation config"):
        decoder.read_options(library, greedy, {})


def test_length_and_ends_of_a_generation_config_are_honoured() -> None:
    model = refusion_lit.load(MODEL)
    ids = torch.tensor([model.encode("12+34,56+78>")])

    def response(**options: Any) -> list[int]:
        config = GenerationConfig(use_cache=True, num_beams=1, **options)
        return refusion.generate(ids, model=model.backbone.model, generation_config=config)[0, ids.shape[1] :].tolist()

    whole = response(max_new_tokens=24, eos_token_id=1)
    assert response(max_new_tokens=5, eos_token_id=1) == whole[:5]
    assert response(max_length=ids.shape[1] + 5, eos_token_id=1) == whole[:5]
    assert response(max_new_tokens=24, eos_token_id=[1, whole[3]])[-1] == whole[3]


def test_a_model_that_was_loaded_with_its_decoder_takes_the_call_of_the_card(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``from_pretrained`` then puts the decoder in place of ``model.generate``, and passes the model by name."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path))
    directory = str(exported / "plain")
    library = AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True)
    ids = torch.tensor([refusion_lit.load(directory).encode(QUERIES["plain"])])
    alone = library.generate(ids, max_new_tokens=64)
    called = library.generate(ids, custom_generate=directory, trust_remote_code=True, max_new_tokens=64)
    plain = AutoModelForCausalLM.from_pretrained(directory)
    expected = plain.generate(ids, custom_generate=directory, trust_remote_code=True, max_new_tokens=64)
    assert torch.equal(alone, expected)
    assert torch.equal(called, expected)


class Recorded(BaseStreamer):
    """Keeps the parts that a decoder streams."""

    def __init__(self) -> None:
        self.parts: list[list[int]] = []
        self.has_ended = False

    def put(self, value: torch.Tensor) -> None:
        self.parts.append(value.flatten().tolist())

    def end(self) -> None:
        self.has_ended = True


@pytest.mark.parametrize("decoder", [refusion, self_speculative])
def test_a_streamer_is_given_the_prompt_and_then_what_is_final(decoder: ModuleType, tmp_path: Path) -> None:
    model = refusion_lit.load(MODEL)
    ids = torch.tensor([model.encode("12+34,56+78>")])
    library: Any = model.backbone.model
    library.generation_config.refusion = {"slot_size": 2, "slot_threshold": 0.99999}
    body = library.get_decoder()
    save_drafter(
        Drafter(body, DrafterOptions(num_masks=2, rank=2), "base"), body, tmp_path, vocab_size=len(model.tokenizer)
    )
    # As a next-token model, this model ends its text at once, so no token may be an end.
    options = {"draft": str(tmp_path), "eos_token_id": -1} if decoder is self_speculative else {}
    streamer = Recorded()
    output = decoder.generate(ids, model=library, streamer=streamer, max_new_tokens=48, **options)
    prompt, *parts = streamer.parts
    assert prompt == ids[0].tolist()
    assert [token for part in parts for token in part] == output[0, ids.shape[1] :].tolist()
    assert len(parts) > 1
    assert streamer.has_ended


@pytest.mark.parametrize("decoder", [refusion, self_speculative])
def test_rows_of_no_token_change_what_is_certain_and_are_never_drawn(decoder: ModuleType, tmp_path: Path) -> None:
    """An embedding may have more rows than the tokenizer has tokens.

    Probabilities are over all rows, as in the engine. Tokens are drawn from the tokenizer's rows alone.
    """
    model = refusion_lit.load(MODEL)
    library: Any = model.backbone.model
    num_rows = model.backbone.special_tokens.vocab_size
    library.resize_token_embeddings(num_rows + 32, mean_resizing=False)
    with torch.no_grad():
        torch.manual_seed(0)
        for weight in {library.get_input_embeddings().weight, library.get_output_embeddings().weight}:
            weight[num_rows:] = torch.randn(32, weight.shape[1]) * 3 * weight[:num_rows].std()
    model.backbone.traits = ModelTraits(attention="causal", predictions=("mask", "next_token_in_slot"))
    if decoder is self_speculative:
        model.backbone.traits = ModelTraits(attention="causal", predictions=("next_token",))
        attach(model.backbone, Drafter(model.backbone.body, DrafterOptions(num_masks=2, rank=2), "base"))
    save_model(model.backbone, model.tokenizer, tmp_path / "model")
    model = refusion_lit.load(tmp_path / "model")
    exported: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    options = {"draft": str(tmp_path / "model")} if decoder is self_speculative else {}
    own_decoder = SelfSpeculative() if decoder is self_speculative else ReFusion()
    queries = ("12+34,56+78>", "11+21,90+10>", "55+31,47+80,12+99>", "21+70>")
    for query in queries:
        ids = torch.tensor([model.encode(query)])
        expected = model.generate([query], decoder=own_decoder, max_new_tokens=40)[0].token_ids
        tokens = decoder.generate(ids, model=exported, max_new_tokens=40, **options)[0, ids.shape[1] :].tolist()
        assert tokens == expected


@pytest.mark.parametrize("options", [{"slot_size": 0}, {"num_serial_blocks": 0}, {"slot_sizes": 4}])
def test_wrong_options_of_an_exported_decoder_are_refused(options: dict[str, int]) -> None:
    library = refusion_lit.load(MODEL).backbone.model
    library.generation_config.refusion = options
    with pytest.raises(ValueError, match=r"^refusion: expected slot_size, num_serial_blocks, slot_threshold, token_"):
        refusion.generate(torch.tensor([[4, 5]]), model=library, max_new_tokens=8)
