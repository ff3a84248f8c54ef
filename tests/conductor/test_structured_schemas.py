"""Whatever a model writes within a structure matches it: schemas, expressions, choices and grammars."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import traceback
import weakref
from pathlib import Path
from typing import Annotated, Any, Literal

import jsonschema
import numpy as np
import pytest
from pydantic import BaseModel, Discriminator

from moonpool.runtime.structure.grammars import Grammars, Structure, StructureInvalid, StructureUnsupported
from moonpool.runtime.structure.schemas import enforceable
from tests.conductor.random_texts import Writer, allowed
from tests.conductor.schema_samples import COSTLY, schema

MODEL = Path(__file__).parents[2] / "moonpool" / "demo" / "model"
CHECKER = jsonschema.Draft202012Validator.FORMAT_CHECKER


@pytest.fixture(scope="module")
def writer() -> Writer:
    return Writer(MODEL, 2048, (1,))


@pytest.mark.parametrize(
    "seeds", [range(20), pytest.param(range(20, 200), marks=pytest.mark.slow)], ids=["some", "others"]
)
async def test_every_answer_validates(writer: Writer, seeds: range) -> None:
    for seed in seeds:
        wanted = schema(seed)
        jsonschema.Draft202012Validator.check_schema(wanted)
        text = await writer.text(Structure("json", json.dumps(wanted)), seed, max_tokens=2000)
        jsonschema.validate(json.loads(text), wanted, format_checker=CHECKER)


async def test_an_answer_cut_off_is_the_beginning_of_one_that_validates(writer: Writer) -> None:
    """Any prefix can be completed."""
    wanted = schema(4)
    structure = Structure("json", json.dumps(wanted))
    ids, complete = await writer.write(structure, 4)
    assert complete
    for cut in range(0, len(ids), 3):
        automaton = await writer.grammars.automaton(structure, np.array(ids[:cut], np.int32))
        automaton.fill(np.array(ids[:cut], np.int32))
        assert not automaton.error
        assert ids[cut] in allowed(automaton, writer.vocab_size)


async def test_an_automaton_rebuilt_from_the_tokens_is_the_same(writer: Writer) -> None:
    structure = Structure("json", json.dumps(schema(1)))
    ids, _ = await writer.write(structure, 1)
    followed = await writer.grammars.automaton(structure)
    for count in range(len(ids) + 1):
        tokens = np.array(ids[:count], np.int32)
        followed.fill(tokens)
        rebuilt = await writer.grammars.automaton(structure, tokens)
        rebuilt.fill(tokens)
        assert not followed.error
        assert np.array_equal(followed.mask, rebuilt.mask)


@pytest.mark.parametrize(
    "expression",
    [
        r"[0-9]{2}:[0-5][0-9]",
        r"(ja|nein|vielleicht)",
        r"a(b|c)*d{1,3}",
        r"[a-z_]{3}@\S{2}\.(org|net)",
        r"[äöüß]{2,4}",
        "(你好|再见)!?",
    ],
)
async def test_expressions(writer: Writer, expression: str) -> None:
    for seed in range(5):
        assert re.fullmatch(expression, await writer.text(Structure("regex", expression), seed))


async def test_choices_that_begin_alike(writer: Writer) -> None:
    """Ambiguous tokens: one choice is the beginning of another."""
    choices = ["a", "ab", "abc", "größer", "groß", '"quoted"', "a\nb", "🦆"]
    structure = Structure("choice", json.dumps(choices))
    assert {await writer.text(structure, seed) for seed in range(120)} == set(choices)


GRAMMARS = {
    "lark": 'start: sum\nsum: term ("+" term)*\nterm: /[0-9]{1,2}/ | "(" sum ")"\n',
    "gbnf": 'root ::= term ("+" term)*\nterm ::= [0-9] [0-9]? | "(" root ")"\n',
}


@pytest.mark.parametrize("kind", GRAMMARS)
async def test_grammars(writer: Writer, kind: str) -> None:
    for seed in range(5):
        text = await writer.text(Structure("grammar", GRAMMARS[kind]), seed)
        assert re.fullmatch(r"[0-9+()]+", text)
        assert text.count("(") == text.count(")")


async def test_json_objects(writer: Writer) -> None:
    for seed in range(5):
        ids, complete = await writer.write(Structure("json_object"), seed, max_tokens=120)
        text = writer.tokenizer.decode(ids)
        assert text.lstrip().startswith("{")
        if complete:
            assert isinstance(json.loads(text), dict)


def kind(name: str, **properties: Any) -> dict[str, Any]:
    """An object with a constant that tells it from others."""
    fields = {"kind": {"const": name, "type": "string"}, **properties}
    return {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}


LEAF, TREE = {"$ref": "#/$defs/Leaf"}, {"$ref": "#/$defs/Tree"}
ONE_OF: dict[str, dict[str, Any]] = {
    "types": {"oneOf": [{"type": "integer"}, {"enum": ["a", "b"]}, {"type": "null"}]},
    "constants": {"oneOf": [kind("cat", lives={"type": "integer"}), kind("dog")]},
    "references": {
        "$defs": {"Cat": kind("cat"), "Dog": kind("dog"), "Pet": {"$ref": "#/$defs/Dog"}},
        "type": "array",
        "items": {"oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Pet"}]},
        "maxItems": 3,
    },
    "recursive": {
        "$defs": {
            "Leaf": kind("leaf"),
            "Tree": kind("tree", of={"type": "array", "maxItems": 2, "items": {"oneOf": [LEAF, TREE]}}),
        },
        "oneOf": [LEAF, TREE],
    },
    "named as keywords": {
        "type": "object",
        "properties": {"oneOf": {"const": [{"$ref": "#"}]}, "uniqueItems": {"const": False}},
        "required": ["oneOf", "uniqueItems"],
        "additionalProperties": False,
    },
    "nothing to be unique": {
        "type": "array",
        "items": {"type": "array", "items": {"type": "boolean"}, "uniqueItems": True, "maxItems": 1},
        "uniqueItems": False,
        "maxItems": 4,
    },
}


@pytest.mark.parametrize("name", ONE_OF)
async def test_alternatives_that_exclude_each_other(writer: Writer, name: str) -> None:
    wanted = ONE_OF[name]
    before = json.dumps(wanted)
    for seed in range(8):
        text = await writer.text(Structure("json", before), seed, hurry=8)
        jsonschema.validate(json.loads(text), wanted)
    enforceable(wanted)
    assert json.dumps(wanted) == before


async def test_a_union_of_pydantic_models_is_enforced(writer: Writer) -> None:
    class Cat(BaseModel, extra="forbid"):
        kind: Literal["cat"]
        lives: int

    class Dog(BaseModel, extra="forbid"):
        kind: Literal["dog"]
        friend: Cat | None

    class Owner(BaseModel, extra="forbid"):
        pet: Annotated[Cat | Dog, Discriminator("kind")]

    schema = Owner.model_json_schema()
    assert "oneOf" in json.dumps(schema)
    for plain in (False, True):
        if plain:
            del schema["properties"]["pet"]["discriminator"]  # as other libraries write it
        for seed in range(5):
            Owner.model_validate_json(await writer.text(Structure("json", json.dumps(schema)), seed, hurry=8))


def has(name: str, value: Any, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {name: value}, "required": [name], **more}


APART: list[list[Any]] = [
    [{"const": 1}, {"const": 2}, {"const": True}, {"enum": ["1", None]}],
    [{"enum": ["a", "b"]}, {"type": "integer"}],
    [{"type": "integer", "maximum": 3}, {"type": "number", "exclusiveMinimum": 3}],
    [{"type": "string", "maxLength": 2}, {"type": "string", "minLength": 3}],
    [has("a", {"const": 1}), has("a", {"enum": [2, 3]})],
    [has("a", {"type": "string"}), has("a", {"type": "null"})],
    [has("a", has("b", {"const": 1})), has("a", has("b", {"const": 2}))],
    [has("a", {}, additionalProperties=False), has("b", {})],
]
TOGETHER: list[list[Any]] = [
    [{"const": 1}, {"const": 1.0}],
    [{"const": []}, {"const": []}],
    [{"enum": ["a", "b"]}, {"enum": ["b"]}],
    [{"type": "integer", "maximum": 3}, {"type": "number", "minimum": 3}],
    [{"maximum": 3}, {"minimum": 4}],
    [{"type": "string", "maxLength": 3}, {"type": "string", "minLength": 3}],
    [has("a", {}), has("b", {})],
    [has("a", {}, additionalProperties=False, patternProperties={"b": {}}), has("b", {})],
    [{"properties": {"a": {"const": 1}}, "required": ["a"]}, {"properties": {"a": {"const": 2}}}],
]


def test_only_what_excludes_each_other_becomes_any_of() -> None:
    cat, dog = kind("cat"), kind("dog")
    open_dog = dog | {"required": []}
    loop = {"$defs": {"A": {"$ref": "#/$defs/A"}}}
    for alternatives in ([cat, cat], [cat, open_dog], [{"$ref": "#/$defs/A"}, cat], [cat, True], [{}, cat]):
        assert "oneOf" in enforceable(loop | {"oneOf": alternatives}), alternatives
    for alternatives in ([cat, dog], [cat, {"type": ["null", "integer"]}], [cat], *APART):
        assert enforceable({"oneOf": alternatives}) == {"anyOf": alternatives}, alternatives
    for alternatives in TOGETHER:
        assert "oneOf" in enforceable({"oneOf": alternatives}), alternatives
    assert "oneOf" in enforceable({"oneOf": [cat, dog], "anyOf": [cat]})
    assert "oneOf" in enforceable({"oneOf": [{"type": "integer"}, {"type": "number"}]})


WITHIN = "#/properties/a~1b/items/anyOf/1"


def within(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema that has another one at ``WITHIN``."""
    items = {"anyOf": [{"type": "null"}, schema]}
    return {"type": "object", "properties": {"a/b": {"type": "array", "items": items}}, "required": ["a/b"]}


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "use anyOf"),
        ({"oneOf": [{"maxLength": 3}, {"type": "string"}]}, "use anyOf"),
        ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, '"uniqueItems" at #; leave'),
        (within({"not": {"type": "integer"}}), f'"not" at {WITHIN}; leave'),
        (within({"if": True, "then": False}), f'"if" at {WITHIN}, "then" at {WITHIN}; leave'),
        (
            within({"type": "object", "propertyNames": {"minLength": 2}}),
            f'"propertyNames" at {WITHIN}; leave',
        ),
        (within({"allOf": [{}], "unevaluatedProperties": False}), f'"unevaluatedProperties" at {WITHIN}; '),
        (within({"contains": {"const": 1}}), f'"contains" at {WITHIN}; leave'),
        (within({"type": "string", "format": "iri"}), f"format 'iri' at {WITHIN} is not known"),
        (within({"type": "string", "pattern": "(?=a)b"}), rf"look-around.* \(of a pattern at {WITHIN}\)"),
        (within({"oneOf": [{"minimum": 1}, {"maximum": 1}]}), f"a oneOf at {WITHIN} may overlap"),
        (within({"type": "object", "minProperties": 2}), f"minProperties at {WITHIN} counts names"),
        (within({"properties": {"a": {}, "b": {}}, "minProperties": 1}), f"minProperties .*{WITHIN} beside"),
        # Orders to the library do not loosen what is enforced.
        (
            {
                "x-guidance": {"lenient": True},
                "type": "array",
                "items": {"enum": [1, 2]},
                "uniqueItems": True,
            },
            '"uniqueItems" at #; leave',
        ),
        ({"x-guidance": {"coerce_one_of": True}, "oneOf": [{"minimum": 1}, {"maximum": 1}]}, "use anyOf"),
    ],
    ids=str,
)
async def test_keywords_that_cannot_be_enforced_are_named(
    writer: Writer, schema: dict[str, Any], says: str
) -> None:
    with pytest.raises(StructureInvalid, match=says):
        await writer.grammars.check(Structure("json", json.dumps(schema)))


# Texts in the form of a schema, and texts that are not.
OPENED: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "names of a list": (
        {
            "$defs": {"Color": {"enum": ["red", "blue"], "title": "Color"}},
            "type": "object",
            "propertyNames": {"$ref": "#/$defs/Color"},
            "additionalProperties": {"type": "integer"},
        },
        ['{"red":1}', '{"red":1,"blue":2}', "{}"],
        ['{"green":1}', '{"red":"a"}'],
    ),
    "names that are texts": (
        {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "null"}},
        ['{"a":null}'],
        ['{"a":1}'],
    ),
    "names of a pattern": (
        {"type": "object", "propertyNames": {"pattern": "^a+$"}, "additionalProperties": {"type": "null"}},
        ['{"aa":null}'],
        ['{"b":null}', '{"a":1}'],
    ),
    "dependencies": (
        {
            "type": "object",
            "properties": {"a": {}, "b": {}, "c": {}},
            "additionalProperties": False,
            "dependentRequired": {"a": ["b"]},
            "dependentSchemas": {"b": {"properties": {"c": {"const": 1}}}},
        },
        ['{"a":1,"b":2}', '{"b":2,"c":1}', '{"c":7}', "{}"],
        ['{"a":1}', '{"b":2,"c":7}'],
    ),
    "dependencies of older drafts": (
        {"type": "object", "properties": {"a": {}, "b": {}}, "dependencies": {"a": ["b"]}},
        ['{"a":1,"b":2}'],
        ['{"a":1}'],
    ),
    "nothing but the listed": (
        {"type": "object", "properties": {"a": {}}, "unevaluatedProperties": False},
        ['{"a":1}'],
        ['{"b":1}'],
    ),
    "items of a tuple alone": (
        {"type": "array", "prefixItems": [{"type": "integer"}], "unevaluatedItems": False},
        ["[1]", "[]"],
        ["[1,2]"],
    ),
    "at least one property": (
        {
            "type": "object",
            "properties": {"a": {}, "b": {}},
            "minProperties": 1,
            "additionalProperties": False,
        },
        ['{"a":1}', '{"b":1}', '{"a":1,"b":2}'],
        ["{}"],
    ),
    "what demands nothing": (
        {"type": "string", "format": "int32", "uniqueItems": True, "then": False, "minContains": 2},
        ['"a"'],
        ["1"],
    ),
}


@pytest.mark.parametrize("name", OPENED)
async def test_keywords_in_another_form_allow_the_same(writer: Writer, name: str) -> None:
    schema, right, wrong = OPENED[name]
    jsonschema.Draft202012Validator.check_schema(schema)
    for text in (*right, *wrong):
        if "dependencies" not in schema:  # which this draft has no longer
            assert jsonschema.Draft202012Validator(schema).is_valid(json.loads(text)) == (text in right)
        assert await writer.accepts(Structure("json", json.dumps(schema)), text) == (text in right), text


REFUSED: dict[str, tuple[str, Any]] = {
    "unsatisfiable": ("json", {"type": "integer", "minimum": 3, "maximum": 2}),
    "no type at all": ("json", {"enum": []}),
    "unknown reference": ("json", {"$ref": "#/$defs/missing"}),
    "several at once": ("json", {"oneOf": [{"type": "integer"}, {"type": "number"}]}),
    "wrong keyword": ("json", {"type": "strin"}),
    "not JSON": ("json", "{"),
    "no expression": ("regex", "a(b"),
    "costly grammar": ("grammar", COSTLY),
    "no grammar": ("grammar", "start: nowhere"),
    "too long": ("regex", "a" * 70_000),
    "unknown kind": ("xml", "<a/>"),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_structures_that_are_refused_say_why(writer: Writer, name: str) -> None:
    kind, text = REFUSED[name]
    structure = Structure(kind, text if isinstance(text, str) else json.dumps(text))
    for _ in range(2):  # the second time from the cache
        with pytest.raises(StructureInvalid) as refused:
            await writer.grammars.check(structure)
        assert 10 < len(str(refused.value)) < 700
        assert "\n" not in str(refused.value)


class Body:
    """What a request holds while its structure is checked."""


async def test_a_refused_structure_keeps_nothing_of_the_requests_that_had_it(writer: Writer) -> None:
    """Not even of those that waited for the compiler together."""
    bodies: list[weakref.ref[Body]] = []

    async def num_frames() -> int:
        body = Body()
        bodies.append(weakref.ref(body))
        with pytest.raises(StructureInvalid) as refused:
            await writer.grammars.check(Structure("regex", "a(b(c"))
        return len(list(traceback.walk_tb(refused.tb)))

    await asyncio.gather(*(num_frames() for _ in range(3)))
    assert len({await num_frames() for _ in range(20)}) == 1
    gc.collect()
    assert not [body for body in bodies if body() is not None]


async def test_after_a_warm_start_no_request_waits_for_the_compiler(tmp_path: Path) -> None:
    grammars = Grammars(MODEL, 2048, (1,))
    await grammars.warm_up()
    with pytest.raises(StopIteration):
        grammars.check(Structure("json_object")).send(None)
    await Grammars(tmp_path, 100, (1,)).warm_up()  # without a tokenizer requests are told why


async def test_a_checkpoint_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    grammars = Grammars(tmp_path, 100, (1,))
    with pytest.raises(StructureUnsupported, match="tokenizer"):
        await grammars.check(Structure("regex", "a"))
    (tmp_path / "tokenizer.json").unlink()
    assert "does not exist" in Grammars(tmp_path, 100, (1,)).lacking
    assert "end-of-sequence" in Grammars(MODEL, 2048, ()).lacking
