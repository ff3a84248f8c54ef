"""Whatever a model writes within a structure matches it: schemas, expressions, choices and grammars."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from moonpool.runtime.structure.grammars import Grammars, Structure, StructureInvalid, StructureUnsupported
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
        text = await writer.text(Structure("json", json.dumps(wanted)), seed)
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


async def test_a_checkpoint_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    grammars = Grammars(tmp_path, 100, (1,))
    with pytest.raises(StructureUnsupported, match="tokenizer"):
        await grammars.check(Structure("regex", "a"))
    (tmp_path / "tokenizer.json").unlink()
    assert "does not exist" in Grammars(tmp_path, 100, (1,)).lacking
    assert "end-of-sequence" in Grammars(MODEL, 2048, ()).lacking
