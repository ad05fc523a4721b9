"""The texts of a batch: what of a call each has of its own, as if transformers had prepared it alone."""

from __future__ import annotations

import copy
import dis
import gc
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from types import CellType, FrameType, FunctionType, ModuleType
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.configuration_utils import GenerationConfig

from ..drafters.sampling import stateless_types
from ..grammars.processor import grammar_of

_CALLED = ("logits_processor", "stopping_criteria")  # after every token, and some remember what they were called with
_STOCK_CRITERIA = "transformers.generation.stopping_criteria"  # the module of criteria that keep no state


class Row(NamedTuple):
    """One text of a call: its prompt `[1, seq]`, the target's other arguments, and who is asked about it alone."""

    ids: torch.Tensor
    arguments: dict[str, Any]
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList


def rows_of(
    target: Any,
    call: Mapping[str, Any],
    batch: Row,
    config: GenerationConfig,
    prompts: torch.Tensor,
    tokenizer: PreTrainedTokenizerBase | None,
) -> list[Row]:
    """Return the texts of a batch that transformers has prepared as a whole.

    Args:
        target: The bound target.
        call: The arguments of the call.
        batch: All texts.
        config: The generation configuration, as prepared.
        prompts: `[prompts, seq]`. Of each there may be several texts.
        tokenizer: For stop strings.

    Raises:
        ValueError: If a processor or a criterion cannot be copied.
    """
    rows = len(batch.ids)
    called = {name: list(call.get(name) or ()) for name in _CALLED}
    copies = _Copies([each for given in called.values() for each in given if not _is_shared(each)])
    allowed = call.get("prefix_allowed_tokens_fn")
    of_prompts = {
        "encoder_input_ids": prompts,
        "negative_prompt_ids": call.get("negative_prompt_ids"),
        "negative_prompt_attention_mask": call.get("negative_prompt_attention_mask"),
    }
    found = []
    for row in range(rows):
        copied, arguments = copies.memo(), _arguments_of(batch.arguments, row, rows)
        prompt = row * len(prompts) // rows
        given_processors, given_criteria = (
            [each if _is_shared(each) else _InItsRow(_copy(each, f"`{name}`", copied), row, rows) for each in given]
            for name, given in called.items()
        )
        processors = target._get_logits_processor(
            generation_config=config,
            input_ids_seq_length=batch.ids.shape[1],
            prefix_allowed_tokens_fn=allowed and (lambda _, ids, prompt=prompt: allowed(prompt, ids)),
            logits_processor=given_processors,
            device=prompts.device,
            model_kwargs=arguments,
            **_arguments_of(of_prompts, row, rows),
        )
        criteria = target._get_stopping_criteria(config, given_criteria, tokenizer=tokenizer)
        found.append(Row(batch.ids[row : row + 1], arguments, processors, criteria))
    return found


def with_grammars(row: Row, number: int, rows: int, vocab_size: int) -> Row:
    """Return a text with its own state of each grammar among its processors.

    Args:
        row: The text.
        number: Of its row.
        rows: Of all texts.
        vocab_size: The target's.
    """
    ids, own = row.ids[0].cpu(), LogitsProcessorList()
    for each in row.processors:
        grammar = grammar_of(each)
        own.append(each if grammar is None else grammar.begin(ids, number, rows, vocab_size))
    return row._replace(processors=own)


def _is_shared(called: object) -> bool:
    """Return whether texts need no copies of a processor or criterion."""
    return _keeps_no_state(called) or grammar_of(called) is not None


def _arguments_of(arguments: Mapping[str, Any], row: int, rows: int) -> dict[str, Any]:
    """Return what of a batch's arguments belongs to one text. Tensors have a row for each text, or for each prompt, or
    one for all; the rest stays as it is."""
    own = dict(arguments)
    for name, value in own.items():
        if isinstance(value, torch.Tensor) and value.ndim:
            axis = int(name == "position_ids" and value.ndim == 3)  # behind those of the positions
            count = value.shape[axis]
            own[name] = value.narrow(axis, row * count // rows, 1) if count and rows % count == 0 else value
    mask = own.get("attention_mask")
    if mask is not None and bool(mask.all()):  # of a text alone, transformers says so by none
        own["attention_mask"] = None
    return own


def _keeps_no_state(called: object) -> bool:
    """Return whether a processor or criterion is transformers' own, and known to keep no state."""
    return type(called) in stateless_types() or type(called).__module__ == _STOCK_CRITERIA


class _InItsRow:
    """A processor or criterion of a batch, asked about one text. In plain decoding it would see a row for each text,
    and it may look up what it has for a row by the row's number: so the text stands in its own row, and in all others.

    Args:
        called: The text's copy.
        row: Of the text.
        rows: Of all texts.
    """

    def __init__(self, called: Callable[..., object], row: int, rows: int) -> None:
        self.called, self.row, self.rows = called, row, rows

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor | tuple[torch.Tensor, ...] | None) -> object:
        if isinstance(scores, torch.Tensor):  # a processor may write into them
            scores = scores.repeat(self.rows, 1)
        elif scores is not None:  # a criterion's, of each step
            scores = tuple(step.expand(self.rows, -1) for step in scores)
        said = self.called(input_ids.expand(self.rows, -1), scores)
        if isinstance(said, torch.Tensor) and said.ndim and len(said) == self.rows:
            return said[self.row : self.row + 1]
        return said


class _Copies:
    """Copies of processors and criteria, for each text its own: some remember what they were called with.

    Shared are those of transformers that keep no state; models, weights and tokenizers, which are large and only read;
    and events, by which others stop all texts. A function is copied with its closure.

    Args:
        called: The request's.
    """

    def __init__(self, called: Iterable[object]) -> None:
        self._shared: dict[int, object] = {}
        self._functions: list[FunctionType] = []
        seen: set[int] = set()
        found = list(called)
        while found:
            each = found.pop()
            # What `copy.deepcopy` never enters would lead to everything that is loaded.
            if id(each) in seen or isinstance(each, (type, FrameType)):
                continue
            seen.add(id(each))
            is_called = isinstance(each, (LogitsProcessor, StoppingCriteria))
            is_outside = isinstance(each, (nn.Module, PreTrainedTokenizerBase, threading.Event)) and not is_called
            is_weight = isinstance(each, torch.Tensor) and each.requires_grad
            if _keeps_no_state(each) or is_outside or is_weight or isinstance(each, ModuleType):
                self._shared[id(each)] = each
            elif isinstance(each, FunctionType):
                self._functions.append(each)
                found += [each.__closure__, each.__defaults__, each.__kwdefaults__, vars(each)]
            else:
                found += gc.get_referents(each)

    def memo(self) -> dict[int, object]:
        """Return the `memo` of `copy.deepcopy` for one text.

        Raises:
            ValueError: If what a function remembers cannot be copied.
        """
        memo = dict(self._shared)
        for function in self._functions:
            _copy(function, "A processor or a criterion", memo)
        return memo


def _copy(called: object, where: str, copied: dict[int, object]) -> Any:
    """Return a text's own copy of a processor or criterion of the request.

    Raises:
        ValueError: If it cannot be copied: each text would move the state of all others on.
    """
    try:
        return _with_own_closure(called, copied) if isinstance(called, FunctionType) else copy.deepcopy(called, copied)
    except Exception as error:
        why = " ".join(str(error).split())
        name = getattr(called, "__name__", type(called).__name__)
        raise ValueError(
            f"{where} has a {name}, which cannot be copied ({type(error).__name__}: {why}), and with a drafter each "
            "text of a batch needs one of its own: pass one prompt, or make it a class with a `__deepcopy__`."
        ) from error


def _with_own_closure(function: FunctionType, copied: dict[int, object]) -> object:
    """Copy a function and what it remembers, which `copy.deepcopy` does not."""
    if id(function) in copied:
        return copied[id(function)]
    instructions = dis.get_instructions(function)
    if written := next((each.argval for each in instructions if each.opname == "STORE_GLOBAL"), None):
        raise TypeError(f"it writes `{written}`, a variable of its module")
    cells = function.__closure__ or ()
    own_cells = [cast(CellType, copied.setdefault(id(cell), CellType())) for cell in cells]
    own = FunctionType(function.__code__, function.__globals__, function.__name__, None, tuple(own_cells))
    copied[id(function)] = own  # before its closure, in which it may stand itself
    own.__defaults__, own.__kwdefaults__ = copy.deepcopy((function.__defaults__, function.__kwdefaults__), copied)
    vars(own).update(copy.deepcopy(vars(function), copied))
    for cell, own_cell in zip(cells, own_cells):
        with suppress(ValueError):  # a variable without a value
            value = cell.cell_contents
            is_function = isinstance(value, FunctionType)
            own_cell.cell_contents = _with_own_closure(value, copied) if is_function else copy.deepcopy(value, copied)
    return own
