"""Fields of request bodies that say what an answer must match."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, model_validator

from moonpool.runtime.structure.grammars import MAX_CHARS, Structure

MAX_CHOICES = 1024
_Text = Annotated[str, Field(min_length=1, max_length=MAX_CHARS)]


class JsonSchema(BaseModel):
    """``response_format.json_schema``. Every answer matches it, with ``strict`` or without."""

    model_config = ConfigDict(strict=True, extra="allow")

    name: str = ""
    definition: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """``response_format``, as in OpenAI's API."""

    model_config = ConfigDict(strict=True, extra="forbid")

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _complete(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("json_schema: is required with the type json_schema")
        return self

    @property
    def structure(self) -> Structure | None:
        """None: any text."""
        match self.type:
            case "text":
                return None
            case "json_object":
                return Structure("json_object")
            case _:
                assert self.json_schema is not None
                return Structure("json", _written(self.json_schema.definition))


class StructuredOutputs(BaseModel):
    """``structured_outputs``, as in vLLM's API: one of the fields."""

    model_config = ConfigDict(strict=True, extra="forbid")

    schema_: dict[str, Any] | _Text | None = Field(default=None, alias="json")
    regex: _Text | None = None
    choice: list[_Text] | None = Field(default=None, min_length=1, max_length=MAX_CHOICES)
    grammar: _Text | None = None
    json_object: bool | None = None

    @model_validator(mode="after")
    def _one(self) -> StructuredOutputs:
        given = [self.schema_, self.regex, self.choice, self.grammar, self.json_object or None]
        if sum(each is not None for each in given) != 1:
            raise ValueError("exactly one of json, regex, choice, grammar and json_object must be given")
        if isinstance(self.schema_, str):
            self.schema_ = _read(self.schema_)
        return self

    @property
    def structure(self) -> Structure:
        if self.schema_ is not None:
            return Structure("json", _written(self.schema_))
        if self.regex is not None:
            return Structure("regex", self.regex)
        if self.choice is not None:
            return Structure("choice", _written(self.choice))
        return Structure("json_object") if self.grammar is None else Structure("grammar", self.grammar)


def _read(text: str) -> dict[str, Any]:
    """Return a schema that was given as text, and can be written again: that bounds its nesting."""
    try:
        schema = orjson.loads(text)
        _written(schema)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"json: is not JSON: {error}") from None
    except orjson.JSONEncodeError:
        raise ValueError("json: is nested too deep") from None
    if not isinstance(schema, dict):
        raise ValueError("json: a schema must be an object")
    return schema


def _written(value: Any) -> str:
    # In the given order: answers have their properties in the order of the schema.
    return orjson.dumps(value).decode()
