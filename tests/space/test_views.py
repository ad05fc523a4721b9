"""What the Space shows: text in the colours of its writers, and draft trees as drawings, every node where its parent
is, and which of them the text got. Needs no gradio."""

import re
import runpy
from html import unescape
from itertools import pairwise
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_hyperdflash.cli.display.text import BY_HEAD, Piece
from hf_hyperdflash.decoding.stats import VerifiedTree
from hf_hyperdflash.trees.tree import ANCHOR, DraftTree

from ..conftest import MODELS
from ..helpers.draft_trees import lists_of_parents

VIEWS = runpy.run_path(str(MODELS.parent / "space" / "views.py"))
TARGET, DRAFTS, position_colour = VIEWS["TARGET"], VIEWS["DRAFTS"], VIEWS["position_colour"]
text_html, tree_html = VIEWS["text_html"], VIEWS["tree_html"]
token_text, tree_text = VIEWS["token_text"], VIEWS["tree_text"]


class Letters:
    """Token n is a word of its own."""

    def decode(self, ids):
        return f"w{ids[0]}"


def drawn(svg: str) -> list[tuple[str, str, float, float, float, str]]:
    """Of each box its kind, its text, left, right, middle and colour."""
    boxes = []
    for group in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}g"):
        _, rectangle, text = group
        x, y, width, height = (float(rectangle.get(name)) for name in ("x", "y", "width", "height"))
        boxes.append((group.get("class"), text.text, x, x + width, y + height / 2, rectangle.get("fill")))
    return boxes


@st.composite
def verified(draw) -> VerifiedTree:
    parents = draw(lists_of_parents())
    tree = DraftTree(torch.arange(100, 100 + len(parents)), tuple(parents))
    node = draw(st.integers(ANCHOR, len(parents) - 1))
    return VerifiedTree(7, tree, tree.path(node), draw(st.sampled_from([None, 9])), 5)


@settings(deadline=None, max_examples=150)
@given(verified())
def test_a_drawing_has_every_node_after_the_one_it_follows(round_):
    tree, svg = round_.drafts, tree_html(round_, Letters())
    boxes = drawn(svg)
    anchor, nodes, own = boxes[0], boxes[1 : 1 + len(tree)], boxes[1 + len(tree) :]
    assert anchor[:2] == ("anchor", "w7") and [box[1] for box in nodes] == [f"w{100 + k}" for k in range(len(tree))]
    for node, (kind, _, left, *_, colour) in enumerate(nodes):
        parent = anchor if tree.parents[node] == ANCHOR else nodes[tree.parents[node]]
        assert left > parent[3]
        assert kind == ("accepted" if node in round_.accepted else "rejected")
        assert colour == (position_colour(tree.depths[node]) if node in round_.accepted else "none")
    assert [box[:2] for box in own] == ([] if round_.own is None else [("own", "w9")])
    assert all(box[5] == position_colour(0) for box in own)
    # What the text got is the first row, from left to right; no two boxes overlap.
    got = [anchor, *(nodes[node] for node in round_.accepted), *own]
    assert len({box[4] for box in got}) == 1 and got == sorted(got, key=lambda box: box[2])
    assert all(box[4] > anchor[4] for box in nodes if box[0] == "rejected") or round_.own is None
    taken = sorted((box[4], box[2], box[3]) for box in boxes)
    assert all(a[0] < b[0] or a[2] < b[1] for a, b in pairwise(taken))
    width, height = (float(ElementTree.fromstring(svg).get(name)) for name in ("width", "height"))
    assert all(box[3] <= width and box[4] < height for box in boxes)
    # Lines lead from a box to a box.
    ends = {(box[2], box[4]) for box in boxes[1:]}
    lines = re.findall(r'd="M(\d+) (\d+)H\d+V(\d+)H(\d+)"', svg)
    assert {(float(x), float(y)) for *_, y, x in lines} == ends and len(lines) == len(boxes) - 1
    assert {(float(x), float(y)) for x, y, *_ in lines} <= {(box[3], box[4]) for box in boxes}


def test_the_words_are_what_was_drafted():
    tokens = torch.arange(3)
    chain = VerifiedTree(0, DraftTree.chain(tokens), [0, 1], 9, 1)
    assert tree_text(chain) == "3 drafts one after the other; 2 of them accepted, and the target's own token"
    tree = VerifiedTree(0, DraftTree(tokens, (-1, -1, 0), passes=(1, 1, 2)), [0], None, 1)
    assert tree_text(tree) == "3 drafts on 2 paths in 2 passes of the drafter; 1 of them accepted"
    assert tree_text(VerifiedTree(0, DraftTree.chain(tokens[:0]), [], 9, 1)).startswith("no drafts")


@pytest.mark.parametrize(
    ("text", "seen"), [(" a\n", "·a⏎"), ("", "∅"), ("\t<&>", "⇥<&>"), ("x" * 17, "x" * 15 + "…"), ("x" * 16, "x" * 16)]
)
def test_any_token_can_be_seen(text, seen):
    class One:
        def decode(self, ids):
            return text

    assert token_text(One(), 3) == seen
    svg = tree_html(VerifiedTree(3, DraftTree.chain(torch.tensor([3])), [0], 3, 1), One())
    assert [unescape(box[1]) for box in drawn(svg)] == [seen] * 3


def spans(html: str) -> list[tuple[str, str, str, str]]:
    """Colour, token, who, text."""
    found = re.findall(r'background: (#\w+);[^>]*data-token="(\d+)" title="([^"]*)">([^<]*)</span>', html)
    return [(*most, unescape(text)) for *most, text in found]


def test_html_is_the_text_in_colours():
    pieces = [Piece("<b>&", 0, 0), Piece(' "x"', 1, 1, True), Piece("\n", 12, 4)]
    html = text_html(pieces)
    assert spans(html) == [
        (TARGET, "0", "target", "<b>&"),
        (DRAFTS[0], "1", "draft 1, by the head", ' "x"'),
        (DRAFTS[-1], "4", "draft 12", "\n"),
    ]
    underlined = [span for span in re.findall("<span[^>]*>", html) if "underline" in span]
    assert len(underlined) == 1 and 'data-token="1"' in underlined[0]
    legend = html.rpartition("<div")[2]
    assert BY_HEAD in legend and BY_HEAD not in text_html([Piece("a", 1, 0)])
    named = re.findall(r"background: (#\w+);[^>]*>([^<]+)</span>", legend)
    assert named == [(position_colour(k), f"draft {k}" if k else "target") for k in range(13)]
    assert len({colour for colour, _ in named}) == 1 + len(DRAFTS)
    assert spans(text_html([])) == [] and "target" not in text_html([])


def test_every_colour_is_legible_under_black():
    """WCAG's contrast of 7 to 1."""

    def light(colour: str) -> float:
        parts = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    assert all((light(colour) + 0.05) / (light("#111111") + 0.05) > 7 for colour in (TARGET, *DRAFTS))
