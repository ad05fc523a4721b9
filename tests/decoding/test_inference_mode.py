"""Rounds run in inference mode only where nobody gets hold of what they compute; else as if there were none."""

from __future__ import annotations

import pytest
import torch
from torch import distributed
from transformers import DynamicCache
from transformers.generation.streamers import BaseStreamer

from hf_hyperdflash import Observer, unbind
from hf_hyperdflash.targets.caches.name import CACHE, cache_of

from ..conftest import half_right, prompt, tiny_drafter
from ..helpers.families import FAMILIES, LlamaForCausalLM, deepseek_v4_remote_code, llama, qwen3


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


WAYS = [
    {}, {"tree_budget": 6}, {"do_sample": True}, {"num_assistant_tokens": "auto"}, {"repetition_penalty": 1.2},
]  # fmt: skip


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("options", WAYS)
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


# Who may keep what is computed: what happened to target and drafter before the call, or what is passed with it. Else a
# cache that goes on, or scores, could not take part in training; nor what a processor has seen.
KEPT = {
    "a hook": lambda target, drafter: target.model.norm.register_forward_hook(lambda *_: None),
    "a hook before": lambda target, drafter: target.model.layers[1].register_forward_pre_hook(lambda *_: None),
    "an observer": lambda target, drafter: setattr(drafter, "observer", Listener()),
    "the target's weights": lambda target, drafter: other_weights(target.model.norm),
    "the drafter's weights": lambda target, drafter: other_weights(drafter.norm),
    "a dictionary": {"return_dict_in_generate": True},
    "a cache": {CACHE: DynamicCache()},
    "a processor": {"logits_processor": [lambda ids, scores: scores]},
    "a criterion": {"stopping_criteria": [lambda ids, scores, **_: torch.zeros(len(ids), dtype=torch.bool)]},
}


@pytest.mark.parametrize("kept", KEPT.values(), ids=KEPT)
def test_not_where_somebody_may_keep_what_is_computed(kept):
    target, drafter = bound_pair()
    options = kept if isinstance(kept, dict) else {}
    if not options:
        kept(target, drafter)
    modes, out = modes_of_rounds(target, drafter, prompt(9), **options)
    assert modes == {False}
    caches = [each for each in (options.get(CACHE), getattr(out, "keys", None) and cache_of(out)) if each is not None]
    assert not any(layer.keys.is_inference() for cache in caches for layer in cache.layers)


def test_not_in_remote_code():
    """It may keep tensors where it likes."""
    assert modes_of_rounds(*bound_pair(deepseek_v4_remote_code), prompt(9))[0] == {False}


def test_not_where_a_target_may_be_spread(tmp_path):
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        assert modes_of_rounds(*bound_pair(), prompt(9))[0] == {False}
    finally:
        distributed.destroy_process_group()


def frequencies_that_grow():
    """With the text: they are computed anew in the middle of a generation, and stay with the target."""
    config = llama().config
    config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    config.max_position_embeddings = 16
    return LlamaForCausalLM(config)


LEARN = [made for made in (*FAMILIES, frequencies_that_grow) if made is not deepseek_v4_remote_code]


@pytest.mark.parametrize("made", LEARN, ids=lambda made: made.__name__)
@pytest.mark.parametrize("options", [{"do_sample": False}, {"tree_budget": 6, "do_sample": True}])
def test_target_and_drafter_learn_afterwards(made, options):
    """What a forward might have kept would be of no use to autograd."""
    target = made().eval()
    drafter = tiny_drafter(target)
    drafter.bind(target)
    text = target.generate(prompt(9), assistant_model=drafter, max_new_tokens=12, **options)
    unbind(target)
    target(text).logits.float().logsumexp(-1).sum().backward()
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
