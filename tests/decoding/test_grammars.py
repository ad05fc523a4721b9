"""Grammars: drafts follow them, and texts are those of plain decoding with the same grammar."""

from __future__ import annotations

import gc
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache, LogitsProcessorList, SuppressTokensLogitsProcessor

from hf_hyperdflash import AfterReasoning, GrammarProcessor, bind
from hf_hyperdflash.decoding.stats import keep_trees
from hf_hyperdflash.drafters.sampling import DraftSampler
from hf_hyperdflash.grammars.processor import SPELLED, Place
from hf_hyperdflash.grammars.states import Matcher, MatcherState, Step
from hf_hyperdflash.targets.caches.name import CACHE

from ..conftest import mostly_nightly, prompt, tiny_drafter
from ..fuzz_trees import padded_on_the_left
from ..helpers import families
from ..helpers.enumerated_draws import every_outcome
from ..helpers.grammars import Masking, Spelling, Table, a_word, random_table
from ..helpers.tree_drafters import RandomChains, RandomTrees
from .test_drafting import of_eight, plain, small_qwen3, with_head
from .test_requests import letters

GREEDILY = {"do_sample": False, "pad_token_id": 0}


def target_of(family=families.qwen3):
    torch.manual_seed(0)
    return bind(family().eval())


def written(target, ids, grammar, new=24, **options):
    """What a call writes by a processor of its own."""
    processors = [GrammarProcessor(grammar)]
    return target.generate(ids, logits_processor=processors, max_new_tokens=new, **{**GREEDILY, **options})


# The text is that of plain decoding


@pytest.mark.parametrize("seed", range(4))
def test_plain_decoding_follows_a_grammar(seed):
    target, table, ids = target_of(), random_table(seed), torch.cat([prompt(9), prompt(9, seed=5)])
    expected = target.generate(ids, logits_processor=[Masking(table, 9)], max_new_tokens=24, **GREEDILY)
    assert torch.equal(written(target, ids, table), expected)
    assert len({*expected[0, 9:].tolist()}) > 3
    beams = dict(num_beams=3, do_sample=False)
    expected = target.generate(ids, logits_processor=[Masking(table, 9)], max_new_tokens=9, **beams)
    assert torch.equal(written(target, ids, table, 9, **beams), expected)
    looked_up = written(target, ids[:1], table, prompt_lookup_num_tokens=4)  # transformers' own loop
    assert torch.equal(looked_up, written(target, ids[:1], table))


def drafters(target):
    """What drafts a block, with heads and without."""
    for head in ("none", "markov", "state"):
        drafter = tiny_drafter(target, sequential_head=head)
        drafter.bind(target)
        yield drafter


@pytest.mark.parametrize("family", mostly_nightly([families.qwen3, families.deepseek_v4, families.gemma3], 2))
@pytest.mark.parametrize(
    "asked", [{}, {"tree_budget": 9, "lookup": True}, {"num_assistant_tokens": "auto", "lookup": True}], ids=str
)
def test_drafts_follow_the_grammar(family, asked):
    """All of them do, and so more are accepted than without it."""
    target, ids = target_of(family), prompt(9)
    for seed, drafter in enumerate(drafters(target)):
        table = random_table(seed)
        expected = written(target, ids, table)
        with keep_trees():
            assert torch.equal(written(target, ids, table, assistant_model=drafter, **asked), expected)
        end, paths = 9, 0
        stats = drafter.last_stats
        for tree, accepted in zip(stats.trees, stats.accepted):
            text, drafts = expected[0, 9 : end + 1].tolist(), tree.drafts
            end += accepted + 1
            for path in drafts.paths:
                paths += 1
                assert table.allows([*text, *drafts.tokens[path].tolist()])
        assert paths and sum(stats.accepted)


@pytest.mark.parametrize("family", mostly_nightly([families.qwen3, families.deepseek_v4], 1))
@pytest.mark.parametrize("kind", [RandomChains, RandomTrees])
def test_four_texts_of_a_batch_have_four_grammars(family, kind):
    target, tables = target_of(family), [random_table(seed) for seed in range(4)]
    rows = [prompt(length, seed=10 + length)[0] for length in (9, 3, 14, 1)]
    ids, mask = padded_on_the_left(rows)
    expected = [written(target, row[None], table)[0] for row, table in zip(rows, tables)]
    together = written(target, ids, tables, attention_mask=mask)
    drafted = written(target, ids, tables, attention_mask=mask, assistant_model=kind(target, expected))
    for row, table, text, *both in zip(rows, tables, expected, together, drafted):
        assert table.allows(text[len(row) :].tolist())
        # A DeepSeek-V4's plain batch reads its padding; a drafted one does not.
        assert all(each[14:].tolist() == text[len(row) :].tolist() for each in both[family is families.deepseek_v4 :])


def test_several_texts_of_a_prompt_share_its_grammar():
    target, tables = target_of(), [random_table(1, forced=0), random_table(2, forced=0)]
    ids = torch.cat([prompt(6), prompt(6, seed=3)])
    for assistant in (None, RandomChains(target, [])):
        texts = written(target, ids, tables, 9, do_sample=True, num_return_sequences=3, assistant_model=assistant)
        assert all(tables[row // 3].allows(text) for row, text in enumerate(texts[:, 6:].tolist()))
        assert len({tuple(text) for text in texts.tolist()}) > 2


# Drawn text has the law of plain decoding


def law_of(target, ids, table, new):
    """The law of texts by plain decoding: the target's, over what the grammar allows."""
    law = {(): (1.0, table.fork())}
    for _ in range(new):
        following = {}
        for text, (mass, state) in law.items():
            logits = target(torch.cat([ids, torch.tensor([text], dtype=torch.long)], 1)).logits[0, -1].float()
            p = logits.masked_fill(~state.allowed(len(logits)), -torch.inf).softmax(-1).tolist()
            for token in state.moves[state.state]:
                after = state.fork()
                after.advance(token)
                following[(*text, token)] = mass * p[token], after
        law = following
    return {text: mass for text, (mass, _) in law.items()}


@pytest.mark.parametrize(
    ("drafter", "asked"),
    [(plain, {}), (with_head("markov"), {}), (plain, {"tree_budget": 3})],
    ids=["chain", "sequential head", "tree"],
)
@torch.no_grad()
def test_drawn_texts_have_the_law_of_plain_decoding(drafter, asked):
    """By every way that draws can go: none is estimated."""
    target, ids = of_eight(small_qwen3), prompt(5, vocab_size=8)
    drafter = drafter(target)
    drafter.bind(target)
    # A token that alone is allowed, one that is thought to follow, and one that is not allowed.
    table = Spelling([{2: 1, 5: 2}, {3: 0, 4: 2, 7: 1}, {6: 0}], {0: [5], 1: [2]})
    expected, found, accepted = law_of(target, ids, table, 4), defaultdict(float), 0
    options = dict(assistant_model=drafter, do_sample=True, top_k=0, num_assistant_tokens=2, **asked)

    def run():
        target.hyperdflash_binding.pairs[drafter].known_stats.clear()  # else one run learns from another
        return written(target, ids, table, 4, **options)

    for probability, text in every_outcome(run):
        found[tuple(text[0, 5:].tolist())] += probability
        accepted += sum(drafter.last_stats.accepted)
    assert accepted and dict(found) == pytest.approx(expected, abs=1e-5)


# Ends


@pytest.mark.parametrize("length", range(1, 8))
def test_a_grammars_end_ends_the_text_inside_a_block(length):
    target, ids = target_of(), prompt(9)
    word = [20 + token for token in range(length)]
    table, options = a_word(word, 1), {"eos_token_id": 1}
    expected = written(target, ids, table, **options)
    assert expected[0, 9:].tolist() == [*word, 1]
    right = torch.cat([expected[0], torch.tensor([1, 1, 1])])  # a drafter that goes on behind the end
    for kind in (RandomChains, RandomTrees):
        drafter = kind(target, [right], most=14, depth=9)
        assert torch.equal(written(target, ids, table, assistant_model=drafter, **options), expected)


def reasoning(budget=None, grammar=None, end=50):
    return AfterReasoning(grammar or random_table(3), end, budget=budget)


@pytest.mark.parametrize("budget", range(8))
@pytest.mark.parametrize("kind", [RandomChains, RandomTrees])
def test_a_budget_of_thinking_ends_it_at_the_very_next_token(budget, kind):
    """Wherever in a block that is; the grammar begins behind the end, which may be several tokens."""
    target, ids = target_of(), prompt(9)
    for end in (50, [50, 51, 50]):
        ends = [end] if end == 50 else end
        expected = written(target, ids, reasoning(budget, end=end))
        free = target.generate(ids, max_new_tokens=24, **GREEDILY)[0, 9:].tolist()
        text = expected[0, 9:].tolist()
        assert 50 not in free[:budget]
        assert text[:budget] == free[:budget] and text[budget : budget + len(ends)] == ends
        assert random_table(3).allows(text[budget + len(ends) :])
        drafter = kind(target, [expected[0]], seed=budget, depth=9)
        assert torch.equal(written(target, ids, reasoning(budget, end=end), assistant_model=drafter), expected)


@pytest.mark.parametrize("at", range(6))
def test_a_grammar_begins_where_the_reasoning_ends_by_itself(at):
    """By a token, or by a text that ends in the middle of one."""
    target, ids = target_of(), prompt(9)
    free = target.generate(ids, max_new_tokens=24, **GREEDILY)[0, 9:].tolist()
    first = free.index(free[at])
    by_token = reasoning(end=free[at], budget=20)
    by_text = AfterReasoning(random_table(3), "".join(chr(65 + t) for t in free[first : first + 2]), letters())
    for state, thought in ((by_token, first + 1), (by_text, first + 2)):
        expected = written(target, ids, state)
        text = expected[0, 9:].tolist()
        assert text[:thought] == free[:thought] and random_table(3).allows(text[thought:])
        assert text[thought:] != free[thought:]
        for kind in (RandomChains, RandomTrees):
            drafter = kind(target, [expected[0]], seed=at, depth=9)
            assert torch.equal(written(target, ids, state, assistant_model=drafter), expected)


def test_a_text_ends_the_reasoning_however_it_is_spelled():
    """Pairs of letters are tokens, too, and the end may stand in the middle of one."""
    tokenizer = letters(pairs=True)
    spell = {tokenizer.decode([token]): token for token in range(len(tokenizer))}
    for pieces, is_over in ((["B", "C", "D"], True), (["BC", "D"], True), (["AB", "CD"], True), (["AB", "C"], False),
                            (["AB", "C", "DE"], True), (["C", "D"], False)):  # fmt: skip
        state = AfterReasoning(Table([{1: 0}]), "BCD", tokenizer).fork()
        for piece in pieces:
            state.advance(spell[piece])
        assert (state.allowed(len(tokenizer)) is not None) is is_over


class LowerCasing:
    """A tokenizer that writes a text otherwise than it was."""

    def encode(self, text, **options):
        return [ord(letter.lower()) - 97 for letter in text]

    def decode(self, tokens):
        return "".join(chr(97 + token) for token in tokens)


def test_a_budget_ends_the_reasoning_where_nobody_finds_its_end():
    """Behind the tokens of the end, whatever they are decoded to. Any token is an end, the first one, too."""
    table = Table([{1: 0}])
    for end, tokens in ((0, [0]), ([3, 0], [3, 0]), ("BAD", [1, 0, 3])):
        state = AfterReasoning(table, end, LowerCasing() if isinstance(end, str) else None, budget=2).fork()
        for token in (9, 9):
            assert state.allowed(64) is None
            state.advance(token)
        for token in (*tokens, 1):
            assert state.allowed(64).nonzero().flatten().tolist() == [token]
            state.advance(token)


# What the grammar leaves no choice in


def test_what_must_follow_is_known():
    """A token that alone is allowed, and what the state says of others, as far as it is allowed."""
    moves = [{20: 1, 21: 1}, {22: 2, 23: 2}, {24: 3}, {25: 4}, {1: 4}]
    for grammar, tokens in ((Table(moves), []), (Spelling(moves, {0: [21, 40]}), [(21, SPELLED)])):
        text = GrammarProcessor(grammar).begin(torch.tensor([5]), 0, 1, 64)
        assert text.likely_tokens(9, [1]) == tokens
        text.accept(20)
        text.accept(23)
        assert text.likely_tokens(9, [1]) == [(24, 1.0), (25, 1.0), (1, 1.0)]
        assert text.likely_tokens(2, [1]) == [(24, 1.0), (25, 1.0)]
        assert text.likely_tokens(9, [25]) == [(24, 1.0), (25, 1.0)]
        assert [text.count_allowed(path) for path in ([24, 25, 1, 1], [24, 26, 1], [25], [])] == [4, 1, 0, 0]
    behind = GrammarProcessor(AfterReasoning(Spelling(moves, {0: [21, 40]}), [7, 8], budget=2)).begin(
        torch.tensor([5]), 0, 1, 64
    )
    assert behind.likely_tokens(9, [1]) == []
    behind.accept(30)
    behind.accept(31)
    assert behind.likely_tokens(9, [1]) == [(7, 1.0), (8, 1.0), (21, SPELLED)]


def test_what_is_likely_behind_a_draft_is_drafted():
    """Of what the state says behind each path; what the target writes there is its own choice."""
    moves = [{20: 1, 21: 2}, {22: 3, 23: 3, 24: 3}, {22: 3, 23: 3}, {25: 3}]
    text = GrammarProcessor(Spelling(moves, {1: [24]})).begin(torch.tensor([5]), 0, 1, 64)
    sampler, logits = DraftSampler(LogitsProcessorList([text]), False, None), torch.arange(64.0).neg().expand(2, -1)
    for drafts, expected in (([[20], [21]], [24, 22]), ([[20, 24]], [25])):
        scores = sampler.scored_after(torch.tensor([[5]]), torch.tensor(drafts), logits[: len(drafts)])
        assert scores.argmax(-1).tolist() == expected
    text.accept(20)
    assert text(torch.tensor([[5, 20]]), logits[:1]).argmax() == 22


# A library's matcher


class Walker(Matcher):
    """Its text is all that it knows, and a 1 ends it."""

    def __init__(self):
        super().__init__(self)
        self.text, self.takes = [], 0

    def rollback(self, count):
        assert 0 < count <= len(self.text)
        del self.text[-count:]

    def has_ended(self):
        return self.text[-1:] == [1]

    def take(self, token):
        self.text.append(token)
        self.takes += 1
        return True


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 99), st.integers(1, 3)), max_size=30), st.randoms(use_true_random=False))
def test_a_matcher_takes_only_what_its_path_does_not_share_with_the_next(grown, chance):
    """Of any two, and what follows an end never."""
    steps, matcher = {(): None}, Walker()
    for parent, token in grown:
        path = sorted(steps)[parent % len(steps)]
        steps.setdefault((*path, token), Step(steps[path], token))
    for path in chance.choices(sorted(steps), k=20):
        text, before, takes = [*path][: [*path, 1].index(1) + 1], matcher.text[:], matcher.takes
        shared = next((k for k, (one, other) in enumerate(zip(text, before)) if one != other), len(before))
        matcher.go_to(steps[path])
        assert matcher.text == text and matcher.takes - takes == max(0, len(text) - shared)


# Calls after calls


class Breaks:
    """A streamer that raises in the middle of a round."""

    def __init__(self, at):
        self.at, self.seen = at, []

    def put(self, value):
        self.seen += value.flatten().tolist()
        if len(self.seen) >= self.at:
            raise KeyboardInterrupt

    def end(self):
        pass


@pytest.mark.parametrize("at", range(10, 20))
def test_a_text_goes_on_in_its_grammar(at):
    """After an error of the caller's, and after a call for fewer tokens; any other prompt begins it anew."""
    target, ids, table = target_of(), prompt(9), random_table(1)
    expected = written(target, ids, table)
    drafter = RandomChains(target, [expected[0]], depth=9)
    for assistant in (None, drafter):
        processor = GrammarProcessor(table)
        options = dict(logits_processor=[processor], assistant_model=assistant, **GREEDILY)
        streamer = Breaks(at)
        with pytest.raises(KeyboardInterrupt):
            target.generate(ids, streamer=streamer, max_new_tokens=24, **options)
        text = torch.tensor([streamer.seen])
        assert torch.equal(text, expected[:, : text.shape[1]])
        for _ in range(3):
            text = target.generate(text, max_new_tokens=3, **options)
        assert torch.equal(text, expected[:, : text.shape[1]])
        assert torch.equal(target.generate(ids, max_new_tokens=24, **options), expected)
        other = prompt(7, seed=8)
        anew = target.generate(other, max_new_tokens=24, **options)
        assert torch.equal(anew, written(target, other, table))


def test_a_text_goes_on_in_its_grammar_and_its_cache():
    target, ids, table = target_of(), prompt(9), random_table(2)
    expected = written(target, ids, table)
    drafter = tiny_drafter(target)
    drafter.bind(target)
    options = dict(logits_processor=[GrammarProcessor(table)], assistant_model=drafter, max_new_tokens=8, **GREEDILY)
    cache, text = DynamicCache(config=target.config), ids
    for _ in range(3):
        text = target.generate(text, **{CACHE: cache}, **options)
    assert torch.equal(text, expected)


def test_what_is_kept_of_texts_does_not_grow():
    """Neither states nor masks: a processor keeps its last texts, and each of them one place."""
    target, processor = target_of(), GrammarProcessor(random_table(1))
    for seed in range(6):
        for assistant in (None, RandomTrees(target, [])):
            target.generate(
                prompt(9, seed=seed), logits_processor=[processor], assistant_model=assistant, max_new_tokens=40,
                **GREEDILY,
            )  # fmt: skip
    gc.collect()
    assert sum(isinstance(each, Place) for each in gc.get_objects()) < 300


def test_a_prompt_is_another_one_where_the_grammar_does_not_allow_its_last_token():
    """As one that is an earlier prompt, or what was written after it, and one token more."""
    target, ids, table = target_of(), prompt(9), random_table(1)
    drafter = RandomChains(target, [], depth=9)
    for assistant in (None, drafter):
        processor = GrammarProcessor(table)
        options = dict(logits_processor=[processor], assistant_model=assistant, max_new_tokens=9, **GREEDILY)
        text = target.generate(ids, **options)
        for before in (ids, text):
            state = table.fork()
            for token in before[0, 9:].tolist():
                state.advance(token)
            wrong = next(token for token in range(2, 64) if token not in table.moves[state.state])
            longer = torch.cat([before, torch.tensor([[wrong]])], 1)
            expected = target.generate(
                longer, logits_processor=[Masking(table, longer.shape[1])], max_new_tokens=9, **GREEDILY
            )
            assert torch.equal(target.generate(longer, **options), expected)


def test_a_prompt_with_one_token_more_than_was_written_is_another_one():
    """Also where the grammar allows that token: with a drafter it is known what was written."""
    target, ids, table = target_of(), prompt(9), random_table(1)
    processor = GrammarProcessor(table)
    options = dict(assistant_model=RandomChains(target, [], depth=9), max_new_tokens=9, **GREEDILY)
    text = target.generate(ids, logits_processor=[processor], **options)
    state = table.fork()
    for token in text[0, 9:].tolist():
        state.advance(token)
    longer = torch.cat([text, torch.tensor([list(table.moves[state.state])[:1]])], 1)
    expected = written(target, longer, table, 9)
    assert torch.equal(target.generate(longer, logits_processor=[processor], **options), expected)


def test_texts_that_begin_alike_have_places_of_their_own():
    """Else a library's matcher would go from one to the other and back with each token."""
    processor, ids = GrammarProcessor(random_table(1)), torch.tensor([5, 6])
    one, other = (processor.begin(ids, row, 2, 64) for row in range(2))
    assert one.place is not other.place and one.place.state is not other.place.state


class Slow(Matcher):
    """Lets another thread run between going to a path and asking there."""

    def __init__(self):
        super().__init__(self)
        self.path = []

    def has_ended(self):
        return False

    def take(self, token):
        self.path.append(token)
        return True

    def rollback(self, count):
        del self.path[-count:]

    def allowed(self, vocab_size):
        time.sleep(0.02)
        return torch.arange(vocab_size) == self.path[-1]


def test_threads_that_go_on_with_one_text_do_not_move_each_others_matcher():
    text = MatcherState(Slow).fork()
    states = [text.fork() for _ in range(4)]
    for token, state in enumerate(states):
        state.advance(token)
    with ThreadPoolExecutor(4) as pool:
        masks = list(pool.map(lambda state: state.allowed(64), states))
    assert [mask.nonzero().tolist() for mask in masks] == [[[token]] for token in range(4)]


def test_a_grammar_without_a_way_on_is_named():
    target, ids = target_of(), prompt(9)
    with pytest.raises(ValueError, match=r"allows no token behind the token 21, .*`eos_token_id`"):
        written(target, ids, Table([{20: 1}, {21: 2}, {}]), assistant_model=RandomChains(target, []))


# Others beside it


def test_other_processors_stay_in_their_order():
    """Before the grammar and behind it; one that forbids all that the grammar allows is named."""
    target, ids, table = target_of(), prompt(9), random_table(1, forced=0)
    before = SuppressTokensLogitsProcessor(list(range(0, 64, 2)))
    options = dict(max_new_tokens=20, repetition_penalty=1.4, temperature=0.8, do_sample=True, top_k=1, pad_token_id=0)
    wide = Table([{token: (token % 3) for token in range(start, 64, 3)} for start in range(3)])
    expected = target.generate(ids, logits_processor=[before, Masking(wide, 9)], **options)
    processors = [before, GrammarProcessor(wide)]
    assert torch.equal(target.generate(ids, logits_processor=processors, **options), expected)
    drafter = tiny_drafter(target)
    drafter.bind(target)
    drafted = target.generate(ids, logits_processor=processors, assistant_model=drafter, **options)
    assert torch.equal(drafted, expected)
    nothing = SuppressTokensLogitsProcessor(list(table.moves[0]))
    with pytest.raises(ValueError, match="another logits processor forbids"):
        target.generate(
            ids, logits_processor=[nothing, GrammarProcessor(table)], assistant_model=drafter, max_new_tokens=5,
            **GREEDILY,
        )  # fmt: skip
