"""A small grammar of our own: a table of states, which any text is easily checked against."""

from __future__ import annotations

import copy
import random

import torch
from transformers import LogitsProcessor


class Table:
    """A grammar over token ids.

    Args:
        moves: Of each state, the tokens that may follow, and the state that each leads to.
    """

    def __init__(self, moves: list[dict[int, int]]) -> None:
        self.moves, self.state = moves, 0

    def allowed(self, vocab_size: int) -> torch.Tensor:
        mask = torch.zeros(vocab_size, dtype=torch.bool)
        mask[list(self.moves[self.state])] = True
        return mask

    def advance(self, token: int) -> None:
        self.state = self.moves[self.state][token]  # raises at a token that is not allowed

    def fork(self) -> Table:
        return copy.copy(self)

    def allows(self, tokens: list[int]) -> bool:
        """Whether a text of these tokens is right, as far as it goes."""
        state = 0
        for token in tokens:
            if token not in self.moves[state]:
                return False
            state = self.moves[state][token]
        return True


class Masking(LogitsProcessor):
    """A table as plain decoding has it, without any of our code: it runs through each text from its beginning.

    Args:
        table: The table.
        start: Where the texts begin, behind their prompts.
    """

    def __init__(self, table: Table, start: int) -> None:
        self.table, self.start = table, start

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        for row, ids in enumerate(input_ids[:, self.start :].tolist()):
            if self.table.allows(ids):  # else it has ended, and has padding
                state = self.table.fork()
                for token in ids:
                    state.advance(token)
                scores[row, ~state.allowed(scores.shape[1])] = -torch.inf
        return scores


def random_table(seed: int, states: int = 9, most: int = 8, vocab_size: int = 64, forced: float = 0.3) -> Table:
    """A table of random moves, in some of whose states one token alone may follow."""
    chance = random.Random(seed)
    moves = []
    for _ in range(states):
        count = 1 if chance.random() < forced else chance.randint(2, most)
        moves.append({token: chance.randrange(states) for token in chance.sample(range(2, vocab_size), count)})
    return Table(moves)


def a_word(word: list[int], end: int) -> Table:
    """The grammar of one text, which `end` ends."""
    return Table([*({token: at + 1} for at, token in enumerate(word)), {end: len(word)}])


class Spelling(Table):
    """A table that knows, or thinks that it knows, what a target writes in some of its states."""

    def __init__(self, moves: list[dict[int, int]], likely: dict[int, list[int]]) -> None:
        super().__init__(moves)
        self.of_states = likely

    def likely(self) -> list[int]:
        return self.of_states.get(self.state, [])
