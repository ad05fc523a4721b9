"""Draw the pictures of docs/index.md: a round of the shipped pair, as it went, and what the gate reads.

python docs/draw_concepts.py            # writes docs/pictures/*.svg
python docs/draw_concepts.py --check    # exit status 1 if they are not what this draws
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

import torch
from transformers import AutoTokenizer

from hf_hyperdflash import load_drafter, load_target
from hf_hyperdflash.decoding.stats import keep_trees
from hf_hyperdflash.training.data.encoding import encode_prompts

ROOT = Path(__file__).parent.parent
PICTURES, MODELS = ROOT / "docs" / "pictures", ROOT / "examples" / "models"
PROMPT = "A baker sells 24 loaves of bread each day for $3 each. How much money does she make in a week?"
# The first round of so many drafts that accepts so many, with at least so many tokens before it.
DRAFTS, ACCEPTED, FROM = 6, 3, 8

# A background of its own: GitHub and the site have a dark one, too.
STYLE = (
    "text{fill:#202124}.card{fill:#fff;stroke:#d0d7de}.quiet{fill:#5f6368}.draft{fill:#bcd7f7}.target{fill:#ffd08a}"
    "@media(prefers-color-scheme:dark){text{fill:#f0f3f6}.card{fill:#0d1117;stroke:#3d444d}.quiet{fill:#a8b1bb}"
    ".draft{fill:#1f4f86}.target{fill:#7d4e00}}"
)
BOXES = (
    ".plain{fill:#e8eaed}.same{fill:#cfe8cf}.wrong{fill:#f6c7c3}.edge{stroke:#80868b}.group{fill:none;stroke:#80868b}"
    ".line{fill:none;stroke:#5f6368}.tip{fill:#5f6368}.name{font-weight:600}"
    "@media(prefers-color-scheme:dark){.plain{fill:#2b3138}.same{fill:#1d5230}.wrong{fill:#7a2e2a}"
    ".line{stroke:#a8b1bb}.tip{fill:#a8b1bb}}"
)
HEAD = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {0} {1}" width="{0}" height="{1}" role="img" '
    'font-family="ui-sans-serif, system-ui, sans-serif" font-size="14">\n<title>{2}</title>\n'
    f"<style>{(STYLE + BOXES).replace('{', '{{').replace('}', '}}')}</style>\n"
    '<rect x=".5" y=".5" width="{3}" height="{4}" rx="8" class="card"/>\n'
    '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    '<path d="M0 0 8 4 0 8z" class="tip"/></marker>'
)


def head(width: int, height: int, title: str) -> str:
    return HEAD.format(width, height, title, width - 1, height - 1)


def box(x: float, y: float, width: float, text: str, kind: str, height: float = 30) -> str:
    lines = text.split("\n")
    first = y + height / 2 + 5 - 9 * (len(lines) - 1)
    spans = "".join(
        f'<tspan x="{x + width / 2}" y="{first + 18 * k}">{escape(line)}</tspan>' for k, line in enumerate(lines)
    )
    return (
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="5" class="{kind} edge"/>'
        f'<text text-anchor="middle">{spans}</text>'
    )


def say(x: float, y: float, text: str, anchor: str = "start", kind: str = "quiet") -> str:
    return "".join(
        f'<text x="{x}" y="{y + 18 * k}" text-anchor="{anchor}" class="{kind}">{escape(line)}</text>'
        for k, line in enumerate(text.split("\n"))
    )


def arrow(*points: tuple[float, float]) -> str:
    path = " ".join(f"{x} {y}" for x, y in points)
    return f'<path d="M{path}" class="line" marker-end="url(#tip)"/>'


def rounds() -> Iterator[tuple[list[str], list[str], int, list[str]]]:
    """The text so far, its last token the anchor, drafts, how many are accepted, what the round adds."""
    name = MODELS / "tiny-deepseek-v4"
    target, tokenizer = load_target(str(name), dtype="float32"), AutoTokenizer.from_pretrained(name)
    drafter = load_drafter(str(MODELS / "tiny-deepseek-v4-hyperdflash"), target=target)
    drafter.bind(target)
    prompt = encode_prompts(tokenizer, [{"messages": [{"role": "user", "content": PROMPT}]}])[0]
    with keep_trees():
        ids = target.generate(prompt, assistant_model=drafter, num_assistant_tokens=DRAFTS, max_new_tokens=96)
    new = ids[0, prompt.shape[1] :]

    def words(tokens: Sequence[int] | torch.Tensor) -> list[str]:
        return [tokenizer.decode([int(token)]) for token in tokens]

    for kept in drafter.last_stats.trees:
        first, end = kept.tokens.start, kept.tokens.stop
        yield words(new[:first]), words(kept.drafts.tokens), len(kept.accepted), words(new[first:end])


def a_round() -> str:
    found = (one for one in rounds() if len(one[1]) == DRAFTS and one[2] == ACCEPTED and len(one[0]) >= FROM)
    before, drafts, accepted, added = next(found)
    wide, left, step, middle = 78, 236, 83, 39
    places = [left + step * k for k in range(DRAFTS + 1)]
    parts = [head(840, 350, f"One round: {accepted} of {DRAFTS} drafts are accepted")]
    parts += [say(20, 38, "the drafter's block:\nthe anchor and mask tokens")]
    parts += [box(x, 28, wide, shown(before[-1]) if k == 0 else "mask", "plain") for k, x in enumerate(places)]
    parts += [say(20, 108, "one pass of the drafter:\na draft for each mask")]
    parts += [say(20, 178, "one forward of the target:\nwhat it would write there")]
    parts += [say(20, 268, "what the round writes")]
    for k, (x, draft) in enumerate(zip(places[1:], drafts)):
        parts += [arrow((x + middle, 58), (x + middle, 97))]
        parts += [box(x, 98, wide, shown(draft), "draft" if k < accepted else "wrong")]
        if k > accepted:
            continue
        is_same = k < accepted
        parts += [say(x + middle, 153, "=" if is_same else "≠", "middle", "name")]
        parts += [box(x, 168, wide, shown(added[k]), "same" if is_same else "target")]
        parts += [arrow((x + middle, 198), (x + middle, 247))]
        parts += [box(x, 248, wide, shown(added[k]), "draft" if is_same else "target")]
    parts += [say(places[accepted + 2], 178, "not used, as it follows\na rejected draft")]
    parts += [say(places[accepted + 2], 268, "← the next anchor")]
    told = (
        f"{accepted} drafts (blue) are what the target would have written: they are accepted. The others are dropped."
    )
    parts += [say(20, 312, told)]
    told = f"The target's own token (orange) comes next: {accepted + 1} tokens with one forward of the target."
    parts += [say(20, 330, told)]
    return "\n".join([*parts, "</svg>", ""])


def shown(token: str) -> str:
    return token.replace("\n", "⏎").replace(" ", "␣")


def the_gate() -> str:
    parts = [head(850, 376, "From the residual streams through the gate to the drafter's block")]
    parts += [say(30, 32, "The target", kind="name"), box(30, 46, 240, "layers 0 … n-1", "plain")]
    streams = [36 + 58 * k for k in range(4)]
    parts += [arrow((x + 27, 76), (x + 27, 103)) for x in streams]
    parts += ['<rect x="30" y="98" width="240" height="54" rx="7" class="group"/>']
    parts += [box(x, 104, 54, f"stream\n{k}", "same", 42) for k, x in enumerate(streams)]
    parts += [say(292, 104, "pre-collapse residual\n[batch, seq, hc_mult, hidden_size]")]
    parts += [
        arrow((150, 152), (150, 189)),
        box(65, 190, 170, "hc_head: a weight\nfor each stream, sum", "target", 48),
    ]
    parts += [arrow((150, 238), (150, 273)), box(65, 274, 170, "norm, LM head", "plain")]
    parts += [arrow((150, 304), (150, 339)), say(150, 358, "the target's own token", "middle")]
    parts += [arrow((270, 140), (395, 140), (395, 189))]
    parts += [box(300, 190, 190, "its own gate, at first\na copy of hc_head", "target", 48)]
    parts += [arrow((395, 238), (395, 273)), box(300, 274, 190, "one feature for each\naccepted token", "same", 48)]
    parts += [arrow((490, 298), (516, 298), (516, 214), (599, 214)), say(524, 250, "keys and\nvalues")]
    parts += [say(600, 32, "The drafter", kind="name"), box(600, 46, 220, "anchor, mask, mask, …", "plain")]
    parts += [arrow((710, 76), (710, 109)), box(600, 110, 220, "the target's embedding", "plain")]
    parts += [arrow((710, 140), (710, 189))]
    parts += [box(600, 190, 220, "a few layers: attention over\nthe features and the block", "draft", 48)]
    parts += [arrow((710, 238), (710, 273)), box(600, 274, 220, "the target's LM head", "plain")]
    parts += [arrow((710, 304), (710, 339)), say(710, 358, "all drafts of the block at once", "middle")]
    return "\n".join([*parts, "</svg>", ""])


def main() -> int:
    drawn = {PICTURES / "round.svg": a_round(), PICTURES / "gate.svg": the_gate()}
    if "--check" in sys.argv:
        return int(any(not path.exists() or path.read_text(encoding="utf-8") != svg for path, svg in drawn.items()))
    PICTURES.mkdir(exist_ok=True)
    for path, svg in drawn.items():
        path.write_text(svg, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
