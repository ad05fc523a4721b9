"""Norms, attention of blocks through every implementation that runs here, the context's cache."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from hf_hyperdflash.drafters.parts.block_attention import AttentionSpan
from hf_hyperdflash.drafters.parts.layers import ContextCache, DrafterRMSNorm
from hf_hyperdflash.training.data.blocks import block_mask

from ..conftest import tiny_drafter
from ..helpers.refusals import Refusal


def blocks(window=None):
    """Two blocks of a row, as training lays them: embeddings, positions, mask, residual and its positions."""
    torch.manual_seed(0)
    anchors, everywhere = torch.tensor([[3, 17]]), torch.arange(24)[None]
    positions = (anchors.unsqueeze(-1) + torch.arange(7)).flatten(1)
    mask = block_mask(anchors, everywhere, 7, AttentionSpan(window))
    return torch.randn(1, 14, 32), positions, None, mask, torch.randn(1, 24, 4, 32), everywhere


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_is_qwen3s(dtype):
    torch.manual_seed(0)
    own, stock = DrafterRMSNorm(48, eps=1e-3).to(dtype), Qwen3RMSNorm(48, eps=1e-3).to(dtype)
    own.weight.data.copy_(stock.weight.data.uniform_(-2, 2))
    hidden = torch.randn(2, 3, 5, 48).to(dtype)
    read = [hidden.clone().requires_grad_() for _ in range(2)]
    found, expected = (norm(x) for norm, x in zip((own, stock), read))
    assert found.dtype == dtype and torch.equal(found, expected)
    for out in (found, expected):
        out.float().square().sum().backward()
    torch.testing.assert_close(read[0].grad, read[1].grad)
    torch.testing.assert_close(own.weight.grad, stock.weight.grad)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("implementation", ["eager", "flex_attention"])
def test_implementations_agree(target, implementation, window):
    drafter = tiny_drafter(target, num_attention_heads=4, num_key_value_heads=2, head_dim=16, sliding_window=window)
    has_gradient, found = implementation != "flex_attention", []  # it has none on a CPU
    for each in ("sdpa", implementation):
        drafter.set_attn_implementation(each)
        drafter.zero_grad()
        # To compile it takes most of a minute.
        with torch.compiler.set_stance("force_eager"), torch.set_grad_enabled(has_gradient):
            found.append(drafter(*blocks(window)))
        if has_gradient:
            found[-1].square().sum().backward()
            found.append(torch.cat([p.grad.flatten() for p in drafter.parameters() if p.grad is not None]))
    for one, other in zip(found, found[len(found) // 2 :]):
        torch.testing.assert_close(other, one, atol=1e-4, rtol=1e-3)


def test_an_implementation_that_cannot_mask_blocks_is_refused(target):
    drafter = tiny_drafter(target)
    drafter.config._attn_implementation = "flash_attention_2"  # which is not installed here
    Refusal(lambda: drafter(*blocks()), ("'flash_attention_2'", "mask")).check()


STEPS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 7), st.booleans()), min_size=1, max_size=12)


@settings(deadline=None, max_examples=100)
@given(STEPS, st.sampled_from([(None, None), (1, 1), (4, 4), (30, 30), (4, None), (7, 2)]))
def test_a_context_is_its_accepted_tokens_whatever_blocks_come_between(steps, windows):
    """Against a list: tokens that are new go in, a block's are seen and overwritten, old ones leave the window of each
    layer, and all of them the buffer."""
    config = type("Config", (), dict(num_hidden_layers=2, num_key_value_heads=1, head_dim=2))
    context, accepted, number = ContextCache([AttentionSpan(window) for window in windows]), [], 0
    longest = None if None in windows else max(windows)

    def rows(values):
        return torch.tensor(values, dtype=torch.float).view(1, 1, -1, 1).expand(1, 1, -1, 2)

    for new, queries, is_kept in steps:
        tokens = list(range(number, number + new + queries))
        number += new + queries
        context.make_room(len(tokens), torch.zeros(1, 0), config)
        for layer, window in enumerate(windows):
            seen = [*accepted, *tokens[:new]]
            seen = seen[-window:] if window else seen
            assert context.visible(layer, new) == len(seen)
            keys, values = context.layer(layer, new)(rows(tokens) + 100 * layer, -rows(tokens))
            assert keys[0, 0, :, 0].tolist() == [token + 100 * layer for token in [*seen, *tokens[new:]]]
            assert values[0, 0, :, 1].tolist() == [-token for token in [*seen, *tokens[new:]]]
        if is_kept:  # else the forward was interrupted before its end
            context.advance(new)
            accepted += tokens[:new]
        visible = accepted[-longest:] if longest else accepted
        assert len(context) == len(visible)
        held = [keys[0, 0, :, 1].tolist() for keys, _ in context.layers]
        assert held == [[token + 100 * layer for token in visible] for layer in range(2)]


def test_a_fresh_convolution_changes_nothing(target):
    plain, convolved = tiny_drafter(target), tiny_drafter(target, conv_kernel_size=3, conv_group_size=8)
    missing, _ = convolved.load_state_dict(plain.state_dict(), strict=False)
    assert len(missing) == 2 * 2 * 2  # of both sublayers in both layers
    with torch.no_grad():
        torch.testing.assert_close(convolved(*blocks()), plain(*blocks()), atol=1e-6, rtol=1e-6)
