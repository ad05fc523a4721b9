"""Ten turns with tool results: tokens run through the target, and seconds, with and without the kept cache.

    python experiments/agents/measure_turns.py --target examples/models/tiny-deepseek-v4 \\
        --drafter examples/models/tiny-deepseek-v4-hyperdflash --dtype float32 --output turns

`conversation.json` has the user's messages, the tool calls and the tools' results; the target writes the answers. The
seventh turn shortens an old result, so that the cache is right up to that place only. All ways take turns at each
prompt, and the conversation goes on from what plain decoding wrote.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from shared import HERE, arguments_of, facts_of, head, load_pair, run, timed

from hf_hyperdflash import Conversation
from hf_hyperdflash.benchmark.results import save_report
from hf_hyperdflash.targets.registry import target_of

WAYS = PLAIN, PLAIN_KEPT, FRESH, KEPT = "plain", "plain, kept cache", "drafter", "drafter, kept cache"


def conversation(path: Any) -> tuple[list[Any], Iterator[list[dict[str, Any]]]]:
    """Return the tools, and the messages before each answer; the caller adds the answers to the last of them."""
    told = json.loads(path.read_text(encoding="utf-8"))

    def turns() -> Iterator[list[dict[str, Any]]]:
        messages: list[dict[str, Any]] = []
        for turn in told["turns"]:
            for edit in turn.get("edits", []):
                old = next(
                    each
                    for each in messages
                    if each.get("tool_call_id") == edit["tool_call_id"] and each["role"] == "tool"
                )
                old["content"] = edit["content"]
            messages += turn["messages"]
            yield messages

    return told["tools"], turns()


def as_written(template: str, tools: list[Any], messages: list[dict[str, Any]]) -> tuple[list[Any] | None, list[Any]]:
    """Return tools and messages for a chat template: as they are, or as text where it knows no tools."""
    if "tool_calls" in template:
        return tools, messages
    listed = "\n".join(json.dumps(tool["function"]) for tool in tools)
    written = [{"role": "system", "content": f"You can call these tools:\n{listed}"}]
    for message in messages:
        if calls := message.get("tool_calls"):
            text = "\n".join(f"<tool_call>{json.dumps(call['function'])}</tool_call>" for call in calls)
            written.append({"role": "assistant", "content": text})
        elif message["role"] == "tool":
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            written.append({"role": "user", "content": text})
        else:
            written.append(message)
    return None, written


@contextmanager
def counting(target: Any) -> Iterator[list[int]]:
    """Count the tokens that run through the target's first layer."""
    seen: list[int] = []

    def count(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        seen.append(hidden.shape[0] * hidden.shape[1])

    hook = target_of(target).layers[0].register_forward_pre_hook(count, with_kwargs=True)
    try:
        yield seen
    finally:
        hook.remove()


def main() -> None:
    parser = arguments_of(__doc__)
    parser.add_argument("--turns", type=int, default=10, help="of the conversation, the first ones")
    arguments = parser.parse_args()
    target, tokenizer, (fresh, kept) = load_pair(arguments, 2)
    facts = facts_of(target)
    rows: list[dict[str, Any]] = []
    tools, turns = conversation(HERE / "conversation.json")
    conversations = {PLAIN_KEPT: Conversation(target), KEPT: Conversation(target)}
    generate = {name: conversations[name].generate if name in conversations else target.generate for name in WAYS}
    options: dict[str, dict[str, Any]] = {PLAIN: {}, PLAIN_KEPT: {}}
    options |= {
        name: {"assistant_model": of, "num_assistant_tokens": "auto"} for name, of in ((FRESH, fresh), (KEPT, kept))
    }
    for number, messages in enumerate(islice(turns, arguments.turns)):
        of_template, written = as_written(tokenizer.chat_template, tools, messages)
        ids = tokenizer.apply_chat_template(
            written, tools=of_template, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]
        figures, texts = {}, {}
        for name in [*WAYS[number % len(WAYS) :], *WAYS[: number % len(WAYS)]]:
            with counting(target) as seen:
                figures[name], texts[name] = timed(generate[name], ids, arguments.tokens, **options[name])
            figures[name] |= {
                "through_target": sum(seen),
                "cached": getattr(conversations.get(name), "cached_tokens", 0),
            }
        same = {name: texts[name] == texts[PLAIN] for name in WAYS}
        rows.append({"turn": number, "prompt_tokens": ids.shape[1], "methods": figures, "same": same})
        print(number + 1, ids.shape[1], {name: each["through_target"] for name, each in figures.items()}, flush=True)
        messages.append({"role": "assistant", "content": tokenizer.decode(texts[PLAIN], skip_special_tokens=True)})
    write(rows, facts, arguments)


def write(rows: list[dict[str, Any]], facts: dict[str, Any], arguments: argparse.Namespace) -> None:
    prompts = [row["prompt_tokens"] for row in rows]
    lines = [
        "| | prompt tokens from the cache | tokens through the target | seconds | CPU-seconds | text as plain |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    sums = {}
    for name in WAYS:
        of = [row["methods"][name] for row in rows]
        sums[name] = {key: sum(each[key] for each in of) for key in ("cached", "through_target", "wall", "cpu")}
        same = sum(row["same"][name] for row in rows)
        lines.append(
            f"| {name} | {sums[name]['cached']:,} of {sum(prompts):,} | {sums[name]['through_target']:,} | "
            f"{sums[name]['wall']:.1f} | {sums[name]['cpu']:.1f} | {same} of {len(rows)} |"
        )
    about = (
        f"{len(rows)} turns, prompts of {prompts[0]:,} to {prompts[-1]:,} tokens, at most {arguments.tokens} new "
        "tokens a turn, greedy. Tokens are those of the target's first layer: prompts, anchors and all drafts."
    )
    report = "\n\n".join([head("A conversation", facts), about, "\n".join(lines)]) + "\n"
    print(report)
    save_report(report, arguments, facts=facts, sums=sums, rows=rows)


if __name__ == "__main__":
    run(main)
