"""The oracle held against transformers' Qwen3 and against itself; the package is not involved."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3Config, Qwen3Model

from ..conftest import prompt
from ..helpers import oracle_dflash as oracle
from ..helpers.families import qwen3

ROLES = dict(block_size=5, mask_token_id=63)


@pytest.fixture(scope="module")
def target():
    torch.manual_seed(0)
    return qwen3().eval()


@torch.no_grad()
def test_without_context_a_causal_body_is_transformers_qwen3(target, tmp_path):
    oracle.write_zlab(tmp_path, target, nested=True, layer_ids=[1], is_causal=True, **ROLES)
    drafter = oracle.read_zlab(tmp_path)
    stock = Qwen3Model(Qwen3Config.from_pretrained(tmp_path)).eval()
    names = stock.state_dict().keys() - {"embed_tokens.weight"}
    stock.load_state_dict({name: drafter.weights[name] for name in names}, strict=False)
    block = torch.randn(7, 64)
    ours = oracle.body(drafter, block, torch.empty(0, 64))
    torch.testing.assert_close(ours, stock(inputs_embeds=block[None]).last_hidden_state[0], atol=1e-5, rtol=1e-5)


def test_where_layouts_differ_drafts_do(target, tmp_path):
    """Layers one off, a block that is shorter, windows that are too narrow or causal, another embedding."""
    ids = prompt(11)

    def zlab(layer_ids, slots=5, **fields):
        oracle.write_zlab(tmp_path, target, nested=True, layer_ids=layer_ids, **ROLES, **fields)
        return oracle.zlab_logits(tmp_path, target, ids, 2, slots=slots)

    def speculators(**fields):
        oracle.write_speculators(tmp_path, target, layer_ids=[1, 3], **ROLES, **fields)
        return oracle.speculators_logits(tmp_path, target, ids, 2, slots=5)

    plain = zlab([0, 2])
    assert plain.shape == (2, 64) and plain.isfinite().all()
    wide = dict(sliding_window=10, sliding_window_non_causal=True)  # as long as the context
    for same in (speculators()[0], speculators(**wide)[0], zlab([0, 2], sliding_window=15, is_causal=False)):
        assert torch.equal(same, plain)
    narrow = {**wide, "sliding_window": 9}
    others = (zlab([1, 3]), zlab([0, 2], slots=3), zlab([0, 2], sliding_window=14, is_causal=False))
    for other in (*others, *(speculators(**each)[0] for each in (
        dict(verifier_weights="own"), dict(sliding_window=10), narrow, dict(sample_from_anchor=True)
    ))):  # fmt: skip
        assert not torch.allclose(other, plain, atol=1e-3)
    cut, kept = speculators(draft_vocab_size=20)
    assert torch.equal(kept, load_file(tmp_path / "model.safetensors")["t2d"].nonzero()[:, 0])
    torch.testing.assert_close(cut, plain[:, kept])
