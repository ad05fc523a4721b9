"""Rounds run in inference mode only where nobody gets hold of what they compute; else as if there were none."""

from __future__ import annotations

import pytest
import torch
from torch import distributed
from transformers import (
    DynamicCache,
    LogitsProcessor,
    StoppingCriteria,
)
from transformers.generation.streamers import BaseStreamer

from hf_hyperdflash import Observer, unbind
from hf_hyperdflash.targets.caches.name import CACHE, cache_of

from ..conftest import half_right, prompt, tiny_drafter
from ..helpers.families import FAMILIES, deepseek_v4_remote_code, llama, qwen3
from ..helpers.headed_drafters import headed


def modes_of_rounds(target, drafter, ids, **options):
    """Whether each round's forward ran in inference mode, the prompt's left out, and what was returned."""
    modes, forward = [], target.forward

    def listened(*args, **kwargs):
        modes.append(torch.is_inference_mode_enabled())
        assert not torch.is_grad_enabled()
        return forward(*args, **kwargs)

    target.forward = listened
    try:
        out = target.generate(ids, assistant_model=drafter, max_new_tokens=9, **options)
    finally:
        del target.forward
    assert not modes[0] and len(modes) > 1
    return set(modes[1:]), out


def bound_pair(made=qwen3):
    target = made().eval()
    drafter = half_right(target, prompt(9), max_new_tokens=9)
    drafter.bind(target)
    return target, drafter


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("options", [{}, {"tree_budget": 6}, {"do_sample": True}, {"num_assistant_tokens": "auto"}])
def test_rounds_that_leave_nothing_run_in_inference_mode(options, rows):
    target, drafter = bound_pair()
    if rows > 1:
        drafter = tiny_drafter(target)
    modes, out = modes_of_rounds(target, drafter, prompt(9).repeat(rows, 1), **options)
    assert modes == {True} and not out.is_inference()


class Listener(Observer):
    def add_round(self, *_):
        pass


class Quantized(torch.nn.Parameter):
    """Weights of a kind of their own, as quantized and spread ones are."""


def other_weights(norm):
    norm.weight = Quantized(norm.weight.detach())


LISTENS = {
    "a hook": lambda target, drafter: target.model.norm.register_forward_hook(lambda *_: None),
    "a hook before": lambda target, drafter: target.model.layers[1].register_forward_pre_hook(lambda *_: None),
    "an observer": lambda target, drafter: setattr(drafter, "observer", Listener()),
    "the target's weights": lambda target, drafter: other_weights(target.model.norm),
    "the drafter's weights": lambda target, drafter: other_weights(drafter.norm),
}


@pytest.mark.parametrize("happens", LISTENS.values(), ids=LISTENS)
def test_not_where_somebody_listens(happens):
    target, drafter = bound_pair()
    happens(target, drafter)
    assert modes_of_rounds(target, drafter, prompt(9))[0] == {False}


def test_not_in_remote_code():
    """It may keep tensors where it likes."""
    assert modes_of_rounds(*bound_pair(deepseek_v4_remote_code), prompt(9))[0] == {False}


def test_not_where_a_target_may_be_spread(tmp_path):
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        assert modes_of_rounds(*bound_pair(), prompt(9))[0] == {False}
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize("options", [{}, {"tree_budget": 6, "do_sample": True}], ids=["chain", "tree"])
def test_a_drafter_that_is_adapted_learns_from_such_rounds(options):
    """What it keeps of them is copied outside."""
    target = qwen3().eval()
    drafter = headed(target, "state")
    drafter.bind(target)
    with drafter.adapt(target, policy="always", every=1) as learning:
        for _ in range(6):
            assert modes_of_rounds(target, drafter, prompt(9), **options)[0] == {True}
        assert sum(decision.arm is not None for decision in learning.log) == 6
        row = learning.replay.rows[-1]
        assert not any(value.is_inference() for value in row.values())
    assert not any(value.is_inference() for value in drafter.parameters())


class Averages(LogitsProcessor):
    """Keeps what it sees, and is changed and learned from afterwards."""

    mean = 0.0

    def __call__(self, input_ids, scores):
        self.mean = 0.5 * self.mean + 0.5 * scores
        return scores


class Counts(StoppingCriteria):
    def __init__(self):
        self.count = None

    def __call__(self, input_ids, scores, **kwargs):
        self.count = torch.zeros_like(input_ids[:, 0]) if self.count is None else self.count + 1
        return torch.zeros(len(input_ids), dtype=torch.bool)


def test_not_where_the_caller_may_keep_what_is_computed():
    """Else a cache that goes on, or scores, could not take part in training; nor what a processor has seen."""
    target, drafter = bound_pair()
    processor, criterion, cache = Averages(), Counts(), DynamicCache(config=target.config)
    asked = [{"return_dict_in_generate": True}, {CACHE: cache}, {"logits_processor": [processor]}]
    for options in (*asked, {"stopping_criteria": [criterion]}):
        assert modes_of_rounds(target, drafter, prompt(9), **options)[0] == {False}
    kept = cache_of(modes_of_rounds(target, drafter, prompt(9), return_dict_in_generate=True)[1])
    assert not any(layer.keys.is_inference() for layer in (*cache.layers, *kept.layers))
    processor.mean.mul_(0.5)
    torch.nn.Linear(processor.mean.shape[-1], 1)(processor.mean).sum().backward()
    criterion.count.add_(1)
    assert modes_of_rounds(target, drafter, prompt(9), repetition_penalty=1.2)[0] == {True}  # transformers' own


@pytest.mark.parametrize(
    "made", [made for made in FAMILIES if made is not deepseek_v4_remote_code], ids=lambda made: made.__name__
)
@pytest.mark.parametrize("options", [{}, {"tree_budget": 6, "do_sample": True}], ids=["chain", "tree"])
def test_target_and_drafter_learn_afterwards(made, options):
    """What a forward might have kept would be of no use to autograd."""
    target = made().eval()
    check_that_they_learn(target, tiny_drafter(target), options)


def test_a_target_whose_frequencies_grow_with_the_text_learns_afterwards():
    """They are computed anew in the middle of a generation, and stay with the target."""
    target = llama().eval()
    config = target.config
    config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    config.max_position_embeddings = 16
    target = type(target)(config).eval()
    check_that_they_learn(target, tiny_drafter(target), {"max_new_tokens": 24})
    assert target.model.rotary_emb.max_seq_len_cached > 16


def check_that_they_learn(target, drafter, options):
    ids = prompt(9)
    drafter.bind(target)
    text = target.generate(ids, assistant_model=drafter, **{"max_new_tokens": 9, "do_sample": False, **options})
    unbind(target)
    logits = target(text).logits
    logits.float().logsumexp(-1).sum().backward()
    assert target.get_input_embeddings().weight.grad.abs().sum() > 0
    width = drafter.config.num_streams, drafter.config.target_hidden_size
    hidden = drafter(
        torch.zeros(1, drafter.config.block_size, width[1]), torch.arange(drafter.config.block_size)[None] + 3,
        residual=torch.ones(1, 3, *width), residual_position_ids=torch.arange(3)[None],
    )  # fmt: skip
    hidden.sum().backward()
    assert any(parameter.grad is not None for parameter in drafter.parameters())


class Kept(BaseStreamer):
    def __init__(self):
        self.tokens = []

    def put(self, value):
        assert not torch.is_inference_mode_enabled() and not torch.is_grad_enabled()
        self.tokens.append(value.flatten())

    def end(self):
        pass


def test_streamed_tokens_are_the_callers():
    target, drafter = bound_pair()
    streamer = Kept()
    modes, out = modes_of_rounds(target, drafter, prompt(9), streamer=streamer)
    assert modes == {True} and torch.equal(torch.cat(streamer.tokens), out[0])
    assert not any(tokens.is_inference() for tokens in streamer.tokens)
    table = torch.nn.Embedding(64, 4)
    table(streamer.tokens[-1]).sum().backward()
    assert table.weight.grad is not None
