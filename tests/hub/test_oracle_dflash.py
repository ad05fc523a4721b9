"""The oracle held against transformers' Qwen3 and against itself; the package is not involved."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3Model

from ..helpers import oracle_dflash as oracle

ROLES = dict(block_size=5, mask_token_id=63)


@pytest.fixture(scope="module")
def target() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        initializer_range=0.2,
        tie_word_embeddings=False,
    )
    return Qwen3ForCausalLM(config).eval()


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(0, 63, (1, 11), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def test_without_context_a_causal_body_is_transformers_qwen3(target, tmp_path):
    oracle.write_zlab(tmp_path, target, nested=True, layer_ids=[1], is_causal=True, **ROLES)
    drafter = oracle.read_zlab(tmp_path)
    stock = Qwen3Model(Qwen3Config.from_pretrained(tmp_path)).eval()
    names = stock.state_dict().keys() - {"embed_tokens.weight"}
    stock.load_state_dict({name: drafter.weights[name] for name in names}, strict=False)
    block = torch.randn(7, 32)
    ours = oracle.body(drafter, block, torch.empty(0, 32))
    torch.testing.assert_close(ours, stock(inputs_embeds=block[None]).last_hidden_state[0], atol=1e-5, rtol=1e-5)


def test_zlab_layouts_ids_and_the_blocks_length(target, ids, tmp_path):
    for name, nested, layer_ids in [("flat", False, [0, 2]), ("new", True, [0, 2]), ("off", True, [1, 3])]:
        oracle.write_zlab(tmp_path / name, target, nested=nested, layer_ids=layer_ids, **ROLES)
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    assert "block_size" not in config and "rope_theta" not in config and config["dflash_config"]["block_size"] == 5
    logits = oracle.zlab_logits(tmp_path / "flat", target, ids, 4)
    assert logits.shape == (4, 64) and logits.isfinite().all()
    assert torch.equal(logits, oracle.zlab_logits(tmp_path / "new", target, ids, 4))
    assert oracle.zlab_draft(tmp_path / "flat", target, ids, 4) == logits.argmax(-1).tolist()
    assert (logits - oracle.zlab_logits(tmp_path / "off", target, ids, 4)).abs().max() > 0.1
    shorter = oracle.zlab_logits(tmp_path / "flat", target, ids, 2)
    assert (logits[:2] - shorter).abs().max() > 1e-3  # the first slots see the later ones
    torch.testing.assert_close(logits[:2], oracle.zlab_logits(tmp_path / "flat", target, ids, 2, slots=5))
    with pytest.raises(ValueError, match="at most 5"):
        oracle.zlab_draft(tmp_path / "flat", target, ids, 5)


@pytest.mark.parametrize("weights", ["copied", "omitted", "own"])
def test_speculators_ids_are_one_more_and_a_truncated_vocabulary_maps_back(target, ids, tmp_path, weights):
    oracle.write_zlab(tmp_path / "z", target, nested=False, layer_ids=[0, 2], **ROLES)
    roles = dict(ROLES, layer_ids=[1, 3], verifier_weights=weights)
    oracle.write_speculators(tmp_path / "full", target, **roles)
    oracle.write_speculators(tmp_path / "cut", target, draft_vocab_size=20, **roles)
    tensors = load_file(tmp_path / "cut" / "model.safetensors")
    assert tensors["t2d"].dtype == torch.bool and tensors["d2t"].dtype == torch.int64
    full, all_ids = oracle.speculators_logits(tmp_path / "full", target, ids, 4)
    assert torch.equal(all_ids, torch.arange(64))
    same = torch.equal(full, oracle.zlab_logits(tmp_path / "z", target, ids, 4))
    assert same == (weights != "own")
    cut, kept = oracle.speculators_logits(tmp_path / "cut", target, ids, 4)
    assert cut.shape == (4, 20) and torch.equal(kept, tensors["t2d"].nonzero()[:, 0])
    assert set(oracle.speculators_draft(tmp_path / "cut", target, ids, 4)) <= set(kept.tolist())
    if same:
        torch.testing.assert_close(cut, full[:, kept])


def test_windows_and_the_anchors_slot(target, ids, tmp_path):
    def written(name: str, **fields) -> Path:
        oracle.write_speculators(tmp_path / name, target, layer_ids=[1, 3], **ROLES, **fields)
        return tmp_path / name

    def logits(folder: Path, count: int = 4) -> Tensor:
        return oracle.speculators_logits(folder, target, ids, count)[0]

    plain = logits(written("plain"))
    wide = dict(sliding_window=10)  # as long as the context
    assert torch.equal(plain, logits(written("wide", sliding_window_non_causal=True, **wide)))
    assert not torch.allclose(plain, logits(written("causal", **wide)))
    assert not torch.allclose(plain, logits(written("narrow", sliding_window=9, sliding_window_non_causal=True)))
    oracle.write_zlab(
        tmp_path / "z", target, nested=True, layer_ids=[0, 2], sliding_window=15, is_causal=False, **ROLES
    )
    assert torch.equal(plain, oracle.zlab_logits(tmp_path / "z", target, ids, 4))
    oracle.write_zlab(
        tmp_path / "z", target, nested=True, layer_ids=[0, 2], sliding_window=14, is_causal=False, **ROLES
    )
    assert not torch.equal(plain, oracle.zlab_logits(tmp_path / "z", target, ids, 4))
    from_anchor = logits(written("anchor", sample_from_anchor=True), 5)
    torch.testing.assert_close(from_anchor[1:], plain)
