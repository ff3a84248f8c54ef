"""From the fields of a chat to its use of tools."""

from __future__ import annotations

import orjson

from moonpool.conductor.api.context import ApiContext
from moonpool.conductor.api.schemas import ChatBody
from moonpool.conductor.api.structure.tool_fields import NamedTool
from moonpool.conductor.tools.formats import FORMATS, NO_PARAMETERS, enforced, format_of
from moonpool.conductor.tools.use import ToolUse
from moonpool.runtime.structure.grammars import Grammars, Structure, StructureInvalid


def tool_use(body: ChatBody, context: ApiContext) -> ToolUse | None:
    """How the chat uses tools; None: it does not."""
    if not body.tools or context.template is None:
        return None
    form = FORMATS.get(context.options.tool_format) or format_of(context.template.source)
    choice = body.tool_choice
    if choice in (None, "auto"):
        return ToolUse(form, several=body.parallel_tool_calls)
    functions = [tool.function for tool in body.tools]
    several = body.parallel_tool_calls and choice == "required"
    if isinstance(choice, NamedTool):
        functions = [each for each in functions if each.name == choice.function.name]
    described = [(each.name, each.parameters) for each in functions]
    structure = enforced(form, described, context.tokenizer.token_id, several=several)
    arguments = {
        name: Structure("json", orjson.dumps(schema or NO_PARAMETERS).decode()) for name, schema in described
    }
    return ToolUse(form, structure, several, arguments)


async def tool_at_fault(tools: ToolUse, grammars: Grammars, error: StructureInvalid) -> StructureInvalid:
    """The refusal of the first tool whose parameters cannot be enforced; ``error``, of all, if each can."""
    for name, structure in tools.arguments.items():
        try:
            await grammars.check(structure)
        except StructureInvalid as own:
            return StructureInvalid(f"parameters of the tool {name!r}: {own}")
    return error
