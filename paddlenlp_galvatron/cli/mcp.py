"""`galvatron mcp`: a server of the Model Context Protocol on stdin and stdout, whose tools are commands that plan.

Each call runs `galvatron COMMAND --json` in a new process and returns its answer; cancelling the call ends the process.
"""

import json
import sys
from typing import Any

from paddlenlp_galvatron.report.answers import answer_schemas

from .command import App, Command
from .main import commands

app = App()

TOOLS = {name: name for name in ("fit", "search", "explain")}
TOOLS |= {"what_if": "explain", "plan_scale": "plan scale", "plan_spare": "plan spare"}
NULL = {"type": "null"}  # answer of a failed command
WHAT_IF = " Its what_if has the best plans under changes of memory, network, batch and nodes."


@app.command(switches=())
def mcp(_: dict[str, Any]) -> None:
    """Serve fit, search, explain and changes of plans to other programs by the Model Context Protocol, on stdin and
    stdout."""
    import anyio
    from mcp import types
    from mcp.server.lowlevel import Server
    from mcp.server.stdio import stdio_server

    async def listed(_: Any, __: Any) -> types.ListToolsResult:
        return types.ListToolsResult(tools=[types.Tool(**tool) for tool in described()])

    async def called(_: Any, call: types.CallToolRequestParams) -> types.CallToolResult:
        answer = await answered(call.name, call.arguments or {})
        text = types.TextContent(type="text", text=json.dumps(answer))
        return types.CallToolResult(content=[text], structured_content=answer, is_error=bool(answer["errors"]))

    async def serve() -> None:
        server = Server("galvatron", on_list_tools=listed, on_call_tool=called)
        async with stdio_server() as (read, write):
            await server.run(read, write, server.create_initialization_options())

    anyio.run(serve)


def described() -> list[dict[str, Any]]:
    """Name, text and JSON Schemas of the arguments and the answer of each tool."""
    by_name, answers = commands(), answer_schemas()
    return [
        {
            "name": name,
            "description": command.help + WHAT_IF * (TOOLS[name] == "explain"),
            "input_schema": arguments_schema(command),
            "output_schema": {"type": "object", "properties": {"answer": {"anyOf": [answers[TOOLS[name]], NULL]}}},
        }
        for name, command in ((name, by_name[words]) for name, words in TOOLS.items())
    ]


def arguments_schema(command: Command) -> dict[str, Any]:
    """JSON Schema of a command's options by their canonical names; numbers may also be texts, as in 8,16."""
    names = [name for name in command.fields if name not in command.switches and name != "config"]
    properties = {name: {"description": command.text(name)} for name in names}
    required = [name for name in names if command.fields[name].is_required()]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


async def answered(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """The command's answer, notes and errors, all as data. The schema says where the numbers come from."""
    import anyio

    if name not in TOOLS:
        return {"answer": None, "notes": [], "errors": [f"{name}: unknown tool; one of {', '.join(TOOLS)}"]}
    words = [f"--{option}={_word(value)}" for option, value in arguments.items()]
    program = [sys.executable, "-m", f"{__package__}.main", *TOOLS[name].split(), *words, "--json"]
    ran = await anyio.run_process(program, check=False)  # killed if the call is cancelled
    shown = ran.stdout.decode().strip().splitlines()
    messages = ran.stderr.decode().splitlines()
    return {
        "answer": json.loads(shown[-1]) if shown else None,
        "notes": [line.removeprefix("note: ") for line in messages if line.startswith("note: ")],
        "errors": [line.removeprefix("error: ") for line in messages if line.startswith("error: ")],
        "exit_code": ran.returncode,
    }


def _word(value: object) -> str:
    if isinstance(value, bool):
        return str(int(value))
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
