"""A logits processor with a state that may run on drafts: each text, and each path of drafts after it, has its own.

Drafts branch off the text, and some are rejected. So a state is a value of its own, which is copied before it goes on
with a draft ([`GrammarState`]), and a text keeps those of its paths until it has gone on itself ([`Place`]).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Sequence
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch
from transformers import LogitsProcessor

from .states import GrammarState, check_beginning, checked_mask, grammars_of, state_of

SPELLED = 0.95  # how probably a target spells what must come next with the tokens that a library names
_REMEMBERED = 128  # texts of earlier calls: the prompt of the next one may be what one of them wrote


class Place:
    """Where a text, or a path of drafts after it, is in its grammar. Masks and the places behind it are made once.

    Args:
        state: The grammar's; `None` behind a token that the grammar does not allow.
        vocab_size: The target's.
    """

    def __init__(self, state: GrammarState | None, vocab_size: int) -> None:
        self.state, self.vocab_size = state, vocab_size
        self._after: dict[int, Place] = {}

    @cached_property
    def forbidden(self) -> torch.Tensor | None:
        """Which tokens may not come next, boolean `[vocab_size]`; `None` if all may."""
        allowed = None if self.state is None else checked_mask(self.state, self.vocab_size)
        return None if allowed is None else allowed.logical_not()

    def after(self, token: int) -> Place:
        """Return the place behind one more token."""
        if token not in self._after:
            state = None
            if self.state is not None and (self.forbidden is None or not self.forbidden[token]):
                state = self.state.fork()
                state.advance(token)
            self._after[token] = Place(state, self.vocab_size)
        return self._after[token]

    @cached_property
    def is_dead_end(self) -> bool:
        """Whether no token may come next."""
        return self.forbidden is not None and bool(self.forbidden.numpy().all())

    @cached_property
    def is_forced(self) -> bool:
        """Whether one token alone may come next."""
        return self.forbidden is not None and self.vocab_size - np.count_nonzero(self.forbidden.numpy()) == 1

    @cached_property
    def likely(self) -> int | None:
        """The token that comes next in all likelihood, whatever the target is: the only one that may, or the one by
        which a target begins to spell what must come."""
        if self.forbidden is None:
            return None
        if self.is_forced:
            return int(self.forbidden.numpy().argmin())
        tokens: list[int] = getattr(self.state, "likely", list)()
        return tokens[0] if tokens and not self.forbidden[tokens[0]] else None


def masked(places: Sequence[Place], scores: torch.Tensor, are_drafted: bool = False) -> torch.Tensor:
    """Return scores `[places, config.vocab_size]`, with minus infinity for what each place forbids.

    Args:
        places: Where the tokens come next.
        scores: Of all tokens.
        are_drafted: Whether drafts are drawn by them: then all but a token that is likely gets minus infinity.
    """
    forbidden = [place.forbidden for place in places]
    known = next((each for each in forbidden if each is not None), None)
    if known is None:
        return scores
    if len(forbidden) > 1:
        known = torch.stack([torch.zeros_like(known) if each is None else each for each in forbidden])
    scores = scores.masked_fill(known.to(scores.device), -torch.inf)
    for row, place in enumerate(places if are_drafted else ()):
        if place.likely is not None:
            scores[row] = -torch.inf
            scores[row, place.likely] = 0.0
    return scores


class TextGrammar(LogitsProcessor):
    """The grammar of one text: a logits processor of what is written, and of drafts behind it.

    Args:
        ids: The prompt `[seq]`, on the CPU.
        place: Where it ends in its grammar.
        number: Which grammar of its processor it is.
    """

    def __init__(self, ids: torch.Tensor, place: Place, number: int) -> None:
        self.ids, self.place, self.number = ids, place, number
        self.written: list[int] = []

    def accept(self, token: int) -> None:
        """Go on with a token that the target wrote."""
        self.place = self.place.after(token)
        self.written.append(token)

    def masked(self, paths: Iterable[Iterable[int]], scores: torch.Tensor, are_drafted: bool = False) -> torch.Tensor:
        """Return scores `[paths, config.vocab_size]` as the grammar leaves them after the text and each path
        ([`masked`]).

        Raises:
            ValueError: If the target wrote what the grammar does not allow, or the grammar allows nothing more.
        """
        if self.place.state is None:
            raise ValueError(
                f"The target wrote the token {self.written[-1]}, expected one that the grammar allows: another logits "
                "processor forbids all of those. Leave that one out."
            )
        if self.place.is_dead_end:
            raise ValueError(
                f"The grammar allows no token behind the token {[*self.ids.tolist(), *self.written][-1]}, expected at "
                "least one, or a text that has ended: let it allow one of the target's `eos_token_id` there."
            )
        return masked([self._place_after(path) for path in paths], scores, are_drafted)

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Return scores `[1, config.vocab_size]` as the grammar leaves them after what is written."""
        return cast(torch.FloatTensor, self.masked([()], scores))

    def likely_tokens(self, count: int, ends: Container[int]) -> list[tuple[int, float]]:
        """Return the tokens that follow the text in all likelihood, whatever the target is, and how probable each is:
        the only ones that may, and those by which a target would spell what must come.

        Args:
            count: How many, at most.
            ends: Those that end the text, behind which nothing follows.
        """
        place, found = self.place, list[tuple[int, float]]()
        while len(found) < count and place.likely is not None and not (found and found[-1][0] in ends):
            found.append((place.likely, 1.0 if place.is_forced else SPELLED))
            place = place.after(place.likely)
        return found

    def count_allowed(self, tokens: Iterable[int]) -> int:
        """Return how many of `tokens`, from the first on, may follow the text."""
        place, count = self.place, 0
        for token in tokens:
            if place.forbidden is not None and place.forbidden[token]:
                break
            place, count = place.after(token), count + 1
        return count

    def place_of(self, ids: torch.Tensor) -> Place | None:
        """Return where `ids`, `[seq]`, end in the grammar if they are this text, or it and one more token."""
        count = len(self.ids)
        end = count + len(self.written)
        # Not its prompt: texts that begin alike would share a matcher, which would go from one to the other and back.
        if len(ids) not in (end, end + 1) or len(ids) == count or ids[count:end].tolist() != self.written:
            return None
        if not torch.equal(ids[:count], self.ids):
            return None
        return self.place if len(ids) == end else self.place.after(int(ids[-1]))

    def _place_after(self, path: Iterable[int]) -> Place:
        place = self.place
        for token in path:
            place = place.after(token)
        return place


class GrammarProcessor(LogitsProcessor):
    """A logits processor that lets a target write what a grammar allows, with a drafter and without.

    ```python
    target.generate(**inputs, assistant_model=drafter, logits_processor=[GrammarProcessor(grammar)])
    ```

    Drafts follow the grammar, too. Text and distribution are those of plain decoding with the same processor. It may
    be used for any number of calls: each begins the grammar anew, unless its prompt is what an earlier one wrote.

    The grammar of a JSON schema, by each library. Without spare whitespace there is less to write, and a small target
    cannot write whitespace for ever:

    ```python
    size = target.config.vocab_size  # with the padding that some targets have behind the tokenizer's tokens

    tokens = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=size)
    grammar = xgrammar.GrammarCompiler(tokens).compile_json_schema(schema, any_whitespace=False)

    tokens = llguidance.hf.from_tokenizer(tokenizer, n_vocab=size)
    compact = {**schema, "x-guidance": {"whitespace_flexible": False}}
    grammar = llguidance.LLMatcher(tokens, llguidance.LLMatcher.grammar_from_json_schema(compact))

    pattern = outlines_core.json_schema.build_regex_from_schema(json.dumps(schema), whitespace_pattern="")
    grammar = outlines_core.Index(pattern, outlines_core.Vocabulary.from_pretrained("the target's name on the Hub"))
    ```

    Args:
        grammar: An xgrammar `CompiledGrammar`, an llguidance `LLMatcher`, an outlines-core `Index`, an
            [`~grammars.reasoning.AfterReasoning`], or a state of your own ([`~grammars.states.GrammarState`]); or a
            list with one for each prompt.

    Raises:
        ValueError: If it is none of these, or has ended or failed already.
    """

    def __init__(self, grammar: Any) -> None:
        grammars = list(grammar) if isinstance(grammar, (list, tuple)) else [grammar]
        if not grammars:
            raise ValueError("`grammar` is an empty list, expected a grammar for each prompt, or one for all.")
        self._states = [state_of(each) for each in grammars]
        self._texts: deque[TextGrammar] = deque()

    def check(self, prompts: int, vocab_size: int) -> None:
        """Raise a `ValueError` if it has grammars for another number of prompts, or over another vocabulary."""
        if len(self._states) not in (1, prompts):
            raise ValueError(
                f"A `GrammarProcessor` has {len(self._states)} grammars for {prompts} prompt{'s' * (prompts != 1)}: "
                "expected one for each prompt, or one for all."
            )
        for state in self._states:
            check_beginning(state_of(state.fork()), vocab_size)

    def begin(self, ids: torch.Tensor, row: int, rows: int, vocab_size: int) -> TextGrammar:
        """Return the grammar of a text, which goes on where an earlier one ended if `ids` are what was written.

        Args:
            ids: The prompt `[seq]`, on the CPU.
            row: Of the text.
            rows: Of all texts.
            vocab_size: The target's.
        """
        if rows % len(self._states):
            raise ValueError(
                f"A `GrammarProcessor` has {len(self._states)} grammars for {rows} text{'s' * (rows != 1)}: expected "
                "one for each prompt, or one for all."
            )
        number, known = row * len(self._states) // rows, list(self._texts)
        # In plain decoding a call is a step, and the row's own text of the step before is as many calls ago.
        known = [text for text in (*known[-rows:][:1], *reversed(known)) if text.number == number]
        places = (text.place_of(ids) for text in known if text.place.vocab_size == vocab_size)
        # A token that the grammar does not allow behind a text is no step of it, but another prompt.
        place = next((place for place in places if place is not None and place.state is not None), None)
        text = TextGrammar(ids, place or Place(self._states[number].fork(), vocab_size), number)
        self._texts.append(text)
        while len(self._texts) > max(_REMEMBERED, 4 * rows):
            self._texts.popleft()
        return text

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Return scores `[texts, config.vocab_size]`, with minus infinity for what the grammar forbids after each."""
        ids, (rows, vocab_size) = input_ids.cpu(), scores.shape
        places = [self.begin(ids[row], row, rows, vocab_size).place for row in range(rows)]
        return cast(torch.FloatTensor, masked(places, scores))


def grammar_of(processor: object) -> GrammarProcessor | None:
    """Return a logits processor as one that may run on drafts, if it is one: a [`GrammarProcessor`] itself, or
    xgrammar's own; `None` for any other.

    Raises:
        ValueError: If it is xgrammar's, and was used in another call.
    """
    if isinstance(processor, GrammarProcessor):
        return processor
    grammars = grammars_of(processor)
    return None if grammars is None else GrammarProcessor(grammars)
