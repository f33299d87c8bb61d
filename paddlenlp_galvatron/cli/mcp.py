"""`galvatron mcp`: a server of the Model Context Protocol on stdin and stdout, whose tools are commands that plan.

Each call is a process of its own, `galvatron COMMAND --json`, whose answer it returns; a cancelled call ends it.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from typing import Any

from paddlenlp_galvatron.report.answers import answer_schemas

from .command import App, Command

app = App()

TOOLS = {"fit": "fit", "search": "search", "explain": "explain", "plan_scale": "plan scale", "plan_spare": "plan spare"}
NULL = {"type": "null"}  # where the command fails
WHAT_IF = " Its what_if has the best plans under changes of memory, network, batch and nodes."
ASSUMED = {"restart_s": 600, "repair_hours": 24}  # of `planner.whole_run`, where the caller does not say them


@app.command(switches=())
def mcp(_: dict[str, Any]) -> None:
    """Serve fit, search, explain and changes of plans to other programs by the Model Context Protocol, on stdin and
    stdout."""
    import anyio
    from mcp.server.stdio import stdio_server

    made = server()

    async def serve() -> None:
        async with stdio_server() as (read, write):
            await made.run(read, write, made.create_initialization_options())

    anyio.run(serve)


def server() -> Any:
    """The server, to be run on any transport."""
    from mcp import types
    from mcp.server.lowlevel import Server

    async def listed(_: Any, __: Any) -> types.ListToolsResult:
        return types.ListToolsResult(tools=[types.Tool(**tool) for tool in described()])

    async def called(_: Any, call: types.CallToolRequestParams) -> types.CallToolResult:
        answer = await answered(call.name, call.arguments or {})
        text = types.TextContent(type="text", text=json.dumps(answer))
        return types.CallToolResult(content=[text], structured_content=answer, is_error=bool(answer["errors"]))

    return Server("galvatron", on_list_tools=listed, on_call_tool=called)


def described() -> list[dict[str, Any]]:
    """Name, text and JSON Schemas of the arguments and the answer of each tool."""
    answers = answer_schemas()
    return [
        {
            "name": name,
            "description": command.help + (WHAT_IF if name == "explain" else ""),
            "input_schema": arguments_schema(command),
            "output_schema": {"type": "object", "properties": {"answer": {"anyOf": [answers[TOOLS[name]], NULL]}}},
        }
        for name, command in ((name, command_of(words)) for name, words in TOOLS.items())
    ]


def command_of(words: str) -> Command:
    """The command of these words, such as `plan scale`."""
    first, _, rest = words.partition(" ")
    commands: dict[str, Command] = import_module(f".{first}", __package__).app.commands
    return commands[rest]


def arguments_schema(command: Command) -> dict[str, Any]:
    """JSON Schema of a command's options by their canonical names; numbers may also be texts, as in 8,16."""
    names = [name for name in command.fields if name not in command.switches and name != "config"]
    properties = {name: {"description": command.text(name)} for name in names}
    required = [name for name in names if command.fields[name].is_required()]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


async def answered(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """The command's answer, its notes, its errors, and where the numbers are from; errors are data."""
    import anyio

    if name not in TOOLS:
        return {"answer": None, "notes": [], "errors": [f"{name}: unknown tool; one of {', '.join(TOOLS)}"]}
    words = [f"--{option}={_word(value)}" for option, value in arguments.items()]
    program = [sys.executable, "-m", f"{__package__}.main", *TOOLS[name].split(), *words, "--json"]
    ran = await anyio.run_process(program, check=False)  # ended where the call is cancelled
    shown = ran.stdout.decode().strip().splitlines()
    messages = ran.stderr.decode().splitlines()
    return {
        "answer": json.loads(shown[-1]) if shown else None,
        "notes": [line.removeprefix("note: ") for line in messages if line.startswith("note: ")],
        "errors": [line.removeprefix("error: ") for line in messages if line.startswith("error: ")],
        "exit_code": ran.returncode,
        "labels": labels(arguments),
    }


def labels(arguments: dict[str, Any]) -> dict[str, str]:
    """Where numbers are from, by their names in the answer."""
    prices = "measured" if arguments.get("profiles") else "derived"
    made = dict.fromkeys(("time_s", "step_s", "tokens_per_s"), f"derived, from {prices} times of layers and messages")
    made["memory"] = "derived, the bound calibrated by published runs"
    if arguments.get("mtbf_hours"):
        made["run"] = (
            "derived" if arguments.get("restart_s") else f"derived, with restart_s {ASSUMED['restart_s']} assumed"
        )
        made["spare_nodes"] = f"derived, with {ASSUMED['repair_hours']} hours of repair assumed"
    return made


def _word(value: object) -> str:
    if isinstance(value, bool):
        return str(int(value))
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
