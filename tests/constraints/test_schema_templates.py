"""Decoders that draw in any order keep a schema through a template; `jsonschema` judges."""

from __future__ import annotations

import functools
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jsonschema", reason="needs jsonschema: pip install --group test")

import jsonschema
from hypothesis import given, settings
from hypothesis import strategies as st

from refusion_lit import load
from refusion_lit.constraints import schema_templates
from refusion_lit.contrib import CARD
from refusion_lit.decoding import Autoregressive, Decoder, FastDLLM, LLaDA, ReFusion
from refusion_lit.text_model import TextModel
from refusion_lit.types import ModelTraits, Prompt, SamplingParams
from support.example_counts import examples
from support.tiny import make_bytes_base
from support.tokenizer_zoo import make_model

GOLDENS = Path(__file__).parents[1] / "goldens" / "models"
DECODERS = [
    ReFusion(slot_size=4, num_serial_blocks=2),
    LLaDA(),
    LLaDA(block_length=8),
    FastDLLM(threshold=0.1),
]


@pytest.mark.parametrize(
    ("low", "high", "inside", "outside"),
    [
        (0, 1, ["0", "0.5", "0.99", "1"], ["-0.5", "1.5"]),
        (0, 1000, ["0.25", "12.5"], ["-0.5", "1000.5"]),
        (-2, 0, ["-0.5", "-1.99", "-2", "0"], ["-2.5", "0.5"]),
        (-3, -1, ["-1.5", "-2.75"], ["-3.5", "-0.5"]),
        (-1000, 1000, ["-0.5", "0.5", "-99.99"], ["-1000.5", "1000.5"]),
    ],
)
def test_numbers_have_all_decimals_within_their_bounds(
    low: int, high: int, inside: list[str], outside: list[str]
) -> None:
    shapes = [*schema_templates._numbers(low, high), *schema_templates._decimals(low, high)]
    for value in inside:
        assert any(fits(shape, value) for shape in shapes), value
    for value in outside:
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
LIMITS = st.integers(-5000, 5000) | st.sampled_from([-0.5, 0.25, 9.75, 2e7])
NUMBERS = st.builds(
    lambda kind, bound, exclusive: {"type": kind, **bound, **exclusive},
    st.sampled_from(["integer", "number"]),
    bounds("minimum", "maximum", LIMITS),
    st.just({}) | bounds("exclusiveMinimum", "exclusiveMaximum", LIMITS),
)
STRINGS = bounds("minLength", "maxLength", st.integers(0, 9)).map(lambda bound: {"type": "string", **bound})
ENUMS = st.lists(CONSTANTS, min_size=1, max_size=4).map(lambda values: {"enum": values})
TYPED = st.lists(TEXTS, min_size=1, max_size=3).map(lambda values: {"type": "string", "enum": [*values, 1]})
LEAVES = st.one_of(
    NUMBERS, STRINGS, ENUMS, TYPED, CONSTANTS.map(lambda value: {"const": value}),
    st.sampled_from([{"type": "boolean"}, {"type": "null", "title": "none"}]),
)  # fmt: skip


TYPES = st.builds(
    lambda kinds, numbers, strings: {**numbers, **strings, "type": kinds},
    st.lists(st.sampled_from(["integer", "number", "string", "boolean", "null"]), min_size=1, unique=True),
    NUMBERS,
    STRINGS,
).map(
    lambda schema: {  # bounds of types that are not listed are refused
        name: value
        for name, value in schema.items()
        if name == "type" or ("Length" in name and "string" in schema["type"])
        or ("imum" in name and {"integer", "number"} & {*schema["type"]})
    }
)  # fmt: skip


@st.composite
def objects(draw: st.DrawFn, values: st.SearchStrategy[Any]) -> dict[str, Any]:
    """Draw objects with optional properties."""
    properties = draw(st.dictionaries(TEXTS, values, max_size=3))
    optional = draw(st.sets(st.sampled_from([*properties]))) if properties else set()
    return {"type": "object", "properties": properties, "required": [key for key in properties if key not in optional]}


@st.composite
def arrays(draw: st.DrawFn, values: st.SearchStrategy[Any]) -> dict[str, Any]:
    """Draw arrays of up to three items."""
    fewest, most = sorted((draw(st.integers(0, 3)), draw(st.integers(0, 3))))
    return {"type": "array", "items": draw(values), "minItems": fewest, "maxItems": most}


@st.composite
def unions(draw: st.DrawFn, values: st.SearchStrategy[Any]) -> dict[str, Any]:
    """Draw unions; options of ``oneOf`` differ in a required property."""
    options = draw(st.lists(values, min_size=1, max_size=3))
    if draw(st.booleans()):
        return {"anyOf": options}
    kinds = [
        {"type": "object", "properties": {"value": option, "kind": {"const": number}}, "required": ["kind"]}
        for number, option in enumerate(options)
    ]
    return {"oneOf": [*kinds, {"type": "null"}]}


SCHEMAS = st.recursive(LEAVES | TYPES, lambda values: objects(values) | arrays(values) | unions(values), max_leaves=5)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return load(make_bytes_base(tmp_path_factory.mktemp("base"), mask=True, max_positions=2048), device="cpu")


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
    """Return whether the bounds of a value leave nothing that a template can write.

    Templates write integers, and strings in tokens that may have a quarter of the longest string's characters each.
    """
    kinds = schema.get("type", [])
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if {"integer", "number"} & {*kinds}:
        lows = [math.ceil(schema["minimum"])] if "minimum" in schema else []
        lows += [math.floor(schema["exclusiveMinimum"]) + 1] if "exclusiveMinimum" in schema else []
        highs = [math.floor(schema["maximum"])] if "maximum" in schema else []
        highs += [math.ceil(schema["exclusiveMaximum"]) - 1] if "exclusiveMaximum" in schema else []
        if lows and max(lows) > min(highs, default=math.inf):
            return True
    if "string" in kinds and "enum" not in schema:
        most = schema.get("maxLength", math.inf)
        if most < math.inf and schema.get("minLength", 0) > most // max(1, most // 4):
            return True
    items = [schema["items"]] if schema.get("maxItems") else []
    options = schema.get("anyOf", schema.get("oneOf", []))
    return any(map(is_impossible, [*schema.get("properties", {}).values(), *items, *options]))


def fill(model: TextModel, schema: Any, seed: int) -> Any:
    """Return an answer whose places are filled in a random order with random tokens.

    Places are filled in groups: the tokens of a group are drawn at once, before the first of them counts.
    """
    rng = random.Random(seed)
    sampling = SamplingParams(max_new_tokens=100_000)
    [prompt] = model.schemas.constrain([Prompt(token_ids=(1,), id="0")], schema, ReFusion(), sampling)
    assert prompt.constraint is not None
    assert prompt.given is not None
    state = prompt.constraint.begin(sampling.max_new_tokens)
    tokens: list[Any] = [*prompt.given]
    places = [place for place, token in enumerate(tokens) if token is None]
    rng.shuffle(places)
    while places:
        group = [places.pop() for _ in range(min(len(places), rng.choice([1, 1, 2, 9])))]
        drawn = []
        for place in group:
            allowed = state.allowed_tokens(place, [])
            assert allowed is not None
            drawn.append(rng.choice(allowed.nonzero()[:, 0].tolist()))
        for place, token in zip(group, drawn, strict=True):
            tokens[place] = state.settle(place, [], token)
    value = json.loads(str(model.tokenizer.decode(tokens[:-1])))
    jsonschema.validate(value, schema)
    return value


@settings(max_examples=examples(150), deadline=None)
@given(schema=SCHEMAS, seed=st.integers(0, 2**32))
def test_any_order_of_filling_keeps_the_schema(model: TextModel, schema: Any, seed: int) -> None:
    if not is_impossible(schema):
        fill(model, schema, seed)


@pytest.mark.filterwarnings("ignore:.*does not fit this model")
@settings(max_examples=10, deadline=None)
@given(schema=SCHEMAS, decoder=st.sampled_from(DECODERS), temperature=st.sampled_from([0.0, 1.0, 5.0]))
def test_answers_keep_what_is_accepted(model: TextModel, schema: Any, decoder: Decoder, temperature: float) -> None:
    sampling = SamplingParams(max_new_tokens=600, temperature=temperature)
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
    """An optional property may also be the first, and an object may have no required property."""
    digit = {"type": "integer", "minimum": 0, "maximum": 9}
    properties = {"a": digit, "b": digit, "c": {"type": "array", "items": digit, "maxItems": 3}}
    names: set[tuple[str, ...]] = set()
    lengths: set[int] = set()
    for seed in range(80):
        for required in (["c"], ["b", "c"], ["a", "c"]):  # which properties may be left out differs
            schema = {"type": "object", "properties": properties, "required": required}
            value = fill(model, schema, seed)
            names.add((*value,))
            lengths.add(len(value["c"]))
    sampling = SamplingParams(max_new_tokens=80, temperature=30.0)
    [text, *_] = generate_checked(
        model, {"type": "object", "properties": {"a": digit, "b": digit}}, ReFusion(), sampling
    )
    assert "a" in json.loads(text)
    assert names == {("c",), ("a", "b", "c"), ("b", "c"), ("a", "c")}
    assert lengths == {1, 2, 3}


def test_a_tokenizer_that_puts_a_space_before_texts_keeps_schemas(tmp_path: Path) -> None:
    """RoBERTa's byte-level tokenizer is of this kind (``add_prefix_space``)."""
    folder = make_model("gpt2", tmp_path)
    path = folder / "tokenizer.json"
    values = json.loads(path.read_text())
    values["pre_tokenizer"]["add_prefix_space"] = True
    path.write_text(json.dumps(values))
    model = load(folder, device="cpu")
    schema = {"type": "object", "properties": {"a": {"enum": ["is", "in"]}}, "required": ["a"]}
    for decoder in (Autoregressive(), ReFusion(slot_size=4)):
        model.backbone.traits = ModelTraits(attention="causal", predictions=tuple(decoder.requirements().predictions))
        [row] = model.generate(["x"], decoder=decoder, json_schema=schema, max_new_tokens=64)
        jsonschema.validate(json.loads(row.text), schema)


def test_a_tokenizer_without_a_character_is_refused() -> None:
    with pytest.raises(ValueError, match=r"json_schema: .*no token.*'-'"):
        golden("additions-clean").generate(["1"], json_schema={"type": "integer"})


def test_optional_objects_and_arrays_may_be_left_out_or_not(model: TextModel) -> None:
    """The schema is in the form in which pydantic writes models in models."""
    digit = {"type": "integer", "minimum": 0, "maximum": 9}
    point = {"type": "object", "properties": {"x": digit, "y": {"anyOf": [digit, {"type": "null"}]}}, "required": ["x"]}
    schema = {
        "$defs": {"Point": point},
        "type": "object",
        "properties": {
            "best": {"$ref": "#/$defs/Point"},
            "all": {"type": "array", "items": {"$ref": "#/$defs/Point"}, "minItems": 1, "maxItems": 2},
            "name": {"type": ["string", "null"], "maxLength": 3},
        },
        "required": ["name"],
    }
    values = [fill(model, schema, seed) for seed in range(40)]
    assert {"best" in value for value in values} == {True, False}
    assert {len(value.get("all", ())) for value in values} == {0, 1, 2}
    assert {type(value["name"]) for value in values} == {str, type(None)}
    points = [point for value in values for point in value.get("all", ())]
    assert {type(point.get("y", "")) for point in points} == {int, str, type(None)}


def doubling_schema(keyword: str) -> dict[str, Any]:
    """Return a schema whose value has 2 ** 40 parts."""
    definitions: dict[str, Any] = {
        str(i): {
            "type": "object",
            "properties": {name: {"$ref": f"#/$defs/{i + 1}"} for name in "ab"},
            keyword: ["a", "b"],
        }
        for i in range(40)
    }
    return {"$ref": "#/$defs/0", "$defs": definitions | {"40": {"const": 1}}}


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
    ({"type": "array", "items": STRING, "uniqueItems": True}, "uniqueItems in the schema"),
    ({"type": "array", "items": STRING, "minItems": 2, "maxItems": 1}, "minItems 2 in the schema"),
    ({"type": ["string", "x"]}, "the type 'x' in the schema"),
    ({"type": ["string", "null"], "minimum": 1}, "minimum in the schema"),
    ({"type": "string", "anyOf": [STRING]}, "type beside anyOf in the schema"),
    ({"anyOf": []}, "no value in the schema"),
    ({"anyOf": [STRING, {}]}, "values of any type in the schema"),
    ({"oneOf": [STRING, {"enum": ["a"]}]}, "oneOf with options that may have a value in common in the schema"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf with options that may have a value in common"),
    ({"oneOf": [{"const": 1}, {"const": 1.0}]}, "oneOf with options that may have a value in common"),
    ({"allOf": [STRING, STRING]}, "allOf in the schema"),
    ({"$ref": "#/$defs/a"}, "the reference '#/$defs/a', which names nothing"),
    ({"$ref": "https://example.com/a"}, "the reference 'https://example.com/a'"),
    (
        {"type": "array", "items": {"$ref": "#"}},
        "the reference '#' to itself",
    ),
    ({"$ref": "#/$defs/a", "minLength": 1, "$defs": {"a": STRING}}, "minLength beside $ref"),
    ({"$ref": "#/$defs/a", "type": "integer", "$defs": {"a": STRING}}, "type beside $ref"),
    ({"allOf": [STRING], "type": "integer"}, "type beside allOf"),
    ({"anyOf": {"a": STRING}}, "anyOf without a list"),
    ({"oneOf": [{"const": number} for number in range(201)]}, "oneOf with more than 200 options"),
    ({"oneOf": [1, 2]}, "oneOf with options that may have a value in common"),
    ({"$ref": 5}, "the reference '5'"),
    (STRING | {"pattern": "a"}, "pattern in the schema"),
    (STRING | {"minLength": 33}, "minLength 33 in the schema"),
    ({"type": "integer", "multipleOf": 2}, "multipleOf in the schema"),
    ({"type": "integer", "minimum": 0, "exclusiveMinimum": True}, "exclusiveMinimum"),
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
        ({"allOf": 5}, ".*allOf"),
        ({"oneOf": [{"type": [[]]}, STRING]}, ".*wrong: "),
        (doubling_schema("required"), ".*more than 10000 values"),
        (doubling_schema("title"), ".*more than 10000 values"),  # no property is required
        ({"anyOf": [STRING] * 100}, ".*more than 100000 tokens"),
        ({"type": "array", "maxItems": 10**9, "items": {"const": 1}}, ".*more than 10000 values"),
        (
            {"$ref": "#/$defs/0", "$defs": {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(2000)}},
            ".*(wrong: |nested too deeply)",
        ),
        ({"enum": ["a" * 1000, *range(1000)]}, ".*more than 100000 tokens"),
        ({"anyOf": [{"enum": [*range(start, start + 4000)]} for start in range(3)]}, ".*more than 10000 values"),
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

    def count_blocks(low: int, high: int) -> Iterator[list[str]]:
        nonlocal num_made
        for block in blocks(low, high):
            num_made += len(block)
            yield block

    monkeypatch.setattr(schema_templates, "_blocks", count_blocks)
    schema = {"type": kind, "minimum": -(10**308) + 1, "maximum": 10**308 - 1}
    with pytest.raises(ValueError, match="more than 100000 tokens"):
        model.generate(["1"], decoder=ReFusion(), json_schema=schema)
    assert num_made <= 100_000


def test_limits_and_decoders_without_templates_are_refused(model: TextModel) -> None:
    with pytest.raises(ValueError, match=r"max_new_tokens: .*at least 33"):
        model.generate(["1"], decoder=ReFusion(), max_new_tokens=32, json_schema=STRING)
    with pytest.raises(ValueError, match="decoder: CARD"):
        model.generate(["1"], decoder=CARD(), json_schema=STRING, allow_mismatch=True)
