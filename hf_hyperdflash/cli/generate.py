"""`hf-hyperdflash generate`: answers a prompt with a drafter's help."""

from __future__ import annotations

import codecs
import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from . import options
from .session import Session, announce, check_adapter, check_text, use_cache_if_offline, with_session

if TYPE_CHECKING:
    import torch
    from rich.console import Console
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..drafters.base import Drafter

# Tokens before a speed is measured, of which what happens once only is no part: the target's first forwards, and with
# a drafter the rounds from which "auto" learns.
_WARM_UP, _WARM_UP_DRAFTED = 8, 32


@with_session
def generate(
    session: Session,
    drafter: options.Drafter,
    prompt: Annotated[str, typer.Argument(help='What to ask, as one chat turn: "What is 2 + 3?".')],
    adapter: options.Adapter = None,
    max_new_tokens: options.NewTokens = 256,
    temperature: options.Temperature = 0.0,
    num_draft_tokens: options.NumDraftTokens = None,
    tree_budget: options.TreeBudget = None,
    lookup: options.Lookup = None,
    show: Annotated[
        bool,
        typer.Option(
            "--show",
            help="Colour each token by who wrote it, underline a head's; in a terminal, speed and tau.",
        ),
    ] = False,
    compare: Annotated[
        bool,
        typer.Option("--compare", help="Answer without the drafter first, show both side by side, and a table."),
    ] = False,
    seed: options.Seed = 0,
) -> None:
    """Answer a prompt with a drafter's help, as it is written, and say how well the drafter did."""
    if not prompt.strip():
        raise ValueError("The prompt is empty, expected what to ask.")
    check_text(prompt, "The prompt")
    encoding = codecs.lookup(sys.stdout.encoding or "utf-8").name
    if not encoding.startswith(("utf", "gb18030")):
        has_all = "PYTHONIOENCODING=utf-8 prints all characters"
        print(f"Characters that {encoding} does not have are printed as escapes; {has_all}.", file=sys.stderr)
    announce("target", session.target)
    use_cache_if_offline(session.target, drafter, adapter)
    session.check([(drafter, num_draft_tokens)])
    check_adapter(adapter, drafter)
    model, tokenizer, loaded = session.load([drafter])
    import torch
    from rich.console import Console
    from transformers import TextStreamer

    from ..decoding.stats import SpeculationStats, keep_trees, percentages
    from ..training.data.encoding import encode_prompts
    from .display.who_wrote import WhoWrote

    assistant = loaded[drafter]
    if adapter is not None:
        cast(Any, assistant).load_adapter(adapter)
    assistant.bind(model)
    if num_draft_tokens is not None:
        assistant.num_draft_tokens = num_draft_tokens
    torch.manual_seed(seed)
    ids = encode_prompts(tokenizer, [{"messages": [{"role": "user", "content": prompt}]}])[0].to(model.device)
    sampling: dict[str, Any] = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    if compare:
        settings = {"max_new_tokens": max_new_tokens, "tree_budget": tree_budget, "lookup": lookup, **sampling}
        _compare(model, tokenizer, assistant, ids, settings, Console(highlight=False))
        return
    plain = nullcontext(TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True))
    with (
        keep_trees() if show else nullcontext(),
        WhoWrote(tokenizer, assistant, Console(highlight=False)) if show else plain as streamer,
    ):
        text = model.generate(  # type: ignore[operator]
            ids,
            assistant_model=assistant,
            max_new_tokens=max_new_tokens,
            tree_budget=tree_budget,
            lookup=lookup,
            streamer=streamer,
            **sampling,
        )
    stats = cast(SpeculationStats, assistant.last_stats)
    rates = percentages(stats.acceptance)
    ends = model.generation_config.eos_token_id
    is_cut = stats.tokens >= max_new_tokens and int(text[0, -1]) not in (ends if isinstance(ends, list) else [ends])
    print(
        f"\n{stats.tokens} tokens in {stats.rounds} verification round{'s' * (stats.rounds != 1)}: "
        f"tau {stats.tau:.2f}, {stats.tokens / max(stats.loop_seconds, 1e-9):.1f} tokens/s. "
        f"Drafts accepted at each position, %: {rates}." + f" Stopped at --max-new-tokens {max_new_tokens}." * is_cut,
        file=sys.stderr,
    )


def _compare(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    drafter: Drafter,
    ids: torch.Tensor,
    settings: dict[str, Any],
    console: Console,
) -> None:
    """Show the answer of the target alone and the one with its drafter, and a table of both."""
    from .display.side_by_side import SideBySide
    from .display.who_wrote import legend

    plain = {name: value for name, value in settings.items() if name not in ("tree_budget", "lookup")}
    drafted = {**settings, "assistant_model": drafter}
    with SideBySide(tokenizer, drafter, console) as shown:
        for title, way, warm_up in (("Target alone", plain, _WARM_UP), ("With drafter", drafted, _WARM_UP_DRAFTED)):
            model.generate(ids, **{**way, "max_new_tokens": warm_up})  # type: ignore[operator]
            streamer = shown.side(title, way is drafted)
            model.generate(ids, streamer=streamer, **way)  # type: ignore[operator]
    if console.is_terminal and console.color_system:
        console.print(legend(shown.drafter.last_stats.written, console.color_system), soft_wrap=True)
    alone, assisted = shown.sides
    note = _note(alone.tokens, assisted.tokens, settings["do_sample"], model.dtype)
    is_cut = len(alone.tokens) >= settings["max_new_tokens"]
    console.print(shown.table(note + f" Stopped at --max-new-tokens {len(alone.tokens)}." * is_cut))


def _note(alone: list[int], assisted: list[int], is_drawn: bool, dtype: torch.dtype) -> str:
    """Return what the tokens of two answers have in common, in words."""
    if is_drawn:
        return "Both are drawn at random from the target's distribution."
    if alone == assisted:
        return "Both texts are the same."
    parted = next((at for at, (one, other) in enumerate(zip(alone, assisted)) if one != other), len(alone))
    name = str(dtype).removeprefix("torch.")
    return f"The texts part at token {parted + 1}: in {name} two tokens may tie. In float32 the texts are the same."
