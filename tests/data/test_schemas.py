"""Responses of a model that knows nothing keep any schema; `jsonschema` judges."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llguidance", reason="needs llguidance: pip install --group test")
pytest.importorskip("jsonschema", reason="needs jsonschema: pip install --group test")

import jsonschema

from refusion_lit import load
from refusion_lit.cli import main
from refusion_lit.data.schemas import Schemas
from refusion_lit.decoding import Autoregressive, Decoder, ReFusion
from refusion_lit.text_model import TextModel
from refusion_lit.types import SamplingParams
from tiny import make_base, make_bytes_base

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 9},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, Any] = {
    "person": PERSON,
    "boolean": {"type": "boolean"},
    "anything": True,
    "enum": {"enum": ["red", "green", 7, None]},
    "numbers": {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 4},
    "people": {"type": "array", "items": PERSON, "minItems": 1},
    "either": {"anyOf": [{"type": "string", "pattern": "^[a-c]+$"}, {"type": "null"}]},
    "nested": {"type": "object", "properties": {"a": {"$ref": "#/$defs/b"}}, "required": ["a"],
               "$defs": {"b": {"type": "object", "properties": {"c": {"const": "d"}}, "required": ["c"]}}},
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return load(make_bytes_base(tmp_path_factory.mktemp("base")), device="cpu")


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("max_new_tokens", [64, 200])
def test_responses_keep_a_schema(model: TextModel, name: str, temperature: float, max_new_tokens: int) -> None:
    sampling = SamplingParams(max_new_tokens=max_new_tokens, temperature=temperature)
    rows = model.generate(["a", "b", "c"], sampling=sampling, json_schema=SCHEMAS[name], batch_size=2)
    for row in rows:
        jsonschema.validate(json.loads(row.text), SCHEMAS[name])
        assert row.finish_reason == "eos"
    [alone] = model.generate_ids([model.encode("c")], ids=["2"], sampling=sampling, json_schema=SCHEMAS[name])
    assert alone.token_ids == rows[2].token_ids


def test_the_shortest_limit_is_found_and_suffices(model: TextModel) -> None:
    with pytest.raises(ValueError, match=r"max_new_tokens: expected at least \d+, the length of an answer") as caught:
        model.generate(["a"], max_new_tokens=1, json_schema=PERSON)
    fewest = int(str(caught.value).split("at least ")[1].split(",")[0])
    [row] = model.generate(["a"], max_new_tokens=fewest, json_schema=PERSON)
    assert row.num_tokens == fewest
    jsonschema.validate(json.loads(row.text), PERSON)


ENDED: list[dict[str, Any]] = [
    {"type": "number", "exclusiveMinimum": 0},
    {"type": "number", "multipleOf": 10},
    {"type": "string", "format": "email"},
    {"type": "string", "pattern": "^\\d+\\.\\d+\\.\\d+$"},
    {"type": "string", "pattern": "\\w"},
]


@pytest.mark.parametrize("schema", ENDED, ids=str)
def test_an_end_is_found_where_one_byte_again_and_again_leads_to_none(model: TextModel, schema: Any) -> None:
    sampling = SamplingParams(max_new_tokens=32, temperature=1.0)
    for row in model.generate(["a", "b"], sampling=sampling, json_schema=schema):
        jsonschema.validate(json.loads(row.text), schema)


REFUSED = [
    ({"type": "nothing"}, {}, "json_schema: this schema cannot be kept: "),
    ({"type": "string", "pattern": "(?=a)b"}, {}, "json_schema: this schema cannot be kept: "),
    (False, {}, "json_schema: this schema cannot be kept: "),
    ({"enum": [1, 2**53 + 1]}, {}, "json_schema: expected numbers below 2**53, as larger ones get rounded, got 9007"),
    (
        {"type": "integer", "minimum": 10**30, "maximum": 10**30},
        {},
        "json_schema: expected numbers below 2**53, as larger ones",
    ),
    ("text", {}, "json_schema: expected an object or a boolean, got 'text'"),
    (PERSON, {"sampling": SamplingParams(stop=("x",))}, "json_schema: expected neither stop strings nor min_entropy"),
    (PERSON, {"templates": ["{{1}}"]}, "json_schema: expected prompts without templates"),
]


@pytest.mark.parametrize(("schema", "options", "message"), REFUSED)
def test_what_cannot_be_guaranteed_is_refused(model: TextModel, schema: Any, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        model.generate(["a"], json_schema=schema, **options)


INFINITE, NO_NUMBER = float("inf"), float("nan")
WRONG_BOUNDS = [
    ({"type": "integer", "minimum": INFINITE}, "minimum: expected a finite number of 64 bits, got inf; correct it"),
    ({"type": "number", "maximum": NO_NUMBER}, "maximum: expected a finite number of 64 bits, got nan"),
    ({"type": "integer", "minimum": -(10**5000)}, "minimum: expected a finite number of 64 bits, got -inf"),
    ({"type": "integer", "maximum": True}, "maximum: expected a number, got True; write one."),
    ({"type": "number", "exclusiveMinimum": "1"}, "exclusiveMinimum: expected a number, got '1'"),
    ({"type": "string", "minLength": -1}, "minLength: expected an integer of at least 0, got -1; correct it"),
    ({"type": "string", "maxLength": 4.5}, "maxLength: expected an integer of at least 0, got 4.5"),
    ({"type": "string", "maxLength": False}, "maxLength: expected an integer of at least 0, got False"),
    ({"type": "array", "minItems": -1}, "minItems: expected an integer of at least 0, got -1"),
    ({"type": "array", "maxItems": 10**5000}, "maxItems: expected an integer of at least 0, got inf"),
    ({"const": [INFINITE]}, "const: expected values that JSON has, got another"),
    ({"enum": [1, NO_NUMBER]}, "enum: expected values that JSON has, got another"),
    ({"anyOf": [{"type": "object", "properties": {"minimum": {"minimum": INFINITE}}}]}, "minimum: expected a finite"),
]


@pytest.mark.parametrize("decoder", [Autoregressive(), ReFusion()], ids=lambda each: type(each).__name__)
@pytest.mark.parametrize(("schema", "message"), WRONG_BOUNDS, ids=[message[:60] for _, message in WRONG_BOUNDS])
def test_wrong_bounds_are_refused_by_their_keyword(
    model: TextModel, decoder: Decoder, schema: Any, message: str
) -> None:
    schemas = Schemas(model.tokenizer, model.backbone.special_tokens)
    with pytest.raises(ValueError, match=f"json_schema: {message}"):
        schemas.constrain([], schema, decoder, SamplingParams(max_new_tokens=64))


def test_names_and_examples_are_no_keywords(model: TextModel) -> None:
    schema = {"type": "object", "properties": {"minimum": {"type": "boolean"}, "maxLength": {"type": "null"}},
              "required": ["minimum", "maxLength"], "additionalProperties": False,
              "examples": [{"minimum": True, "maxLength": None}]}  # fmt: skip
    bounds = {"type": "integer", "minimum": 5, "maximum": 7, "exclusiveMinimum": True, "exclusiveMaximum": True}
    for each in (schema, bounds):
        [row] = model.generate(["a"], max_new_tokens=64, json_schema=each)
        json.loads(row.text)
    assert row.text == "6"  # draft 4 has booleans here


def test_a_schema_that_is_nested_too_deeply_is_refused(model: TextModel) -> None:
    schema: Any = True
    for _ in range(5000):
        schema = {"not": schema}
    with pytest.raises(ValueError, match="json_schema: this schema is nested too deeply; simplify it"):
        model.generate(["a"], json_schema=schema)


def test_a_tokenizer_of_whole_words_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="json_schema: this tokenizer cannot keep a schema"):
        load(make_base(tmp_path, "ab"), device="cpu").generate(["a"], json_schema=True)


def test_the_command_keeps_a_schema(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = make_bytes_base(tmp_path / "base")
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps(PERSON), encoding="utf-8")
    command = ["generate", "--ckpt_path", str(base), "--json_schema", str(schema), "--max_new_tokens", "80"]
    assert main([*command, "--prompt", "a"]) == 0
    jsonschema.validate(json.loads(capsys.readouterr().out), PERSON)
    output = tmp_path / "answers.jsonl"
    assert main([*command, "--prompt", "a", "--output", str(output)]) == 0
    jsonschema.validate(json.loads(json.loads(output.read_text(encoding="utf-8"))["response"]), PERSON)
    schema.write_text("{", encoding="utf-8")
    assert main([*command, "--prompt", "a"]) == 2
    assert "schema.json is not JSON" in capsys.readouterr().err
