"""Triton's kernels in its interpreter, against the modules' own forwards: `test_fused.py` runs this in a process."""

import pytest
import torch
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4HyperConnection,
    DeepseekV4RMSNorm,
    DeepseekV4UnweightedRMSNorm,
)

from hf_hyperdflash import PromptLookupDrafter, bind, unbind
from hf_hyperdflash.targets.fused import _kernels, hyper_connection, rms_norm

from ..conftest import prompt, tiny_config, tiny_target
from ..helpers.families import glm5_next
from .test_fused import GREEDY, logits_of, replaced, rugged


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("paths", "width"), [(4, 32), (2, 200), (4, 1500)])
@torch.no_grad()
def test_kernels_do_what_the_modules_do(paths, width, dtype):
    connection = DeepseekV4HyperConnection(tiny_config(hc_mult=paths, hidden_size=width, hc_sinkhorn_iters=20))
    rugged(connection)
    streams = torch.randn(2, 3, paths, width).to(dtype)
    step = 0.02 if dtype == torch.bfloat16 else 2e-6  # the interpreter cuts bfloat16 off
    for found, expected in zip(hyper_connection(connection, streams), connection(streams)):
        assert found.shape == expected.shape and found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, atol=step, rtol=step)
    norm, states = DeepseekV4RMSNorm(width), torch.randn(2, 3, 5, width).to(dtype).transpose(1, 2)
    torch.nn.init.normal_(norm.weight)
    for module in (norm, DeepseekV4UnweightedRMSNorm()):
        found, expected = rms_norm(module, states), module(states)
        assert found.shape == expected.shape
        torch.testing.assert_close(found.float(), expected.float(), atol=step, rtol=step)


@pytest.mark.parametrize("family", [tiny_target, glm5_next])
def test_text_with_kernels_is_the_targets(family):
    torch.manual_seed(0)
    target, ids = rugged(family().eval()), prompt(9)
    options = GREEDY | {"max_new_tokens": 8}  # the interpreter is slow
    logits, expected = logits_of(target, ids), target.generate(ids, **options)
    bind(target)
    assert not torch.equal(logits_of(target, ids), logits)
    torch.testing.assert_close(logits_of(target, ids), logits, atol=1e-4, rtol=0)
    drafter = PromptLookupDrafter(target)
    for way in ({}, {"assistant_model": drafter}):
        assert torch.equal(target.generate(ids, **options, **way), expected)
    unbind(target)
    assert torch.equal(logits_of(target, ids), logits) and not replaced(target)


@pytest.mark.parametrize("broken", ["differs", "fails"])
def test_a_kernel_that_does_not_work_is_not_used(monkeypatch, broken):
    target, ids = tiny_target(), prompt(9)
    expected = logits_of(target, ids)
    own = _kernels().rms_norm

    class Broken:
        def __getitem__(self, grid):
            def launch(states, weight, normed, *args, **kwargs):
                if broken == "fails":
                    raise RuntimeError("no compiler\nwas found")
                own[grid](states, weight, normed, *args, **kwargs)
                normed *= 1.1

            return launch

    monkeypatch.setattr(_kernels(), "rms_norm", Broken())
    bind(target)
    with pytest.warns(UserWarning, match="runs operation by operation"):
        torch.testing.assert_close(logits_of(target, ids), expected, atol=2e-5, rtol=0)  # others worked before it
    assert torch.equal(logits_of(target, ids), expected)
