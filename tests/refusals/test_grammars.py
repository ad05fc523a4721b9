"""What a grammar cannot be."""

from __future__ import annotations

import pytest
import torch

from hf_hyperdflash import AfterReasoning, GrammarProcessor

from ..conftest import MODELS
from ..helpers.grammars import Table
from ..helpers.refusals import Refusal
from .test_decoding import V4, asked

TABLE = Table([{1: 0}])


class Narrow(Table):
    def allowed(self, vocab_size):
        return torch.ones(50, dtype=torch.bool)


class Listed(Table):
    def allowed(self, vocab_size):
        return list(self.moves[self.state])


class Lost(Table):
    def fork(self):
        return None


class Scores(Table):
    def allowed(self, vocab_size):
        return torch.zeros(vocab_size)


def call(grammar, rows=1, family=None, **options):
    """A call in which the target is not run, with a drafter and without."""

    def calls():
        processors = [GrammarProcessor(grammar() if callable(grammar) else grammar)]
        where = {} if family is None else {"family": family}
        asked(rows=rows, logits_processor=processors, **where, **options)()

    return calls


def xgrammar(size):
    def compiled():
        xgr = pytest.importorskip("xgrammar")
        info = xgr.TokenizerInfo([chr(65 + token) for token in range(size)], vocab_size=size, stop_token_ids=[0])
        return xgr.GrammarCompiler(info, max_threads=1).compile_regex("[A-Z]+")

    return compiled


def used_by_another_text():
    pytest.importorskip("xgrammar")
    from xgrammar.contrib.hf import LogitsProcessor

    processor = LogitsProcessor(xgrammar(64)())
    processor(torch.zeros(1, 3, dtype=torch.long), torch.zeros(1, 64))
    asked(logits_processor=[processor])()


def llguidance(pattern, *tokens):
    def matcher():
        llg = pytest.importorskip("llguidance")
        from llguidance.hf import from_tokenizer
        from transformers import AutoTokenizer

        known = from_tokenizer(AutoTokenizer.from_pretrained(MODELS / "tiny-deepseek-v4"))
        grammar = llg.LLMatcher.grammar_from_regex(pattern)
        made = llg.LLMatcher(known, grammar, log_level=0)
        for token in known.tokenize_str("".join(tokens)):
            made.consume_token(token)
        return made

    return matcher


def outlines_core():
    core = pytest.importorskip("outlines_core")
    return core.Index("a|b", core.Vocabulary(1, {b"a": [3], b"b": [99]}))


REFUSED = {
    "another number of rows": Refusal(call([TABLE, TABLE], 4), ("2 grammars for 4 prompts", "one for each")),
    "more than prompts": Refusal(call([TABLE] * 3), ("3 grammars for 1 prompt:", "one for all")),
    "several texts": Refusal(call([TABLE] * 4, 2, num_return_sequences=2, do_sample=True),
                             ("4 grammars for 2 prompts",)),
    "without a drafter": Refusal(call([TABLE, TABLE], 4, assistant_model=None), ("2 grammars for 4 prompts",)),
    "written one by one": Refusal(call([TABLE, TABLE], 4, V4), ("2 grammars for 4 prompts",)),
    "a processor alone": Refusal(asked(logits_processor=GrammarProcessor(TABLE)), ("a GrammarProcessor", "a list")),
    **{f"{type(each).__name__} alone, {plain}": Refusal(
        asked(logits_processor=[each], **({"assistant_model": None} if plain else {})),
        (type(each).__name__, "[GrammarProcessor(grammar)]"))
       for each in (TABLE, AfterReasoning(TABLE, 5)) for plain in (False, True)},
    "no grammar": Refusal(lambda: GrammarProcessor([]), ("empty list", "one for all")),
    "a schema": Refusal(lambda: GrammarProcessor({"type": "object"}), ("is a dict,", "CompiledGrammar", "LLMatcher",
                                                                        "Index", "`allowed`", "compile")),
    "another vocabulary": Refusal(call(Narrow([{}])), ("Narrow", "[50]", "[64]")),
    "scores": Refusal(call(Scores([{}])), ("Scores", "torch.float32 [64]", "torch.bool [64]")),
    "another vocabulary behind": Refusal(call(AfterReasoning(Narrow([{}]), 5)), ("Narrow", "[50]", "[64]")),
    "an end beyond": Refusal(call(AfterReasoning(TABLE, 64)), ("the token 64", "64")),
    "a text without tokenizer": Refusal(lambda: AfterReasoning(TABLE, "</think>"), ("'</think>'", "`tokenizer`")),
    "no end": Refusal(lambda: AfterReasoning(TABLE, []), ("`end` is []", "token's id")),
    **{f"an end of {each!r}": Refusal(lambda each=each: AfterReasoning(TABLE, each),
                                      (f"`end` is {each!r}", "token's id"))
       for each in (None, True, -1, 5.0, [5.0], ["</think>"], [3, -2], b"</think>")},
    **{f"the tokenizer {each!r}": Refusal(lambda each=each: AfterReasoning(TABLE, "</think>", each),
                                          (f"`tokenizer` a {type(each).__name__}", "the target's tokenizer"))
       for each in ("gpt2", 200)},
    "a list of tokens": Refusal(call(Listed([{5: 0}])), ("Listed", "type list", "torch.bool [64]")),
    "a class": Refusal(lambda: GrammarProcessor(Table), ("is a type,", "CompiledGrammar")),
    "a tensor": Refusal(lambda: GrammarProcessor(torch.ones(3)), ("is a torch.Tensor,", "CompiledGrammar")),
    "no fork": Refusal(call(Lost([{5: 0}])), ("NoneType", "`fork`")),
    "nothing to begin with": Refusal(call(Table([{}])), ("Table", "no token to begin with", "64")),
    "nothing behind": Refusal(call(AfterReasoning(Table([{}]), 5)), ("Table", "no token to begin with")),
    "nothing, without a drafter": Refusal(call(Table([{}]), assistant_model=None), ("no token to begin with",)),
    "no list": Refusal(asked(logits_processor=GrammarProcessor(TABLE)), ("a GrammarProcessor", "a list")),
    "no list, without a drafter": Refusal(asked(logits_processor=GrammarProcessor(TABLE), assistant_model=None),
                                          ("a GrammarProcessor", "a list")),
    "a grammar itself": Refusal(asked(logits_processor=[TABLE]),
                                ("`logits_processor[0]`", "a Table", "GrammarProcessor(")),
    "a processor's class": Refusal(asked(logits_processor=[GrammarProcessor]), ("the class GrammarProcessor",)),
    **{f"a budget of {each!r}": Refusal(lambda each=each: AfterReasoning(TABLE, 5, budget=each),
                                        (f"`budget` is {each!r}", "whole number")) for each in (-1, 2.5, "9", True)},
    "xgrammar's other vocabulary": Refusal(call(xgrammar(32)), ("xgrammar", "32 tokens", "64")),
    "xgrammar's used processor": Refusal(used_by_another_text, ("xgrammar", "another text", "new one")),
    "llguidance's other vocabulary": Refusal(call(llguidance("[a-z]+")), ("llguidance", "2048 tokens", "64")),
    "llguidance's wrong grammar": Refusal(call(llguidance("[a-z")), ("llguidance", "expected a new one")),
    "llguidance's ended text": Refusal(call(llguidance("ab", "ab")), ("llguidance", "another text")),
    "outlines' other vocabulary": Refusal(call(outlines_core), ("outlines_core.Index", "100 tokens", "64")),
}  # fmt: skip


@pytest.mark.parametrize("refusal", REFUSED.values(), ids=REFUSED)
def test_it_is_refused_before_the_target_runs(refusal: Refusal):
    refusal.check()
