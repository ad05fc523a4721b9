"""Fused modules: against the modules' own forwards, compiled on this CPU and in Triton's interpreter."""

import copy
import importlib.util
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from packaging.version import Version
from torch._dynamo.utils import counters
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperConnection, DeepseekV4RMSNorm

from hf_hyperdflash import PromptLookupDrafter, bind, load_target, unbind
from hf_hyperdflash.decoding.bind import BoundTarget
from hf_hyperdflash.targets.fused import FusedForward

from ..conftest import half_right_about, prompt, tiny_target
from ..helpers.refusals import Refusal

GREEDY = dict(do_sample=False, max_new_tokens=20)


def rugged(target):
    """With hyper-connections far from their initial values, which differ little from stream to stream."""
    for module in target.modules():
        if hasattr(module, "hc_sinkhorn_iters"):
            torch.nn.init.normal_(module.fn, std=0.3)
            torch.nn.init.normal_(module.base)
            torch.nn.init.normal_(module.scale)
    return target


@torch.no_grad()
def logits_of(target, ids):
    return target(ids).logits


def replaced(model):
    return [type(module).__name__ for module in model.modules() if isinstance(module.forward, FusedForward)]


@pytest.fixture(scope="module")
def compiled():
    """A bound target with compiled hyper-connections, and a copy that was never bound."""
    if Version(torch.__version__) < Version("2.9"):
        pytest.skip("this torch compiles no hyper-connection for any number of tokens, which `bind` says")
    torch.manual_seed(0)
    stock = rugged(tiny_target())
    return bind(copy.deepcopy(stock), fuse=True), stock


# Takes seconds: inductor compiles the hyper-connections for all tests of this file.
def test_logits_move_little_and_come_back(compiled):
    target, stock = compiled
    ids = prompt(40)
    expected, found = logits_of(stock, ids), logits_of(target, ids)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    assert not torch.equal(found, expected)  # a compiler rounds otherwise: it was one
    bind(target, fuse=False)
    assert torch.equal(logits_of(target, ids), expected)
    bind(target, fuse=True)
    assert torch.equal(logits_of(target, ids), found)
    copied = unbind(copy.deepcopy(target))
    assert torch.equal(logits_of(copied, ids), expected) and not replaced(copied)
    assert [set(vars(m)) for m in copied.modules()] == [set(vars(m)) for m in stock.modules()]


def test_plain_and_assisted_text_are_the_targets(compiled):
    target, stock = compiled
    for ids in (prompt(9), prompt(31)):
        expected = stock.generate(ids, **GREEDY)
        drafter = half_right_about(target, expected[0])
        assert torch.equal(target.generate(ids, **GREEDY), expected)
        for way in ({}, {"tree_budget": 9}, {"num_assistant_tokens": "auto"}):
            assert torch.equal(target.generate(ids, **GREEDY, assistant_model=drafter, **way), expected)
        assert torch.equal(target.generate(ids, **GREEDY, assistant_model=PromptLookupDrafter(target)), expected)


def test_nothing_compiles_again(compiled):
    """Over lengths, batches, modes and drafts: `bind` has compiled all there is."""
    target, _ = compiled
    with torch._dynamo.config.patch(error_on_recompile=True):
        graphs = counters["stats"]["unique_graphs"]
        for batch, length in ((1, 1), (1, 2), (1, 33), (3, 1), (2, 7)):
            logits_of(target, torch.randint(2, 64, (batch, length)))
            with torch.inference_mode():
                target(torch.randint(2, 64, (batch, length)))
        for length in (5, 12):
            target.generate(prompt(length), **GREEDY, assistant_model=PromptLookupDrafter(target))
            target.generate(prompt(length), do_sample=True, max_new_tokens=8, tree_budget=7)
        assert counters["stats"]["unique_graphs"] == graphs


def test_gradients_are_the_modules_own(compiled):
    target, stock = compiled
    ids, gradients = prompt(12), []
    for model in (target, stock):
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
    assert gradients[0] and all(map(torch.equal, *gradients))


def test_copies_pickles_and_checkpoints(compiled, tmp_path):
    target, stock = compiled
    ids = prompt(9)
    expected = logits_of(target, ids)
    for again in (copy.deepcopy(target), pickle.loads(pickle.dumps(target))):
        assert isinstance(again, BoundTarget) and replaced(again) == replaced(target)
        assert torch.equal(logits_of(again, ids), expected)
        inside = {id(module) for module in again.modules()}
        assert all(id(m.forward.module) in inside for m in again.modules() if isinstance(m.forward, FusedForward))
    target.save_pretrained(tmp_path)
    loaded = load_target(str(tmp_path), dtype=torch.float32)
    assert torch.equal(logits_of(loaded, ids), logits_of(stock, ids)) and not replaced(loaded)


def test_disable_compile_is_honoured_thread_by_thread(compiled):
    """One thread with its modules' own forwards, and one with compiled ones."""
    target, stock = compiled
    options = dict(GREEDY, output_logits=True, return_dict_in_generate=True)
    ids, found = prompt(9), {}
    expected = {True: stock.generate(ids, **options).logits, False: target.generate(ids, **options).logits}
    assert not all(map(torch.equal, *expected.values()))

    def write(is_disabled):
        written = [target.generate(ids, **options, disable_compile=is_disabled).logits for _ in range(3)]
        found[is_disabled] = all(all(map(torch.equal, logits, expected[is_disabled])) for logits in written)

    threads = [threading.Thread(target=write, args=(is_disabled,)) for is_disabled in (True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert found == {True: True, False: True}
    target.generation_config.disable_compile = True
    try:
        assert all(map(torch.equal, target.generate(ids, **options).logits, expected[True]))
    finally:
        target.generation_config.disable_compile = None
    assert not target.hyperdflash_binding.fusion.paused


def test_modules_that_a_user_compiles_share_a_graph():
    target, ids = bind(tiny_target()), prompt(9)
    expected, graphs = logits_of(target, ids), counters["stats"]["unique_graphs"]
    connections = [module for module in target.modules() if isinstance(module, DeepseekV4HyperConnection)]
    for module in connections:
        module.compile(backend="eager", fullgraph=True, dynamic=True)
    assert torch.equal(logits_of(target, ids), expected)
    assert counters["stats"]["unique_graphs"] == graphs + 1 < graphs + len(connections)


@pytest.mark.parametrize("is_bound_first", [True, False])
def test_beside_hooks_of_accelerate(is_bound_first, monkeypatch):
    from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_submodules

    class Counting(ModelHook):
        calls = 0

        def pre_forward(self, module, *args, **kwargs):
            Counting.calls += 1
            return args, kwargs

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    target, ids = rugged(tiny_target()), prompt(9)
    expected, norms = logits_of(target, ids), [m for m in target.modules() if isinstance(m, DeepseekV4RMSNorm)]
    bind(target) if is_bound_first else None
    for norm in norms:
        add_hook_to_module(norm, Counting())
    bind(target)
    assert len([m for m in norms if isinstance(m._old_forward, FusedForward)]) == len(norms)
    assert torch.equal(logits_of(target, ids), expected) and Counting.calls
    unbind(target)
    Counting.calls = 0
    assert torch.equal(logits_of(target, ids), expected) and Counting.calls and not replaced(target)
    remove_hook_from_submodules(target)
    assert torch.equal(logits_of(target, ids), expected)


def test_forwards_are_replaced_only_where_a_kernel_could_run(compiled, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert not replaced(bind(tiny_target()))
    assert set(replaced(compiled[0])) == {"DeepseekV4HyperConnection"}
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert {"DeepseekV4HyperConnection", "DeepseekV4RMSNorm"} < set(replaced(bind(tiny_target())))


def test_a_forward_that_somebody_replaced_is_left_alone(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    target = tiny_target()
    norm, calls = target.model.norm, []
    own = norm.forward
    norm.forward = replacing = lambda states: (calls.append(1), own(states))[1]
    bind(target)
    logits_of(target, prompt(5))
    assert calls == [1]
    assert unbind(target).model.norm.forward is replacing


def test_a_cpu_without_a_compiler_is_said_in_one_line():
    def bound():
        bind(target, fuse=True)

    target = tiny_target(hc_sinkhorn_iters=3)
    with torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",), "force_disable_caches": True}):
        Refusal(bound, ("`fuse`", "torch.compile", "install a C")).check()
    assert not isinstance(target, BoundTarget) and not replaced(target)


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="a CPU's torch has no Triton: pip install triton"
)
def test_kernels_in_tritons_interpreter():
    """Triton reads the variable when it is first imported."""
    file = Path(__file__).with_name("interpreted_kernels.py")
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", str(file)]
    said = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert said.returncode == 0, said.stdout[-3000:]
