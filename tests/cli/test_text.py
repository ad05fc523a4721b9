"""Text in pieces, and as HTML."""

import re
from html import unescape

import pytest
import torch
from transformers import AutoTokenizer

from hf_hyperdflash import load_drafter, load_target
from hf_hyperdflash.cli.display.text import (
    BY_HEAD,
    DRAFTS,
    TARGET,
    Piece,
    Pieces,
    pieces_of,
    position_colour,
    text_html,
)
from hf_hyperdflash.training.data.encoding import encode_prompts

from ..conftest import MODELS


class Bytes:
    """A tokenizer whose tokens are bytes; 0 is special."""

    def decode(self, ids, skip_special_tokens):
        return bytes(token for token in ids if token).decode(errors="replace")


def test_pieces_are_of_whole_characters_and_say_which_token():
    ids, written = [*"a世".encode(), 0, *b"\nb"], [0, 1, 2, 3, 0, 1, 2]
    by_head = [False, False, True, True, False, False, True]
    pieces = pieces_of(Bytes(), ids, written, by_head)
    assert pieces == [Piece("a", 0, 0), Piece("世", 3, 3, True), Piece("\n", 1, 5), Piece("b", 2, 6, True)]
    assert pieces_of(Bytes(), ids, written) == [piece._replace(by_head=False) for piece in pieces]
    one_by_one = Pieces(Bytes())
    made = [one_by_one.add(*each) for each in zip(ids, written, by_head)]
    assert made == [pieces[0], None, None, pieces[1], None, *pieces[2:]]
    assert pieces_of(Bytes(), [0], [0]) == []


def test_a_text_cut_within_a_character_is_shown_to_its_end():
    ids, written = [97, *"世".encode()[:2]], [0, 1, 2]
    assert pieces_of(Bytes(), ids, written, [False, False, True]) == [Piece("a", 0, 0), Piece("�", 2, 2, True)]


def test_a_text_with_its_prompt_is_no_text_that_was_written():
    with pytest.raises(ValueError, match=r"3 tokens and `written` 1: expected the new tokens alone"):
        pieces_of(Bytes(), [97, 98, 99], [0])


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


def test_pieces_of_a_generation_are_its_text():
    name = MODELS / "tiny-deepseek-v4"
    target, tokenizer = load_target(str(name), dtype=torch.float32), AutoTokenizer.from_pretrained(name)
    drafter = load_drafter(str(MODELS / "tiny-deepseek-v4-hyperdflash"), target=target)
    drafter.bind(target)
    chat = [{"role": "user", "content": "Write a Python function that prints 'héllo 世界' twice.\n"}]
    ids = encode_prompts(tokenizer, [{"messages": chat}])[0]
    new = target.generate(ids, assistant_model=drafter, max_new_tokens=60, do_sample=False)[0, ids.shape[1] :]
    written = drafter.last_stats.written
    pieces = pieces_of(tokenizer, new, written)
    assert "".join(piece.text for piece in pieces) == tokenizer.decode(new, skip_special_tokens=True)
    assert all(piece.position == written[piece.token] for piece in pieces)
    assert "".join(text for *_, text in spans(text_html(pieces))) == tokenizer.decode(new, skip_special_tokens=True)
