"""Text in pieces, as it is written."""

import torch
from transformers import AutoTokenizer

from hf_hyperdflash import load_drafter, load_target
from hf_hyperdflash.cli.display.text import Piece
from hf_hyperdflash.training.data.encoding import encode_prompts

from ..conftest import MODELS
from ..helpers.pieces import pieces_of


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
    assert pieces_of(Bytes(), [0], [0]) == []


def test_a_text_cut_within_a_character_is_shown_to_its_end():
    ids, written = [97, *"世".encode()[:2]], [0, 1, 2]
    assert pieces_of(Bytes(), ids, written, [False, False, True]) == [Piece("a", 0, 0), Piece("�", 2, 2, True)]


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
