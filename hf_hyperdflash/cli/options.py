"""Options that several commands have, each defined once."""

import math
from pathlib import Path
from typing import Annotated, Any, TypeVar

from typer import Argument, BadParameter, Option

PROMPT_LOOKUP = "prompt-lookup"  # a drafter that every target has; a folder of that name is ./prompt-lookup
MOST_NODES = 1024  # of `decoding.request`, which takes seconds to import
_Temperature = TypeVar("_Temperature", float, list[float], None)
_DTYPES = ("auto", "bfloat16", "float16", "float32", "float64")


def _temperature(value: _Temperature) -> _Temperature:
    for temperature in value if isinstance(value, list) else [value]:
        if temperature is not None and not 0 <= temperature < math.inf:
            raise BadParameter(f"{temperature} is no temperature: 0 (greedy) or above.")
    return value


def check_dtype(value: str | None) -> str | None:
    if value is not None and value not in _DTYPES:
        raise BadParameter(f"{value!r} is not one of {', '.join(_DTYPES)}.")
    return value


def _number_or_auto(value: str) -> int | str:
    if value.lower() != "auto" and not (value.isdecimal() and int(value)):
        raise BadParameter(f"{value!r} is neither a number, 1 or above, nor auto.")
    return "auto" if value.lower() == "auto" else int(value)


def _nodes_or_auto(value: str) -> int | str:
    nodes = _number_or_auto(value)
    if isinstance(nodes, int) and nodes > MOST_NODES:
        raise BadParameter(f"{value!r} is more nodes than a draft tree can have: {MOST_NODES} at most, or auto.")
    return nodes


NumDraftTokens = Annotated[
    Any,
    Option(
        parser=_number_or_auto,
        metavar="NUMBER|auto",
        help="Drafted tokens per round, or auto for as many as pay; all that the drafter can if unset.",
    ),
]
TreeBudget = Annotated[
    Any,
    Option(
        parser=_nodes_or_auto,
        metavar="NUMBER|auto",
        help=f"Most nodes of a draft tree, {MOST_NODES} at most, or auto for as many as pay; one chain if unset.",
    ),
]
Lookup = Annotated[
    bool | None,
    Option(
        "--lookup/--no-lookup",
        help="Copy what followed the last tokens before, where that is likely to be right; with auto if unset.",
    ),
]

Target = Annotated[str, Option(help="Path or Hub id of the target, or of a GGUF file in it: org/name/model.gguf.")]
TargetOrNone = Annotated[str, Option(help="Path or Hub id of the target, or of a GGUF file in it; or --endpoint.")]
Endpoint = Annotated[
    str | None, Option(help="Address of a server of OpenAI's protocol that serves the target, instead of --target.")
]
ServedModel = Annotated[
    str | None,
    Option("--model", "--served-model", help="What the server calls the target, if it serves several."),
]
Concurrency = Annotated[int | None, Option(min=1, help="Requests to the server in flight; 64 if unset.")]
Timeout = Annotated[
    float | None, Option(min=1, help="Seconds that the server may take for an answer, or be away; 600 if unset.")
]
Drafter = Annotated[
    str,
    Option(help=f"Path or Hub id of the drafter, or {PROMPT_LOOKUP}; `hf-hyperdflash drafters TARGET` lists others'."),
]
Adapter = Annotated[str | None, Option(help="Path or Hub id of a LoRA adapter of the drafter.")]
Drafters = Annotated[
    list[str] | None,
    Option(
        "--drafter",
        help=f'Path or Hub id, or {PROMPT_LOOKUP}; NAME=PATH, "NAME (auto)=PATH", '
        '"NAME (4, 16 nodes, lookup, adaptive)=PATH".',
    ),
]
SavedDrafter = Annotated[Path, Argument(exists=True, file_okay=False, help="Folder of a saved drafter.")]
Output = Annotated[
    Path, Option(file_okay=False, help="Folder of results.jsonl and the report; a killed run continues there.")
]
Suites = Annotated[
    list[str] | None,
    Option(
        "--suite",
        help="gsm8k, math500, aime25, humaneval, mbpp, livecodebench, mt-bench; all, or all in --data, if unset.",
    ),
]
Data = Annotated[
    Path | None, Option(help='Folder with <suite>.jsonl files of {"turns": [...]} lines; the Hub if unset.')
]
Modes = Annotated[list[str] | None, Option("--mode", help="non-think or think-high; repeatable.")]
Temperature = Annotated[float, Option(callback=_temperature, help="0 is greedy.")]
Temperatures = Annotated[
    list[float] | None, Option("--temperature", callback=_temperature, help="0 is greedy; repeatable.")
]
Limit = Annotated[int | None, Option(min=1, help="Prompts of each suite; all if unset.")]
NewTokens = Annotated[int, Option(min=1, help="Most new tokens of the answer.")]
NewTokensOfRounds = Annotated[int, Option(min=3, help="Most new tokens per turn; less than 3 has no round.")]
Seed = Annotated[int, Option(min=0, max=2**63 - 1, help="Of sampling.")]
Dtype = Annotated[
    str | None,
    Option(
        callback=check_dtype, help="float32, bfloat16, ..; float32 on a CPU, the checkpoint's elsewhere, if unset."
    ),
]
DeviceMap = Annotated[
    str | None, Option(help="auto, balanced, .. spread the target; or one device, for example cpu or cuda:1.")
]
Threads = Annotated[int | None, Option(min=1, max=1024, help="CPU threads.")]
TrustRemoteCode = Annotated[bool, Option("--trust-remote-code", help="Run the code that the target brings along.")]
