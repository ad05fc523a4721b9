"""`hf-hyperdflash answers`: a dataset's prompts, answered by the target itself."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from typer import BadParameter, Option

from . import options
from .session import Session, announce, check_text, check_writable, use_cache_if_offline, with_session


def _top_p(value: float) -> float:
    if not 0 < value <= 1:
        raise BadParameter(f"{value} is no top-p: more than 0 and at most 1.")
    return value


@with_session
def answers(
    session: Session,
    data: Annotated[list[str], Option(help="A .jsonl, .json or .parquet file or a Hub name; repeatable.")],
    output: Annotated[
        Path, Option(dir_okay=False, help="A .jsonl file of conversations; a stopped run continues there.")
    ],
    split: Annotated[str, Option(help="Of the datasets.")] = "train",
    limit: Annotated[int | None, Option(min=1, help="Rows of each dataset; all if unset.")] = None,
    question_suffix: Annotated[str, Option(help="Put after the question of question/answer rows.")] = "",
    chat_template: Annotated[
        Path | None, Option(exists=True, dir_okay=False, help="A Jinja file, where the tokenizer has none.")
    ] = None,
    thinking: Annotated[bool, Option("--thinking", help="Reason first; stored as reasoning_content.")] = False,
    batch_size: Annotated[int, Option(min=1, help="Prompts that are answered together.")] = 64,
    max_prompt_length: Annotated[int, Option(min=1, help="Tokens; a longer prompt ends its conversation.")] = 4096,
    max_new_tokens: options.NewTokens = 256,
    temperature: options.Temperature = 0.0,
    top_p: Annotated[float, Option(callback=_top_p, help="Of sampling: more than 0 and at most 1.")] = 1.0,
    seed: options.Seed = 0,
) -> None:
    """Let the target answer a dataset's prompts: drafters that are trained on its own answers accept more."""
    check_writable(output.parent)
    check_text(question_suffix, "`--question-suffix`")
    target = session.target
    use_cache_if_offline(target, *data)
    session.check()
    import torch

    from ..hub.loading import load_tokenizer
    from ..training.data.answers import AnswerSettings, WrittenAnswers, check_tokenizer, read_conversations
    from ..training.data.templates import read_chat_template

    settings = AnswerSettings(
        question_suffix,
        max_prompt_length,
        max_new_tokens,
        temperature,
        top_p,
        thinking,
        seed,
        session.dtype,
        batch_size,
    )
    tokenizer = load_tokenizer(target, session.trust_remote_code)
    if chat_template:
        tokenizer.chat_template = read_chat_template(chat_template, "--chat-template")
    check_tokenizer(target, tokenizer, thinking)
    conversations = read_conversations(data, tokenizer, settings, split, limit)
    written = WrittenAnswers(output, settings.written(target, tokenizer))
    waiting = {conversation.prompt_id for conversation in conversations} - written.answers.keys()
    if waiting:
        if written.answers:
            print(f"{len(written.answers)} rows are in {output} already, {len(waiting)} prompts to answer.")
        announce("target", target)
        model = session.load_target(is_exact=False)
        if session.dtype is None and model.dtype == torch.bfloat16 and model.device.type == "cpu":
            print("In bfloat16, which this CPU multiplies faster; `--dtype float32` for float32.", file=sys.stderr)
        written.add(model, conversations)
    else:
        print(f"All {len(conversations)} prompts are answered already.")
    print(written.summary(max_new_tokens))
