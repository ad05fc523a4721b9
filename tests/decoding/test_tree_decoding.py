"""Generation with draft trees: the target's own text, and all that `generate` offers with chains."""

from __future__ import annotations

import threading
from collections import Counter

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    TopKLogitsWarper,
)
from transformers.generation.streamers import BaseStreamer

from hf_hyperdflash import DeepseekV4MTPDrafter, PromptLookupDrafter, bind
from hf_hyperdflash.decoding.bind import capture_residual
from hf_hyperdflash.decoding.request import MOST_NODES
from hf_hyperdflash.drafters.parts.heads import HEADS
from hf_hyperdflash.drafters.sampling import DraftSampler
from hf_hyperdflash.targets.caches.linear import RewindableLinearLayer
from hf_hyperdflash.targets.caches.name import CACHE, cache_of
from hf_hyperdflash.targets.registry import target_of
from hf_hyperdflash.trees.tree import DraftTree

from ..conftest import CSA, HCA, MIXES, mostly_nightly, perfect, prompt, tiny_drafter, tiny_target
from ..helpers import families
from ..helpers.drawn_tokens import assert_drawn_from
from ..helpers.greedy_options import GREEDY_OPTIONS
from ..helpers.headed_drafters import headed
from ..helpers.tree_drafters import RandomChains, RandomTrees, is_wide


@pytest.fixture(params=[families.deepseek_v4, families.gemma3, families.qwen3_next], ids=lambda made: made.__name__)
def target(request):
    """One target for each way of verifying a tree."""
    torch.manual_seed(0)
    return bind(request.param().eval())


@pytest.mark.parametrize("family", families.FAMILIES, ids=lambda family: family.__name__)
def test_every_family_writes_its_own_text_with_trees(family, caplog):
    torch.manual_seed(0)
    target = family().eval()
    ids = prompt(23)
    expected = target.generate(ids, do_sample=False, max_new_tokens=30)
    drafter = perfect(target, expected[0])
    drafter.bind(target)
    options = dict(do_sample=False, max_new_tokens=30, assistant_model=drafter)
    assert torch.equal(target.generate(ids, tree_budget=12, **options), expected)
    if target.config.model_type == "remote_v4":
        assert "draft trees of a remote_v4 target are not verified: drafting chains" in caplog.text
        with pytest.raises(ValueError, match="whose trees are not verified: expected a chain of drafts"):
            target.generate(ids, assistant_model=RandomTrees(target, [expected[0]]), max_new_tokens=30)
        return
    assert drafter.last_stats.nodes > 6 * drafter.last_stats.rounds and "chains" not in caplog.text
    drafter = RandomTrees(target, [expected[0]])
    assert torch.equal(target.generate(ids, assistant_model=drafter, do_sample=False, max_new_tokens=30), expected)
    assert sum(map(is_wide, drafter.trees)) > 3 and drafter.last_stats.tau > 1.5


def test_a_family_that_no_test_covers_drafts_chains():
    target = families.qwen3()
    target.config.model_type = "qwen9"
    assert target_of(target).tree_verification == "chain"
    target = families.qwen3()
    target.config._attn_implementation = "flash_attention_2"  # which takes no mask
    assert target_of(target).tree_verification == "fork"


@pytest.mark.parametrize("length", mostly_nightly([31, 130, 8, 1], kept=2))
@pytest.mark.parametrize("mix", range(len(MIXES)))
def test_v4_of_any_mix_writes_its_own_text_with_trees(mix, length):
    window, rates = [4, 8, 16, 7, 5][mix], [{CSA: 4, HCA: 8}, {CSA: 2, HCA: 4}, {CSA: 3, HCA: 6}][mix % 3]
    target = tiny_target(mix, layer_types=MIXES[mix], sliding_window=window, compress_rates=rates, hidden_size=64)
    ids = prompt(length, seed=mix)
    expected = target.generate(ids, do_sample=False, max_new_tokens=30)
    drafter = RandomTrees(bind(target), [expected[0]], seed=length, most=16)
    assert torch.equal(target.generate(ids, do_sample=False, max_new_tokens=30, assistant_model=drafter), expected)


@pytest.mark.parametrize("kind", ["none", *HEADS, "mtp"])
def test_every_drafter_grows_trees(kind):
    """Most probable or drawn, alike on each path; a tree with as many nodes as a chain is no worse than it."""
    target, ids = tiny_target(layer_types=["sliding_attention", CSA]), prompt(12)
    if kind == "mtp":
        drafter = DeepseekV4MTPDrafter(target.config).eval()
    else:
        drafter = headed(target, kind, confidence_head=True)
    drafter.bind(target)
    expected = target.generate(ids, do_sample=False, max_new_tokens=16)
    options = dict(assistant_model=drafter, max_new_tokens=16, num_assistant_tokens=3)
    assert torch.equal(target.generate(ids, do_sample=False, tree_budget=10, **options), expected)
    stats = drafter.last_stats
    assert stats.nodes >= 9 * (stats.rounds - 2) and stats.draft_positions <= 3
    proposed, propose = [], drafter.propose
    drafter.propose = lambda *args: proposed.append(propose(*args)) or proposed[-1]
    target.generate(ids, do_sample=True, tree_budget=10, **options)
    assert any(map(is_wide, proposed)) and all(q.sum() == pytest.approx(1, abs=1e-4) for q in proposed[0].q)


class Asking(DraftSampler):
    """Asks for the logits after some paths, side by side or one after the other, and makes no drafts of them."""

    def __init__(self, levels):
        super().__init__(LogitsProcessorList(), False)
        self.levels, self.logits = levels, []

    def grow(self, ids, count, steps, width=None):
        levels = [([int(ids[0, -1])], [0]), *self.levels]
        self.logits = [steps(k, torch.tensor(t), torch.tensor(rows)).logits for k, (t, rows) in enumerate(levels)]
        return DraftTree.chain(ids.new_empty(0))


@pytest.mark.parametrize("kind", [*HEADS, "candidates", "mtp"])
def test_what_follows_a_path_does_not_depend_on_the_paths_beside_it(kind):
    target, ids = tiny_target(layer_types=["sliding_attention"], sliding_window=4), prompt(12)
    if kind == "mtp":
        drafter = DeepseekV4MTPDrafter(target.config).eval()
    else:
        head, candidates = ("state", 5) if kind == "candidates" else (kind, 0)
        drafter = headed(target, head, head_candidates=candidates)
    drafter.bind(target)
    paths = capture_residual(target, drafter.target_layer_ids)
    with paths as captured, torch.no_grad():
        target(ids[:, :-1])
    positions = torch.arange(12)[None]

    def after(levels):
        context, sampler = drafter.new_context(), Asking(levels)
        drafter.extend(target_of(target), context, captured[0], positions[:, :-1], ids[:, 1:])
        drafter.propose(target_of(target), context, ids, positions, 4, sampler)
        return sampler.logits

    beside = after([([3, 9, 4], [0, 0, 0]), ([5, 6, 7, 8], [2, 0, 0, 1]), ([30, 31], [3, 1])])
    for k, row, path in [(1, 1, [9]), (2, 0, [4, 5]), (2, 2, [3, 7]), (3, 0, [9, 8, 30]), (3, 1, [3, 6, 31])]:
        alone = after([([token], [0]) for token in path])
        torch.testing.assert_close(beside[k][row], alone[k][0], atol=1e-5, rtol=1e-5)
    assert not torch.equal(beside[1][0], beside[1][1])


@pytest.mark.parametrize("name", GREEDY_OPTIONS)
def test_greedy_options(target, name):
    options, ids = GREEDY_OPTIONS[name], prompt(20)
    expected = target.generate(ids, **options)
    drafter = RandomTrees(target, [expected[0]])
    assert torch.equal(target.generate(ids, assistant_model=drafter, **options), expected)


def test_a_text_can_end_anywhere_in_a_tree(target):
    ids = prompt(20)
    text = target.generate(ids, do_sample=False, max_new_tokens=24)[0]

    class StopAfter(StoppingCriteria):
        def __init__(self, count):
            self.count, self.lengths = count, []

        def __call__(self, input_ids, scores, **kwargs):
            self.lengths.append(input_ids.shape[1])
            return torch.tensor([len(self.lengths) >= self.count])

    for position in range(2, 12):
        options = dict(max_new_tokens=24, do_sample=False, eos_token_id=[int(text[20 + position]), 1])
        drafter = RandomTrees(target, [text], seed=position)
        assert torch.equal(target.generate(ids, assistant_model=drafter, **options), target.generate(ids, **options))
        stops = StopAfter(position)
        out = target.generate(
            ids,
            stopping_criteria=StoppingCriteriaList([stops]),
            assistant_model=drafter,
            do_sample=False,
            max_new_tokens=24,
        )
        assert torch.equal(out[0], text[: 20 + position]) and stops.lengths == list(range(21, 21 + position))


def test_all_that_is_shown_is_that_of_the_accepted_path(target):
    ids = prompt(20)
    options = dict(
        do_sample=False, max_new_tokens=18, return_dict_in_generate=True, output_scores=True, output_logits=True,
        output_hidden_states=True, output_attentions=True, repetition_penalty=1.2,
    )  # fmt: skip
    target.set_attn_implementation("eager")
    plain = target.generate(ids, **options)
    drafter = RandomTrees(target, [plain.sequences[0]])
    assisted = target.generate(ids, assistant_model=drafter, **options)
    assert torch.equal(plain.sequences, assisted.sequences) and max(drafter.last_stats.accepted) > 1
    close = dict(atol=1e-3, rtol=1e-3)
    for a, b in zip(plain.scores + plain.logits, assisted.scores + assisted.logits, strict=True):
        torch.testing.assert_close(a, b, **close)
    for name in ("hidden_states", "attentions"):
        for a, b in zip(plain[name], assisted[name], strict=True):
            for x, y in zip(a, b, strict=True):
                torch.testing.assert_close(x, y, **close)
    assert cache_of(assisted).get_seq_length() == cache_of(plain).get_seq_length()


def test_what_is_shown_of_drawn_text_is_that_of_its_prefixes(target):
    ids, count = prompt(20), 12
    options = dict(do_sample=True, top_k=2, repetition_penalty=1.2, max_new_tokens=count)
    shown = dict(return_dict_in_generate=True, output_scores=True, output_logits=True, output_hidden_states=True)
    torch.manual_seed(0)
    drafter = RandomTrees(target, list(target.generate(ids, num_return_sequences=40, **options)))
    drawn = target.generate(ids, assistant_model=drafter, **options, **shown)
    assert sum(drafter.last_stats.accepted) > 1 and any(map(is_wide, drafter.trees))
    assert len(drawn.scores) == len(drawn.logits) == len(drawn.hidden_states) == count
    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.2), TopKLogitsWarper(2)])
    with torch.no_grad():
        whole = target(drawn.sequences, output_hidden_states=True)
    close = dict(atol=1e-3, rtol=1e-3)
    for at, scores, logits, states in zip(range(19, 19 + count), drawn.scores, drawn.logits, drawn.hidden_states):
        torch.testing.assert_close(logits, whole.logits[:, at], **close)
        torch.testing.assert_close(scores, processors(drawn.sequences[:, : at + 1], logits.clone()))
        assert scores[0, drawn.sequences[0, at + 1]].isfinite()
        torch.testing.assert_close(states[-1][:, -1], whole.hidden_states[-1][:, at], **close)


def test_a_chat_goes_on_from_the_cache_that_trees_left(target):
    ids, turn = prompt(14), prompt(9, seed=4)
    options = dict(do_sample=False, max_new_tokens=16, return_dict_in_generate=True)
    first = target.generate(ids, do_sample=False, max_new_tokens=16)
    whole = torch.cat([first, turn], dim=1)
    expected = target.generate(whole, do_sample=False, max_new_tokens=16)
    drafter = RandomTrees(target, [first[0], expected[0]])
    out = target.generate(ids, assistant_model=drafter, **options)
    again = target.generate(whole, **{CACHE: cache_of(out)}, assistant_model=drafter, **options)
    assert torch.equal(out.sequences, first) and torch.equal(again.sequences, expected)


def test_a_filled_stock_cache_is_gone_on_from(target):
    """Of which DeepSeek-V4's layers do not know what the next window overlaps with: its trees are forked at first."""
    ids = prompt(31)
    expected = target.generate(ids, do_sample=False, max_new_tokens=20)
    plain = target.generate(ids, do_sample=False, max_new_tokens=3, return_dict_in_generate=True)
    drafter = RandomTrees(target, [expected[0]])
    out = target.generate(
        expected[:, :34], **{CACHE: cache_of(plain)}, assistant_model=drafter, do_sample=False,
        max_new_tokens=17,
    )  # fmt: skip
    assert torch.equal(out, expected) and any(map(is_wide, drafter.trees))


class StopAt(BaseStreamer):
    def __init__(self, count):
        self.count = count

    def put(self, value):
        self.count -= 1
        if self.count < 0:
            raise KeyboardInterrupt

    def end(self):
        pass


def test_after_an_interruption_inside_a_tree_the_cache_is_that_of_the_text_so_far(target):
    ids = prompt(14)
    text = target.generate(ids, do_sample=False, max_new_tokens=20)
    for count in range(3, 9):
        first = target.generate(ids, do_sample=False, max_new_tokens=1, return_dict_in_generate=True,
                                assistant_model=PromptLookupDrafter(target))  # fmt: skip
        cache = cache_of(first)
        with pytest.raises(KeyboardInterrupt):
            target.generate(
                first.sequences, **{CACHE: cache}, assistant_model=RandomTrees(target, [text[0]], seed=count),
                do_sample=False, max_new_tokens=19, streamer=StopAt(count),
            )  # fmt: skip
        length = cache.get_seq_length()
        assert length >= 14 and cache.layers[-1].get_seq_length() == length
        out = target.generate(
            text[:, : length + 1], **{CACHE: cache}, do_sample=False, max_new_tokens=text.shape[1] - length - 1,
            assistant_model=RandomTrees(target, [text[0]]),
        )  # fmt: skip
        assert torch.equal(out, text)


INTERRUPTED = [
    families.deepseek_v4, families.gemma3, families.qwen3, families.qwen3_next, families.bamba, families.falcon_h1,
    families.nemotron_h, *[families.qwen4_exp] * families.REWINDABLE_QWEN4,
]  # fmt: skip


def lengths_of_keys(cache):
    return {layer.get_seq_length() for layer in cache.layers if getattr(layer, "keys", None) is not None}


@pytest.mark.parametrize("forked", [False, True], ids=["masked", "forked"])
@pytest.mark.parametrize("kind", [RandomTrees, RandomChains])
@pytest.mark.parametrize("family", INTERRUPTED)
def test_after_an_interrupted_forward_the_cache_is_that_of_the_text_so_far(family, kind, forked, monkeypatch):
    """Whichever layer it comes in, of those that have seen the round and those that have not."""
    target, ids = bind(family().eval()), prompt(14)
    if forked:
        monkeypatch.setattr(type(target_of(target)), "tree_verification", "fork")
    text = target.generate(ids, do_sample=False, max_new_tokens=20)
    layers = target_of(target).layers
    for place in (0, len(layers) // 2, len(layers) - 1):
        first = target.generate(ids, do_sample=False, max_new_tokens=1, return_dict_in_generate=True,
                                assistant_model=PromptLookupDrafter(target))  # fmt: skip
        cache, drafter = cache_of(first), kind(target, [text[0]])
        rounds = []

        def interrupt(*_, rounds=rounds):
            rounds.append(1)
            if len(rounds) == 4:
                raise KeyboardInterrupt

        handle = layers[place].register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            target.generate(first.sequences, **{CACHE: cache}, assistant_model=drafter, do_sample=False,
                            max_new_tokens=19)  # fmt: skip
        handle.remove()
        length = cache.get_seq_length()
        assert 16 <= length < text.shape[1] - 1 and lengths_of_keys(cache) == {length}
        out = target.generate(
            text[:, : length + 1], **{CACHE: cache}, do_sample=False, max_new_tokens=text.shape[1] - length - 1,
            assistant_model=kind(target, [text[0]]),
        )  # fmt: skip
        assert torch.equal(out, text)


@pytest.mark.parametrize("kind", [RandomTrees, RandomChains])
def test_after_an_interruption_between_a_window_and_its_entry_neither_is_there(kind, monkeypatch):
    target, ids = bind(families.deepseek_v4().eval()), prompt(14)
    monkeypatch.setattr(type(target_of(target)), "tree_verification", "fork")
    text = target.generate(ids, do_sample=False, max_new_tokens=20)
    norms = [
        module for name, module in target.named_modules() if name.endswith(("compressor.kv_norm", "indexer.kv_norm"))
    ]
    assert len(norms) == 3
    for norm in norms:
        first = target.generate(ids, do_sample=False, max_new_tokens=1, return_dict_in_generate=True,
                                assistant_model=PromptLookupDrafter(target))  # fmt: skip
        cache = cache_of(first)
        handle = norm.register_forward_hook(interrupted)
        with pytest.raises(KeyboardInterrupt):
            target.generate(first.sequences, **{CACHE: cache}, do_sample=False, max_new_tokens=19,
                            assistant_model=kind(target, [text[0]]))  # fmt: skip
        handle.remove()
        length = cache.get_seq_length()
        out = target.generate(
            text[:, : length + 1], **{CACHE: cache}, do_sample=False, max_new_tokens=text.shape[1] - length - 1,
            assistant_model=kind(target, [text[0]]),
        )  # fmt: skip
        assert torch.equal(out, text)


@pytest.mark.skipif(
    not families.REWINDABLE_QWEN4, reason="drafts cannot be taken back of this transformers' Qwen4-Exp"
)
@pytest.mark.parametrize("kind", [RandomTrees, RandomChains])
def test_after_an_interruption_between_an_indexers_keys_and_its_layers_neither_are_there(kind):
    target, ids = bind(families.qwen4_exp().eval()), prompt(14)
    text = target.generate(ids, do_sample=False, max_new_tokens=20)
    indexers = [module for name, module in target.named_modules() if name.endswith("indexer")]
    assert len(indexers) == 2
    for indexer in indexers:
        first = target.generate(ids, do_sample=False, max_new_tokens=1, return_dict_in_generate=True,
                                assistant_model=PromptLookupDrafter(target))  # fmt: skip
        cache, calls = cache_of(first), []

        def interrupt(*_, calls=calls):
            calls.append(1)
            if len(calls) == 2:  # the first runs the last token of the prompt
                raise KeyboardInterrupt

        handle = indexer.register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            target.generate(first.sequences, **{CACHE: cache}, do_sample=False, max_new_tokens=19,
                            assistant_model=kind(target, [text[0]]))  # fmt: skip
        handle.remove()
        assert cache.get_seq_length() == 15
        out = target.generate(text[:, :16], **{CACHE: cache}, do_sample=False, max_new_tokens=18,
                              assistant_model=kind(target, [text[0]]))  # fmt: skip
        assert torch.equal(out, text)
        held = {layer.indexer_keys.shape[1] for layer in cache.layers if hasattr(layer, "indexer_keys")}
        assert held == {cache.get_seq_length()}


def interrupted(*_):
    raise KeyboardInterrupt


def test_a_cache_whose_rewinding_was_interrupted_is_refused(monkeypatch):
    """Some of its running states have seen rejected drafts, which nothing undoes any more."""
    target, ids = bind(families.qwen3_next().eval()), prompt(14)
    text = target.generate(ids, do_sample=False, max_new_tokens=20)
    first = target.generate(ids, do_sample=False, max_new_tokens=1, return_dict_in_generate=True,
                            assistant_model=PromptLookupDrafter(target))  # fmt: skip
    again = dict(**{CACHE: cache_of(first)}, do_sample=False, max_new_tokens=19,
                 assistant_model=RandomChains(target, [text[0]]))  # fmt: skip
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(RewindableLinearLayer, "_replay", interrupted)
        target.generate(first.sequences, **again)
    with pytest.raises(ValueError, match="interrupted inside a forward or while drafts were taken back"):
        target.generate(first.sequences, **again)


@pytest.mark.parametrize("family", INTERRUPTED)
def test_a_cache_whose_second_prompt_was_interrupted_is_refused(family):
    """Whichever layer it comes in, also where no count of tokens tells, and whatever goes on with it."""
    target, ids = bind(family().eval()), prompt(14)
    layers = target_of(target).layers
    for place in (0, len(layers) // 2, len(layers) - 1):
        drafter = PromptLookupDrafter(target)
        first = target.generate(ids, do_sample=False, max_new_tokens=5, return_dict_in_generate=True,
                                assistant_model=drafter)  # fmt: skip
        turn = dict(**{CACHE: cache_of(first)}, do_sample=False, max_new_tokens=3)
        handle = layers[place].register_forward_hook(interrupted)
        with pytest.raises(KeyboardInterrupt):
            target.generate(torch.cat([first.sequences, prompt(6)], dim=1), assistant_model=drafter, **turn)
        handle.remove()
        for asked in ({}, {"assistant_model": drafter}):
            with pytest.raises(ValueError, match=r"was interrupted inside a forward .* Start from a new cache"):
                target.generate(torch.cat([first.sequences, prompt(9)], dim=1), **asked, **turn)


def test_a_cache_of_v4_that_plain_decoding_was_interrupted_in_is_refused():
    """Between layers, and in a layer between its keys and its compressor: the windows all have their keys, and going
    on wrote other text."""
    target, ids = bind(families.deepseek_v4().eval()), prompt(14)
    layers = target_of(target).layers
    inside = [module for name, module in target.named_modules() if name.endswith("compressor.kv_norm")]
    for module in (layers[0], layers[-2], *inside):
        first = target.generate(ids, do_sample=False, max_new_tokens=5, return_dict_in_generate=True)
        turn = dict(**{CACHE: cache_of(first)}, do_sample=False, max_new_tokens=3)
        handle = module.register_forward_hook(interrupted)
        with pytest.raises(KeyboardInterrupt):
            target.generate(torch.cat([first.sequences, prompt(6)], dim=1), **turn)
        handle.remove()
        for asked in ({}, {"assistant_model": PromptLookupDrafter(target)}):
            with pytest.raises(ValueError, match=r"different tokens \(of lengths \[1[78], "):
                target.generate(torch.cat([first.sequences, prompt(9)], dim=1), **asked, **turn)


def test_the_drafter_is_given_the_accepted_paths_residual(target):
    ids = prompt(14)
    text = target.generate(ids, do_sample=False, max_new_tokens=20)
    drafter = RandomTrees(target, [text[0]])
    target.generate(ids, do_sample=False, max_new_tokens=20, assistant_model=drafter)
    residual = torch.cat([part for part, _, _ in drafter.seen], dim=1)
    positions = torch.cat([part for _, part, _ in drafter.seen], dim=1)[0].tolist()
    following = torch.cat([part for _, _, part in drafter.seen], dim=1)
    assert positions == list(range(len(positions))) and torch.equal(following, text[:, 1 : len(positions) + 1])
    with torch.no_grad():
        expected = target(text[:, : len(positions)]).logits
    found = target_of(target).logits(target_of(target).collapse(residual))
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)


def test_left_padding_is_hidden_from_every_node(target):
    ids = prompt(14)
    expected = target.generate(ids, do_sample=False, max_new_tokens=20)[:, 14:]
    padded, mask = torch.cat([torch.zeros(1, 3, dtype=torch.long), ids], dim=1), torch.ones(1, 17, dtype=torch.long)
    mask[:, :3] = 0
    own = target.generate(padded, attention_mask=mask, do_sample=False, max_new_tokens=20)
    drafter = RandomTrees(target, [own[0], torch.cat([ids, expected], dim=1)[0]])
    out = target.generate(padded, attention_mask=mask, do_sample=False, max_new_tokens=20, assistant_model=drafter)
    assert torch.equal(out[:, 17:], expected)


def test_a_chain_is_no_longer_than_the_budget(target):
    ids = prompt(8).repeat(1, 3)
    drafter = PromptLookupDrafter(target, 9)
    target.generate(ids, assistant_model=drafter, tree_budget=2, do_sample=False, max_new_tokens=20)
    assert drafter.last_stats.draft_positions <= 2 and drafter.last_stats.nodes


@pytest.mark.parametrize("budget", [0, -3, 2.5, True, "8", 1025, 10**7])
def test_a_budget_is_a_number_of_nodes(target, budget):
    drafter = PromptLookupDrafter(target)
    with pytest.raises(ValueError, match=f"`tree_budget` is {budget!r}, expected the most nodes of a draft tree"):
        target.generate(prompt(5), assistant_model=drafter, tree_budget=budget, max_new_tokens=4)


def test_the_largest_tree_is_one(target):
    ids = prompt(8)
    drafter = tiny_drafter(target)
    drafter.bind(target)
    options = dict(do_sample=False, max_new_tokens=6)
    out = target.generate(ids, assistant_model=drafter, tree_budget=MOST_NODES, **options)
    assert torch.equal(out, target.generate(ids, **options)) and drafter.last_stats.nodes > MOST_NODES / 2


def test_two_threads_grow_trees_on_one_target(target):
    prompts = [prompt(12, seed=seed) for seed in range(2)]
    expected = [target.generate(ids, do_sample=False, max_new_tokens=20) for ids in prompts]
    found = {}

    def run(i):
        drafter = RandomTrees(target, [expected[i][0]], seed=i)
        found[i] = target.generate(prompts[i], do_sample=False, max_new_tokens=20, assistant_model=drafter)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(found[i], expected[i]) for i in range(2))


SAMPLED = mostly_nightly([("full", "markov", 7), (CSA, "state", 9)])


# Takes seconds: thousands of texts are drawn.
@pytest.mark.parametrize(("layer", "kind", "budget"), SAMPLED)
def test_sampled_text_with_trees_has_the_targets_distribution(layer, kind, budget):
    """End to end: pairs of sampled tokens against the target's own joint law, processors included."""
    if layer == CSA:
        target = tiny_target(5, vocab_size=8, layer_types=[CSA], sliding_window=4, hc_sinkhorn_iters=1)
    else:
        torch.manual_seed(5)
        config = families.Qwen3Config(
            **{**families.COMMON, "vocab_size": 8}, intermediate_size=16, num_hidden_layers=1, num_key_value_heads=2,
            head_dim=16,
        )  # fmt: skip
        target = families.Qwen3ForCausalLM(config).eval()
    ids, temperature, k = prompt(6, vocab_size=8), 0.8, 5

    def distribution(context):
        with torch.no_grad():
            logits = target(context).logits[0, -1] / temperature
        return logits.masked_fill(logits < logits.topk(k).values[-1], -torch.inf).softmax(-1)

    # The first token comes from the prefill; the next two pass through drafting and verification.
    joint, first = torch.zeros(8, 8), distribution(ids)
    for a in first.nonzero()[:, 0].tolist():
        start = torch.cat([ids, torch.tensor([[a]])], dim=1)
        second = distribution(start)
        for b in second.nonzero()[:, 0].tolist():
            joint[b] += first[a] * second[b] * distribution(torch.cat([start, torch.tensor([[b]])], dim=1))
    drafter = headed(target, kind, num_draft_tokens=3)
    drafter.bind(target)
    observed = Counter()
    for _ in range(500):
        out = target.generate(
            ids, assistant_model=drafter, do_sample=True, temperature=temperature, top_k=k, max_new_tokens=4,
            tree_budget=budget,
        )[0, 6:].tolist()  # fmt: skip
        observed[out[1] * 8 + out[2]] += 1
    assert_drawn_from(joint.flatten(), observed)
    assert drafter.last_stats.nodes > drafter.last_stats.draft_positions
