"""A conversation writes what each of its prompts gets alone, whatever they share, and runs only the rest."""

import copy
import random
import threading
from types import SimpleNamespace

import pytest
import torch

from hf_hyperdflash import Conversation, Lookup, PromptLookupDrafter, bind, unbind
from hf_hyperdflash.decoding import conversation as module
from hf_hyperdflash.decoding.request import CONTEXT
from hf_hyperdflash.decoding.stats import keep_trees

from ..conftest import prompt, tiny_drafter
from ..helpers import families
from ..helpers.refusals import Refusal
from ..helpers.tree_drafters import RandomChains, RandomTrees

WATCHED = [family for family in families.FAMILIES if family is not families.deepseek_v4_remote_code]
OF_FULL_ATTENTION = [families.qwen3, families.llama, families.deepseek_v3, families.hunyuan_v4]
ACTS = ["said", "same", "shorter", "edited", "unanswered", "reformatted", "cut", "other"]


def ones(ids):
    return torch.ones_like(ids)


class Turns:
    """Prompts that have some of the text before in common, each answered by a conversation and by stock.

    Args:
        family: Makes the target.
        seed: Of the prompts and of what drafts.
        options: Of the conversation.
    """

    def __init__(self, family, seed, **options):
        self.chance = random.Random(seed)
        self.target = bind(family().eval())
        self.stock = unbind(copy.deepcopy(self.target))
        self.conversation = Conversation(self.target, **options)
        self.drafter = self.chance.choice([RandomTrees, RandomChains])(self.target, [], seed=seed)
        self.ids = self.text = prompt(self.chance.randint(5, 60), seed)
        self.done, self.chunks = [], [None, 7]

    # Prompts

    def more(self):
        return prompt(self.chance.randint(1, 40), self.chance.randrange(999))

    def said(self):
        return torch.cat([self.text, self.more()], dim=1)

    def same(self):
        return self.ids

    def shorter(self):
        return self.text[:, : self.chance.randint(1, self.text.shape[1])]

    def edited(self):
        text = self.said()
        place = self.chance.randrange(text.shape[1])
        text[0, place] = (text[0, place] + 1) % 60 + 2
        return text

    def unanswered(self):
        return torch.cat([self.ids, self.more()], dim=1)

    def reformatted(self):
        return torch.cat([self.ids[:, : -self.chance.randint(1, 4)], self.more()], dim=1)

    def cut(self):
        kept = self.chance.randint(1, self.text.shape[1])
        return torch.cat([self.text[:, :kept], self.more()], dim=1)

    def other(self):
        return prompt(self.chance.randint(1, 60), self.chance.randrange(999))

    # Answers

    def turn(self, act, drafter="any", **options):
        self.done.append(act)
        before, self.ids = self.text[0].tolist(), getattr(self, act)().clone()
        count = self.chance.randint(1, 12)
        expected = self.stock.generate(self.ids, attention_mask=ones(self.ids), do_sample=False, max_new_tokens=count)
        self.drafter.texts.append(expected[0].tolist())
        if drafter == "any":
            drafter = self.chance.choice([self.drafter, self.drafter, None, PromptLookupDrafter(self.target)])
        chunk = self.chance.choice(self.chunks)
        out = self.conversation.generate(
            input_ids=self.ids, do_sample=False, max_new_tokens=count, assistant_model=drafter,
            prefill_chunk_size=chunk, **options,
        )  # fmt: skip
        assert torch.equal(out, expected), self.done
        self.text = out
        shared = module._shared(before, self.ids[0].tolist())
        assert 0 <= self.conversation.cached_tokens <= min(shared, self.ids.shape[1] - 1), self.done
        if drafter is self.drafter:
            self.check_context()
        return shared

    def check_context(self):
        """The drafter's context has each token of the text but the last, once, with the one that follows it."""
        context = getattr(self.conversation._cache, CONTEXT).context
        positions, following = (torch.cat(parts, dim=1)[0] for parts in list(zip(*context.seen))[1:])
        assert positions.tolist() == list(range(self.text.shape[1] - 1)), self.done
        assert torch.equal(following, self.text[0, 1:]), self.done
        assert sum(part.shape[1] for part, _, _ in context.seen) == len(positions), self.done


@pytest.mark.parametrize("family", WATCHED)
def test_any_prompts_in_any_order(family):
    turns = Turns(family, 0)
    for act in ["said", "unanswered", "said", *ACTS]:
        turns.turn(act)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(1, 10))
@pytest.mark.parametrize("family", WATCHED)
def test_any_prompts_in_any_order_by_chance(family, seed):
    turns = Turns(family, seed, max_copies=seed % 4)
    for _ in range(7):
        turns.turn(turns.chance.choice(ACTS))
        assert len(turns.conversation._kept) <= seed % 4


def rope(kind, **fields):
    """A target whose rotary frequencies change at 48 tokens: once, or with each from there on."""
    parameters = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, **fields}
    return lambda: families.made(
        "llama", **{**families.DENSE, "max_position_embeddings": 48}, rope_parameters=parameters
    )


LONG_ROPE = rope(
    "longrope", short_factor=[1.0] * 8, long_factor=[4.0] * 8, original_max_position_embeddings=48
)  # fmt: skip


@pytest.mark.parametrize("family", [rope("dynamic"), LONG_ROPE])
def test_prompts_of_any_length_where_rotary_frequencies_depend_on_it(family):
    for seed in range(3):
        turns = Turns(family, seed)
        turns.chunks = [None]  # in parts a prompt would have others
        for act in ["said", "said", "shorter", "unanswered", "said", "said", "cut", "reformatted"]:
            turns.turn(act)


def filled(family, drafter=None, length=80, **options):
    """A conversation after a prompt of 80 tokens and an answer of 20, and the text."""
    target = bind(family().eval())
    conversation = Conversation(target, None if drafter is None else drafter(target), **options)
    text = conversation.generate(prompt(length), do_sample=False, max_new_tokens=20)
    assert conversation.cached_tokens == 0 and conversation.length == text.shape[1] == length + 20
    return conversation, text


def asked(conversation, ids, **options):
    """How many tokens of a prompt are in the cache, whose answer is as long."""
    out = conversation.generate(ids, **{"do_sample": False, "max_new_tokens": 5, **options})
    expected = type(conversation.target).generate(
        conversation.target, ids, attention_mask=ones(ids), do_sample=False, max_new_tokens=5
    )
    assert torch.equal(out, expected)
    return conversation.cached_tokens


def with_turn(ids, count=40, seed=7):
    return torch.cat([ids, prompt(count, seed)], dim=1)


@pytest.mark.parametrize("family", WATCHED)
def test_how_much_is_kept_of_each_kind_of_cache(family):
    """All where the prompt goes on. Else all up to the difference where every token has its keys, and elsewhere up to
    the copy that was made 16 tokens before the prompt's end."""
    conversation, text = filled(family)
    assert asked(conversation, with_turn(text)) == 99
    assert asked(conversation, with_turn(text, seed=8)) >= 99  # where the last turn began is a copy, too
    keeps_all = not conversation._kept
    assert keeps_all == (family in [families.deepseek_v3, families.glm4_moe, families.hunyuan_v4,
                                    families.kimi_k25, families.minimax_m2, families.qwen3, families.llama,
                                    getattr(families, "hunyuan_v4_multimodal", None)])  # fmt: skip
    other = text.clone()
    other[0, 85:] = prompt(15, seed=9)
    assert asked(conversation, other) == (85 if keeps_all else 64)
    assert asked(conversation, text[:, :70]) == (69 if keeps_all else 64)
    assert asked(conversation, with_turn(text[:, :10])) == (10 if keeps_all else 0)
    assert asked(conversation, prompt(50, seed=3)) == 0


@pytest.mark.parametrize("family", [families.mistral, families.gemma3])
def test_within_a_window_a_cache_goes_back_anywhere(family):
    conversation = Conversation(family().eval())
    text = conversation.generate(prompt(4), do_sample=False, max_new_tokens=2)
    text[0, 3] = (text[0, 3] + 1) % 60 + 2
    assert asked(conversation, text) == 3 and not conversation._kept


@pytest.mark.parametrize("family", [families.qwen3, families.qwen3_next, families.mistral])
def test_a_prompt_is_run_in_parts_where_that_is_asked_for(family):
    conversation, text = filled(family, tiny_drafter)
    widths, options = [], dict(do_sample=False, max_new_tokens=5, num_assistant_tokens=4, prefill_chunk_size=7)
    layer = conversation._binding.target.layers[1]
    layer.register_forward_hook(lambda _, args, out: widths.append((out if torch.is_tensor(out) else out[0]).shape[1]))
    conversation.generate(with_turn(text), **options)
    assert max(widths) == 7 and widths.count(7) >= 3 and sum(widths) >= 41


@pytest.mark.parametrize("family", [families.qwen3_next, families.mistral, families.deepseek_v4])
def test_where_texts_have_differed_a_copy_is_made(family):
    """As behind the system prompt that several chats begin with: the second one is the last that runs it."""
    system, cached = prompt(64, seed=1), []
    conversation = Conversation(family().eval())
    for seed in range(3):
        cached.append(asked(conversation, with_turn(system, 60, seed + 11)))
    assert cached == [0, 0, 63]


def test_copies_are_few_spread_and_of_their_own_memory():
    conversation, text = filled(families.qwen3_next, max_copies=3)
    for seed in range(8):
        text = with_turn(text, 40, seed)
        asked(conversation, text)
    lengths = [kept.cache.length for kept in conversation._kept]
    assert len(lengths) == 3 and lengths[-1] == text.shape[1] - 16 and lengths[0] < text.shape[1] / 2
    states = [[layer.recurrent_states[0] for layer in kept.cache.layers.values()] for kept in conversation._kept]
    assert len({part.data_ptr() for parts in states for part in parts}) == 3 * len(states[0]) > 3
    assert all(set(kept.cache.layers) == {0, 2} for kept in conversation._kept)  # linear attention
    none, text = filled(families.qwen3_next, max_copies=0)
    assert asked(none, with_turn(text)) == 99 and asked(none, text) == 0 and not none._kept
    none.reset()
    assert none.length == none.cached_tokens == 0 and none._cache is None


@pytest.mark.parametrize("most", [1, 2, 4])
def test_of_too_many_copies_that_goes_whose_neighbours_are_nearest(most):
    """The last one stays, and of two near each other the earlier one alone is made."""
    chance, conversation = random.Random(most), Conversation(families.qwen3().eval(), max_copies=most)
    length, expected = 0, []
    for _ in range(40):
        length += chance.randint(1, 60)
        conversation._cache = SimpleNamespace(layers=[], get_seq_length=lambda length=length: length)
        conversation._keep(keeps_all=True)
        if length >= 16 + (expected[-1] if expected else 0):
            expected.append(length)
        if len(expected) > most:
            places = list(zip([0, *expected], expected, expected[1:]))
            expected.remove(min(places, key=lambda place: place[2] - place[0])[1])
        assert [kept.cache.length for kept in conversation._kept] == expected


def test_a_copy_of_a_long_text_is_no_larger_than_that_of_a_short_one():
    for family in (families.mistral, families.deepseek_v4, families.falcon_h1):
        sizes = []
        for length in (60, 240):
            conversation, _ = filled(family, length=length)
            layers = conversation._kept[-1].cache.layers.values()
            parts = [part for layer in layers for value in vars(layer).values()
                     for part in (value.values() if isinstance(value, dict) else [value])]  # fmt: skip
            sizes.append(sum(each.untyped_storage().nbytes() for each in parts if isinstance(each, torch.Tensor)))
        assert 0 < sizes[1] <= sizes[0] * 1.5


class StopsAt:
    def __init__(self, count, error):
        self.count, self.error = count, error

    def put(self, value):
        self.count -= 1
        if self.count < 0:
            raise self.error

    def end(self):
        pass


@pytest.mark.parametrize("error", [ConnectionError("closed"), KeyboardInterrupt()])
@pytest.mark.parametrize("is_drafted", [True, False])
@pytest.mark.parametrize("family", [families.qwen3, families.gemma3, families.qwen3_next, families.deepseek_v4])
def test_after_an_error_of_the_caller_the_conversation_goes_on(family, is_drafted, error):
    conversation, text = filled(family, tiny_drafter if is_drafted else None)
    for count in (0, 1, 4):
        text = with_turn(text, 40, count)
        with pytest.raises(type(error)):
            conversation.generate(text, do_sample=False, max_new_tokens=9, streamer=StopsAt(count, error))
        assert asked(conversation, text) >= (text.shape[1] - 17 if count else 99)
        assert asked(conversation, with_turn(text, 3)) >= text.shape[1] - 17


@pytest.mark.parametrize("family", [families.qwen3, families.gemma3, families.qwen3_next, families.deepseek_v4])
def test_after_an_error_among_copies_the_drafter_knows_the_text(family):
    """In rounds of copies alone it is given nothing; the next turn needs all."""
    conversation, text = filled(family, tiny_drafter)
    text = with_turn(text)
    expected = type(conversation.target).generate(
        conversation.target, text, attention_mask=ones(text), do_sample=False, max_new_tokens=40
    )
    options = dict(do_sample=False, max_new_tokens=40, lookup=Lookup(documents=[expected[0]]))
    for count in (4, 9, 20):
        with pytest.raises(ConnectionError):
            conversation.generate(text, streamer=StopsAt(count, ConnectionError()), **options)
        assert getattr(conversation._cache, CONTEXT).context.end == conversation._length == text.shape[1] + count - 1
        assert torch.equal(conversation.generate(text, **options), expected)
        assert conversation.cached_tokens >= text.shape[1] - 17 and conversation.drafter.last_stats.known_accepted


@pytest.mark.parametrize("family", [families.qwen3, families.gemma3, families.qwen3_next, families.deepseek_v4])
def test_after_an_interruption_inside_any_forward_the_text_is_right(family):
    for place in (1, 2, 3):
        for drafter in (None, tiny_drafter):
            conversation, text = filled(family, drafter)
            forwards = []

            def interrupt(*_, forwards=forwards, place=place):
                forwards.append(1)
                if len(forwards) == place:
                    raise KeyboardInterrupt

            handle = conversation._binding.target.layers[1].register_forward_hook(interrupt)
            with pytest.raises(KeyboardInterrupt):
                conversation.generate(with_turn(text), do_sample=False, max_new_tokens=9)
            handle.remove()
            asked(conversation, with_turn(text))
            assert asked(conversation, with_turn(with_turn(text))) > 100


def test_another_drafter_or_none_may_draft_each_turn():
    """What one has not seen is run again for it; one that reads no layer has seen all."""
    conversation, text = filled(families.qwen3)
    one, other = (tiny_drafter(conversation.target, num_hidden_layers=layers) for layers in (1, 2))
    found = []
    for drafter in (None, PromptLookupDrafter(conversation.target), one, one, None, one, other):
        text = with_turn(conversation.generate(text, do_sample=False, max_new_tokens=5, assistant_model=drafter))
        found.append(conversation.cached_tokens)
    assert found == [99, 104, 0, 194, 239, 239, 0]  # the sixth goes back to where that drafter has read


@pytest.mark.parametrize("family", [families.qwen3, families.gemma3, families.qwen3_next])
def test_a_drafter_with_a_window_drafts_as_from_the_whole_text(family):
    """Of a prompt's parts it is given as many of the last tokens as it sees, and knows that others are left out: also
    when a prompt goes back to a token that does not see what it was given alone."""
    conversation, text = filled(family, lambda target: tiny_drafter(target, sliding_window=24))
    text = with_turn(text, 60)
    for following in (text, *(with_turn(text[:, :kept], 20) for kept in (150, 135, 122))):
        found = []
        for generate in (conversation.target.generate, conversation.generate):
            with keep_trees():
                options = dict(do_sample=False, max_new_tokens=8, assistant_model=conversation.drafter)
                generate(following, attention_mask=ones(following), **options)
            found.append([kept.drafts.tokens.tolist() for kept in conversation.drafter.last_stats.trees])
        assert found[0] == found[1] and conversation.cached_tokens >= 64, following.shape


def test_a_target_that_was_unbound_meanwhile_is_bound_again():
    conversation, text = filled(families.qwen3, tiny_drafter)
    unbind(conversation.target)
    assert asked(conversation, with_turn(text)) == 99 and conversation.drafter.last_stats.rounds


def test_after_an_error_while_the_drafter_reads_it_reads_the_text_again(monkeypatch):
    """What it has read of a round in which that failed is not known."""
    conversation, text = filled(families.qwen3)
    drafter, calls = RandomTrees(conversation.target, []), []
    extend = drafter.extend

    def fails(*given):
        calls.append(given)
        extend(*given)
        if len(calls) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(drafter, "extend", fails)
    text = with_turn(text)
    options = dict(do_sample=False, max_new_tokens=12, assistant_model=drafter)
    with pytest.raises(KeyboardInterrupt):
        conversation.generate(text, **options)
    text = conversation.generate(with_turn(text, 9), **options)
    context = getattr(conversation._cache, CONTEXT).context
    positions, following = (torch.cat(parts, dim=1)[0] for parts in list(zip(*context.seen))[1:])
    assert positions.tolist() == list(range(text.shape[1] - 1)) and torch.equal(following, text[0, 1:])


@pytest.mark.parametrize("family", [families.qwen3, families.qwen3_next])
def test_a_refusal_leaves_the_conversation_as_it_is(family):
    conversation, text = filled(family, tiny_drafter)
    with pytest.raises(ValueError, match="-1"):
        conversation.generate(prompt(30, seed=3), tree_budget=-1)
    assert asked(conversation, with_turn(text)) == 99


def test_after_an_interruption_while_it_goes_back_nothing_is_kept(monkeypatch):
    conversation, text = filled(families.qwen3_next)

    def torn(cache, kept):
        cache.layers[1].crop(-60)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module, "restore", torn)
        conversation.generate(with_turn(text[:, :90]), do_sample=False, max_new_tokens=3)
    assert asked(conversation, with_turn(text[:, :90])) == 0


def test_one_call_at_a_time():
    conversation, text = filled(families.qwen3)
    seen = []

    class Streamer:
        def put(self, value):
            if not seen:
                seen.append(1)
                thread = threading.Thread(target=self.ask)
                thread.start()
                thread.join()

        def ask(self):
            Refusal(conversation.generate, ("another thread", "`Conversation` for each")).check(text)
            seen.append(2)

        def end(self):
            pass

    conversation.generate(with_turn(text), do_sample=False, max_new_tokens=3, streamer=Streamer())
    assert seen == [1, 2]


def test_a_caller_may_have_results_and_sample():
    conversation, text = filled(families.qwen3, tiny_drafter)
    options = dict(do_sample=True, max_new_tokens=5, return_dict_in_generate=True, output_scores=True)
    out = conversation.generate(input_ids=with_turn(text), attention_mask=ones(with_turn(text)), **options)
    assert len(out.scores) == out.sequences.shape[1] - 140 and conversation.cached_tokens == 99


def test_nothing_is_kept_across_the_length_at_which_rotary_frequencies_change():
    conversation = Conversation(LONG_ROPE().eval())
    text = conversation.generate(prompt(30), do_sample=False, max_new_tokens=5)
    found = [asked(conversation, ids) for ids in (with_turn(text, 8), with_turn(text), with_turn(text, 60), text)]
    assert found == [34, 0, 75, 0]


def test_a_target_with_a_cache_of_its_own_keeps_nothing():
    """Remote code's, in which nobody can look up what it holds."""
    conversation, text = filled(families.deepseek_v4_remote_code, tiny_drafter)
    assert [asked(conversation, with_turn(text)), asked(conversation, text[:, :50], assistant_model=None)] == [0, 0]
