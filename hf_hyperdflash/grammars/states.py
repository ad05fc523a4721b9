"""Where a text is in a grammar: the protocol, and the grammars that xgrammar, llguidance and outlines-core compile.

None of the libraries is imported before one of its objects is passed.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, Protocol, cast

import numpy as np
import torch

_MAX_AHEAD = 32  # tokens, or states, that are looked for behind a state of an index
_MAX_WAYS = 8  # a state with more tokens leaves a choice, and is not looked through
_MAX_MASKS = 256  # that an index keeps: 12 MB for a vocabulary of 49,152 tokens


class GrammarState(Protocol):
    """Where a text is in its grammar: any class with these three methods will do.

    Where one token alone is allowed, it is drafted without the drafter. So are those of a fourth method, if there is
    one: `likely() -> list[int]`, the tokens by which a target probably spells what must come next.
    """

    def allowed(self, vocab_size: int) -> torch.Tensor | None:
        """Return which tokens may come next, boolean `[vocab_size]` on the CPU; `None` for all."""

    def advance(self, token: int) -> None:
        """Go on with a token that is allowed. Behind the one that ends the text it is called no more, or with it."""

    def fork(self) -> GrammarState:
        """Return a copy that goes on by itself."""
        ...


def state_of(grammar: Any) -> GrammarState:
    """Return where a text begins in a grammar.

    Raises:
        ValueError: If it is no grammar, or has failed or ended already.
    """
    is_state = all(callable(getattr(grammar, method, None)) for method in ("allowed", "advance", "fork"))
    if is_state and not isinstance(grammar, type):
        return cast(GrammarState, grammar)
    known = type(grammar).__module__.partition(".")[0], type(grammar).__name__
    if known == ("outlines_core", "Index"):
        return IndexState(grammar)
    if known == ("xgrammar", "CompiledGrammar"):
        return MatcherState(partial(XGrammarMatcher, grammar))
    if known in (("llguidance", "LLMatcher"), ("builtins", "LLMatcher")):  # whose class does not say its module
        return MatcherState(partial(LLGuidanceMatcher, grammar))
    name = known[1] if known[0] == "builtins" else ".".join(known)
    raise ValueError(
        f"A grammar is a {name}, expected an xgrammar.CompiledGrammar, an llguidance.LLMatcher, an "
        "outlines_core.Index, or an object with the methods `allowed`, `advance` and `fork`: compile a schema or a "
        "pattern with one of these libraries first."
    )


def checked_mask(state: GrammarState, vocab_size: int) -> torch.Tensor | None:
    """Return what a state allows.

    Raises:
        ValueError: If that is no mask of the target's vocabulary.
    """
    allowed: Any = state.allowed(vocab_size)
    is_tensor = isinstance(allowed, torch.Tensor)
    if allowed is not None and not (is_tensor and allowed.dtype == torch.bool and allowed.shape == (vocab_size,)):
        given = f"{allowed.dtype} {list(allowed.shape)}" if is_tensor else f"the type {type(allowed).__name__}"
        raise ValueError(
            f"A {type(state).__name__} allows tokens by a mask of {given}, expected torch.bool [{vocab_size}], one "
            "for each token of the target, or None for all."
        )
    return cast("torch.Tensor | None", allowed)


def check_beginning(state: GrammarState, vocab_size: int) -> None:
    """Raise a `ValueError` if a text cannot begin in a state: if that has no mask, or allows nothing."""
    allowed = checked_mask(state, vocab_size)
    if allowed is not None and not bool(allowed.any()):
        raise ValueError(
            f"A {type(state).__name__} allows no token to begin with, expected at least one of the target's "
            f"{vocab_size}: compile the grammar with the target's own tokenizer."
        )


def grammars_of(processor: object) -> list[Any] | None:
    """Return the grammars of xgrammar's own logits processor; `None` of any other.

    Raises:
        ValueError: If it was used in another call: plain decoding would go wrong with it.
    """
    kind, own = type(processor), cast(Any, processor)
    if (kind.__module__, kind.__name__) != ("xgrammar.contrib.hf", "LogitsProcessor"):
        return None
    if own.prefilled:
        raise ValueError(
            "An xgrammar.contrib.hf.LogitsProcessor was used by another text, expected a new one: make one for each "
            "call, or pass `GrammarProcessor(compiled_grammar)`, which can be used again."
        )
    return list(own.compiled_grammars)


class IndexState:
    """A state of an outlines-core `Index`: a number. Forks share the masks of the states that were visited.

    Args:
        index: The index.
    """

    def __init__(self, index: Any) -> None:
        self.index, self.state = index, index.get_initial_state()
        self._masks: dict[tuple[int, int], torch.Tensor] = {}
        self._likely: dict[int, int | None] = {}
        self._known_ways: dict[int, dict[int, int]] = {}

    def allowed(self, vocab_size: int) -> torch.Tensor:
        key = self.state, vocab_size
        mask = self._masks.get(key)
        if mask is None:  # another thread may keep one, too, or drop it
            tokens = self.index.get_allowed_tokens(self.state) or []
            check_vocabulary("an outlines_core.Index", 1 + max(tokens, default=0), vocab_size, has_fewer=True)
            for oldest in list(self._masks)[: max(0, len(self._masks) + 1 - _MAX_MASKS)]:
                self._masks.pop(oldest, None)
            mask = torch.zeros(vocab_size, dtype=torch.bool)
            mask[torch.tensor(tokens, dtype=torch.long)] = True
            self._masks[key] = mask
        return mask

    def advance(self, token: int) -> None:
        following = self.index.get_next_state(self.state, token)
        if following is not None:  # else it is the end, which leads nowhere
            self.state = following

    def fork(self) -> IndexState:
        return copy.copy(self)

    def likely(self) -> list[int]:
        tokens, state = list[int](), self.state
        while len(tokens) < _MAX_AHEAD and (token := self._likely_after(state)) is not None:
            tokens.append(token)
            state = self._ways(state)[token]
        return tokens

    def _likely_after(self, state: int) -> int | None:
        """Return the longest of a state's tokens if all others are beginnings of it, so that one text alone may
        follow; else `None`. An index does not know the texts of its tokens. But the state behind a beginning leads on
        to the states behind the longer tokens, and a state behind another text does not."""
        if state not in self._likely:
            ways = self._ways(state)
            ahead = {token: self._ahead(end) for token, end in ways.items()}
            order = sorted(ways, key=lambda token: sum(end in ahead[token] for end in ways.values()))
            is_one_text = all(ways[longer] in ahead[shorter] for longer, shorter in pairwise(order))
            self._likely[state] = order[0] if order and is_one_text else None
        return self._likely[state]

    def _ahead(self, state: int) -> set[int]:
        """Return the states that may come after a state, as far as there are few ways on."""
        found, waiting = set[int](), [state]
        while waiting and len(found) < _MAX_AHEAD:
            new = set(self._ways(waiting.pop()).values()) - found
            found |= new
            waiting += new
        return found

    def _ways(self, state: int) -> dict[int, int]:
        """Return the states that a state's tokens lead to; none if there are many, or the text may end."""
        if state not in self._known_ways:
            tokens = self.index.get_allowed_tokens(state) or []
            ends = {token: self.index.get_next_state(state, token) for token in tokens[: _MAX_WAYS + 1]}
            self._known_ways[state] = {} if len(ends) > _MAX_WAYS or None in ends.values() else ends
        return self._known_ways[state]


class Step:
    """A token of a text. The steps before it are the path to it."""

    def __init__(self, before: Step | None, token: int) -> None:
        self.before, self.token = before, token
        self.count: int = 1 if before is None else before.count + 1


class MatcherState:
    """A place in a text that a library's matcher goes to when somebody asks what is allowed there. So a fork copies no
    matcher: those of some libraries hold the whole text, or all states of their lexer.

    Args:
        begin: Makes the matcher of a text.
    """

    def __init__(self, begin: Callable[[], Matcher]) -> None:
        self._begin, self._step = begin, cast("Step | None", None)
        self._matcher: Matcher | None = None

    def allowed(self, vocab_size: int) -> torch.Tensor:
        matcher = cast(Matcher, self._matcher)
        with matcher.lock:
            matcher.go_to(self._step)
            return matcher.allowed(vocab_size)

    def advance(self, token: int) -> None:
        self._step = Step(self._step, token)

    def likely(self) -> list[int]:
        matcher = cast(Matcher, self._matcher)
        with matcher.lock:
            matcher.go_to(self._step)
            return [] if matcher.has_ended() else matcher.likely()

    def fork(self) -> MatcherState:
        own = copy.copy(self)
        own._matcher = self._matcher or self._begin()  # one for each text, which all its paths share
        return own


class Matcher:
    """A library's matcher of one text, which moves between the paths of its drafts: it takes tokens back to where two
    paths part, and takes in the other one's.

    Args:
        matcher: The library's object, at the beginning of the text.

    Attributes:
        lock: Of who goes to a path and asks there: several threads may go on with one text.
    """

    def __init__(self, matcher: Any) -> None:
        self.matcher, self.lock = matcher, threading.Lock()
        self._steps: list[Step] = []  # where it is
        self._are_taken: list[bool] = []  # the end may be repeated, but is taken once

    def go_to(self, step: Step | None) -> None:
        """Go to the path that ends in a step; `None` for the beginning."""
        new = []
        while step is not None and (step.count > len(self._steps) or self._steps[step.count - 1] is not step):
            new.append(step)
            step = step.before
        shared = 0 if step is None else step.count
        if count := sum(self._are_taken[shared:]):
            self.matcher.rollback(count)
        del self._steps[shared:], self._are_taken[shared:]
        for each in reversed(new):
            self._are_taken.append(not self.has_ended())
            if self._are_taken[-1] and not self.take(each.token):
                raise ValueError(f"{self.about()} refused the token {each.token}, which it had allowed.")
            self._steps.append(each)

    # Of each library

    def about(self) -> str:
        """Return the matcher in words, for errors."""
        raise NotImplementedError

    def has_ended(self) -> bool:
        """Return whether nothing but the end may follow."""
        raise NotImplementedError

    def take(self, token: int) -> bool:
        """Go on with a token, and return whether it is allowed."""
        raise NotImplementedError

    def allowed(self, vocab_size: int) -> torch.Tensor:
        """Return which tokens may come next, boolean `[vocab_size]`."""
        raise NotImplementedError

    def likely(self) -> list[int]:
        """Return the tokens of what must come next, if the library knows some."""
        return []


class XGrammarMatcher(Matcher):
    """The place of one text in an xgrammar grammar.

    Args:
        grammar: A `CompiledGrammar`.
    """

    def __init__(self, grammar: Any) -> None:
        from xgrammar import GrammarMatcher

        super().__init__(GrammarMatcher(grammar))
        self._vocab_size = grammar.tokenizer_info.vocab_size

    def about(self) -> str:
        return "An xgrammar.CompiledGrammar"

    def has_ended(self) -> bool:
        return self.matcher.is_terminated()

    def take(self, token: int) -> bool:
        return self.matcher.accept_token(token)

    def allowed(self, vocab_size: int) -> torch.Tensor:
        check_vocabulary(self.about(), self._vocab_size, vocab_size)
        if self.has_ended():
            mask = torch.zeros(vocab_size, dtype=torch.bool)
            mask[self.matcher.stop_token_ids] = True
            return mask
        words = torch.empty(1, -(-vocab_size // 32), dtype=torch.int32)
        self.matcher.fill_next_token_bitmask(words)
        return unpacked(words, vocab_size)

    def likely(self) -> list[int]:
        find = getattr(self.matcher, "find_jump_forward_tokens", None)  # of newer versions
        return [] if find is None else find()


class LLGuidanceMatcher(Matcher):
    """The place of one text in an llguidance grammar.

    Args:
        matcher: An `LLMatcher`, which stays as it is.

    Raises:
        ValueError: If it has failed or ended.
    """

    def __init__(self, matcher: Any) -> None:
        super().__init__(matcher.deep_copy())
        if self.matcher.is_error() or self.has_ended():
            why = " ".join(self.matcher.get_error().split()) or "it was used by another text, which has ended"
            raise ValueError(f"{self.about()} allows no tokens ({why}), expected a new one of a right grammar.")
        self._vocab_size = len(self.matcher.compute_logit_bias())  # a byte for each token

    def about(self) -> str:
        return "An llguidance.LLMatcher"

    def has_ended(self) -> bool:
        return self.matcher.is_stopped()

    def take(self, token: int) -> bool:
        return self.matcher.consume_token(token)

    def allowed(self, vocab_size: int) -> torch.Tensor:
        check_vocabulary(self.about(), self._vocab_size, vocab_size)
        words = torch.empty(1, -(-vocab_size // 32), dtype=torch.int32)
        self.matcher.unsafe_compute_mask_ptr(words.data_ptr(), 4 * words.numel())
        return unpacked(words, vocab_size)


def unpacked(words: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return the bits of int32 `[1, words]`, the lowest first, as booleans `[vocab_size]`."""
    return torch.from_numpy(np.unpackbits(words.numpy().view(np.uint8), bitorder="little")[:vocab_size].view(np.bool_))


def check_vocabulary(what: str, size: int, vocab_size: int, has_fewer: bool = False) -> None:
    """Raise a `ValueError` unless a grammar is over as many tokens as the target has, or fewer if it `has_fewer`."""
    if size != vocab_size and not (has_fewer and size < vocab_size):
        raise ValueError(
            f"{what} is over {size} tokens and the target has {vocab_size}, expected the same: compile it with the "
            f"target's tokenizer, and with the vocabulary size {vocab_size}, padding included."
        )
