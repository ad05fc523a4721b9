"""What `generate` with a drafter refuses, and what a draft tree cannot be."""

from __future__ import annotations

import functools
import threading
from collections import namedtuple
from unittest import mock

import pytest
import torch
from transformers import DynamicCache, LogitsProcessor, Phi3Config, Phi3ForCausalLM, StaticCache, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from hf_hyperdflash import Conversation, bind
from hf_hyperdflash.drafters.base import Drafter
from hf_hyperdflash.targets.caches.linear import RewindableLinearLayer
from hf_hyperdflash.targets.caches.name import CACHE, cache_of
from hf_hyperdflash.trees.tree import ANCHOR, DraftTree

from ..conftest import prompt, tiny_drafter, tiny_target
from ..helpers import families
from ..helpers.loops import in_transformers_loop
from ..helpers.refusals import Refusal
from ..helpers.tree_drafters import RandomChains, RandomTrees

# Before any work


@functools.cache
def bound(family):
    torch.manual_seed(0)
    return bind(family().eval())


@functools.cache
def drafter_of(family):
    """A drafter of a target that can draft six tokens a round."""
    target = bound(family)
    drafter = tiny_drafter(target)
    drafter.bind(target)
    return drafter


def restarting():
    """Starts its cache anew at 25 tokens, from which on its positions are others."""
    rope = dict(
        rope_type="longrope", rope_theta=1e4, short_factor=[1.0] * 8, long_factor=[4.0] * 8, factor=4.0,
        original_max_position_embeddings=24,
    )  # fmt: skip
    small = dict(intermediate_size=48, num_hidden_layers=2, num_key_value_heads=2, max_position_embeddings=96)
    config = Phi3Config(**{**families.COMMON, **small}, rope_parameters=rope, original_max_position_embeddings=24)
    return Phi3ForCausalLM(config)


def asked(family=families.qwen3, rows=1, length=9, **options):
    """A call with a drafter, in which the target is not run."""

    def call():
        target, ids = bound(family), prompt(length).repeat(rows, 1)
        given = {"input_ids": ids, "assistant_model": drafter_of(family), "max_new_tokens": 6, **options}
        given = {name: value() if value is cache_of_39 else value for name, value in given.items()}
        with mock.patch.object(type(target), "forward", lambda *_, **__: pytest.fail("the target ran")):
            target.generate(**given)

    return call


def talked(rows=1, length=9, **options):
    """A turn of a conversation, in which the target is not run."""

    def call():
        target = bound(families.qwen3)
        given = {"inputs": prompt(length).repeat(rows, 1), "max_new_tokens": 6, **options}
        with mock.patch.object(type(target), "forward", lambda *_, **__: pytest.fail("the target ran")):
            Conversation(target).generate(**given)

    return call


def cache_of_39():
    return StaticCache(config=bound(families.qwen3).config, max_cache_len=39)


def ones(*shape):
    return torch.ones(*shape, dtype=torch.long)


class CannotBeCopied(LogitsProcessor):
    def __deepcopy__(self, memo):
        raise TypeError("cannot pickle 'GrammarMatcher' object")


class Locked(StoppingCriteria):
    def __init__(self):
        self.lock = threading.Lock()


def holding(lock):
    return lambda input_ids, scores, **kwargs: lock.locked()


def count_calls(input_ids, scores):
    global called
    called = 1
    return scores


V4 = families.deepseek_v4
BATCH = functools.partial(asked, rows=4)
WHOLE = "whole number"
BEFORE = {
    "embeddings": Refusal(asked(input_ids=None, inputs_embeds=torch.zeros(2, 5, 64)), ("inputs_embeds", "input_ids")),
    "an empty prompt": Refusal(asked(length=0), ("[1, 0]", "at least one token")),
    "a drafter's name": Refusal(asked(assistant_model="a/drafter"), ("'a/drafter'", "load_drafter")),
    "no cache": Refusal(asked(use_cache=False), ("use_cache", "True")),
    "another law": Refusal(asked(assistant_ensemble_weight=0.5), ("assistant_ensemble_weight", "0.5", "None")),
    "synced ranks": Refusal(asked(synced_gpus=True), ("synced_gpus=True",)),
    "an unbound assistant": Refusal(asked(V4, assistant_model=tiny_target(4)), ("hf_hyperdflash.bind(",)),
    **{f"{each!r} drafts": Refusal(asked(V4, num_assistant_tokens=each), (repr(each), WHOLE, "from 1"))
       for each in (7, 19, 20, "3", 2.5)},
    **{f"a budget of {each!r}": Refusal(asked(tree_budget=each), (f"`tree_budget` is {each!r}", WHOLE, "1024"))
       for each in (0, -3, 2.5, True, "8", 1025, 10**7)},
    "a budget without drafter": Refusal(asked(assistant_model=None, tree_budget=-5), ("`tree_budget` is -5", WHOLE)),
    **{f"pieces of {each!r}": Refusal(asked(prefill_chunk_size=each), (f"`prefill_chunk_size` is {each!r}", WHOLE))
       for each in (0, -5, "a", 2.5)},
    "lookup beside": Refusal(asked(prompt_lookup_num_tokens=4), ("`prompt_lookup_num_tokens` is 4", "one of the two")),
    "early exit beside": Refusal(asked(assistant_early_exit=2), ("`assistant_early_exit` is 2", "one of the two")),
    "dola beside": Refusal(asked(dola_layers="high"), ("`dola_layers` is 'high'", "one of the two")),
    **{f"a mask of {shape}": Refusal(asked(rows=rows, attention_mask=ones(*shape)),
                                     ("`attention_mask`", str(list(shape)), f"[{rows}, 9]", "a column for each"))
       for rows, shape in [(1, (1, 3)), (1, (2, 9)), (1, (1, 12)), (2, (1, 9))]},
    **{f"{count} positions": Refusal(asked(position_ids=torch.arange(count)[None]), (f"[1, {count}]", "the 9 tokens"))
       for count in (4, 10)},
    **{f"a {kind} cache of V4": Refusal(asked(V4, cache_implementation=kind), (f"'{kind}'", "leave it out"))
       for kind in ("static", "offloaded_static", "quantized")},
    "an offloaded static cache": Refusal(asked(cache_implementation="offloaded_static"),
                                         ("'offloaded_static'", "qwen3", "'static'")),
    "a static cache of a hybrid": Refusal(asked(families.granite_hybrid, **{CACHE: cache_of_39}),
                                          ("StaticCache", "granitemoehybrid")),
    "a short static cache": Refusal(asked(max_new_tokens=32, **{CACHE: cache_of_39}), ("39", "41", "at least 40")),
    "attentions of a static cache": Refusal(
        asked(cache_implementation="static", output_attentions=True, return_dict_in_generate=True),
        ("output_attentions", "static")),
    "a row that starts anew": Refusal(
        asked(restarting, rows=2, length=26, max_new_tokens=16,
              attention_mask=(torch.arange(26) >= torch.tensor([[0], [13]])).long()), ("25", "13", "max_length=37")),
    "greedy texts": Refusal(BATCH(num_return_sequences=2, do_sample=False),
                            ("`num_return_sequences` is 2", "do_sample=True")),
    **{f"{count} texts": Refusal(BATCH(num_return_sequences=count), (f"`num_return_sequences` is {count}", WHOLE))
       for count in (-1, 0)},
    "a cache of a batch": Refusal(BATCH(**{CACHE: DynamicCache()}), (CACHE, "4 texts", "one text at a time")),
    "a streamer of a batch": Refusal(BATCH(streamer=BaseStreamer()), ("streamer", "4 texts", "one prompt")),
    "states of a batch": Refusal(BATCH(output_hidden_states=True), ("output_hidden_states", "4 texts")),
    "attentions of a batch": Refusal(BATCH(output_attentions=True), ("output_attentions", "4 texts")),
    "padding on the right": Refusal(BATCH(attention_mask=torch.tensor([[1] * 9] * 2 + [[1] * 8 + [0]] * 2)),
                                    ("in row 2", "padding_side", "'left'")),
    "a processor that is one": Refusal(BATCH(logits_processor=[CannotBeCopied()]), ("CannotBeCopied", "one prompt")),
    "a criterion with a lock": Refusal(BATCH(stopping_criteria=[Locked()]), ("Locked", "one prompt")),
    "a function with a lock": Refusal(BATCH(stopping_criteria=[holding(threading.Lock())]), ("lock", "one prompt")),
    "a function with a global": Refusal(BATCH(logits_processor=[count_calls]), ("count_calls", "`called`")),
    "a conversation of two texts": Refusal(talked(rows=2), ("[2, 9]", "[1, tokens]", "`Conversation` for each")),
    "of several answers": Refusal(talked(num_return_sequences=3, do_sample=True), ("[1, 9]", "3 texts")),
    "of nothing": Refusal(talked(length=0), ("[1, 0]", "[1, tokens]")),
    "of no tensor": Refusal(talked(inputs=[[1, 2]]), ("a list", "no tensor", "[1, tokens]", "apply_chat_template")),
    "of a list as mask": Refusal(talked(attention_mask=[[1] * 9]), ("`attention_mask`", "a list", "Leave it out")),
    "of padding": Refusal(talked(attention_mask=torch.arange(9)[None].clamp(max=1)), ("`attention_mask`", "padding")),
    "of a longer mask": Refusal(talked(attention_mask=ones(1, 12)), ("`attention_mask`", "Leave it out")),
    "of positions": Refusal(talked(position_ids=torch.arange(9)[None]), ("`position_ids`", "token ids")),
    "of pictures": Refusal(talked(pixel_values=torch.zeros(1)), ("`pixel_values`", "token ids")),
    "of a cache": Refusal(talked(**{CACHE: DynamicCache()}), (f"`{CACHE}`", "DynamicCache", "of its own")),
    "of no cache": Refusal(talked(use_cache=False), ("`use_cache`", "False", "Leave it out")),
    "of a static cache": Refusal(talked(cache_implementation="static"), ("`cache_implementation`", "'static'")),
    "of beams": Refusal(talked(num_beams=3), ("`num_beams`", "3", "`target.generate`")),
    "of lookup": Refusal(talked(prompt_lookup_num_tokens=3), ("`prompt_lookup_num_tokens`", "3", "Leave it out")),
    "of an assistant": Refusal(talked(assistant_model=tiny_target(4)), ("`assistant_model`", "DeepseekV4ForCausalLM")),
    "of no drafts": Refusal(talked(assistant_model=drafter_of(families.qwen3), num_assistant_tokens=0), ("0", WHOLE)),
    **{f"of {copies!r} copies": Refusal(functools.partial(Conversation, bound(families.qwen3), max_copies=copies),
                                        (f"`max_copies` is {copies!r}", WHOLE)) for copies in (-1, 2.0, None)},
    "with another's drafter": Refusal(lambda: Conversation(bound(families.qwen3), tiny_drafter(tiny_target())),
                                      ("hidden_size",)),
    "with a drafter's name": Refusal(lambda: Conversation(bound(families.qwen3), "org/one"),
                                     ("'org/one'", "load_drafter")),
    "with two targets": Refusal(lambda: Conversation(*[bound(families.qwen3)] * 2), ("Qwen3ForCausalLM", "a drafter")),
}  # fmt: skip


@pytest.mark.parametrize("refusal", BEFORE.values(), ids=BEFORE)
def test_it_is_refused_before_the_target_runs(refusal: Refusal):
    refusal.check()


# What a drafter of somebody's own proposes


class Returns(Drafter):
    """Proposes one and the same."""

    def __init__(self, target, proposed):
        self.config, self.proposed, self.max_draft_tokens = target.config, proposed, 4

    def propose(self, *_):
        return self.proposed() if callable(self.proposed) else self.proposed


class ReturnsForAll(Returns):
    def draft(self, *_):
        return self.proposed() if callable(self.proposed) else self.proposed


def chain(*tokens, q=None):
    return lambda: DraftTree.chain(torch.tensor(tokens), q)


def chains(*each):
    return lambda: [DraftTree.chain(torch.tensor(tokens)) for tokens in each]


UNIFORM = torch.full((64,), 1 / 64)
Lookalike = namedtuple("Lookalike", "tokens parents q depths")  # as of another copy of this code
PROPOSED = {
    "none": (None, "None"),
    "a list": ([5, 7], "a list"),
    "a tensor": (torch.tensor([5, 7]), "a Tensor"),
    "a token too large": (chain(5, 64), "token 64"),
    "a token too small": (chain(-1), "token -1"),
    "floats": (chain(5.0), "torch.float32"),
    "truths": (chain(True), "torch.bool"),
    "elsewhere": (lambda: DraftTree.chain(torch.tensor([5], device="meta")), "meta"),
    "a short distribution": (chain(5, q=[UNIFORM[:63]]), "torch.float32 [63]"),
    "a row of one": (chain(5, 6, q=[None, UNIFORM[None]]), "torch.float32 [1, 64]"),
    "whole numbers": (chain(5, q=[UNIFORM.long()]), "torch.int64 [64]"),
    "a number": (chain(5, q=[0.5]), "float"),
    "a lookalike": (Lookalike(torch.tensor([99]), (-1,), None, (1,)), "token 99"),
}


def proposing(kind, proposed, way="alone"):
    def call():
        target = bound(families.qwen3)
        drafter = kind(target, proposed)
        drafter.bind(target)
        ids, options = prompt(9).repeat(2 if way == "batch" else 1, 1), {"max_new_tokens": 9}
        if way == "transformers":
            in_transformers_loop(target, drafter, ids, do_sample=False, **options)
        target.generate(ids, assistant_model=drafter, do_sample=way == "sampled", **options)

    return call


def tree_of(**wrong):
    parts = dict(tokens=torch.tensor([5, 6]), parents=(ANCHOR, 0), q=(None, UNIFORM), confidence=torch.ones(2))
    return lambda: DraftTree(**parts | dict(passes=(1, 2), by_head=(False, True)) | wrong)


DRAFTED = {
    **{f"{name}, {way}": Refusal(proposing(Returns, proposed, way), ("a Returns", word, "`DraftTree`", "0 to 63"))
       for name, (proposed, word) in PROPOSED.items() for way in ("alone", "batch", "sampled", "transformers")},
    "no trees": Refusal(proposing(ReturnsForAll, None, "batch"), ("`draft`", "a NoneType", "2 `DraftTree`s")),
    "too few trees": Refusal(proposing(ReturnsForAll, [], "batch"), ("`draft`", "0 of them", "2 `DraftTree`")),
    "a wrong tree": Refusal(proposing(ReturnsForAll, chains([5], [64]), "batch"), ("token 64", "0 to 63")),
    "a long tree": Refusal(proposing(ReturnsForAll, chains([5], range(2, 8)), "batch"), ("6 drafts", "at most 4")),
    "a long chain": Refusal(proposing(Returns, chain(*range(2, 7))), ("5 drafts", "at most 4")),
    "tokens in a list": Refusal(lambda: DraftTree.chain([5, 7]), ("type list", "`[nodes]`")),
    "a parent behind": Refusal(tree_of(parents=(1, ANCHOR)), ("(1, -1)", "before its node")),
    "a parent before all": Refusal(tree_of(parents=(ANCHOR, -2)), ("(-1, -2)", "before its node")),
    "its own parent": Refusal(tree_of(parents=(ANCHOR, 1)), ("(-1, 1)", "before its node")),
    **{f"{name} {number}": Refusal(tree_of(**{name: value}), (said, "one of each per node"))
       for name, number, value, said in [
           ("tokens", 3, torch.tensor([5, 6, 7]), "[3]"), ("tokens", 1, torch.tensor([5]), "[1]"),
           ("tokens", "row", torch.tensor([[5, 6]]), "[1, 2]"), ("tokens", "none", torch.tensor(5), "[]"),
           ("parents", 1, (ANCHOR,), "1 parents"), ("parents", 3, (ANCHOR, 0, 1), "3 parents"),
           ("q", 0, (), "0 distributions"), ("q", 3, (None, UNIFORM, None), "3 distributions"),
           ("confidence", 3, torch.ones(3), "[3]"), ("confidence", "column", torch.ones(2, 1), "[2, 1]"),
           ("passes", 1, (1,), "1 passes"), ("by_head", 1, (True,), "1 choices")]},
}  # fmt: skip


@pytest.mark.parametrize("refusal", DRAFTED.values(), ids=DRAFTED)
def test_a_wrong_draft_is_refused_in_one_line(refusal: Refusal):
    refusal.check()


# Of a text that goes on


def first_turn(family=V4, drafter=None, **options):
    target = bound(family)
    options = {"do_sample": False, "max_new_tokens": 5, "return_dict_in_generate": True, **options}
    return target.generate(prompt(9), assistant_model=drafter or drafter_of(family), **options)


def going_on(ids, masked=None, **options):
    """With so many ids more than the first turn left, or with these alone."""

    def call():
        out = first_turn()
        whole = ids if torch.is_tensor(ids) else torch.cat([out.sequences, prompt(10)], dim=1)[:, : 14 + ids]
        mask = {} if masked is None else {"attention_mask": ones(1, masked)}
        given = {CACHE: cache_of(out), "assistant_model": drafter_of(V4), "max_new_tokens": 5, **mask, **options}
        bound(V4).generate(whole, **given)

    return call


class Unbinds(BaseStreamer):
    """After some tokens."""

    tokens = 0

    def __init__(self, drafter, target):
        self.drafter, self.target = drafter, target

    def put(self, value):
        self.tokens += 1
        if self.tokens == 5:
            self.drafter.unbind(self.target)


def unbinding():
    target = bind(families.qwen3().eval())
    drafter = tiny_drafter(target)
    target.generate(prompt(9), assistant_model=drafter, max_new_tokens=30, streamer=Unbinds(drafter, target))


def trees_of_remote_code():
    target = bound(families.deepseek_v4_remote_code)
    text = target.generate(prompt(23), do_sample=False, max_new_tokens=30)
    target.generate(prompt(23), assistant_model=RandomTrees(target, [text[0]]), max_new_tokens=30)


def interrupt(*_):
    raise KeyboardInterrupt


def compressor_interrupted():
    """The last layer's, of a target that was not bound: all layers have the keys of all tokens."""
    target, ids = families.deepseek_v4().eval(), prompt(14)
    cache = DynamicCache(config=target.config)
    with torch.no_grad():
        target(ids[:, :8], **{CACHE: cache})
        target.model.layers[-1].self_attn.compressor.register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            target(ids[:, 8:13], **{CACHE: cache})
    bind(target).generate(ids, assistant_model=RandomChains(target, [ids[0]]), **{CACHE: cache})


def rewinding_interrupted():
    """Some running states have seen rejected drafts, which nothing undoes any more."""
    target = bound(families.qwen3_next)
    text = target.generate(prompt(9), do_sample=False, max_new_tokens=24)
    out = first_turn(families.qwen3_next)
    options = {CACHE: cache_of(out), "do_sample": False, "max_new_tokens": 19}
    for _ in range(2):
        with mock.patch.object(RewindableLinearLayer, "_replay", interrupt):
            try:
                target.generate(out.sequences, assistant_model=RandomChains(target, [text[0]]), **options)
            except KeyboardInterrupt:
                continue
            raise AssertionError("no drafts were rejected")


def run_elsewhere():
    """A loop of somebody's own that did not run the target."""
    target = bind(tiny_target())
    target.generation_config.max_length, target.generation_config.do_sample = 40, False
    cache = cache_of(target.generate(prompt(9), max_new_tokens=2, return_dict_in_generate=True))
    generator = target._get_candidate_generator(
        generation_config=target.generation_config, input_ids=prompt(9), assistant_model=tiny_drafter(target),
        logits_processor=None, model_kwargs={CACHE: cache},
    )  # fmt: skip
    generator.get_candidates(prompt(9))


LATER = {
    "a new turn alone": Refusal(going_on(prompt(3)), (CACHE, "whole sequence")),
    "no new token": Refusal(going_on(-1), (CACHE, "whole sequence")),
    "a mask of the new turn": Refusal(going_on(2, masked=2), ("attention_mask", "[1, 2]", "in the cache included")),
    "a mask of more": Refusal(going_on(prompt(2), masked=16), (CACHE, "whole sequence")),
    "unbound meanwhile": Refusal(unbinding, ("unbound", "bind it again")),
    "trees of remote code": Refusal(trees_of_remote_code, ("remote_v4", "a chain of drafts")),
    "an interrupted rewinding": Refusal(rewinding_interrupted, ("interrupted", "Start from a new cache")),
    "an interrupted compressor": Refusal(compressor_interrupted, ("interrupted", "Start from a new cache")),
    "a target that was not run": Refusal(run_elsewhere, ("0 to 8", "one forward a round")),
}  # fmt: skip


@pytest.mark.parametrize("refusal", LATER.values(), ids=LATER)
def test_what_cannot_go_on_is_refused_in_one_line(refusal: Refusal):
    refusal.check()
