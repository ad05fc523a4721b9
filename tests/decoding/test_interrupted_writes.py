"""Ctrl-C between any two writes to a cache: it is gone on from with the target's own text, or refused in words."""

import copy

import pytest
import torch

from hf_hyperdflash import bind
from hf_hyperdflash.drafters.without_weights.prompt_lookup import PromptLookupDrafter
from hf_hyperdflash.targets.caches.name import CACHE, cache_of
from hf_hyperdflash.targets.registry import target_of

from ..conftest import mostly_nightly, prompt
from ..helpers import families
from ..helpers.cache_writes import CacheWrites
from ..helpers.refusals import Refusal
from ..helpers.tree_drafters import RandomChains, RandomTrees

PROMPT, ROUND = 1, 2  # forwards of a turn


class Turn:
    """A second turn on a cache, which is interrupted.

    Args:
        family: Makes the target.
        kind: The drafter's class; `None` for a plain turn.
        cache: The cache's implementation.
    """

    def __init__(self, family, kind, cache="dynamic"):
        self.target, self.kind = bind(family().eval()), kind
        ids = prompt(13)
        self.text = self.target.generate(ids, do_sample=False, max_new_tokens=16)
        first = self.target.generate(
            ids, do_sample=False, max_new_tokens=4, return_dict_in_generate=True,
            assistant_model=PromptLookupDrafter(self.target), cache_implementation=cache,
        )  # fmt: skip
        self.left = cache_of(first)
        self.drafter = None if kind is None else kind(self.target, [self.text[0]])

    def go_on(self, cache, length, more, is_drafted=True):
        drafter = self.drafter if is_drafted else None
        ids = self.text[:, :length]
        # Without a mask a padding token that was written is hidden.
        given = {CACHE: cache, "attention_mask": torch.ones_like(ids)}
        return self.target.generate(ids, **given, do_sample=False, max_new_tokens=more, assistant_model=drafter)

    def writes(self, forward, inside=False):
        """What is written in a forward of the turn."""
        cache = copy.deepcopy(self.left)
        with CacheWrites(self.target, forward, inside=inside).of(cache) as writes:
            self.go_on(cache, 17, 8)
        return writes.seen

    def interrupted(self, forward, after, inside=False):
        """The cache after an interruption."""
        cache = copy.deepcopy(self.left)
        with (
            CacheWrites(self.target, forward, after, inside).of(cache),
            pytest.raises(KeyboardInterrupt),
        ):
            self.go_on(cache, 17, 8)
        return cache

    def assert_goes_on(self, cache, is_drafted):
        length = int(cache.get_seq_length())
        assert 17 <= length < 25
        assert torch.equal(self.go_on(cache, length + 1, 4, is_drafted), self.text[:, : length + 5])
        assert target_of(self.target).cached_lengths(cache) == {length + 4}

    def assert_refuses(self, cache, is_drafted):
        Refusal(self.go_on, ("interrupted", "Start from a new cache")).check(cache, 25, 4, is_drafted)


WATCHED = [family for family in families.FAMILIES if family is not families.deepseek_v4_remote_code]


@pytest.mark.parametrize("kind", mostly_nightly([RandomTrees, RandomChains]))
@pytest.mark.parametrize("family", WATCHED)
def test_a_round_that_is_interrupted_between_two_writes_is_taken_back(family, kind):
    turn = Turn(family, kind)
    writes = turn.writes(ROUND)
    assert len(writes) >= len(target_of(turn.target).layers) - 2  # an MLP or experts write nothing
    for after in range(1, len(writes) + 1):
        turn.assert_goes_on(turn.interrupted(ROUND, after), is_drafted=after % 2 == 0)


# Parts of a round's forward: where trees are verified row by row, or are made to be, and in static caches.
PARTS = [
    (families.deepseek_v4, "compressor.kv_norm", "dynamic"), (families.deepseek_v4, "indexer.kv_norm", "dynamic"),
    (families.deepseek_v4, "mlp", "dynamic"), (families.gemma3, "mlp", "dynamic"), (families.qwen3, "mlp", "dynamic"),
    (families.nemotron_h, "mixer", "dynamic"), (families.qwen3_next, "mlp", "dynamic"),
    *[(families.qwen4_exp, "indexer", "dynamic")] * families.REWINDABLE_QWEN4,
    (families.qwen3, "mlp", "static"), (families.gemma3, "mlp", "static"),
]  # fmt: skip


@pytest.mark.parametrize("kind", [RandomTrees, RandomChains])
@pytest.mark.parametrize(("family", "part", "cache"), PARTS)
def test_a_round_that_is_interrupted_in_any_part_is_taken_back(family, part, cache, kind, monkeypatch):
    """Also between a window of DeepSeek-V4's and its entry, and between an indexer's keys and its layer's."""
    turn = Turn(family, kind, cache)
    if cache == "dynamic":
        monkeypatch.setattr(type(target_of(turn.target)), "tree_verification", "fork")
    parts = [module for name, module in turn.target.named_modules() if name.endswith(part)]
    assert parts
    for module in parts:
        cache, forwards = copy.deepcopy(turn.left), []

        def interrupt(*_, forwards=forwards):
            if len(forwards) >= ROUND:
                raise KeyboardInterrupt

        handles = [
            module.register_forward_hook(interrupt),
            turn.target.register_forward_pre_hook(lambda *_, forwards=forwards: forwards.append(1)),
        ]
        with pytest.raises(KeyboardInterrupt):
            turn.go_on(cache, 17, 8)
        for handle in handles:
            handle.remove()
        turn.assert_goes_on(cache, is_drafted=True)
        assert len({layer.indexer_keys.shape[1] for layer in cache.layers if hasattr(layer, "indexer_keys")}) <= 1


# Where rounds have a cache of their own, a token counts when it is accepted: there is nothing to take back.
@pytest.mark.parametrize("family", [family for family in WATCHED if family not in families.MASKED])
def test_a_round_that_is_interrupted_inside_a_write_is_refused(family):
    turn = Turn(family, RandomChains)
    places = {name: place for place, name in enumerate(turn.writes(ROUND, inside=True), 1)}
    assert places
    for after in places.values():
        turn.assert_refuses(turn.interrupted(ROUND, after, inside=True), is_drafted=after % 2 == 0)


@pytest.mark.parametrize("kind", mostly_nightly([RandomChains, None]))
@pytest.mark.parametrize("family", WATCHED)
def test_a_forward_that_nothing_takes_back_is_refused(family, kind):
    """A prompt's, and all of plain decoding: also where no count of tokens tells."""
    turn = Turn(family, kind)
    for forward in (PROMPT, ROUND) if kind is None else (PROMPT,):
        for after in range(1, len(turn.writes(forward)) + 1):
            turn.assert_refuses(turn.interrupted(forward, after), is_drafted=after % 2 == 0)


@pytest.mark.parametrize("forward", [PROMPT, ROUND])
def test_a_cache_of_remote_code_is_refused_whenever_it_was_interrupted(forward):
    """Of its parts nothing is known."""
    turn = Turn(families.deepseek_v4_remote_code, RandomChains)
    layers, calls, cache = target_of(turn.target).layers, [], turn.left

    def interrupt(*_):
        calls.append(1)
        if len(calls) == forward:
            raise KeyboardInterrupt

    handle = layers[1].register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        turn.go_on(cache, 17, 8)
    handle.remove()
    turn.assert_refuses(cache, is_drafted=True)


def test_nobody_listens_after_an_interruption():
    turn = Turn(families.qwen3, RandomChains)
    for forward in (PROMPT, ROUND):
        turn.interrupted(forward, 1)
        binding = turn.target.hyperdflash_binding
        assert not binding.residual.captures and not binding.target.rounds
