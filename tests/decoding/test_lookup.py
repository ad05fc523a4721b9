"""Copies joined to a drafter's drafts: the text stays the target's, and they are drafted where they are right."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import pytest
import torch
from transformers import CompileConfig, GenerationConfig, LogitsProcessor

from hf_hyperdflash import Lookup, PromptLookupDrafter, bind
from hf_hyperdflash.auto.copies import PRECISION, CopyChances, KnownStats
from hf_hyperdflash.decoding.sources import CopySource
from hf_hyperdflash.decoding.stats import keep_trees
from hf_hyperdflash.drafters.base import Drafter
from hf_hyperdflash.drafters.sampling import draft_batch
from hf_hyperdflash.targets.caches.name import CACHE, cache_of
from hf_hyperdflash.trees.growth import DraftStep
from hf_hyperdflash.trees.tree import DraftTree

from ..conftest import half_right, mostly_nightly, prompt, tiny_drafter, tiny_target
from ..fuzz_trees import padded_on_the_left
from ..helpers import families
from ..helpers.enumerated_draws import every_outcome
from ..helpers.tree_drafters import RandomChains, RandomTrees

GREEDY = dict(do_sample=False, pad_token_id=0)


class NeverRight(Drafter):
    """Drafts what the target would never write, and counts how often it is asked."""

    num_draft_tokens = 4

    def __init__(self, target, text):
        self.config, self.text, self.asked = target.config, text.tolist(), 0

    def draft(self, target, requests):
        self.asked += 1
        ends = [each.ids.shape[1] for each in requests]
        return [
            DraftTree.chain((torch.tensor(self.text[end : end + each.num_drafts]) + 1) % 60 + 2)
            for end, each in zip(ends, requests)
        ]


def made(family, seed=0):
    torch.manual_seed(seed)
    return bind(family().eval())


# Text


@pytest.mark.parametrize(
    "options", [{}, dict(tree_budget=9), dict(num_assistant_tokens="auto"), dict(tree_budget="auto")]
)
@pytest.mark.parametrize(
    "family",
    [families.qwen3, tiny_target, *mostly_nightly([families.gemma3, families.qwen3_next, families.granite_hybrid], 0)],
)  # fmt: skip
def test_text_is_the_targets_and_copies_are_accepted(family, options):
    """Of a document that holds the text: copies are long, and right."""
    target, ids = made(family), prompt(9)
    expected = target.generate(ids, max_new_tokens=60, **GREEDY)
    drafter = half_right(target, ids, max_new_tokens=60) if family is tiny_target else tiny_drafter(target)
    drafter.bind(target)
    known = Lookup(documents=[expected[0]])
    for _ in range(2):  # "auto" copies once it knows what rounds take
        out = target.generate(ids, assistant_model=drafter, lookup=known, max_new_tokens=60, **GREEDY, **options)
        assert torch.equal(out, expected)
    stats = drafter.last_stats
    assert 0 < stats.known_accepted <= stats.known_nodes <= stats.nodes
    assert stats.known_accepted <= sum(stats.accepted) == sum(position > 0 for position in stats.written)


def test_a_copy_that_is_likely_to_be_right_is_drafted_instead_of_the_drafter():
    target, ids = made(families.qwen3), prompt(9)
    expected = target.generate(ids, max_new_tokens=60, **GREEDY)
    for lookup, most in ((Lookup(documents=[expected[0]]), 6), (False, 60)):
        drafter = NeverRight(target, expected[0])
        out = target.generate(ids, assistant_model=drafter, lookup=lookup, max_new_tokens=60, **GREEDY)
        assert torch.equal(out, expected) and drafter.asked <= most
    assert drafter.asked > 50 and drafter.last_stats.known_nodes == 0


def test_a_request_that_was_made_before_is_copied_and_others_are_not():
    target, ids = made(families.qwen3), prompt(9)
    drafter, known, rounds = NeverRight(target, torch.zeros(99, dtype=torch.long)), Lookup(), []
    for prompt_ids in (ids, ids, prompt(9, seed=5)):
        target.generate(prompt_ids, assistant_model=drafter, lookup=known, max_new_tokens=50, **GREEDY)
        rounds.append(drafter.last_stats.rounds)
    assert rounds[1] < 10 < min(rounds[0], rounds[2])
    target.generate(ids, assistant_model=drafter, lookup=True, max_new_tokens=50, **GREEDY)
    assert drafter.last_stats.rounds > 40  # of the text itself alone


def test_trees_hold_a_copy_beside_the_drafters_nodes_within_the_budget():
    target, ids = made(families.qwen3), prompt(9)
    expected = target.generate(ids, max_new_tokens=40, **GREEDY)
    drafter = RandomTrees(target, [], most=20)
    drafter.bind(target)
    target.hyperdflash_binding.pairs[drafter].known_stats[False] = Unlearning(
        Fixed([0.9] * 7), 99.0
    )  # no copy is better alone
    with keep_trees():
        out = target.generate(
            ids,
            assistant_model=drafter,
            lookup=Lookup(documents=[expected[0]]),
            tree_budget=8,
            max_new_tokens=40,
            **GREEDY,
        )
    assert torch.equal(out, expected) and drafter.last_stats.known_accepted > 0
    trees = [tree.drafts for tree in drafter.last_stats.trees]
    joined = [(tree, own) for tree, own in zip(trees, drafter.trees) if tree.tokens.tolist() != own.tokens.tolist()]
    assert joined and max(len(tree) for tree, _ in joined) == 8
    assert any(tree.tokens[0] == own.tokens[0] and len(tree.paths) > len(own.paths) for tree, own in joined)


def test_sequences_of_a_batch_copy_from_their_own_texts_and_a_drafter_hears_of_all():
    target = made(families.qwen3)
    texts = [torch.cat([prompt(6 + row, seed=row)[0]] * 3) for row in range(3)]
    ids, mask = padded_on_the_left(texts)
    expected = target.generate(ids, attention_mask=mask, max_new_tokens=40, **GREEDY)
    for options in ({}, dict(tree_budget=6), dict(num_assistant_tokens="auto")):
        own = [text[count:] for text, count in zip(expected, (mask == 0).sum(1).tolist())]
        drafter = RandomChains(target, own)
        known = Lookup(documents=own)
        for lookup in (True, known):
            out = target.generate(
                ids,
                attention_mask=mask,
                assistant_model=drafter,
                lookup=lookup,
                max_new_tokens=40,
                **GREEDY,
                **options,
            )
            assert torch.equal(out, expected)
        assert all(row.known_accepted > 0 for row in drafter.last_stats.rows)
        assert drafter.last_stats.known_accepted == sum(row.known_accepted for row in drafter.last_stats.rows)
        for context, text in zip(drafter.contexts[-3:], own):  # in whatever pieces, each token once
            heard = torch.cat([parts[1][0] for parts in context.seen]).tolist()
            assert heard == list(range(len(text) - 1))


def test_static_caches_have_room_for_a_copy():
    target, ids = made(families.gemma3), prompt(9)
    expected = target.generate(ids, max_new_tokens=60, **GREEDY)
    drafter, known = tiny_drafter(target), Lookup(documents=[expected[0]])
    drafter.bind(target)
    compiled = CompileConfig(mode=None, fullgraph=True, backend="eager")
    compiled._compile_all_devices = True
    torch._dynamo.reset()
    for options in ({}, dict(tree_budget=5), dict(compile_config=compiled)):
        out = target.generate(
            ids, assistant_model=drafter, lookup=known, cache_implementation="static", max_new_tokens=60,
            **GREEDY, **options,
        )  # fmt: skip
        assert torch.equal(out, expected) and drafter.last_stats.known_accepted > 0


def test_the_next_turn_goes_on_with_a_cache_and_a_context_that_are_whole(target):
    bind(target)
    ids = prompt(9)
    drafter = half_right(target, ids, max_new_tokens=90)
    drafter.bind(target)
    whole, known, cache = target.generate(ids, max_new_tokens=90, **GREEDY), Lookup(), None
    for end in (30, 60, 99):
        out = target.generate(
            whole[:, : max(9, end - 30)] if cache is not None else ids, assistant_model=drafter, lookup=known,
            max_length=end, return_dict_in_generate=True, **{CACHE: cache}, **GREEDY,
        )  # fmt: skip
        assert torch.equal(out.sequences, whole[:, :end])
        cache = cache_of(out)


def test_two_threads_share_a_lookup(target):
    bind(target)
    drafter, known, found = tiny_drafter(target), Lookup(), []
    drafter.bind(target)
    prompts = [prompt(9, seed=seed) for seed in range(2)]
    expected = [target.generate(ids, max_new_tokens=30, **GREEDY) for ids in prompts]

    def write(number):
        for _ in range(3):
            out = target.generate(prompts[number], assistant_model=drafter, lookup=known, max_new_tokens=30, **GREEDY)
            found.append(torch.equal(out, expected[number]))

    threads = [threading.Thread(target=write, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 6


# Law


@dataclass
class Unlearning(KnownStats):
    """What is known of copies, whatever they bring: a run is repeated for each way that its draws can go."""

    def observe(self, accepted):
        pass


class Fixed(CopyChances):
    def observe(self, length, is_right, is_resumed=False):
        pass


class Forgetful(Lookup):
    """Counts what a drafter's texts had of it instead of remembering them."""

    def begin(self, drafter):
        self.drafter, self.nodes, self.accepted = drafter, 0, 0
        return self

    def remember(self, text):
        self.nodes += self.drafter.last_stats.known_nodes
        self.accepted += self.drafter.last_stats.known_accepted


class Silent(LogitsProcessor):
    """A user's own, which may remember: with it drafts are accepted one after the other."""

    def __call__(self, input_ids, scores):
        return scores


class Draws(Drafter):
    """Drafts at random, from what depends on the draft before."""

    num_draft_tokens = 3

    def __init__(self, target):
        self.config = target.config
        self.logits = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))

    def draft(self, target, requests):
        return draft_batch(requests, lambda k, tokens, _: DraftStep(self.logits[tokens]))


WAYS = {
    "a chain": {}, "a tree": dict(tree_budget=4), "a processor of a user's own": dict(logits_processor=[Silent()]),
    "a tree, token by token": dict(tree_budget=3, logits_processor=[Silent()]),
}  # fmt: skip


# Takes seconds: every way that all draws can go.
@pytest.mark.parametrize("temperature", [0.7, *mostly_nightly([1.5], kept=0)])
@pytest.mark.parametrize("is_alone", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_drawn_text_has_the_targets_law(way, is_alone, temperature):
    """Copies of a few of the texts that the target may write, alone or beside drawn drafts."""
    torch.manual_seed(0)
    target, ids, new = families.qwen3(layers=1).eval(), prompt(5, vocab_size=8), 4
    target.resize_token_embeddings(8)
    law = {(): 1.0}
    for _ in range(new):
        for text, chance in [*law.items()]:
            with torch.no_grad():
                logits = target(torch.cat([ids, torch.tensor([text], dtype=torch.long)], dim=1)).logits[0, -1]
            best = logits.topk(2)
            for token, share in zip(best.indices.tolist(), (best.values / temperature).softmax(-1).tolist()):
                law[(*text, token)] = chance * share
            del law[text]
    drafter = Draws(target)
    drafter.bind(target)
    stats = Unlearning(Fixed([0.9] * 7), accepted=0.0 if is_alone else 99.0)
    target.hyperdflash_binding.pairs[drafter].known_stats[True] = stats
    known = Forgetful(documents=[[int(ids[0, -1]), *text] for text in [*law][::3]]).begin(drafter)
    options = dict(do_sample=True, top_k=2, temperature=temperature, max_new_tokens=new, lookup=known, **WAYS[way])
    found = dict.fromkeys(law, 0.0)
    for probability, text in every_outcome(lambda: target.generate(ids, assistant_model=drafter, **options)):
        found[tuple(text[0, 5:].tolist())] += probability
    assert found == pytest.approx(law, abs=1e-6)
    assert (known.nodes > known.accepted > 0) == (is_alone or "tree" in way)


# What is refused


@pytest.mark.parametrize(
    ("lookup", "said"),
    [
        (3, "`lookup` is 3, expected True, False or a `Lookup`"),
        ("file.txt", "`lookup` is 'file.txt', expected True, False or a `Lookup`"),
        ([[1, 2]], r"`lookup` is \[\[1, 2\]\], expected True, False or a `Lookup`"),
        (torch.ones(30), r"`lookup` is tensor\(\[1., 1., .*, expected True, False or a `Lookup`"),
        (Lookup(documents=[[1, 64]]), "has a text with the token 64, expected token ids from 0 to 63"),
    ],
)
def test_a_wrong_lookup_is_refused_in_a_line(target, lookup, said):
    bind(target)
    with pytest.raises(ValueError, match=said) as refused:
        target.generate(prompt(5), assistant_model=PromptLookupDrafter(target), lookup=lookup)
    assert "\n" not in str(refused.value)


def test_a_configuration_may_have_one_which_all_calls_share(target):
    bind(target)
    drafter, known = NeverRight(target, torch.zeros(99, dtype=torch.long)), Lookup()
    for _ in range(2):
        config = GenerationConfig(max_new_tokens=50, lookup=known, **GREEDY)
        target.generate(prompt(9), assistant_model=drafter, generation_config=config)
    assert drafter.last_stats.known_accepted > 20


def test_a_lookup_needs_a_drafter(target):
    bind(target)
    with pytest.raises(ValueError, match="`lookup` is True, but there is no drafter"):
        target.generate(prompt(5), lookup=True, max_new_tokens=3)
    target.generate(prompt(5), lookup=False, max_new_tokens=3)  # is as if it were not there


def test_an_edited_copy_goes_on_behind_the_difference():
    """A name is another one at each place: the words behind it follow in the source, and not where they were last."""
    lines = [[10 + line, 11 + line, 1, 2, 50 + line, 3, 4, 60 + line, 5] for line in range(0, 24, 3)]
    edited = [[90 if token == 4 else token for token in line] for line in lines]
    chances = CopyChances()
    source, drafted = CopySource([token for line in lines for token in line], chances, None), []
    for line in edited:
        for token in line:
            path = source.path(1)
            drafted.append(path is not None and path.tokens[0] == token)
            source.append(token)
    # What is behind the new name is new; then one token is the same, or none yet, by what was learned.
    behind = [drafted[9 * number + 7 : 9 * number + 9] for number in range(len(lines))]
    assert all(right[1] for right in behind[1:]) and sum(drafted) > 0.7 * len(drafted)
    assert chances(1, True) > chances(1) and chances.seen[-1] > PRECISION
