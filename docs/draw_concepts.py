"""Draw the pictures of docs/concepts.md: a round of the shipped pair, as it went, and what the gate reads.

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

GREY, BLUE, ORANGE, RED, GREEN = "#e8eaed", "#bcd7f7", "#ffd08a", "#f6c7c3", "#cfe8cf"
# A background of its own: GitHub and the site have a dark one, too.
HEAD = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {0} {1}" width="{0}" height="{1}" '
    'font-family="ui-sans-serif, system-ui, sans-serif" font-size="14" fill="#202124">\n'
    '<rect width="{0}" height="{1}" rx="8" fill="#ffffff"/>\n'
    '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    '<path d="M0 0 8 4 0 8z" fill="#5f6368"/></marker>'
)


def box(x: float, y: float, width: float, text: str, fill: str, height: float = 30) -> str:
    lines = text.split("\n")
    first = y + height / 2 + 5 - 9 * (len(lines) - 1)
    spans = "".join(
        f'<tspan x="{x + width / 2}" y="{first + 18 * k}">{escape(line)}</tspan>' for k, line in enumerate(lines)
    )
    return (
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="5" fill="{fill}" stroke="#80868b"/>'
        f'<text text-anchor="middle">{spans}</text>'
    )


def say(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="#5f6368">{escape(text)}</text>'


def arrow(*points: tuple[float, float]) -> str:
    path = " ".join(f"{x} {y}" for x, y in points)
    return f'<path d="M{path}" fill="none" stroke="#5f6368" marker-end="url(#tip)"/>'


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
    wide, left, step = 82, 210, 88
    parts = [HEAD.format(840, 330), say(20, 40, "the text so far: its")]
    parts += [say(20, 58, "last token is the anchor")]
    places = [left + step * k for k in range(DRAFTS + 1)]
    parts += [say(places[0] - 8, 48, "…", "end"), box(places[0], 28, wide, shown(before[-1]), GREY)]
    parts += [say(20, 118, "the drafter's block")]
    parts += [box(x, 98, wide, shown(before[-1]) if k == 0 else "mask", GREY) for k, x in enumerate(places)]
    parts += [arrow((places[0] + wide / 2, 58), (places[0] + wide / 2, 97))]
    parts += [say(20, 178, f"one pass: {DRAFTS} drafts")]
    parts += [
        box(x, 158, wide, shown(draft), BLUE if k < accepted else RED)
        for k, (x, draft) in enumerate(zip(places[1:], drafts))
    ]
    parts += [arrow((x + wide / 2, 128), (x + wide / 2, 157)) for x in places[1:]]
    parts += [say(20, 232, "one forward of the target:"), say(20, 250, "what follows each token")]
    for k, (x, token) in enumerate(zip(places, added)):
        parts += [box(x, 222, wide, shown(token), ORANGE if k == accepted else GREEN)]
        parts += [arrow((x + wide / 2, 188 if k else 128), (x + wide / 2, 221))]
    told = f"{accepted} drafts (blue) are what the target would have written, and it adds a token of its own (orange):"
    parts += [say(20, 290, f"{told} {accepted + 1} tokens.")]
    told = "The other drafts (red) are dropped, the caches rewound. The last token is the next anchor."
    parts += [say(20, 310, told)]
    return "\n".join([*parts, "</svg>", ""])


def shown(token: str) -> str:
    return token.replace("\n", "⏎").replace(" ", "␣")


def the_gate() -> str:
    parts = [HEAD.format(820, 376), say(30, 32, "The target")]
    parts += [box(30, 46, 230, "layers 0 … n-1", GREY)]
    streams = [33 + 58 * k for k in range(4)]
    parts += [arrow((x + 25, 76), (x + 25, 103)) for x in streams]
    parts += [box(x, 104, 50, f"stream\n{k}", GREEN, 42) for k, x in enumerate(streams)]
    parts += [say(285, 124, "pre-collapse residual"), say(285, 142, "[batch, seq, hc_mult, hidden_size]")]
    parts += [arrow((145, 146), (145, 189)), box(60, 190, 170, "hc_head: a weight\nfor each stream, sum", ORANGE, 48)]
    parts += [arrow((145, 238), (145, 273)), box(60, 274, 170, "norm, LM head", GREY)]
    parts += [arrow((145, 304), (145, 339)), say(145, 358, "the target's own token", "middle")]
    parts += [say(570, 32, "The drafter")]
    parts += [arrow((262, 134), (274, 134), (274, 164), (405, 164), (405, 189))]
    parts += [box(310, 190, 190, "the same gate,\ninherited from hc_head", ORANGE, 48)]
    parts += [arrow((405, 238), (405, 273)), box(310, 274, 190, "one feature for each\naccepted token", GREEN, 48)]
    parts += [arrow((500, 298), (535, 298), (535, 214), (569, 214)), say(506, 322, "keys and values")]
    parts += [box(570, 46, 220, "anchor, mask, mask, …", GREY), arrow((680, 76), (680, 109))]
    parts += [box(570, 110, 220, "the target's embedding", GREY), arrow((680, 140), (680, 189))]
    parts += [box(570, 190, 220, "a few layers: attention over\nthe features and the block", BLUE, 48)]
    parts += [arrow((680, 238), (680, 273)), box(570, 274, 220, "the target's LM head", GREY)]
    parts += [arrow((680, 304), (680, 339)), say(680, 358, "all drafts of the block at once", "middle")]
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
