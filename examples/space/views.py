"""What a page shows of a generation, as HTML: the text in its writers' colours, and the draft tree of a round."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple, cast

from transformers import PreTrainedTokenizerBase

from hf_hyperdflash.cli.display.text import BY_HEAD, Piece, writer_name
from hf_hyperdflash.decoding.stats import VerifiedTree

TARGET = "#ffc46b"
# Colours of draft positions 1, 2, ..; the last one is for all later ones. Black text is legible on each.
DRAFTS = ("#a6e3b4", "#90e0d5", "#93d7ef", "#a3c4f7", "#b9b4f5", "#d2aef0", "#ecabe0", "#f5b5c4")
_ROW_HEIGHT, _BOX, _GAP, _LETTER, _LETTERS = 30, 22, 28, 7.9, 16  # pixels; letters of a token


def position_colour(position: int) -> str:
    """Return the colour of a draft position; 0 is the target."""
    return DRAFTS[min(position, len(DRAFTS)) - 1] if position else TARGET


def text_html(pieces: Iterable[Piece]) -> str:
    """Render a text in the colours of its writers, with tokens of a sequential head underlined, and a legend below.

    The attribute `data-token` is the index of a piece's token.
    """
    pieces = list(pieces)
    most = max((piece.position for piece in pieces), default=0)
    text = "".join(
        _coloured(
            escape(piece.text), piece.position, piece.by_head,
            f' data-token="{piece.token}" title="{writer_name(piece.position, piece.by_head)}"',
        )
        for piece in pieces
    )  # fmt: skip
    legend = " ".join(_coloured(writer_name(position), position) for position in range(most + 1)) if pieces else ""
    legend += f" {BY_HEAD}" if any(piece.by_head for piece in pieces) else ""
    return (
        f'<div style="white-space: pre-wrap; overflow-wrap: anywhere; line-height: 1.6">{text}</div>'
        f'<div style="margin-top: 0.8em; font-size: 0.85em">{legend}</div>'
    )


def _coloured(html: str, position: int, by_head: bool = False, more: str = "") -> str:
    style = f"background: {position_colour(position)}; color: #111; border-radius: 3px; padding: 1px 0"
    style += "; text-decoration: underline" * by_head
    return f'<span style="{style}"{more}>{html}</span>'


class _Node(NamedTuple):
    token: int
    parent: int  # which of the nodes, the anchor 0
    depth: int
    kind: str


def tree_html(verified: VerifiedTree, tokenizer: PreTrainedTokenizerBase) -> str:
    """Draw a round's drafts as SVG, from the anchor to the right.

    The first row is the text: accepted drafts in the colours of their positions, then the target's own token. Below
    are the other drafts, hollow. Lines have the colour of the page's text.

    Args:
        verified: An entry of `last_stats.trees`.
        tokenizer: The target's tokenizer.
    """
    nodes = _nodes(verified)
    texts = [token_text(tokenizer, node.token) for node in nodes]
    widths = [round(_LETTER * len(text)) + 12 for text in texts]
    lefts = [1]  # of each depth
    for depth in range(max(node.depth for node in nodes) + 1):
        lefts.append(lefts[-1] + _GAP + max(width for node, width in zip(nodes, widths) if node.depth == depth))
    rows = _assign_rows(nodes)
    lines, boxes = [], []
    for node, text, width, row in zip(nodes, texts, widths, rows):
        x, y = lefts[node.depth], _ROW_HEIGHT * row + _ROW_HEIGHT // 2
        boxes.append(_box(x, y, width, text, node))
        if node.kind != "anchor":
            start, above = (
                lefts[nodes[node.parent].depth] + widths[node.parent],
                _ROW_HEIGHT * rows[node.parent] + _ROW_HEIGHT // 2,
            )
            stroke = '"#8a8f98"' if node.kind == "rejected" else '"currentColor" stroke-width="2"'
            bend = f"M{start} {above}H{x - _GAP // 2}V{y}H{x}"
            lines.append(f'<path d="{bend}" fill="none" stroke={stroke}/>')
    width, height = lefts[-1] - _GAP + 1, _ROW_HEIGHT * (max(rows) + 1)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" style="max-width: none" '
        f'font-family="ui-monospace, Menlo, Consolas, monospace" font-size="13">{"".join([*lines, *boxes])}</svg>'
    )


def tree_text(verified: VerifiedTree) -> str:
    """Describe a round's drafts in words."""
    drafts = verified.drafts
    if not len(drafts):
        return "no drafts; the target wrote its own token"
    form = "one after the other" if drafts.is_chain else f"on {len(drafts.paths)} paths"
    passes = f" in {max(drafts.passes)} passes of the drafter" if drafts.passes and max(drafts.passes) > 1 else ""
    target_token = ", and the target's own token" if verified.own is not None else ""
    return f"{len(drafts)} drafts {form}{passes}; {len(verified.accepted)} of them accepted{target_token}"


def token_text(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    """Return a visible text for any token."""
    text = cast(str, tokenizer.decode([token])).replace("\n", "⏎").replace("\t", "⇥").replace(" ", "·") or "∅"
    return text if len(text) <= _LETTERS else f"{text[: _LETTERS - 1]}…"


def _nodes(verified: VerifiedTree) -> list[_Node]:
    """Return the anchor, the drafts, and the target's own token as nodes."""
    drafts, accepted = verified.drafts, set(verified.accepted)
    nodes = [_Node(verified.anchor, 0, 0, "anchor")]
    for node, (token, parent, depth) in enumerate(zip(drafts.tokens.tolist(), drafts.parents, drafts.depths)):
        nodes.append(_Node(token, parent + 1, depth, "accepted" if node in accepted else "rejected"))
    if verified.own is not None:
        last = verified.accepted[-1] + 1 if accepted else 0
        nodes.append(_Node(verified.own, last, nodes[last].depth + 1, "own"))
    return nodes


def _assign_rows(nodes: Sequence[_Node]) -> list[int]:
    """Return the row of each node: the text in the first; a parent has the row of its first child."""
    children: dict[int, list[int]] = {}
    for index, node in enumerate(nodes[1:], start=1):
        children.setdefault(node.parent, []).append(index)
    rows, used = [0] * len(nodes), 0

    def assign(index: int) -> None:
        nonlocal used
        rows[index] = used
        below = sorted(children.get(index, ()), key=lambda child: nodes[child].kind == "rejected")
        for child in below:
            assign(child)
        used += not below

    assign(0)
    return rows


def _box(x: int, y: int, width: int, text: str, node: _Node) -> str:
    filled = node.kind in ("accepted", "own")
    colour = position_colour(node.depth if node.kind == "accepted" else 0)
    frame = f'fill="{colour}"' if filled else 'fill="none" stroke="#8a8f98"'
    letters = 'fill="#111"' if filled else f'fill="currentColor" fill-opacity="{1 if node.kind == "anchor" else 0.75}"'
    title = f"draft {node.depth}, {node.kind}" if node.kind in ("accepted", "rejected") else node.kind
    return (
        f'<g class="{node.kind}"><title>{title}</title>'
        f'<rect x="{x}" y="{y - _BOX // 2}" width="{width}" height="{_BOX}" rx="5" {frame}/>'
        f'<text x="{x + width // 2}" y="{y + 5}" text-anchor="middle" {letters}>{escape(text)}</text></g>'
    )
