"""Rounds over static caches, eager and compiled: the text is that of plain decoding, and nothing compiles twice.

Compiled forwards are run by torch's backend `eager` here: it captures the same graphs and checks the same guards as
code that is generated, and takes a second instead of a minute.
"""

import copy
import pickle
import sys

import pytest
import torch
import torch._dynamo
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.version import Version
from torch.profiler import profile
from transformers import CompileConfig, DynamicCache, LogitsProcessorList, StaticCache
from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer

from hf_hyperdflash import HyperDFlashDrafter, MedusaConfig, MedusaDrafter, PromptLookupDrafter, bind
from hf_hyperdflash.auto.acceptance import AcceptanceLine
from hf_hyperdflash.auto.policies import ChainPolicy
from hf_hyperdflash.drafters.parts.block_attention import AttentionSpan
from hf_hyperdflash.drafters.parts.entry_context import EntryBatch
from hf_hyperdflash.drafters.parts.fixed_context import FixedLayers
from hf_hyperdflash.drafters.sampling import DraftRequest, DraftSampler
from hf_hyperdflash.drafters.saved import SavedDrafter
from hf_hyperdflash.targets.caches import slot_forward
from hf_hyperdflash.targets.caches.name import CACHE
from hf_hyperdflash.targets.caches.slot_forward import CompiledForwards, CompiledGraph, CompiledGraphs
from hf_hyperdflash.targets.caches.static import SlotCache
from hf_hyperdflash.targets.registry import target_of
from hf_hyperdflash.trees.growth import Admission
from hf_hyperdflash.trees.layout import TreeLayout
from hf_hyperdflash.trees.tree import DraftTree

from ..conftest import mostly_nightly, prompt
from ..helpers import families
from ..helpers.draft_trees import lists_of_parents
from ..helpers.tree_drafters import RandomTrees
from ..helpers.unrolled import unrolled
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
    drafts, one after the other, and makes trees of up to twelve nodes, of which a window has no slots for all."""
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
)
def test_slots_hold_what_a_list_would(rounds, window, prompt_length, size):
    """Round after round: each position sees, in the order of the text, the tokens that it is to see, and no others."""
    layer = StaticLayer(200) if window is None else StaticSlidingWindowLayer(200, sliding_window=window)
    lengths = [prompt_length - min(row, prompt_length - 1) for row in range(size)]
    numbers = torch.zeros(size, 1, prompt_length, 1)
    texts = []
    for row, length in enumerate(lengths):  # tokens are numbers, which keys and values hold
        numbers[row, 0, prompt_length - length :, 0] = torch.arange(1, length + 1) + 1000 * row
        texts.append(numbers[row, 0, prompt_length - length :, 0].tolist())
    layer.update(numbers, -numbers)
    stock = DynamicCache()
    stock.layers = [layer]
    cache, count = SlotCache(stock, [window], lengths, width=9), 100
    for parents, choice in rounds:
        layout = TreeLayout(DraftTree(torch.zeros(len(parents)), tuple(parents)))
        width = len(layout)
        new = torch.arange(count, count + size * width).view(size, 1, width, 1).float()
        count += size * width
        cache.look_at(max(map(len, texts)) + width)
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
        cache.layers[0].move(old, places)
        cache.starts += len(path)
    if size == 1:
        cache.give_back()
        assert int(layer.get_seq_length()) == len(texts[0])
        held = texts[0][-layer.max_cache_len :]
        assert layer.keys[0, 0, : len(held), 0].tolist() == held


@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 12), st.integers(0, 4), st.integers(1, 5), st.booleans(), st.booleans(),
    st.sampled_from([None, 1, 3, 6]), st.sampled_from([21, 30, 99]),
)  # fmt: skip
def test_a_fixed_context_shows_what_a_growing_one_shows(old, new, block, from_slot, causal, window, view):
    span, most_new = AttentionSpan(window, from_slot and window is not None, causal), 5
    view = min(view, 40)
    buffers = [torch.zeros(1, 1, 40, 1), torch.zeros(1, 1, 40, 1)]
    for buffer in buffers:
        buffer[0, 0, :old, 0] = torch.arange(1, old + 1)
    written = torch.zeros(1, 1, most_new + block, 1)
    written[0, 0, :new, 0], written[0, 0, new:most_new, 0] = torch.arange(old + 1, old + new + 1), -99
    written[0, 0, most_new:, 0] = torch.arange(100, 100 + block)
    context = FixedLayers([buffers], torch.tensor([[old, new]]), most_new, view)
    keys, _ = context.layer(0, most_new)(written, written)
    mask = context.masks(["kind"], [span], block)["kind"][0, 0]
    text = [*range(1, old + new + 1), *range(100, 100 + block)]
    expected = span.mask(block, old + new, torch.device("cpu"))
    expected = torch.ones(block, len(text), dtype=torch.bool) if expected is None else expected[0, 0]
    for slot in range(block):
        assert keys[0, 0, mask[slot], 0].tolist() == [key for key, sees in zip(text, expected[slot].tolist()) if sees]


# Compiled


def drafter_of(target, **fields):
    torch.manual_seed(3)
    drafter = HyperDFlashDrafter.from_target(
        target, num_draft_tokens=4, target_layer_ids=[0, 2], mask_token_id=63, sequential_head="state", **fields
    )
    with torch.no_grad():
        drafter.state_head.down_proj.weight.normal_(std=0.3)
    return drafter


def drafter_of_kind(kind, target, **fields):
    """One of [`drafter_of`], of [`UNROLLED`], or Medusa heads."""
    if kind == "medusa":
        torch.manual_seed(3)
        drafter = MedusaDrafter(MedusaConfig(medusa_num_heads=3, hidden_size=64, vocab_size=64)).eval()
        for parameter in drafter.parameters():
            parameter.data.normal_(std=0.4)
        return drafter
    return unrolled(kind, target, **UNROLLED[kind]) if kind else drafter_of(target, **fields)


UNROLLED = {"eagle3": {"max_blocks": 5, "draft_vocab_size": 40}, "specblock": {"block_size": 3, "max_blocks": 2}}


class Pair:
    """Two contexts of one text, drafted from by turns: one that grows, and one that may be fixed."""

    def __init__(self, kind):
        self.target = families.qwen3().eval()
        self.seen, self.drafter = target_of(self.target), drafter_of_kind(kind, self.target)
        self.compiled = CompiledForwards(dict(fullgraph=True, backend="eager"), CompiledGraphs())
        self.contexts = [self.drafter.new_context() for _ in range(2)]
        self.text, self.state = prompt(100), torch.randn(1, 100, len(self.drafter.target_layer_ids), 64)
        self.positions, self.done = torch.arange(100)[None], 0

    def fix(self, room, drafts):
        (self.contexts[1],) = self.drafter.fixed_contexts(
            self.seen, self.contexts[1:], room, 1 + drafts, 7, self.compiled
        )

    def extend(self, count):
        new, after = slice(self.done, self.done + count), slice(self.done + 1, self.done + count + 1)
        for context in self.contexts:
            inputs = self.state[:, new], self.positions[:, new], self.text[:, after]
            self.drafter.extend(self.seen, context, *inputs)
        self.done += count

    def drafts(self, count, budget=None, chains=(None, None), nodes=None):
        """Return how many there are, after a look that they are the same."""
        samplers = [DraftSampler(LogitsProcessorList(), False, budget, each, nodes) for each in chains]
        inputs = self.text[:, : self.done + 1], self.positions[:, : self.done + 1]
        eager, own = (
            self.drafter.propose(self.seen, each, *inputs, count, sampler)
            for each, sampler in zip(self.contexts, samplers)
        )
        assert own.tokens.tolist() == eager.tokens.tolist() and own.parents == eager.parents
        assert own.passes == eager.passes
        if nodes is not None:
            torch.testing.assert_close(own.confidence, eager.confidence)
        return len(own)


@pytest.mark.parametrize("kind", UNROLLED)
@pytest.mark.parametrize("is_launch_bound", mostly_nightly([False, True]), ids=["CPU", "accelerator"])
@torch.no_grad()
def test_a_compiled_chain_or_tree_is_the_eager_one(is_launch_bound, kind, counted, monkeypatch):
    """Whatever number of tokens a round adds, at once and in turns with what is drafted eagerly."""
    monkeypatch.setattr(SavedDrafter, "_is_launch_bound", is_launch_bound)
    pair = Pair(kind)
    pair.extend(20)
    pair.fix(70, drafts=5)
    pair.drafts(5)  # eagerly: all entries are there
    for _ in range(3):
        for count in (1, 3, 6, 2):
            pair.extend(count)
            asked = 4 if count == 3 else 5
            assert pair.drafts(asked) == asked
            pair.extend(1)
            assert pair.drafts(asked, budget=7) == 7
            # Of blocks, entries and later passes are graphs of their own, these of one of two widths.
            most = 1 if not is_launch_bound else 2 if kind == "eagle3" else 4
            assert counted["unique_graphs"] <= most
        pair.drafts(5, budget=7)  # eagerly
    pair.extend(2), pair.extend(3)  # the first two were not drafted for
    pair.drafts(5)
    assert not torch._dynamo.utils.counters["graph_break"]


class Least:
    """Admits drafts as long as they are probable enough, and the text has room for them."""

    def __init__(self, least, most):
        self.least, self.most, self.signals = least, most, []

    def is_open(self):
        return len(self.signals) < self.most

    def admits(self, signal):
        self.signals.append(signal)
        return signal >= self.least


# Takes seconds: rounds are traced.
@pytest.mark.parametrize(
    ("kind", "is_launch_bound"),
    mostly_nightly([("", False), ("medusa", True), ("specblock", True), ("eagle3", True), ("", True)], kept=3),
)
@torch.no_grad()
def test_what_is_admitted_of_a_graph_is_what_is_admitted_eagerly(kind, is_launch_bound, counted, monkeypatch):
    """On an accelerator a graph drafts all that there may be, and only what was learned so far is new to it."""
    monkeypatch.setattr(SavedDrafter, "_is_launch_bound", is_launch_bound)
    pair, line, numbers = Pair(kind), AcceptanceLine(), set()
    most = pair.drafter.max_draft_tokens
    pair.extend(20)
    pair.fix(100, drafts=most)
    pair.drafts(most)
    graphs, signals = [], [0.0]
    for turn in range(12):
        pair.extend(1 + turn % 3)
        # Of the last round's signals the lowest one, the next, and so on.
        seen = [Least(sorted(signals)[turn % len(signals)], most - turn % 2) for _ in range(2)]
        numbers.add(pair.drafts(most, chains=seen))
        torch.testing.assert_close(*(torch.tensor(each.signals) for each in seen))
        signals = seen[0].signals
        line.observe(0.1 + 0.05 * turn, turn % 2 > 0)
        pair.extend(1)
        numbers.add(pair.drafts(most, 7, nodes=Admission(line, 0.6 * 0.75**turn)))
        graphs.append(counted["unique_graphs"])
    assert len(numbers) > 4 and not torch._dynamo.utils.counters["graph_break"]
    # Whatever was learned since; blocks of a host's trees run in passes of one of two widths.
    assert graphs[-1] <= 4 if kind == "specblock" else graphs[-1] == graphs[1]


@pytest.mark.parametrize("budget", [None, 7])
@pytest.mark.parametrize("kind", UNROLLED)
@torch.no_grad()
def test_a_text_that_is_not_asked_keeps_its_entries(kind, budget, counted, monkeypatch):
    """A pass is of all texts of a batch, and writes something for each."""
    monkeypatch.setattr(SavedDrafter, "_is_launch_bound", True)
    target = families.qwen3().eval()
    seen, drafter, lengths = target_of(target), unrolled(kind, target, **UNROLLED[kind]), (15, 31)
    residual, sampler = torch.randn(1, 40, drafter.config.num_streams, 64), DraftSampler([], False, budget)
    positions, contexts = torch.arange(40)[None], [drafter.new_context() for _ in range(4)]

    def extend(start, stop, context, row):
        new = slice(start, stop)
        drafter.extend(seen, context, residual[:, new], positions[:, new], prompt(41, seed=row)[:, 1:][:, new])

    for row, context in enumerate(contexts):
        extend(0, lengths[row % 2], context, row % 2)
    compiled = CompiledForwards(dict(fullgraph=True, backend="eager"), CompiledGraphs())
    contexts[:2] = drafter.fixed_contexts(seen, contexts[:2], 60, 6, 7, compiled)
    for row, context in enumerate(contexts):
        extend(lengths[row % 2], lengths[row % 2] + 2, context, row % 2)

    def drafts(context, row):
        end = lengths[row] + 3
        request = DraftRequest(context, prompt(41, seed=row)[:, :end], positions[:, :end], 5, sampler)
        (tree,) = drafter.propose_batch(seen, [request])
        return tree.tokens.tolist(), tree.parents

    for row in range(2):  # the shorter one first
        assert drafts(contexts[row], row) == drafts(contexts[2 + row], row)
    assert counted["unique_graphs"]


@pytest.mark.parametrize("kind", UNROLLED)
@torch.no_grad()
def test_what_has_no_place_in_a_graph_is_drafted_eagerly(kind, counted):
    """More new tokens than a round has, as of a short prompt; a text beyond what there is room for."""
    pair = Pair(kind)
    pair.extend(5)
    pair.fix(20, drafts=2)
    assert pair.drafts(2) == 2 and not counted["unique_graphs"]
    for _ in range(20):
        pair.extend(3)
        assert pair.drafts(2) == 2
    assert counted["unique_graphs"] == 1 and pair.done > 60


# Takes seconds: every graph that a chat needs is traced.
@pytest.mark.parametrize(
    ("family", "kind"),
    mostly_nightly(
        [(families.gemma3, "specblock"), (families.qwen3, ""), (families.gemma3, ""), (families.qwen3, "eagle3")]
    ),
)
def test_nothing_compiles_twice(family, kind, counted, monkeypatch):
    """After one text of each way to draft, others of any length that fits, turns and temperatures compile nothing."""
    monkeypatch.setattr(SavedDrafter, "_is_launch_bound", True)
    target, own = target_and_own(family)
    drafter = drafter_of_kind(kind, target)
    options = dict(assistant_model=drafter, pad_token_id=0, cache_implementation="static", compile_config=compiling())
    options["max_cache_len"] = 150

    def write(length, **asked):
        ids = prompt(length, seed=length)
        text = target.generate(ids, **options, **{"max_new_tokens": 24, "do_sample": False, **asked})
        if not asked.get("do_sample"):
            expected = own.generate(ids, max_new_tokens=asked.get("max_new_tokens", 24), **GREEDILY)
            assert torch.equal(text, expected)

    ways = [{}, dict(tree_budget=6), dict(do_sample=True, temperature=0.8), dict(do_sample=True, tree_budget=6)]
    for way in ways:
        write(9, **way)
    compiled = counted["unique_graphs"]
    assert 0 < compiled <= (8 if kind else 6) and not torch._dynamo.utils.counters["graph_break"]
    with torch._dynamo.config.patch(error_on_recompile=True):
        for length, way in zip((3, 9, 21, 40, 2, 33, 64, 17), [*ways, *ways]):
            write(length, **way)
            write(length, **{**way, "max_new_tokens": 7})
    assert counted["unique_graphs"] == compiled


# Takes seconds: a drafter's passes and the target's are traced.
@pytest.mark.parametrize("kind", mostly_nightly(["medusa", "", *UNROLLED]))
def test_a_greedy_round_is_two_graphs_and_one_wait(kind, counted, monkeypatch):
    """The drafter's passes and the target's; then what was written is read, and no tensor before."""
    target, own = target_and_own(families.qwen3)
    drafter, ids, rounds = drafter_of_kind(kind, target), prompt(9), []
    options = dict(max_new_tokens=24, cache_implementation="static", max_cache_len=60, compile_config=compiling())
    without_guards, propose = CompiledGraph.without_guards, drafter.propose

    def note(call, what):
        def noted(*args):
            if rounds:
                rounds[-1].append(what or sys._getframe(1).f_code.co_name)
            return call(*args)

        return noted

    def begin(*args):
        rounds.append([])
        return propose(*args)

    monkeypatch.setattr(CompiledGraph, "without_guards", lambda graph: note(without_guards(graph), "graph"))
    target.generate(ids, assistant_model=drafter, **options, **GREEDILY)
    for name in ("tolist", "item", "__bool__", "__int__", "__float__", "__index__"):
        monkeypatch.setattr(torch.Tensor, name, note(getattr(torch.Tensor, name), ""))
    drafter.propose = begin
    text = target.generate(ids, assistant_model=drafter, **options, **GREEDILY)
    monkeypatch.undo()
    assert torch.equal(text, own.generate(ids, max_new_tokens=24, **GREEDILY))
    assert not torch._dynamo.utils.counters["graph_break"] and len(rounds) > 4
    # The first calls look at guards; drafts on the host are looked at, which is no wait.
    for of_round in rounds[2:-1]:
        assert [each for each in of_round if each != "_wrong_with"] == ["graph", "graph", "choices"], rounds


@pytest.mark.nightly  # inductor compiles a target and a drafter, each twice
@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="weights are packed for MKL here")
def test_packed_weights_change_neither_text_nor_drafts(counted, monkeypatch):
    """By inductor, which takes for a weight what it may: it must not take what changes from round to round, nor the
    cache of the first prompt for that of the next."""
    target, own = target_and_own(families.qwen3)
    drafter, drafts = drafter_of(target), []
    propose = drafter.propose
    monkeypatch.setattr(drafter, "propose", lambda *args: drafts.append(propose(*args)) or drafts[-1])
    config = CompileConfig(mode=None, fullgraph=True)
    config._compile_all_devices = True
    options = dict(max_new_tokens=12, assistant_model=drafter, cache_implementation="static", **GREEDILY)

    def write(ids, **asked):
        drafts.clear()
        text = target.generate(ids, max_cache_len=60, **asked, **options)
        assert torch.equal(text, own.generate(ids, max_new_tokens=12, **GREEDILY))
        return [tree.tokens.tolist() for tree in drafts]

    prompts = [prompt(length, seed=length) for length in (11, 20, 7, 11)]
    eager = [write(ids) for ids in prompts]
    with torch._inductor.config.patch(freezing=True), profile() as trace:
        assert [write(ids, compile_config=config) for ids in prompts] == eager
    assert any(event.key == "mkl::_mkl_linear" for event in trace.key_averages())


def test_a_compiled_batch_keeps_its_shape(counted):
    """Texts that have ended keep their rows."""
    way = WAYS["static batch"]
    _, expected, _ = write(way._replace(asked={**way.asked, "compile_config": compiling()}), families.qwen3, ENDS)
    assert len({each.sequences.shape for each in expected}) > 1
    assert 0 < counted["unique_graphs"] <= 2  # the forward, and what moves an accepted path


# Takes seconds: the passes of a batch are traced.
@pytest.mark.parametrize(
    ("family", "kind", "do_sample", "budget"),
    mostly_nightly([
        (families.qwen3, "", True, None), (families.gemma3, "eagle3", False, 7), (families.gemma3, "", False, None),
        (families.qwen3, "", False, 7), (families.qwen3, "eagle3", False, None),
        (families.qwen3, "specblock", False, None), (families.qwen3, "specblock", False, 7),
        (families.gemma3, "specblock", True, None), (families.qwen3, "eagle3", True, 7),
        (families.qwen3, "medusa", False, None), (families.qwen3, "medusa", False, 7),
        (families.qwen3, "medusa", True, 7),
    ], kept=2),
)  # fmt: skip
def test_a_batch_is_drafted_for_in_one_compiled_pass(family, kind, do_sample, budget, counted, monkeypatch):
    """The drafts of every round are those of an eager one, until the last text has ended."""
    monkeypatch.setattr(SavedDrafter, "_is_launch_bound", True)
    target, own = target_and_own(family)
    layers = dict(sliding_window=6, layer_types=["full_attention", "sliding_attention"], num_hidden_layers=2)
    drafter, drafted = drafter_of_kind(kind, target, **layers), []
    ids, mask = torch.cat([prompt(12, seed=seed) for seed in range(3)]), torch.ones(3, 12, dtype=torch.long)
    mask[0, :5] = 0
    texts = own.generate(ids, attention_mask=mask, max_new_tokens=40, **GREEDILY)[:, 12:].tolist()
    lengths = [[text.index(end) if end in text else 40 for text in texts] for end in range(64)]
    # They end one after the other, the first one before the others.
    end = max(range(64), key=lambda token: (0 < lengths[token][0] < min(lengths[token][1:]), len({*lengths[token]})))
    alone, together = type(drafter).propose, type(drafter).propose_batch

    def propose(self, *inputs):
        tree = alone(self, *inputs)
        drafted.append([(tree.tokens.tolist(), tree.parents)])
        return tree

    def propose_batch(self, *inputs):
        trees = together(self, *inputs)
        drafted.append([(tree.tokens.tolist(), tree.parents) for tree in trees])
        return trees

    monkeypatch.setattr(type(drafter), "propose", propose)
    monkeypatch.setattr(type(drafter), "propose_batch", propose_batch)
    options = dict(assistant_model=drafter, cache_implementation="static", attention_mask=mask, eos_token_id=end)
    options["tree_budget"], eagerly = budget, []
    options |= dict(do_sample=do_sample, top_k=5, temperature=0.7) if do_sample else dict(do_sample=False)
    torch.manual_seed(0)
    expected = target.generate(ids, max_new_tokens=40, pad_token_id=0, **options)
    eager, drafted[:] = [*drafted], []
    monkeypatch.setattr("hf_hyperdflash.drafters.blocks.drafter.JointContext", None)
    make_room = EntryBatch.make_room

    def run_eagerly(batch, *inputs):
        if len(batch.contexts) > 1:  # else of a text that does not ask for drafts, as it is at its end
            eagerly.append(len(drafted))
        make_room(batch, *inputs)

    monkeypatch.setattr(EntryBatch, "make_room", run_eagerly)
    monkeypatch.setattr(slot_forward, "LEAST_VIEW", 16)  # so that rounds of 16, 32 and 64 slots, and passes of two
    torch.manual_seed(0)
    written = target.generate(ids, max_new_tokens=40, pad_token_id=0, **options, compile_config=compiling())
    assert torch.equal(written, expected) and drafted == eager
    assert set(eagerly) <= {0}  # no pass after the first round, for which the prompts' entries are there
    assert len({len(each) for each in drafted}) > 1 or do_sample
    graphs = counted["unique_graphs"]  # of two numbers of slots each
    for seed in (0, 9):
        others = torch.cat([prompt(12, seed=seed + row) for row in range(3)])
        target.generate(others, max_new_tokens=30, pad_token_id=0, **options, compile_config=compiling())
    assert graphs == counted["unique_graphs"] <= 10
    assert not torch._dynamo.utils.counters["graph_break"]


# Takes seconds: rounds are traced.
def test_compiled_turns_and_eager_ones(counted):
    target, own = target_and_own(families.qwen3)
    drafter, cache, text = drafter_of(target), StaticCache(config=own.config, max_cache_len=150), prompt(11)
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
    monkeypatch.setattr(slot_forward, "_SLOW_CALLS", 1)
    target, own = target_and_own(families.qwen3)
    drafter, rounds, graphs = drafter_of(target), [], [0]
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
    monkeypatch.setattr(slot_forward, "_SLOW_CALLS", 10**6)
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
    target, own = target_and_own(families.qwen3)
    options = dict(cache_implementation="static", max_cache_len=60, max_new_tokens=20, **GREEDILY)
    ids, texts, drafter = prompt(11), [], drafter_of(target)
    for _ in range(2):
        text = target.generate(ids, assistant_model=drafter, compile_config=compiling(), **options)
        assert torch.equal(text, own.generate(ids, **options))
        texts.append(text.tolist())
        for each in (target, own):
            change(each)
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
        drafter = drafter_of(each)
        assert torch.equal(each.generate(prompt(11), assistant_model=drafter, **options), expected)


# Takes seconds: rounds are traced.
def test_who_decides_whether_rounds_compile(counted):
    """As in transformers' own loop: not on a CPU, unless it is asked for; not with `disable_compile`; and not where
    the caller wants to see what is inside a forward."""
    target, own = target_and_own(families.qwen3)
    ids, drafter = prompt(9), drafter_of(target)
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
