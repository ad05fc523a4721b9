"""`hf-hyperdflash answers`: a dataset's prompts, answered by the target itself, here or by a server of it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from typer import BadParameter, Option

from . import options
from .session import (
    SessionOrServer,
    announce,
    check_text,
    check_writable,
    use_cache_if_offline,
    with_session,
)


def _top_p(value: float) -> float:
    if not 0 < value <= 1:
        raise BadParameter(f"{value} is no top-p: more than 0 and at most 1.")
    return value


@with_session
def answers(
    session: SessionOrServer,
    data: Annotated[list[str], Option(help="A .jsonl, .json or .parquet file or a Hub name; repeatable.")],
    output: Annotated[
        Path, Option(dir_okay=False, help="A .jsonl file of conversations; a stopped run continues there.")
    ],
    endpoint: options.Endpoint = None,
    model: options.ServedModel = None,
    concurrency: options.Concurrency = None,
    timeout: options.Timeout = None,
    split: Annotated[str, Option(help="Of the datasets.")] = "train",
    limit: Annotated[int | None, Option(min=1, help="Rows of each dataset; all if unset.")] = None,
    question_suffix: Annotated[str, Option(help="Put after the question of question/answer rows.")] = "",
    chat_template: Annotated[
        Path | None, Option(exists=True, dir_okay=False, help="A Jinja file, where the tokenizer has none.")
    ] = None,
    thinking: Annotated[bool, Option("--thinking", help="Reason first; stored as reasoning_content.")] = False,
    batch_size: Annotated[
        int | None, Option(min=1, help="Prompts that are answered together here; 64 if unset.")
    ] = None,
    max_prompt_length: Annotated[int, Option(min=1, help="Tokens; a longer prompt ends its conversation.")] = 4096,
    max_new_tokens: options.NewTokens = 256,
    temperature: options.Temperature = 0.0,
    top_p: Annotated[float, Option(callback=_top_p, help="Of sampling: more than 0 and at most 1.")] = 1.0,
    seed: options.Seed = 0,
) -> None:
    """Let the target answer a dataset's prompts: drafters that are trained on its own answers accept more."""
    check_writable(output.parent)
    check_text(question_suffix, "`--question-suffix`")
    session.check_producer(
        endpoint,
        here={"--chat-template": chat_template, "--batch-size": batch_size},
        there={"--model": model, "--concurrency": concurrency, "--timeout": timeout},
    )
    use_cache_if_offline(session.target or None, *data)
    if endpoint is None:
        session.check()
    import torch

    from ..hub.loading import load_tokenizer
    from ..training.data.answers import (
        AnswerSettings,
        WrittenAnswers,
        answer_here,
        check_tokenizer,
        read_conversations,
    )
    from ..training.data.endpoint import Requests, find_endpoint
    from ..training.data.served_answers import ServedTarget
    from ..training.data.templates import read_chat_template

    settings = AnswerSettings(
        question_suffix, max_prompt_length, max_new_tokens, temperature, top_p, thinking, seed,
        dtype=session.dtype, batch_size=batch_size or 64,
    )  # fmt: skip
    if endpoint is None:
        target, tokenizer, requests = session.target, load_tokenizer(session.target, session.trust_remote_code), None
        if chat_template:
            tokenizer.chat_template = read_chat_template(chat_template, "--chat-template")
        check_tokenizer(target, tokenizer, thinking)
    else:
        requests = Requests(find_endpoint(endpoint, model), concurrency or 64, timeout or 600, report=_say)
        target, tokenizer = requests.endpoint.target(), None
    conversations = read_conversations(data, tokenizer, settings, split, limit)
    written = WrittenAnswers(output, settings.written(target, tokenizer))
    waiting = [conversation for conversation in conversations if conversation.prompt_id not in written.answers]
    if not waiting:
        print(f"All {len(conversations)} prompts are answered already.")
        print(written.summary(max_new_tokens))
        return
    if written.answers:
        print(f"{len(written.answers)} rows are in {output} already, {len(waiting)} prompts to answer.")
    if requests is not None:
        served = ServedTarget(requests, settings, report=_say)
        try:
            written.add(conversations, served.answer(waiting))
        finally:
            if said := served.summary():
                _say(said)
        if served.refused and not written.cut:
            raise ValueError(f"No prompt has an answer: {served.refused[0]}")
    else:
        announce("target", target)
        loaded = session.load_target(is_exact=False)
        if session.dtype is None and loaded.dtype == torch.bfloat16 and loaded.device.type == "cpu":
            print("In bfloat16, which this CPU multiplies faster; `--dtype float32` for float32.", file=sys.stderr)
        written.add(conversations, answer_here(loaded, conversations, written.answers))
    print(written.summary(max_new_tokens))


def _say(line: str) -> None:
    from tqdm.auto import tqdm

    tqdm.write(" ".join(line.split()), file=sys.stderr)  # above the bar
