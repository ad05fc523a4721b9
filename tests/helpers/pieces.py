"""The pieces of a whole text, as the displays make them one by one."""

from hf_hyperdflash.cli.display.text import Piece, Pieces


def pieces_of(tokenizer, ids, written, by_head=None) -> list[Piece]:
    pieces, by_head = Pieces(tokenizer), by_head or [False] * len(written)
    made = [pieces.add(*parts) for parts in zip(map(int, ids), written, by_head)]
    return [piece for piece in [*made, pieces.last_piece(written[-1], by_head[-1])] if piece is not None]
