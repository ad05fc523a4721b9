"""Whatever a caller does with a cache between our calls, the next call writes stock's text or refuses in words."""

import copy
import pickle
import random

import pytest
import torch
from transformers import DynamicCache, StaticCache

from hf_hyperdflash import PromptLookupDrafter, bind, unbind
from hf_hyperdflash.targets.caches.name import CACHE, cache_of

from ..conftest import prompt
from ..helpers import families
from ..helpers.refusals import Refusal
from ..helpers.tree_drafters import RandomChains, RandomTrees

FAMILIES = [
    families.deepseek_v4, families.hunyuan_v4, families.glm5_next, families.qwen3, families.qwen3_next,
    families.mistral, families.gemma2, families.gemma3, families.gpt_oss, families.bamba, families.falcon_h1,
    families.nemotron_h, *[families.qwen4_exp] * families.REWINDABLE_QWEN4,
]  # fmt: skip


class Conversation:
    """A text that grows, the cache of all but its last token, and stock's text of the whole as the oracle.

    Args:
        family: Makes the target.
        seed: Of what is done.
        is_static: Whether its cache is a static one.
    """

    def __init__(self, family, seed, is_static=False):
        self.chance = random.Random(seed)
        self.target = bind(family().eval())
        self.stock = unbind(copy.deepcopy(self.target))
        config = self.target.config.get_text_config(decoder=True)
        self.ids, self.cache = prompt(6, seed), DynamicCache(config=config)
        if is_static:
            self.cache = StaticCache(config=config, max_cache_len=160)
        self.kinds = list(map(type, self.cache.layers)) if is_static else None
        self.done = []

    # Calls of ours

    def call(self, drafter=None):
        """A turn, of which the text is compared."""
        self.said()
        count = self.chance.randint(1, 6)
        expected = self.stock.generate(self.ids, attention_mask=torch.ones_like(self.ids), do_sample=False,
                                       max_new_tokens=count)  # fmt: skip
        if drafter in (RandomTrees, RandomChains):
            drafter = drafter(self.target, [expected[0]], seed=self.chance.randrange(99))
        out = self.target.generate(
            self.ids, attention_mask=torch.ones_like(self.ids), **{CACHE: self.cache}, do_sample=False,
            max_new_tokens=count, assistant_model=drafter, return_dict_in_generate=True,
        )  # fmt: skip
        assert torch.equal(out.sequences, expected), self.done
        self.ids, self.cache = out.sequences, cache_of(out)
        # Static layers are left as they were made, so that anything may follow.
        assert self.kinds is None or list(map(type, self.cache.layers)) == self.kinds
        assert int(self.cache.get_seq_length()) == self.ids.shape[1] - 1

    def trees(self):
        self.call(RandomTrees)

    def chains(self):
        self.call(RandomChains)

    def lookup(self):
        self.call(PromptLookupDrafter(self.target))

    def plain(self):
        self.call()

    # What a caller does in between

    def said(self):
        """A new turn of the user's."""
        self.ids = torch.cat([self.ids, prompt(self.chance.randint(1, 4), self.chance.randrange(999))], dim=1)

    def own_forward(self, model=None):
        """Over all that is new but a token, as over a tool's output."""
        self.said()
        self.forward(model or self.target, self.cache.get_seq_length(), self.ids.shape[1] - 1)

    def own_forwards_token_by_token(self):
        self.said()
        for place in range(self.cache.get_seq_length(), self.ids.shape[1] - 1):
            self.forward(self.target, place, place + 1)

    def forward(self, model, start, end):
        if start < end:
            with torch.no_grad():  # positions are given: stock Bamba counts those of every forward from 0
                model(self.ids[:, start:end], **{CACHE: self.cache}, position_ids=torch.arange(start, end)[None])

    def unbound_forward(self):
        self.own_forward(self.stock)

    def unbound_generate(self):
        self.said()
        out = self.stock.generate(
            self.ids, attention_mask=torch.ones_like(self.ids), **{CACHE: self.cache}, do_sample=False,
            max_new_tokens=self.chance.randint(1, 9), return_dict_in_generate=True,
        )  # fmt: skip
        self.ids, self.cache = out.sequences, cache_of(out)

    def crop(self):
        if self.cache.get_seq_length() > 4:
            self.cache.crop(-self.chance.randint(1, 3))

    def crop_nothing(self):
        self.cache.crop(0)

    def record(self):
        self.cache.activate_past_recording()

    def repeat_and_select(self):
        self.cache.batch_repeat_interleave(3)
        self.cache.batch_select_indices(torch.tensor([self.chance.randrange(3)]))

    def reorder(self):
        self.cache.reorder_cache(torch.tensor([0]))

    def deepcopied(self):
        self.cache = copy.deepcopy(self.cache)

    def pickled(self):
        self.cache = pickle.loads(pickle.dumps(self.cache))

    def rebind(self):
        unbind(self.target)
        if self.chance.random() < 0.5:
            self.own_forward()
        bind(self.target)

    def other_target(self):
        """Of the same weights."""
        self.target = bind(copy.deepcopy(self.stock))


CALLS = ["trees", "chains", "lookup", "plain"]
BETWEEN = [
    "own_forward", "own_forwards_token_by_token", "unbound_forward", "unbound_generate", "crop", "crop_nothing",
    "record", "repeat_and_select", "reorder", "deepcopied", "pickled", "rebind", "other_target",
]  # fmt: skip
OF_DYNAMIC = {"crop", "crop_nothing", "record", "repeat_and_select", "reorder"}  # caches alone


def carry_out(conversation, acts):
    """All acts, up to one that the cache itself refuses, as a crop of what nothing recorded, or that a call of ours
    refuses in words after a crop."""
    for act in acts:
        conversation.done.append(act)
        try:
            getattr(conversation, act)()
        except (RuntimeError, AttributeError) as error:  # transformers' linear layers know nothing of a batch
            of_cache = {"crop", "crop_nothing", "repeat_and_select"}
            assert act in of_cache and "size of tensor" not in str(error), (conversation.done, error)
            return
        except ValueError as error:
            assert "crop" in conversation.done and "Start from a new cache" in str(error), (conversation.done, error)
            return


@pytest.mark.parametrize("act", BETWEEN)
@pytest.mark.parametrize("family", FAMILIES)
def test_an_act_between_two_calls(family, act):
    """Then plain, and with drafts again."""
    carry_out(Conversation(family, 0), ["trees", act, "plain", "own_forward", act, "chains"])


@pytest.mark.parametrize("family", FAMILIES)
def test_any_acts_between_any_calls(family):
    for seed in range(3):
        conversation = Conversation(family, seed)
        acts = [conversation.chance.choice(CALLS + BETWEEN) for _ in range(8)]
        carry_out(conversation, [*acts, conversation.chance.choice(CALLS)])


@pytest.mark.parametrize("act", [act for act in BETWEEN if act not in OF_DYNAMIC])
@pytest.mark.parametrize("family", [families.qwen3, families.mistral, families.gemma3])
def test_an_act_between_two_calls_on_a_static_cache(family, act):
    carry_out(Conversation(family, 0, is_static=True), ["trees", act, "plain", "trees", "own_forward", act, "chains"])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cache_of_several_texts_is_refused_until_one_is_selected(family):
    conversation = Conversation(family, 0)
    conversation.chains()
    conversation.cache.batch_repeat_interleave(2)
    Refusal(conversation.lookup, ("2 texts", "`input_ids`", "batch_select_indices")).check()
    conversation.cache.batch_select_indices(torch.tensor([1]))
    conversation.trees()


def test_keys_that_a_crop_lost_are_missed():
    """Of a window that stock crops twice, or without a record."""
    conversation = Conversation(families.mistral, 0)
    conversation.unbound_generate()
    conversation.unbound_generate()
    conversation.cache.activate_past_recording()
    conversation.cache.crop(-2)
    for act in (conversation.chains, conversation.plain):
        Refusal(act, ("5 keys", "layer 0", "the last 7")).check()
