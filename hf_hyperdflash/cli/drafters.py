"""`hf-hyperdflash drafters`: which drafters are published for a target."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from ..hub.published import PUBLISHED, as_text, choose, hub_drafters, known_drafters, own_drafter
from .options import PROMPT_LOOKUP
from .session import why_unreachable

_NONE = """\
No drafter is known for {target}. What remains:

  Prompt lookup, which needs none, and is fast where texts repeat their prompts:
    hf-hyperdflash generate --target {target} --drafter {lookup} "..."
    drafter = PromptLookupDrafter(target)

  A drafter of your own, from the target's own answers to some thousand of your questions. On one GPU a model of
  a hundred million parameters takes minutes, one of several billions hours:
    hf-hyperdflash answers --target {target} --data openai/gsm8k:main --output answers.jsonl
    hf-hyperdflash train --target {target} --dataset answers.jsonl --output_dir my-drafter --recipe ours \\
        --sequential_head state

  The drafter of the model that it was fine-tuned from: `hf-hyperdflash drafters ORIGINAL`."""


def drafters(
    target: Annotated[
        str | None, typer.Argument(help="Path or Hub id of the target; all that are known here if left out.")
    ] = None,
) -> None:
    """List the drafters of a target, those in its own checkpoint, known here and on the Hub: what fits, and which to
    try first."""
    if target is None:
        print(as_text(PUBLISHED))
        return
    why, found = why_unreachable(), known_drafters(target)
    if not why:
        from huggingface_hub import HfApi

        try:
            found = hub_drafters(target, HfApi())
        except OSError as error:
            why = f"The Hub does not answer ({error})"
    alone = f"{why}: from the table of this release alone."
    print(alone if why else "From the table of this release and from the Hub.", file=sys.stderr)
    if (own := own_drafter(target)) and all(drafter.name != target for drafter in found):
        found = [own, *found]
    print(as_text(found) if found else _NONE.format(target=target, lookup=PROMPT_LOOKUP))
    if first := choose(found):
        print(
            f"\nTry first: {first.name}, whose method drafts fastest. What it brings here:\n"
            f"  hf-hyperdflash doctor --target {target} --drafter {first.name}"
        )
