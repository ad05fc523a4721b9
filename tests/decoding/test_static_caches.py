"""Rounds over static caches, eager and compiled: the text is that of plain decoding, and nothing compiles twice.

Compiled forwards are run by torch's backend `eager` here: it captures the same graphs and checks the same guards as
code that is generated, and takes a second instead of a minute.
"""

import copy
import pickle
import sys
import time
from functools import partial

import pytest
import torch
import torch._dynamo
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.version import Version
from torch.profiler import profile
from transformers import CompileConfig, DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer

from hf_hyperdflash import PromptLookupDrafter, bind, unbind
from hf_hyperdflash.auto.policies import ChainPolicy
from hf_hyperdflash.drafters.saved import SavedDrafter
from hf_hyperdflash.targets import compiled
from hf_hyperdflash.targets.caches.name import CACHE
from hf_hyperdflash.targets.caches.round_cache import RoundCache, move_columns
from hf_hyperdflash.targets.compiled import CompiledGraph
from hf_hyperdflash.trees.tree import DraftTree, TreeLayout

from ..conftest import mostly_nightly, prompt
from ..fuzz_trees import padded_on_the_left, trained_kinds
from ..helpers import families
from ..helpers.draft_trees import lists_of_parents
from ..helpers.tree_drafters import RandomTrees
from .test_requests import WAYS, write

GREEDILY = dict(do_sample=False, pad_token_id=0)
ENDS = "an end token at 5"  # of the requests


def target_and_own(family, seed=0):
    torch.manual_seed(seed)
    target = family().eval()
    own = copy.deepcopy(target)
    bind(target)
    return target, own


def compiling(**options):
    config = CompileConfig(mode=None, fullgraph=True, backend="eager", **options)
    config._compile_all_devices = True  # a CPU's, too
    return config


@pytest.fixture
def counted():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield torch._dynamo.utils.counters["stats"]
    torch._dynamo.reset()


# Eager


@pytest.mark.parametrize("asked", [{}, dict(num_return_sequences=3, prefill_chunk_size=5)])
def test_drawn_text_is_that_of_a_cache_that_grows(asked):
    """At one seed: rounds draw in the same order, from the same logits. Also of several texts of one prompt, for whose
    pieces transformers prepares a static cache of one text."""
    target, _ = target_and_own(families.gemma3)
    ids, texts = prompt(9), []
    for cache in ("dynamic", "static"):
        drafter = RandomTrees(target, [])
        torch.manual_seed(0)
        options = dict(do_sample=True, top_k=8, temperature=0.7, pad_token_id=0, assistant_model=drafter, **asked)
        texts.append(target.generate(ids.repeat(1, 3), max_new_tokens=40, cache_implementation=cache, **options))
    assert torch.equal(*texts)


def test_trees_that_have_no_room_are_cut():
    """The last ones of a caller's cache that is as long as the text; and those of a drafter that was asked for two
    drafts, one after the other, and makes trees of up to twelve nodes, of which a window has no columns for all."""
    target, own = target_and_own(families.mistral)
    whole = own.generate(prompt(13), max_new_tokens=50, **GREEDILY)
    for asked in ({CACHE: StaticCache(config=own.config, max_cache_len=62)}, dict(cache_implementation="static")):
        drafter = RandomTrees(target, [whole[0]], depth=6 if CACHE in asked else 2)
        options = dict(assistant_model=drafter, tree_budget=12 if CACHE in asked else None, **GREEDILY, **asked)
        assert torch.equal(target.generate(prompt(13), max_new_tokens=50, **options), whole)
        assert max(map(len, drafter.trees)) > 6
    assert drafter.last_stats.nodes <= 2 * drafter.last_stats.rounds


# The layers


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(lists_of_parents(8), st.integers(0, 100)), min_size=1, max_size=6),
    st.sampled_from([None, 3, 5, 8]),
    st.integers(1, 20),
    st.integers(1, 3),
    st.booleans(),
)
def test_columns_hold_what_a_list_would(rounds, window, prompt_length, size, is_static):
    """Round after round: each position sees, in the order of the text, the tokens that it is to see, and no others."""
    if is_static:
        layer = StaticLayer(200) if window is None else StaticSlidingWindowLayer(200, sliding_window=window)
    else:  # whose columns become more
        layer = DynamicLayer() if window is None else DynamicSlidingWindowLayer(window)
    lengths = [prompt_length - min(row, prompt_length - 1) for row in range(size)]
    numbers = torch.zeros(size, 1, prompt_length, 1)
    texts = []
    for row, length in enumerate(lengths):  # tokens are numbers, which keys and values hold
        numbers[row, 0, prompt_length - length :, 0] = torch.arange(1, length + 1) + 1000 * row
        texts.append(numbers[row, 0, prompt_length - length :, 0].tolist())
    layer.update(numbers, -numbers)
    stock = DynamicCache()
    stock.layers = [layer]
    cache, count = RoundCache(stock, [window], lengths, width=9 if is_static else 2), 100
    for parents, choice in rounds:
        layout = TreeLayout(DraftTree(torch.zeros(len(parents)), tuple(parents)))
        width = len(layout)
        new = torch.arange(count, count + size * width).view(size, 1, width, 1).float()
        count += size * width
        cache.begin(max(map(len, texts)), width)
        keys, values = cache.layers[0].update(new, -new)
        assert window or keys.shape[2] == max(map(len, texts)) + width
        visible = layout.ancestors.repeat(size, 1, 1)
        depths = layout.depths.repeat(size, 1)
        (mask,) = cache.masks(visible, depths, None).values()
        path = layout.paths[choice % width]
        for row, text in enumerate(texts):
            for position, above in enumerate(layout.paths):
                own = [*text, *(float(new[row, 0, node, 0]) for node in above)][-window if window else 0 :]
                seen = keys[row, 0, mask[row, 0, position], 0].tolist()
                assert sorted(seen) == sorted(own)
                assert sorted(values[row, 0, mask[row, 0, position], 0].tolist()) == sorted(-value for value in own)
            text += [float(new[row, 0, node, 0]) for node in path]
        places = torch.arange(width).repeat(size, 1)
        old = places.clone()
        old[:, : len(path)] = torch.tensor(path)
        move_columns(cache, old, places)
        cache.starts += len(path)
    if size == 1:
        cache.give_back()
        assert int(layer.get_seq_length()) == len(texts[0])
        held = texts[0][-layer.max_cache_len :] if is_static else texts[0][1 - window if window else 0 :]
        assert layer.keys[0, 0, : len(held), 0].tolist() == held
        assert is_static or layer.keys.shape[2] == len(held)


# Compiled


class Pair:
    """A target, its copy that is never bound, and a drafter whose drafts are noted call by call.

    Attributes:
        end: The end token; `None` for none.
        graphs: That the drafter's passes have compiled.
    """

    def __init__(self, family, kind):
        self.target, self.own = target_and_own(family)
        self.drafter, self.drafted, self.end = trained_kinds(self.target)[kind], [], None
        self.graphs = 0
        self.drafter.draft = partial(self.drafts, self.drafter.draft)

    def drafts(self, call, *given):
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        trees = call(*given)
        self.graphs += torch._dynamo.utils.counters["stats"]["unique_graphs"] - before
        self.note(trees)
        return trees

    def note(self, trees):
        self.drafted.append([(tree.tokens.tolist(), tree.parents, tree.passes) for tree in trees])

    def write(self, lengths, config=None, seed=0, **asked):
        """The texts and what was drafted for them, compiled by a `config`; greedy text is the target's own."""
        self.drafted.clear()
        torch.manual_seed(seed)
        ids, mask = padded_on_the_left([prompt(length, seed + row)[0] for row, length in enumerate(lengths)])
        asked = {"max_new_tokens": 20, **asked}
        plain = GREEDILY | dict(attention_mask=mask, eos_token_id=self.end, max_new_tokens=asked["max_new_tokens"])
        static = dict(cache_implementation="static", max_cache_len=60, assistant_model=self.drafter)
        compiles = {} if config is None else {"compile_config": config}
        text = self.target.generate(ids, **plain | asked | static | compiles)
        assert asked.get("do_sample") or torch.equal(text, self.own.generate(ids, **plain))
        return text.tolist(), list(self.drafted)


SAMPLED = {"do_sample": True, "top_k": 5, "temperature": 0.7}
ASKED = [{}, {"tree_budget": 7}, SAMPLED, SAMPLED | {"tree_budget": 7, "repetition_penalty": 1.2}]
# A target and a kind of drafter, the prompts' lengths, and whether passes cost little beside their launch, as on an
# accelerator.
COMPILED = [
    (families.qwen3, "state", (12, 7, 12), True), (families.gemma3, "eagle3", (12, 7, 12), True),
    (families.gemma3, "specblock", (12,), True), (families.qwen3, "medusa", (12, 7, 12), True),
    (families.gemma3, "none", (12,), False), (families.qwen3, "eagle3", (12,), False),
    (families.qwen3, "specblock", (12, 7, 12), False), (families.gemma3, "medusa", (12,), False),
    (families.muse_glimmer, "peagle", (12, 7, 12), True), (families.qwen3, "peagle", (12,), False),
]  # fmt: skip


# Takes seconds: the passes of a target and a drafter are traced.
@pytest.mark.parametrize(("family", "kind", "lengths", "on_accelerator"), mostly_nightly(COMPILED, kept=2))
def test_compiled_rounds_draft_and_write_what_eager_ones_do(
    family, kind, lengths, on_accelerator, counted, monkeypatch
):
    """Whatever is asked for, until the last of several texts has ended; then other prompts compile nothing."""
    monkeypatch.setattr(SavedDrafter, "_on_accelerator", on_accelerator)
    monkeypatch.setattr(compiled, "MIN_ATTENDED", 16)  # so that rounds attend to 32 and 64 columns
    pair = Pair(family, kind)
    first, *others = (row[max(lengths) :] for row in pair.write(lengths)[0])
    # The first text ends before the others; one alone is to have as many columns as those of later prompts.
    ends = (token for token in first[6:] if others and not any(token in row[:16] for row in (first[:6], *others)))
    pair.end = next(ends, 63)
    for asked in ASKED:
        assert pair.write(lengths, compiling(), **asked) == pair.write(lengths, **asked)
    graphs = counted["unique_graphs"]
    assert pair.graphs  # the drafter's passes, and not the target's alone
    with torch._dynamo.config.patch(error_on_recompile=True):
        for asked in ASKED:
            pair.write((14, 3, 9)[: len(lengths)], compiling(), seed=9, max_new_tokens=12, **asked)
    assert graphs == counted["unique_graphs"] and not torch._dynamo.utils.counters["graph_break"]


AUTO = [
    ("specblock", 1, True), ("none", 1, False), ("eagle3", 3, True), ("medusa", 1, True), ("state", 3, True),
    ("peagle", 3, True),
]  # fmt: skip


# Takes seconds: rounds are traced.
@pytest.mark.parametrize(("kind", "texts", "on_accelerator"), mostly_nightly(AUTO))
def test_auto_admits_of_a_graph_what_it_admits_eagerly(kind, texts, on_accelerator, counted, monkeypatch):
    """On an accelerator a graph drafts all that there may be, and only what was learned so far is new to it."""
    monkeypatch.setattr(SavedDrafter, "_on_accelerator", on_accelerator)
    monkeypatch.setattr(compiled, "_SLOW_CALLS", 0)  # or nothing is learned from the first rounds
    pair, seconds = Pair(families.qwen3, kind), []
    monkeypatch.setattr(time, "perf_counter", lambda: sum(seconds))
    note = pair.note
    # A round takes a second, and a fifth of one for each draft.
    pair.note = lambda trees: (seconds.append(1 + 0.2 * max(map(len, trees))), note(trees))
    found = []
    for config in (None, compiling()):
        unbind(pair.target)
        bind(pair.target)  # nothing is known of its rounds
        seconds.clear()
        found.append([
            pair.write((12, 7, 12)[:texts], config, seed, **{name: "auto"})
            for seed in range(2) for name in ("num_assistant_tokens", "tree_budget")
        ])  # fmt: skip
    assert found[0] == found[1]
    assert len({len(tree[0]) for _, drafts in found[0] for of_round in drafts for tree in of_round}) > 2
    assert counted["unique_graphs"] and not torch._dynamo.utils.counters["graph_break"]


# Takes seconds: a drafter's passes and the target's are traced.
@pytest.mark.parametrize("kind", mostly_nightly(["medusa", "none", "state", "eagle3", "specblock", "peagle"]))
def test_a_greedy_round_is_two_graphs_and_one_wait(kind, counted, monkeypatch):
    """The target's passes and the drafter's; between them what was written is read, and no tensor before."""
    pair, rounds = Pair(families.qwen3, kind), []
    without_guards = CompiledGraph.without_guards

    def note(call, what):
        def noted(*args):
            if rounds:
                rounds[-1].append(what or sys._getframe(1).f_code.co_name)
            return call(*args)

        return noted

    monkeypatch.setattr(CompiledGraph, "without_guards", lambda graph: note(without_guards(graph), "graph"))
    pair.write((9,), compiling())
    for name in ("tolist", "item", "__bool__", "__int__", "__float__", "__index__"):
        monkeypatch.setattr(torch.Tensor, name, note(getattr(torch.Tensor, name), ""))
    pair.note = lambda trees: rounds.append([])
    pair.write((9,), compiling())
    monkeypatch.undo()
    # The first calls look at guards; drafts on the host are looked at, which is no wait; a drafter may ask itself.
    rounds = [[each for each in of_round if each != "_wrong_with"] for of_round in rounds if of_round]
    assert not torch._dynamo.utils.counters["graph_break"] and len(rounds) > 4
    assert all(of_round == ["graph", "choices", "graph"] for of_round in rounds[2:-2]), rounds


@pytest.mark.nightly  # inductor compiles a target and a drafter, each twice
@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="weights are packed for MKL here")
def test_packed_weights_change_neither_text_nor_drafts(counted):
    """By inductor, which takes for a weight what it may: it must not take what changes from round to round, nor the
    cache of the first prompt for that of the next."""
    pair, config = Pair(families.qwen3, "state"), CompileConfig(mode=None, fullgraph=True)
    config._compile_all_devices = True
    eager = [pair.write((length,), seed=length) for length in (11, 20, 7, 11)]
    with torch._inductor.config.patch(freezing=True), profile() as trace:
        assert [pair.write((length,), config, seed=length) for length in (11, 20, 7, 11)] == eager
    assert any(event.key == "mkl::_mkl_linear" for event in trace.key_averages())


def test_a_compiled_batch_keeps_its_shape(counted):
    """Texts that have ended keep their rows."""
    way = WAYS["static batch"]
    _, expected, _ = write(way._replace(asked={**way.asked, "compile_config": compiling()}), families.qwen3, ENDS)
    assert len({each.sequences.shape for each in expected}) > 1
    assert 0 < counted["unique_graphs"] <= 2  # the forward, and what moves an accepted path


# Takes seconds: rounds are traced.
def test_compiled_turns_and_eager_ones(counted):
    target, own = target_and_own(families.qwen3)
    drafter, cache, text = (
        trained_kinds(target)["state"],
        StaticCache(config=own.config, max_cache_len=150),
        prompt(11),
    )
    for turn in range(4):
        expected = own.generate(text, max_new_tokens=12, **GREEDILY)
        options = dict(compile_config=compiling()) if turn % 2 == 0 else {}
        written = target.generate(
            text, max_new_tokens=12, assistant_model=drafter, **GREEDILY, **options, **{CACHE: cache}
        )
        assert torch.equal(written, expected)
        text = torch.cat([expected, prompt(4, seed=turn)], dim=1)
    assert counted["unique_graphs"] == 2


@pytest.mark.nightly  # every number of drafts is compiled
def test_auto_learns_nothing_from_rounds_that_compile(counted, monkeypatch):
    """Nor from the next ones of these shapes, in which a GPU records what it replays later."""
    monkeypatch.setattr(compiled, "_SLOW_CALLS", 1)
    target, own = target_and_own(families.qwen3)
    drafter, rounds, graphs = trained_kinds(target)["state"], [], [0]
    options = dict(cache_implementation="static", max_cache_len=90, compile_config=compiling(), **GREEDILY)
    end = ChainPolicy.end

    def record(policy, outcomes, seconds):
        rounds.append((seconds is None, counted["unique_graphs"] > graphs[-1]))
        graphs.append(counted["unique_graphs"])
        end(policy, outcomes, seconds)

    monkeypatch.setattr(ChainPolicy, "end", record)
    for length in (9, 12):
        ids = prompt(length, seed=length)
        text = target.generate(ids, assistant_model=drafter, num_assistant_tokens="auto", max_new_tokens=40, **options)
        assert torch.equal(text, own.generate(ids, max_new_tokens=40, **GREEDILY))
    assert all(told == compiled for told, compiled in rounds) and 2 < sum(told for told, _ in rounds) < len(rounds) / 2
    rounds.clear()
    monkeypatch.setattr(compiled, "_SLOW_CALLS", 10**6)
    target.generate(prompt(9), assistant_model=drafter, num_assistant_tokens="auto", max_new_tokens=20, **options)
    assert rounds and all(told for told, _ in rounds)


def with_other_activation(target):
    target.model.layers[1].mlp.act_fn = torch.nn.ReLU()


def with_eager_attention(target):
    target.set_attn_implementation("eager")


def with_other_weights(target):
    target.model.layers[2].mlp = copy.deepcopy(target.model.layers[2].mlp)
    target.model.layers[2].mlp.down_proj.weight.data.mul_(-1)


def with_adapter(target):
    layer = target.model.layers[1].mlp
    layer.up_proj = torch.nn.Sequential(layer.up_proj, torch.nn.Tanh())  # as LoRA wraps it


# Takes seconds: rounds are traced.
@pytest.mark.parametrize(
    "change", mostly_nightly([with_other_weights, with_other_activation, with_eager_attention, with_adapter])
)
def test_what_changes_between_requests_is_seen(change, counted):
    """Although a request's graphs run without guards after their first call."""
    pair, texts = Pair(families.qwen3, "state"), []
    for _ in range(2):
        texts.append(pair.write((11,), compiling())[0])
        change(pair.target), change(pair.own)
    assert texts[0] != texts[1] or change is with_eager_attention


@pytest.mark.skipif(
    Version(torch.__version__) < Version("2.9"), reason="torch 2.8 makes no whole graph of a bound target's own calls"
)
@pytest.mark.parametrize("is_compiled", mostly_nightly([True, False]))
@pytest.mark.parametrize("asked", [{}, dict(max_cache_len=400), dict(prefill_chunk_size=4)])
def test_a_call_with_a_drafter_leaves_the_target_as_it_found_it(asked, is_compiled, counted):
    """What was compiled for plain calls over a static cache fits afterwards, too."""
    target = bind(families.qwen3(layers=2).eval())
    options = dict(do_sample=False, max_new_tokens=6, cache_implementation="static", compile_config=compiling())
    text = target.generate(prompt(9), **options)
    graphs, attributes = counted["unique_graphs"], dict(vars(target))
    assert graphs == 1
    asked = {**asked, "disable_compile": not is_compiled, "assistant_model": PromptLookupDrafter(target)}
    assert torch.equal(target.generate(prompt(9), **options, **asked), text)
    assert vars(target).keys() == attributes.keys()
    assert all(value is attributes[name] for name, value in vars(target).items())
    assert counted["unique_graphs"] == graphs + is_compiled  # of the rounds
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert torch.equal(target.generate(prompt(9), **options), text)
    assert counted["unique_graphs"] == graphs + is_compiled


@pytest.mark.nightly  # three copies are compiled
def test_a_target_with_compiled_rounds_can_be_copied_and_pickled(counted):
    target, own = target_and_own(families.qwen3)
    options = dict(max_new_tokens=9, cache_implementation="static", compile_config=compiling(), **GREEDILY)
    expected = own.generate(prompt(11), max_new_tokens=9, **GREEDILY)
    for each in (target, copy.deepcopy(target), pickle.loads(pickle.dumps(target))):
        drafter = trained_kinds(each)["state"]
        assert torch.equal(each.generate(prompt(11), assistant_model=drafter, **options), expected)


# Takes seconds: rounds are traced.
def test_who_decides_whether_rounds_compile(counted):
    """As in transformers' own loop: not on a CPU, unless it is asked for; not with `disable_compile`; and not where
    the caller wants to see what is inside a forward."""
    target, own = target_and_own(families.qwen3)
    ids, drafter = prompt(9), trained_kinds(target)["state"]
    expected = own.generate(ids, max_new_tokens=12, **GREEDILY)
    options = dict(assistant_model=drafter, max_new_tokens=12, **GREEDILY, return_dict_in_generate=True)
    asked = dict(cache_implementation="static", compile_config=compiling())
    for way in (
        dict(cache_implementation="static"),
        dict(compile_config=compiling()),
        dict(**asked, disable_compile=True),
        dict(**asked, output_hidden_states=True),
    ):
        assert torch.equal(target.generate(ids, **options, **way).sequences, expected)
        assert not counted["unique_graphs"]
    assert torch.equal(target.generate(ids, **options, **asked).sequences, expected)
    assert counted["unique_graphs"]
