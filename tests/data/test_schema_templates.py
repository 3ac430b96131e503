"""Decoders that draw in any order keep a schema through a template; `jsonschema` judges."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jsonschema", reason="needs jsonschema: pip install --group test")

import jsonschema
from hypothesis import given, settings
from hypothesis import strategies as st

from refusion_lit import load
from refusion_lit.contrib import CARD
from refusion_lit.data import schema_templates
from refusion_lit.decoding import Decoder, FastDLLM, LLaDA, ReFusion
from refusion_lit.text_model import TextModel
from refusion_lit.types import SamplingParams
from support.tiny import make_bytes_base

GOLDENS = Path(__file__).parents[1] / "goldens" / "models"
DECODERS = [
    ReFusion(slot_size=4, num_serial_blocks=2),
    LLaDA(),
    LLaDA(block_length=8),
    FastDLLM(threshold=0.1),
]


@pytest.mark.parametrize(
    ("schema", "values"),
    [
        ({"minimum": 0, "maximum": 1}, ["0", "0.5", "0.99", "1"]),
        ({"minimum": 0}, ["0.25", "12.5"]),
        ({"minimum": -2, "maximum": 0}, ["-0.5", "-1.99", "-2", "0"]),
        ({"minimum": -3, "maximum": -1}, ["-1.5", "-2.75"]),
        ({}, ["-0.5", "0.5", "-99.99"]),
    ],
)
def test_numbers_have_all_decimals_within_their_bounds(schema: dict[str, Any], values: list[str]) -> None:
    low, high = (schema.get(name, bound) for name, bound in (("minimum", -1000), ("maximum", 1000)))
    shapes = [*schema_templates._numbers(low, high), *schema_templates._decimals(low, high)]
    for value in values:
        assert any(fits(shape, value) for shape in shapes), value
    for value in (f"{low}.5" if low < 0 else f"-{low}.5", f"{high}.5" if high >= 0 else f"-{-high - 1}.5"):
        assert not any(fits(shape, value) for shape in shapes), value


def fits(alternative: list[str], value: str) -> bool:
    """Return whether the characters of a value are those of an alternative."""
    return len(alternative) == len(value) and all(a in b for a, b in zip(value, alternative, strict=True))


def bounds(low: str, high: str, values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Draw none, one or both of two bounds."""
    both = st.lists(values, min_size=2, max_size=2).map(sorted).map(lambda pair: {low: pair[0], high: pair[1]})
    return st.one_of(st.just({}), both, values.map(lambda value: {low: value}), values.map(lambda value: {high: value}))


TEXTS = st.text(st.characters(codec="utf-8", max_codepoint=0x2FF), max_size=6)
CONSTANTS = st.none() | st.booleans() | st.integers(-99, 99) | st.sampled_from([0.5, -1e30]) | TEXTS
NUMBERS = st.builds(
    lambda kind, bound: {"type": kind, **bound},
    st.sampled_from(["integer", "number"]),
    bounds("minimum", "maximum", st.integers(-5000, 5000) | st.sampled_from([-0.5, 0.25, 9.75, 2e7])),
)
STRINGS = bounds("minLength", "maxLength", st.integers(0, 9)).map(lambda bound: {"type": "string", **bound})
ENUMS = st.lists(CONSTANTS, min_size=1, max_size=4).map(lambda values: {"enum": values})
TYPED = st.lists(TEXTS, min_size=1, max_size=3).map(lambda values: {"type": "string", "enum": [*values, 1]})
LEAVES = st.one_of(
    NUMBERS, STRINGS, ENUMS, TYPED, CONSTANTS.map(lambda value: {"const": value}),
    st.sampled_from([{"type": "boolean"}, {"type": "null", "title": "none"}]),
)  # fmt: skip


@st.composite
def objects(draw: st.DrawFn, values: st.SearchStrategy[Any]) -> dict[str, Any]:
    """Draw objects; properties with a single value may be optional."""
    properties = draw(st.dictionaries(TEXTS, values, max_size=3))
    single = [key for key, value in properties.items() if value.get("type") not in ("object", "array")]
    optional = draw(st.sets(st.sampled_from(single))) if single else set()
    return {"type": "object", "properties": properties, "required": [key for key in properties if key not in optional]}


@st.composite
def arrays(draw: st.DrawFn, values: st.SearchStrategy[Any]) -> dict[str, Any]:
    """Draw arrays; the number of items that are arrays or objects is fixed."""
    items = draw(values)
    fewest, most = sorted((draw(st.integers(0, 2)), draw(st.integers(0, 2))))
    is_single = items.get("type") not in ("object", "array")
    return {"type": "array", "items": items, "minItems": fewest if is_single or most == 1 else most, "maxItems": most}


SCHEMAS = st.recursive(LEAVES, lambda values: objects(values) | arrays(values), max_leaves=4)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return load(make_bytes_base(tmp_path_factory.mktemp("base"), mask=True), device="cpu")


@functools.cache
def golden(name: str) -> TextModel:
    return load(GOLDENS / name, device="cpu")


def generate_checked(
    model: TextModel, schema: Any, decoder: Decoder, sampling: SamplingParams, size: int = 2
) -> list[str]:
    """Return the texts of answers, all of which keep the schema."""
    options: dict[str, Any] = {"decoder": decoder, "sampling": sampling, "allow_mismatch": True}
    rows = model.generate(["1", "2", "3"], json_schema=schema, batch_size=size, **options)
    for row in rows:
        jsonschema.validate(json.loads(row.text), schema)
        assert row.finish_reason == "eos"
    return [row.text for row in rows]


def is_impossible(schema: dict[str, Any]) -> bool:
    """Whether bounds of a value leave nothing that a template has: integers, and tokens of a quarter of a string."""
    if schema.get("type") in ("integer", "number"):
        low, high = schema.get("minimum", -math.inf), schema.get("maximum", math.inf)
        return low > -math.inf and math.ceil(low) > high
    if schema.get("type") == "string" and "enum" not in schema:
        most = schema.get("maxLength", math.inf)
        return most < math.inf and schema.get("minLength", 0) > most // max(1, most // 4)
    items = [schema["items"]] if schema.get("maxItems") else []
    return any(map(is_impossible, [*schema.get("properties", {}).values(), *items]))


@pytest.mark.filterwarnings("ignore:.*does not fit this model")
@settings(max_examples=15, deadline=None)
@given(schema=SCHEMAS, decoder=st.sampled_from(DECODERS), temperature=st.sampled_from([0.0, 1.0, 5.0]))
def test_answers_keep_what_is_accepted(model: TextModel, schema: Any, decoder: Decoder, temperature: float) -> None:
    sampling = SamplingParams(max_new_tokens=160, temperature=temperature)
    if is_impossible(schema):
        with pytest.raises(ValueError, match=r"no integer within its bounds|minLength"):
            generate_checked(model, schema, decoder, sampling)
    else:
        texts = generate_checked(model, schema, decoder, sampling)
        assert generate_checked(model, schema, decoder, sampling, size=1) == texts


NATURAL = st.tuples(st.integers(0, 999), st.integers(0, 99_999)).map(sorted)
OF_DIGITS = st.lists(st.integers(0, 999), min_size=1).map(lambda values: {"enum": values}) | NATURAL.map(
    lambda pair: {"type": "integer", "minimum": pair[0], "maximum": pair[1]}
)


@pytest.mark.parametrize("name", ["additions-clean", "additions-bidirectional"])
@settings(max_examples=10, deadline=None)
@given(schema=OF_DIGITS)
def test_a_trained_model_keeps_numbers(name: str, schema: Any) -> None:
    trained = golden(name)
    generate_checked(trained, schema, trained.default_decoder, SamplingParams(max_new_tokens=16))


def test_optional_properties_and_items_may_be_left_out_or_not(model: TextModel) -> None:
    """Also before the first required property, and where no property is required."""
    digit = {"type": "integer", "minimum": 0, "maximum": 9}
    properties = {"a": digit, "b": digit, "c": {"type": "array", "items": digit, "maxItems": 3}}
    names: set[tuple[str, ...]] = set()
    lengths: set[int] = set()
    for seed in range(20):  # until all were seen
        if len(names) == 4 and len(lengths) == 3:
            break
        sampling = SamplingParams(max_new_tokens=80, temperature=30.0, seed=seed)
        for required in (["c"], ["b", "c"], ["a", "c"]):
            schema = {"type": "object", "properties": properties, "required": required}
            for text in generate_checked(model, schema, ReFusion(slot_size=4), sampling):
                names.add((*json.loads(text),))
                lengths.add(len(json.loads(text)["c"]))
    [text, *_] = generate_checked(
        model, {"type": "object", "properties": {"a": digit, "b": digit}}, ReFusion(), sampling
    )
    assert "a" in json.loads(text)
    assert names == {("c",), ("a", "b", "c"), ("b", "c"), ("a", "c")}
    assert lengths == {1, 2, 3}


def test_a_tokenizer_without_a_character_is_refused() -> None:
    with pytest.raises(ValueError, match=r"json_schema: .*no token.*'-'"):
        golden("additions-clean").generate(["1"], json_schema={"type": "integer"})


STRING = {"type": "string"}
REFUSED = [
    (True, "values of any type in the schema"),
    ({}, "values of any type in the schema"),
    ({"type": "object"}, "optional or unnamed properties in the schema"),
    (
        {"type": "object", "properties": {"a": STRING}, "required": ["b"]},
        "required properties without a schema in the schema",
    ),
    (
        {"type": "object", "properties": {"a": {"type": "array"}}, "required": ["a"]},
        'values of any type in the items of "a"',
    ),
    (
        {"type": "object", "properties": {"a": STRING, "b": {"type": "array", "items": STRING}}, "required": ["a"]},
        'an optional value that is an array or object in "b"',
    ),
    ({"type": "array", "items": STRING, "uniqueItems": True}, "uniqueItems in the schema"),
    ({"type": "array", "items": STRING, "minItems": 2, "maxItems": 1}, "minItems 2 in the schema"),
    ({"type": ["string", "null"]}, "the type ['string', 'null'] in the schema"),
    ({"anyOf": [STRING]}, "anyOf in the schema"),
    (STRING | {"pattern": "a"}, "pattern in the schema"),
    (STRING | {"minLength": 33}, "minLength 33 in the schema"),
    ({"type": "integer", "multipleOf": 2}, "multipleOf in the schema"),
    ({"type": "string", "enum": [1]}, "no value in the schema"),
    ({"const": 1, "enum": [2]}, "enum in the schema"),
]


@pytest.mark.parametrize(("schema", "what"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_cannot_be_guaranteed_is_refused_before_work_starts(model: TextModel, schema: Any, what: str) -> None:
    with pytest.raises(ValueError, match="json_schema: ") as caught:
        model.generate(["1"], decoder=ReFusion(), json_schema=schema)
    assert what in str(caught.value)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "object", "properties": [1]}, ".*wrong: "),
        ({"enum": 1}, ".*wrong: "),
        ({"enum": ["a" * 1000, *range(1000)]}, ".*more than 100000 tokens"),
        (
            {
                "type": "object",
                "properties": dict.fromkeys(map(str, range(999)), STRING),
                "required": [*map(str, range(999))],
            },
            ".*more than 1000000 tokens.*the schema",
        ),
    ],
    ids=lambda value: str(value)[:30],
)
def test_wrong_and_huge_schemas_are_refused(model: TextModel, schema: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"json_schema: {message}"):
        model.generate(["1"], decoder=ReFusion(), json_schema=schema)


@pytest.mark.parametrize("kind", ["integer", "number"])
def test_a_huge_range_is_refused_before_it_is_laid_out(
    model: TextModel, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_made = 0
    blocks = schema_templates._blocks

    def counted(low: int, high: int) -> Iterator[list[str]]:
        nonlocal num_made
        for block in blocks(low, high):
            num_made += len(block)
            yield block

    monkeypatch.setattr(schema_templates, "_blocks", counted)
    schema = {"type": kind, "minimum": -(10**308) + 1, "maximum": 10**308 - 1}
    with pytest.raises(ValueError, match="more than 100000 tokens"):
        model.generate(["1"], decoder=ReFusion(), json_schema=schema)
    assert num_made <= 100_000


def test_limits_and_decoders_without_templates_are_refused(model: TextModel) -> None:
    with pytest.raises(ValueError, match=r"max_new_tokens: .*at least 33"):
        model.generate(["1"], decoder=ReFusion(), max_new_tokens=32, json_schema=STRING)
    with pytest.raises(ValueError, match="decoder: CARD"):
        model.generate(["1"], decoder=CARD(), json_schema=STRING, allow_mismatch=True)
