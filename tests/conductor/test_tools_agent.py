"""An agent framework works unchanged: it calls a tool, and answers from what came of it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.lazily import Lazily

pydantic_ai = Lazily("pydantic_ai")
openai_models = Lazily("pydantic_ai.models.openai")
openai_providers = Lazily("pydantic_ai.providers.openai")

CALL = '<tool_call>\n{"name": "look", "arguments": {"city": "Ulm"}}\n</tool_call>'


@pytest.mark.parametrize("streams", [False, True])
async def test_an_agent(tools_api: Any, streams: bool) -> None:
    core, asked = tools_api.core, list[str]()

    def script(request: Any) -> list[Any]:
        prompt = core.tokenizer.decode(request.prompt_token_ids, skip_special=False)
        return core.says("Take an umbrella." if "It rains" in prompt else CALL)

    core.script = script
    provider = openai_providers.OpenAIProvider(base_url=f"{tools_api.url}/v1", api_key="any")
    agent = pydantic_ai.Agent(openai_models.OpenAIChatModel("tiny", provider=provider))

    @agent.tool_plain
    def look(city: str) -> str:
        """The weather in a city."""
        asked.append(city)
        return f"It rains in {city}."

    if streams:
        async with agent.run_stream("How is the weather in Ulm?") as result:
            assert await result.get_output() == "Take an umbrella."
    else:
        assert (await agent.run("How is the weather in Ulm?")).output == "Take an umbrella."
    assert asked == ["Ulm"]
    assert len(core.requests) == 2
