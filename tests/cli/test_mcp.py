"""`galvatron mcp`, driven by the client of the `mcp` package."""

import sys

import pytest

pytest.importorskip("mcp")
import anyio
from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client

FIT = {"model_size": "llama2-7b", "gpus": [16], "device": "h100-80gb"}


def ask(work):
    """Runs `work` with a session of a server of its own."""

    async def session_of() -> None:
        program = StdioServerParameters(command=sys.executable, args=["-m", "paddlenlp_galvatron.cli.main", "mcp"])
        async with stdio_client(program) as (read, write), ClientSession(read, write) as session:
            await session.initialize()
            await work(session)

    with anyio.from_thread.start_blocking_portal() as portal:
        portal.call(session_of)


def test_tools_are_listed_called_refused_and_cancelled():
    async def work(session: ClientSession) -> None:
        tools = {tool.name: tool for tool in (await session.list_tools()).tools}
        assert {"fit", "search", "explain", "what_if", "plan_scale", "plan_spare"} == set(tools)
        assert tools["fit"].input_schema["required"] == ["model_size"]

        fitted = await session.call_tool("fit", FIT | {"mtbf_hours": 9000, "save_gb_per_s": 2})
        answer = fitted.structured_content
        assert not fitted.is_error and answer["answer"]["rows"][0]["run"]["lost"] > 0
        assert answer["answer"]["assumptions"]["network"]["origin"] == "data sheet"
        row = tools["fit"].output_schema["properties"]["answer"]["anyOf"][0]["properties"]["rows"]["items"][
            "properties"
        ]
        assert (
            "600 s for a restart are assumed" in row["run"]["description"]
            and row["days"]["description"] == "days; derived"
        )

        wrong = await session.call_tool("fit", FIT | {"gpus": "eight", "colour": "red"})
        assert wrong.is_error and any("colour" in error for error in wrong.structured_content["errors"])
        assert (await session.call_tool("fit", {"model_size": "llama3-405b", "gpus": 8})).structured_content[
            "exit_code"
        ] == 3

        with anyio.move_on_after(1):
            await session.call_tool("fit", {"model_size": "llama3-405b", "device": "h20,h100,h800,a100"})
            raise AssertionError("the call was not cancelled")
        assert not (await session.call_tool("fit", FIT)).is_error  # the server still answers

    ask(work)
