"""xgrammar, llguidance and outlines-core: texts are those of plain decoding by each library's own means."""

from __future__ import annotations

import copy
import functools
import json

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, LogitsProcessor, Qwen3Config, Qwen3ForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

from hf_hyperdflash import AfterReasoning, GrammarProcessor, HyperDFlashDrafter, bind, load_target
from hf_hyperdflash.grammars import states
from hf_hyperdflash.grammars.states import state_of

from ..conftest import MODELS, mostly_nightly, tiny_drafter
from ..helpers.tree_drafters import RandomChains, RandomTrees

NAME, AGE = {"type": "string", "maxLength": 6, "pattern": "^[a-z]*$"}, {"type": "integer", "minimum": 0, "maximum": 99}
SCHEMAS = [
    {"type": "object", "properties": {"name": NAME, "age": AGE}, "required": ["name", "age"]},
    {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 2, "maxItems": 3},
    {"type": "object", "properties": {"open": {"type": "boolean"}}, "required": ["open"]},
    {"type": "object", "properties": {"a": {"type": "object", "properties": {"b": AGE}, "required": ["b"]}},
     "required": ["a"]},
]  # fmt: skip
for schema in SCHEMAS:
    schema.update({} if "properties" not in schema else {"additionalProperties": False})
SIZE = 2048
GREEDILY = {"do_sample": False, "max_new_tokens": 40}


@functools.cache
def tokenizer():
    return AutoTokenizer.from_pretrained(MODELS / "tiny-deepseek-v4")


@functools.cache
def target():
    """A random one with a real tokenizer, whose texts can share a forward."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=SIZE, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=512, initializer_range=0.5, bos_token_id=0,
        eos_token_id=tokenizer().eos_token_id, pad_token_id=2, tie_word_embeddings=False,
    )  # fmt: skip
    return bind(Qwen3ForCausalLM(config).eval())


class Own(LogitsProcessor):
    """Asks a library's objects, one for each row, as its documentation shows."""

    def __init__(self, matchers, take, fill):
        self.matchers, self.take, self.fill, self.start = matchers, take, fill, None

    def __call__(self, input_ids, scores):
        for row, matcher in enumerate(self.matchers):
            if self.start is not None:
                self.take(matcher, int(input_ids[row, -1]))
            words = np.zeros(SIZE // 32, dtype=np.int32)
            self.fill(matcher, words)
            bits = np.unpackbits(words.view(np.uint8), bitorder="little").astype(bool)
            scores[row, ~torch.from_numpy(bits)] = -torch.inf
        self.start = input_ids.shape[1]
        return scores


class XGrammar:
    def __init__(self):
        xgr = self.library = pytest.importorskip("xgrammar")
        info = xgr.TokenizerInfo.from_huggingface(tokenizer(), vocab_size=SIZE)
        compiler = xgr.GrammarCompiler(info, max_threads=1)
        self.grammars = [compiler.compile_json_schema(schema, any_whitespace=False) for schema in SCHEMAS]

    def own(self, rows):
        from xgrammar.contrib.hf import LogitsProcessor as Processor

        return Processor([self.grammars[row] for row in rows])


class LLGuidance:
    def __init__(self):
        llg = self.library = pytest.importorskip("llguidance")
        from llguidance.hf import from_tokenizer

        known = from_tokenizer(tokenizer(), n_vocab=SIZE)
        texts = [llg.LLMatcher.grammar_from_json_schema({**schema, "x-guidance": {"whitespace_flexible": False}})
                 for schema in SCHEMAS]  # fmt: skip
        self.grammars = [llg.LLMatcher(known, text) for text in texts]

    def own(self, rows):
        def fill(matcher, words):
            matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)

        matchers = [self.grammars[row].deep_copy() for row in rows]
        return Own(matchers, lambda matcher, token: matcher.consume_token(token), fill)


class OutlinesCore:
    def __init__(self):
        core = self.library = pytest.importorskip("outlines_core")
        from outlines_core.json_schema import build_regex_from_schema

        byte_of = {letter: byte for byte, letter in bytes_to_unicode().items()}
        end = tokenizer().eos_token_id
        vocabulary = core.Vocabulary(end, {})
        for token, number in tokenizer().get_vocab().items():
            if number != end and all(letter in byte_of for letter in token):
                vocabulary.insert(bytes(byte_of[letter] for letter in token), number)
        self.grammars = [core.Index(build_regex_from_schema(json.dumps(each)), vocabulary) for each in SCHEMAS]

    def own(self, rows):
        def take(guide, token):
            if token != tokenizer().eos_token_id and not ended.get(id(guide)):
                guide.advance(token, return_tokens=False)
            else:
                ended[id(guide)] = True

        ended = {}
        guides = [self.library.Guide(self.grammars[row]) for row in rows]
        return Own(guides, take, lambda guide, words: guide.write_mask_into(words.ctypes.data, len(words), 4))


@functools.cache
def made(kind):
    return kind()


KINDS = [XGrammar, LLGuidance, OutlinesCore]


def prompts(texts):
    known = tokenizer()
    known.padding_side = "left"
    return known(texts, return_tensors="pt", padding=True)


def answers(out, start):
    end = tokenizer().eos_token_id
    rows = [row[: row.index(end)] if end in row else row for row in out[:, start:].tolist()]
    return [tokenizer().decode(row) for row in rows]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("drafter", [RandomChains, RandomTrees, None])
def test_batches_of_four_with_four_schemas_are_those_of_the_library(kind, drafter):
    library, seen = made(kind), set()
    for seed in range(3):
        inputs = prompts([f"{seed} Tell me", "A color", f"Is it open? {seed}", "number"])
        start = inputs["input_ids"].shape[1]
        expected = target().generate(**inputs, **GREEDILY, logits_processor=[library.own(range(4))])
        processor = [GrammarProcessor(library.grammars)]
        assert torch.equal(target().generate(**inputs, **GREEDILY, logits_processor=processor), expected)
        drafts = tiny_drafter(target()) if drafter is None else drafter(target(), list(expected), seed)
        out = target().generate(**inputs, **GREEDILY, logits_processor=processor, assistant_model=drafts)
        assert torch.equal(out, expected)
        for schema, answer, row in zip(SCHEMAS, answers(out, start), expected.tolist()):
            if tokenizer().eos_token_id in row[start:]:
                assert json.loads(answer) is not None and isinstance(json.loads(answer), (dict, list)), answer
                seen.add(str(schema))
    assert len(seen) > 2


@pytest.mark.parametrize("kind", mostly_nightly(KINDS, 3))
def test_the_shipped_pair_writes_json(kind):
    """By chains and trees, with its own drafter, behind a budget of thinking."""
    library = made(kind)
    pair = (
        load_target(MODELS / "tiny-deepseek-v4", dtype="float32"),
        HyperDFlashDrafter.from_pretrained(MODELS / "tiny-deepseek-v4-hyperdflash", dtype="float32").eval(),
    )
    pair[1].bind(pair[0])
    size = pair[0].config.vocab_size
    assert size == SIZE
    inputs = prompts(["Tom has 12 marbles."])
    for number in range(2):
        expected = pair[0].generate(**inputs, **GREEDILY, logits_processor=[library.own([number])])
        for asked in ({}, {"tree_budget": 12}, {"num_assistant_tokens": "auto"}):
            processor = [GrammarProcessor(library.grammars[number])]
            out = pair[0].generate(**inputs, **GREEDILY, **asked, logits_processor=processor, assistant_model=pair[1])
            assert torch.equal(out, expected)
            assert pair[1].last_stats.tau > 1.2
        thinking = [GrammarProcessor(AfterReasoning(library.grammars[number], "\n\n", tokenizer(), budget=7))]
        expected = pair[0].generate(**inputs, **GREEDILY, logits_processor=thinking)
        thinking = [GrammarProcessor(AfterReasoning(library.grammars[number], "\n\n", tokenizer(), budget=7))]
        out = pair[0].generate(**inputs, **GREEDILY, logits_processor=thinking, assistant_model=pair[1])
        assert torch.equal(out, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_goes_anywhere_in_a_text(kind):
    """In any order, and back: what is allowed after a path is what a matcher allows that saw nothing else."""
    library, chance = made(kind), np.random.default_rng(0)
    for grammar, number in zip(library.grammars, range(4)):
        root = state_of(grammar).fork()
        known = {(): root}
        for _ in range(150):
            path = list(known)[chance.integers(len(known))]
            allowed = known[path].allowed(SIZE).nonzero().flatten().tolist()
            token = int(chance.choice(allowed))
            after = known[path].fork()
            after.advance(token)
            known[(*path, token)] = after
        for path in [list(known)[place] for place in chance.permutation(len(known))][:60]:
            own, ids, scores = library.own([number]), torch.zeros(1, 3, dtype=torch.long), torch.zeros(1, SIZE)
            expected = own(ids, scores.clone())
            for token in path:
                if token == tokenizer().eos_token_id:
                    break
                ids = torch.cat([ids, torch.tensor([[token]])], 1)
                expected = own(ids, scores.clone())
            else:
                fresh = state_of(grammar).fork()
                for token in path:
                    fresh.advance(token)
                assert torch.equal(fresh.allowed(SIZE), expected[0] == 0)
                assert known[path].likely() == fresh.likely()
                assert torch.equal(known[path].allowed(SIZE), expected[0] == 0), path


def test_an_index_keeps_the_masks_of_its_latest_states(monkeypatch):
    """Its forks have them in common."""
    monkeypatch.setattr(states, "_MAX_MASKS", 3)
    root = state_of(made(OutlinesCore).grammars[0]).fork()
    path, masks = [root], [root.allowed(SIZE)]
    for _ in range(6):
        path.append(path[-1].fork())
        path[-1].advance(int(masks[-1].nonzero()[0]))
        masks.append(path[-1].allowed(SIZE))
        assert len(root._masks) == min(3, len(masks)) and path[-1].allowed(SIZE) is masks[-1]
    assert len({each.state for each in path}) == 7
    for state, mask in zip(path, masks):
        assert torch.equal(state.allowed(SIZE), mask)


@pytest.mark.parametrize("kind", KINDS)
def test_what_must_come_is_spelled_as_the_tokenizer_does(kind):
    """Up to where two spellings are possible, or a choice is."""
    known, library = tokenizer(), made(kind)
    for grammar, answer in zip(library.grammars, ['{"name":"tom","age":7}', '["red","red"]', '{"open":true}']):
        if kind is XGrammar:
            answer = answer.replace(":", ": ").replace(",", ", ")
        text, ids, right = GrammarProcessor(grammar).begin(torch.tensor([5]), 0, 1, SIZE), known.encode(answer), []
        for place, token in enumerate(ids):
            tokens = [each for each, _ in text.likely_tokens(9, [known.eos_token_id])]
            right += [tokens[:1] == ids[place : place + 1]] if tokens else []
            text.accept(token)
        assert sum(right) > len(right) / 2 and sum(right) > 2, (answer, right)


def test_xgrammars_own_processor_is_known():
    library, inputs = made(XGrammar), prompts(["Tell me"])
    expected = target().generate(**inputs, **GREEDILY, logits_processor=[library.own([0])])
    given, drafter = library.own([0]), RandomTrees(target(), [expected[0]])
    options = dict(**inputs, **GREEDILY, assistant_model=drafter)
    assert torch.equal(target().generate(**options, logits_processor=[given]), expected)
    assert sum(drafter.last_stats.accepted)
    assert not given.prefilled and not copy.copy(given).matchers  # it stays the caller's
