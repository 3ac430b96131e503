"""Responses under a JSON schema: a random model writes only texts that `jsonschema` accepts."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("llguidance", reason="needs llguidance: pip install --group test")
pytest.importorskip("jsonschema", reason="needs jsonschema: pip install --group test")

import jsonschema

from refusion_lit import load
from refusion_lit.cli import main
from refusion_lit.constraints.schemas import Schemas
from refusion_lit.decoding import Autoregressive, Decoder, ReFusion
from refusion_lit.text_model import TextModel
from refusion_lit.types import Constraint, Prompt, SamplingParams
from support.example_counts import examples
from support.tiny import make_base, make_bytes_base

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
@pytest.mark.parametrize(("temperature", "max_new_tokens"), [(0.0, 64), (1.0, 120)])
def test_responses_keep_a_schema(model: TextModel, name: str, temperature: float, max_new_tokens: int) -> None:
    sampling = SamplingParams(max_new_tokens=max_new_tokens, temperature=temperature)
    rows = model.generate(["a", "b", "c"], sampling=sampling, json_schema=SCHEMAS[name], batch_size=2)
    for row in rows:
        jsonschema.validate(json.loads(row.text), SCHEMAS[name])
        assert row.finish_reason == "eos"
    [alone] = model.generate_ids([model.encode("c")], ids=["2"], sampling=sampling, json_schema=SCHEMAS[name])
    assert alone.token_ids == rows[2].token_ids


def test_the_shortest_limit_is_found_and_suffices(model: TextModel) -> None:
    with pytest.raises(ValueError, match=r"max_new_tokens: .*at least \d+, ") as caught:
        model.generate(["a"], max_new_tokens=1, json_schema=PERSON)
    fewest = int(str(caught.value).split("at least ")[1].split(",")[0])
    [row] = model.generate(["a"], max_new_tokens=fewest, json_schema=PERSON)
    assert row.num_tokens == fewest
    jsonschema.validate(json.loads(row.text), PERSON)


HARD_TO_END: list[dict[str, Any]] = [  # schemas under which a text may go on for long before it can end
    {"type": "number", "exclusiveMinimum": 0},
    {"type": "number", "multipleOf": 10},
    {"type": "string", "format": "email"},
    {"type": "string", "pattern": "^\\d+\\.\\d+\\.\\d+$"},
    {"type": "string", "pattern": "\\w"},
]


@pytest.mark.parametrize("schema", HARD_TO_END, ids=str)
def test_a_text_ends_in_time_where_repeating_a_byte_leads_to_no_end(model: TextModel, schema: Any) -> None:
    sampling = SamplingParams(max_new_tokens=32, temperature=1.0)
    for row in model.generate(["a", "b"], sampling=sampling, json_schema=schema):
        jsonschema.validate(json.loads(row.text), schema)


# For each format of a string, texts that keep the format and texts that do not.
FORMATS = {
    "date": (["2024-02-29", "2000-02-29", "2023-02-28", "2023-12-31"], ["2023-02-29", "1900-02-29", "0000-01-01"]),
    "time": (["23:59:59Z", "12:00:00.5+01:00"], ["06:12:60Z", "23:59:60Z"]),
    "date-time": (["2024-02-29T23:59:59Z"], ["2023-02-29T12:00:00Z", "2023-02-28T12:00:60Z", "0000-01-01T12:00:00Z"]),
    "email": (["a.b@c-d.org", "a@" + "b" * 63], ["a@b@c.org", "a@" + "b" * 64, "a" * 65 + "@b", "a@-b", "a@b."]),
    "hostname": (["a-b.org", "b" * 63], ["b" * 64, ".".join(["b" * 63] * 4), "-b.org"]),
    "duration": (["P1Y2M", "PT5S", "P3W"], ["P", "PT", "1Y", "P1S"]),
    "ipv4": (["127.0.0.1"], ["256.0.0.1", "1.2.3"]),
    "ipv6": (["::1", "1:2:3:4:5:6:7:8"], ["1::2::3", "12345::", "::1%eth0"]),
    "uri": (["https://a.org/b?c=d#e"], ["a.org", "http://a b"]),
    "uuid": (
        ["c0ffee00-0000-4000-8000-00000000000a"],
        ["c0ffee000000400080000000000000a", "g0ffee00-0000-4000-8000-00000000000a"],
    ),
}


@pytest.mark.parametrize("extra", [{}, {"maxLength": 90}, {"allOf": [{"minLength": 1}]}, {"type": ["string", "null"]}])
@pytest.mark.parametrize("name", FORMATS)
def test_formats_are_kept(model: TextModel, name: str, extra: dict[str, Any]) -> None:
    constraint = make_constraint(model, {"type": "string", "format": name, **extra})
    kept, broken = FORMATS[name]
    for texts, expected in ((kept, True), (broken, False)):
        for text in texts:
            tokens = [*model.tokenizer(json.dumps(text), add_special_tokens=False)["input_ids"]]
            state: Any = constraint.begin(400)
            is_accepted = state._matcher.try_consume_tokens(tokens) == len(tokens) and state._matcher.is_accepting()
            assert is_accepted == expected, text


REFUSED = [  # a schema, further options of `generate`, and the message
    ({"type": "nothing"}, {}, "json_schema: .*cannot be enforced"),
    ({"type": "string", "pattern": "(?=a)b"}, {}, "json_schema: .*cannot be enforced"),
    ({"type": "string", "pattern": "^(?i)ab$"}, {}, "json_schema: pattern"),
    *(({"format": name}, {}, "json_schema: .*ormat") for name in ("unknown", "regex", "Time", "idn-email", 5, None)),
    (False, {}, "json_schema: expected a schema that allows"),
    ({"enum": [1, 2**53 + 1]}, {}, r"json_schema: .*2\*\*53.* got \['9007199254740993'\]"),
    ({"type": "integer", "minimum": 10**30, "maximum": 10**30}, {}, r"json_schema: .*2\*\*53.* got"),
    ("text", {}, "json_schema: .*object.*, got 'text'"),
    (PERSON, {"sampling": SamplingParams(stop=("x",))}, "json_schema: .*stop strings"),
    (PERSON, {"templates": ["{{1}}"]}, "json_schema: .*templates"),
]


@pytest.mark.parametrize(("schema", "options", "message"), REFUSED)
def test_schemas_and_options_that_cannot_be_guaranteed_are_refused(
    model: TextModel, schema: Any, options: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        model.generate(["a"], json_schema=schema, **options)


def make_constraint(model: TextModel, schema: Any, max_new_tokens: int = 400) -> Constraint:
    """Return the constraint that a schema puts on the tokens of a response."""
    schemas = Schemas(model.tokenizer, model.backbone.special_tokens)
    sampling = SamplingParams(max_new_tokens=max_new_tokens)
    [prompt] = schemas.constrain([Prompt(token_ids=(3,), id="0")], schema, Autoregressive(), sampling)
    assert prompt.constraint is not None
    return prompt.constraint


def sample_text(
    model: TextModel, constraint: Constraint, random: Random, wanted: str, max_length: int, eos_weight: float = 1e2
) -> str:
    """Draw a text from the tokens that a constraint allows.

    Args:
        model: The model, of which only the tokenizer is used.
        constraint: The constraint.
        random: Draws the tokens.
        wanted: Characters whose tokens are drawn 1000 times as often as others.
        max_length: Maximum number of tokens.
        eos_weight: How often the EOS token is drawn; a tiny weight makes the text as long as possible.
    """
    eos = list(model.backbone.special_tokens.eos_token_ids)
    weights = torch.ones(model.backbone.special_tokens.vocab_size)
    weights[[model.encode(character)[0] for character in wanted]] = 1e3
    weights[eos] = eos_weight
    state = constraint.begin(max_length)
    tokens: list[int] = []
    while not tokens or tokens[-1] not in eos:
        allowed = state.allowed_tokens(len(tokens), tokens)
        assert allowed is not None
        [token] = random.choices(range(len(weights)), (weights * allowed).tolist())
        tokens.append(state.settle(len(tokens), tokens, token))
    assert len(tokens) <= max_length
    return model.tokenizer.decode(tokens[:-1])


def test_a_token_that_leads_to_no_end_is_replaced_at_its_place_and_not_after_it(model: TextModel) -> None:
    """After "b" the text could not end within 40 tokens, so "b" becomes "a"; a draft after "b" stays as it is."""
    quote, a, b, c = (model.encode(character)[0] for character in '"abc')
    state = make_constraint(model, {"type": "string", "pattern": "^(a|bb{3000})$"}).begin(40)
    assert state.settle(1, [quote], b) == a
    assert state.settle(2, [quote, b], b) == b
    assert state.settle(1, [quote], a) == a
    assert state.settle(2, [quote, a], c) == quote


def is_accepted(model: TextModel, constraint: Constraint, text: str) -> bool:
    """Return whether a constraint allows all tokens of a text, and its end."""
    state = constraint.begin(400)
    tokens: list[int] = []
    for token in [*model.encode(text), *model.backbone.special_tokens.eos_token_ids]:
        allowed = state.allowed_tokens(len(tokens), tokens)
        if allowed is None or not allowed[token]:
            return False
        tokens.append(token)
    return True


DRAFT_7 = {"$schema": "http://json-schema.org/draft-07/schema#"}
EVADING: list[tuple[dict[str, Any], str, str]] = [
    ({"type": "number", "exclusiveMinimum": 1.1}, "1.1000000000000000000000001", "1.2"),
    ({"type": "number", "exclusiveMaximum": 3}, "2.9999999999999999999999999", "2.5"),
    ({"type": "number", "exclusiveMinimum": 0}, f"0.{'0' * 330}1", "0.00001"),
    ({"type": "integer", "minimum": 3, "anyOf": [{}], "exclusiveMinimum": True, **DRAFT_7}, "3", "4"),
    ({"type": "integer", "exclusiveMaximum": 2}, "2", "1"),
    ({"type": "object", "properties": {"a": {"type": "integer"}}}, '{"\\u0061": "x"}', '{"b": "x"}'),
    ({"type": "object", "patternProperties": {"^a": {"type": "integer"}}}, '{"\\u0061": "x"}', '{"b": "x"}'),
    ({"type": "array", "prefixItems": [{"type": "null"}], "additionalItems": False}, "[1]", "[null, 1]"),
    ({"additionalItems": False, "anyOf": [{}], "items": [{"type": "null"}], **DRAFT_7}, "[null, 1]", "[null]"),
]
"""Schemas with a text that llguidance accepts by itself although it breaks the schema, and one that keeps it."""


@pytest.mark.parametrize(("schema", "wrong", "right"), EVADING, ids=str)
def test_no_spelling_evades_a_schema(model: TextModel, schema: Any, wrong: str, right: str) -> None:
    constraint = make_constraint(model, schema)
    assert not is_accepted(model, constraint, wrong)
    assert is_accepted(model, constraint, right)
    jsonschema.validators.validator_for(schema)(schema).validate(json.loads(right))


# Schemas that llguidance accepts and does not keep, and the message.
UNENFORCEABLE: list[tuple[dict[str, Any], str]] = [
    ({"x-guidance": {"lenient": True}, "not": {"type": "integer"}}, "x-guidance: expected draft 4"),
    ({"$schema": "http://json-schema.org/draft-03/schema#", "disallow": "null"}, r"\$schema: expected draft 4"),
    ({"multipleOf": 0.01}, "multipleOf: expected an integer.* got 0.01"),
    ({"allOf": [{"multipleOf": 65537}, {"multipleOf": 65539}]}, "multipleOf: .*smaller"),
    ({"type": "object", "minProperties": 2}, "minProperties: .*at most 1.* got 2"),
    ({"minProperties": 1, "required": True}, ".*'required'"),
    ({"pattern": "^[[:alpha:]]$"}, "pattern: "),
    ({"pattern": "^[a-z&&[^b]]$"}, "pattern: "),
    ({"pattern": r"^[^\w\s]$"}, "pattern: "),
    ({"patternProperties": {r"\W": True}}, "patternProperties: "),
    ({"const": 0.12345678901234567}, r".*15 digits, got \['0.1234"),
    ({"minimum": 0.30000000000000004}, r".*15 digits, got \['0.3000"),
    ({"const": "\x01"}, "expected a schema that allows a value"),
    ({"enum": [["a\x1f"], {"b": "c\x7f"}]}, "expected a schema that allows a value"),
    ({"pattern": r"^a\x01?$"}, "pattern: "),
    ({"pattern": "^[\\u0000-\\u001f]"}, "pattern: "),
    ({"enum": [-13, -13.0]}, ".*panic"),
]


@pytest.mark.parametrize(("schema", "message"), UNENFORCEABLE, ids=str)
def test_schemas_that_llguidance_would_not_keep_are_refused(model: TextModel, schema: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"json_schema: {message}"):
        make_constraint(model, schema)


def test_many_patterns_are_refused_and_repeated_ones_are_not(model: TextModel) -> None:
    make_constraint(model, {"anyOf": [{"type": "string", "pattern": "^a0$"}] * 101})
    different = [{"type": "string", "pattern": f"^a{i}$"} for i in range(101)]
    with pytest.raises(ValueError, match=r"^json_schema: .*patterns, got 101"):
        make_constraint(model, {"anyOf": different})


COMMON: list[dict[str, Any]] = [
    {"type": "object", "properties": {"price": {"type": "number", "exclusiveMinimum": 0}}, "required": ["price"]},
    {"type": "object", "minProperties": 1, "additionalProperties": {"type": "integer"}},
    {"type": "integer", "minimum": -9007199254740991, "maximum": 9007199254740991, "default": 0.30000000000000004},
    {"type": "string", "pattern": r"^[^\s@]+@[\w.-]+\.[a-z]{2,}$"},
    {"type": "integer", "multipleOf": 60},
    {"enum": ["a\x01b", "a\tb"]},  # of which the first cannot be written
    {"type": "string", "pattern": r"^[^\x00-\x1f]+[\x00-\x7f\n]$"},
]


@pytest.mark.parametrize("schema", COMMON, ids=str)
def test_common_schemas_are_kept(model: TextModel, schema: Any) -> None:
    text = sample_text(model, make_constraint(model, schema), Random(0), "0123456789", 100)
    jsonschema.validate(json.loads(text), schema)


PDF = {"type": "string", "pattern": r"\.pdf$"}
PATTERNS: list[dict[str, Any]] = [
    {"type": "string", "pattern": "foo"},
    {"type": "string", "pattern": "^(foo.*x|bar.*y)$"},
    {"type": "string", "pattern": "^(a|b)*c{3,}$"},
    {"type": "string", "pattern": '"é$'},
    {"type": "string", "allOf": [{"pattern": "foo"}, {"pattern": "bar"}], "minLength": 8},
    {"type": "object", "properties": {"a": PDF, "b": {"type": "string"}, "c": PDF}, "required": ["a", "b", "c"]},
    {"type": "array", "items": {"anyOf": [PDF, {"type": "string", "pattern": "[0-9]{3}-[0-9]"}]}, "minItems": 2},
    {"patternProperties": {"foo": True}, "type": "object", "additionalProperties": False, "minProperties": 1},
]


@pytest.mark.parametrize("schema", PATTERNS, ids=str)
def test_patterns_need_no_maximum_length(model: TextModel, schema: Any) -> None:
    """A pattern whose text may stand anywhere ends within the length limit, as a string without a pattern does."""
    constraint = make_constraint(model, schema)
    for seed in range(2):
        text = sample_text(model, constraint, Random(seed), "abcfo .pdf1-", 60, 1e-9)
        jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize(
    ("schema", "wanted", "max_length"),
    [
        ({"type": "integer"}, "9", 5000),
        ({"type": "number"}, "9e", 5000),
        ({"type": "number"}, "e12", 5000),
        ({"type": "number", "minimum": 2}, "9", 5000),
        ({"type": "array", "items": {"$ref": "#"}}, "[", 500),
    ],
    ids=str,
)
def test_a_long_number_or_a_deep_text_ends_before_a_parser_refuses_it(
    model: TextModel, schema: Any, wanted: str, max_length: int
) -> None:
    """Python's parser refuses integers of more than 4300 digits and texts of more than about 1000 levels."""
    text = sample_text(model, make_constraint(model, schema, 5000), Random(0), wanted, max_length, 1e-9)
    jsonschema.validate(json.loads(text, parse_constant=pytest.fail), schema)
    assert "Infinity" not in json.dumps(json.loads(text))


def test_a_name_whose_value_cannot_be_written_is_not_drawn(model: TextModel) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"const": "\x01"}, "b": {"type": "null"}},
        "additionalProperties": False,
    }
    constraint = make_constraint(model, schema)
    assert {sample_text(model, constraint, Random(seed), '"ab', 40) for seed in range(8)} <= {"{}", '{"b": null}'}


NAMES = st.sampled_from(["a", "b", "ab", 'a"', "\u00e9", "1", "u"])
SIZE = st.integers(0, 2)
NUMBER = st.integers(-30, 30) | st.sampled_from([0.1, -1.5, 1.1, 0.0, 2.25])
VALUE = st.sampled_from([1, 1.0, -2, 0.5, "a", 'a"', "", None, True, False, [1], {"a": 1}, []])
LEAVES: st.SearchStrategy[Any] = st.one_of(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["integer", "number"])},
        optional=dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), NUMBER)
        | {"multipleOf": st.sampled_from([1, 3, 10])},
    ),
    st.fixed_dictionaries({"type": st.just("string")}, optional={"minLength": SIZE, "maxLength": st.integers(1, 3)}),
    st.builds(lambda pattern: {"pattern": pattern}, st.sampled_from(["^[a-c]+$", r"\d", r"^\w", '"', r"\\", "^.{2}$"])),
    st.builds(lambda values: {"enum": values}, st.lists(VALUE, min_size=1, max_size=3)),
    st.builds(lambda value: {"const": value}, VALUE),
    st.sampled_from(
        [True, False, {"type": ["string", "null"]}, {"type": "boolean"}, {"type": "string", "format": "date"}]
    ),
)


def nest(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Return schemas of objects and arrays with up to four keywords, whose values are inner schemas."""
    several = st.lists(inner, min_size=1, max_size=2)
    keywords = {
        "type": st.sampled_from(["object", "array"]),
        "properties": st.dictionaries(NAMES, inner, max_size=2),
        "patternProperties": st.dictionaries(st.sampled_from(["^a", "b", '"', "1"]), inner, max_size=1),
        "additionalProperties": inner,
        "required": st.lists(NAMES, max_size=2),
        "minProperties": SIZE,
        "maxProperties": st.integers(1, 3),
        "prefixItems": several,
        "items": inner,
        "minItems": SIZE,
        "maxItems": st.integers(1, 3),
        "anyOf": several,
        "allOf": several,
        "oneOf": several,
        "$ref": st.just("#/$defs/a"),
    }
    order = st.permutations([*keywords]).map(lambda names: names[:4])
    return order.flatmap(lambda names: st.fixed_dictionaries({name: keywords[name] for name in names}))


@settings(max_examples=examples(400), deadline=None)
@given(nest(st.recursive(LEAVES, nest, max_leaves=4)), LEAVES, st.randoms(use_true_random=False))
def test_random_texts_keep_random_schemas(model: TextModel, schema: Any, shared: Any, random: Random) -> None:
    schema = {**schema, "$defs": {"a": shared}}
    try:
        constraint = make_constraint(model, schema, 60)
    except ValueError:
        return
    for _ in range(3):
        text = sample_text(model, constraint, random, '0123456789"\\{}[]:,.eE-uab', 60)
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))


INFINITE, NO_NUMBER = float("inf"), float("nan")
WRONG_BOUNDS = [
    ({"type": "integer", "minimum": INFINITE}, "minimum: .*finite.*, got inf"),
    ({"type": "number", "maximum": NO_NUMBER}, "maximum: .*finite.*, got nan"),
    ({"type": "integer", "minimum": -(10**5000)}, "minimum: .*finite.*, got -inf"),
    ({"type": "integer", "maximum": True}, "maximum: .*number, got True"),
    ({"type": "number", "exclusiveMinimum": "1"}, "exclusiveMinimum: .*number, got '1'"),
    ({"type": "string", "minLength": -1}, "minLength: .*integer of at least 0, got -1"),
    ({"type": "string", "maxLength": 4.5}, "maxLength: .*integer of at least 0, got 4.5"),
    ({"type": "string", "maxLength": False}, "maxLength: .*integer of at least 0, got False"),
    ({"type": "array", "minItems": -1}, "minItems: .*integer of at least 0, got -1"),
    ({"type": "array", "maxItems": 10**5000}, "maxItems: .*integer of at least 0, got inf"),
    ({"const": [INFINITE]}, "const: .*JSON"),
    ({"enum": [1, NO_NUMBER]}, "enum: .*JSON"),
    ({"anyOf": [{"type": "object", "properties": {"minimum": {"minimum": INFINITE}}}]}, "minimum: .*finite"),
]


@pytest.mark.parametrize("decoder", [Autoregressive(), ReFusion()], ids=lambda value: type(value).__name__)
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
    [row] = model.generate(["a"], max_new_tokens=64, json_schema=schema)
    jsonschema.validate(json.loads(row.text), schema)


def test_exclusive_bounds_may_be_booleans_as_in_draft_4(model: TextModel) -> None:
    schema = {"type": "integer", "minimum": 5, "maximum": 7, "exclusiveMinimum": True, "exclusiveMaximum": True}
    [row] = model.generate(["a"], max_new_tokens=64, json_schema=schema)
    assert row.text == "6"


def test_a_schema_that_is_nested_too_deeply_is_refused(model: TextModel) -> None:
    schema: Any = True
    for _ in range(5000):
        schema = {"not": schema}
    with pytest.raises(ValueError, match=r"json_schema: .*nested too deeply"):
        model.generate(["a"], json_schema=schema)


def test_a_tokenizer_of_whole_words_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"json_schema: .*tokenizer"):
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
