"""`partial_rotary_factor` below 1 was refused in others' drafters. In ours it was taken in silence and all of a head
turned, while exports asked for the part; with another `rope_type` than the default a round ended in sizes that do not
match."""

import json
from functools import partial

import pytest
import torch
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from hf_hyperdflash import Eagle3Drafter, SpecBlockDrafter, load_drafter
from hf_hyperdflash.benchmark.doctor.config_variants import variants
from hf_hyperdflash.hub.formats import export_dflash
from hf_hyperdflash.serving.sglang.config import SGLangConfig
from hf_hyperdflash.serving.vllm.config import VLLMConfig
from hf_hyperdflash.targets.registry import target_of

from ..conftest import prompt, tiny_drafter
from ..helpers import oracle_layouts, oracle_specblock
from ..helpers.families import COMMON, DELTA_NET, FULL, LINEAR, qwen3
from ..helpers.oracle_dflash import speculators_logits, write_speculators, write_zlab, zlab_logits
from ..helpers.refusals import Refusal
from ..helpers.released_layouts import (
    LAYER,
    VOCABULARY,
    check_eagle3,
    check_rounds,
    drafted,
    eagle3_tensors,
    read,
    safeailab,
    saved,
    specblock_tensors,
    speculators,
    whole,
)
from ..helpers.released_layouts import check_logits as check

SHAPE = {"block_size": 5, "mask_token_id": 1}
PART = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
# As files say it: where RoPE is, beside it, and with M-RoPE, which is plain RoPE for text.
FLAT = {
    "in rope_parameters": {"rope_parameters": PART},
    "beside them": {"rope_theta": 1e4, "rope_scaling": None, "partial_rotary_factor": 0.25},
    "linear": {"rope_parameters": {**PART, "rope_type": "linear", "factor": 4.0}},
    "linear, as earlier": {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 4.0},
                           "partial_rotary_factor": 0.75},
    "M-RoPE": {"rope_parameters": {**PART, "mrope_section": [2, 1, 1], "mrope_interleaved": True}},
}  # fmt: skip


@pytest.fixture
def target():
    torch.manual_seed(0)
    return qwen3().eval()


@pytest.fixture
def qwen3_5():
    """With heads of 256, of which a quarter turns, and positions of three axes."""
    torch.manual_seed(0)
    text = {**COMMON, **DELTA_NET, "head_dim": 256, "num_hidden_layers": 4, "intermediate_size": 48}
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25, "mrope_section": [16, 8, 8]}
    kinds = [LINEAR, FULL, LINEAR, FULL]
    config = Qwen3_5TextConfig(**text, rope_parameters={**rope, "mrope_interleaved": True}, layer_types=kinds)
    return Qwen3_5ForCausalLM(config).eval()


@pytest.mark.parametrize("layout", ["z-lab", "speculators"])
@pytest.mark.parametrize("said", FLAT)
def test_others(target, tmp_path, said, layout):
    ids, file = prompt(14), tmp_path / "config.json"
    if layout == "z-lab":
        plain = {"rope_parameters": None, "rope_theta": None, "rope_scaling": None}
        write_zlab(tmp_path, target, nested=True, layer_ids=[0, 2], outer={**plain, **FLAT[said]}, **SHAPE)
        expected = zlab_logits(tmp_path, target, ids, 4, slots=5)
    else:
        write_speculators(tmp_path, target, layer_ids=[1, 3], **SHAPE)
        fields = json.loads(file.read_text())
        del fields["transformer_layer_config"]["rope_parameters"]
        fields["transformer_layer_config"] |= FLAT[said]
        file.write_text(json.dumps(fields))
        expected = whole(*speculators_logits(tmp_path, target, ids, 4, slots=5))
    check(load_drafter(tmp_path, dtype=torch.float32), target, expected, ids)


def test_others_in_dflashs_section(target, tmp_path):
    """Where the oracle does not look."""
    write_zlab(tmp_path, target, nested=True, layer_ids=[0, 2], inner={"partial_rotary_factor": 0.5}, **SHAPE)
    ids, written = prompt(14), (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(json.dumps({**json.loads(written), "partial_rotary_factor": 0.5}))
    expected = zlab_logits(tmp_path, target, ids, 4, slots=5)
    (tmp_path / "config.json").write_text(written)
    check(load_drafter(tmp_path, dtype=torch.float32), target, expected, ids)


@pytest.mark.parametrize("layout", ["z-lab", "speculators"])
def test_others_dflash2(target, tmp_path, layout):
    roles = {**SHAPE, "layer_ids": [0, 2] if layout == "z-lab" else [1, 3]}
    oracle_layouts.write_dflash2(tmp_path, target, layout=layout, **roles)
    fields = json.loads((tmp_path / "config.json").read_text())
    (fields if layout == "z-lab" else fields["transformer_layer_config"])["rope_parameters"] = PART
    (tmp_path / "config.json").write_text(json.dumps(fields))
    drafter = load_drafter(tmp_path, target=target, dtype=torch.float32)
    check_rounds(drafter, target, tmp_path, (0.7,))


@pytest.mark.parametrize("layout", [safeailab, speculators])
def test_others_eagle3(tmp_path, layout):
    torch.manual_seed(0)
    target, tensors = qwen3(layers=8).eval(), eagle3_tensors()
    rope = {"rope_theta": 5000.0, "partial_rotary_factor": 0.5}
    fields = rope if layout is safeailab else {"transformer_layer_config": {**LAYER, **rope}}
    drafter = load_drafter(layout(tmp_path, tensors, **fields), dtype=torch.float32)
    check_eagle3(drafter, target, tensors, rotary=8)
    with pytest.raises(AssertionError):
        check_eagle3(drafter, target, tensors)


@torch.no_grad()
def test_others_specblock(tmp_path):
    torch.manual_seed(0)
    target, tensors, slots = qwen3(layers=8).eval(), specblock_tensors(), 3
    fields = {**LAYER, "num_hidden_layers": 2, "diffspec_draft_token_num": slots, "draft_vocab_size": 40}
    drafter = load_drafter(saved(tmp_path, {**fields, "partial_rotary_factor": 0.25}, tensors), dtype=torch.float32)
    drafter.check_target(target_of(target))
    ids, tokens = prompt(12), [7, 9]
    shape = oracle_specblock.Shape(4, 2, 16, 2, slots, 1e-6, 5000.0, rotary=4)
    last = oracle_specblock.blocks(tensors, shape, read(target, ids)[0][:-1], read(target, ids)[1])[-1]
    kept, expected = tensors["t2d"].nonzero().flatten(), []
    for k in range(slots):
        logits = oracle_specblock.logits(tensors, shape, last.hidden[k])
        expected.append(torch.full((VOCABULARY,), -torch.inf).index_copy(0, kept, logits))
    torch.testing.assert_close(drafted(drafter, target, ids, tokens), torch.stack(expected), atol=5e-4, rtol=2e-3)


@pytest.mark.parametrize("format", ["z-lab", "speculators"])
def test_ours_on_qwen3_5_turn_the_part_that_their_exports_name(qwen3_5, tmp_path, format):
    rope = qwen3_5.config.rope_parameters
    before = dict(rope)
    fields = dict(target_layer_ids=[0, 2], num_draft_tokens=4, sliding_window=None)
    drafter = tiny_drafter(qwen3_5, reducer="fc", rope_parameters=rope, **fields).float()
    assert drafter.config.head_dim == 128 and drafter.config.rope_parameters is not rope and rope == before
    told = export_dflash(drafter, tmp_path / "out", format)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "mrope" not in json.dumps(written) and '"partial_rotary_factor": 0.25' in json.dumps(written)
    assert "--speculative-draft-model-path" not in told  # SGLang's drafters turn all of a head
    ids = prompt(14)
    if format == "z-lab":
        expected = zlab_logits(tmp_path / "out", qwen3_5, ids, 4, slots=5)
    else:
        expected = whole(*speculators_logits(tmp_path / "out", qwen3_5, ids, 4, slots=5))
    check(drafter, qwen3_5, expected, ids)
    again = load_drafter(tmp_path / "out", dtype=torch.float32)
    check(again, qwen3_5, expected, ids)
    drafter.save_pretrained(tmp_path / "ours")
    check(load_drafter(tmp_path / "ours", dtype=torch.float32), qwen3_5, expected, ids)


def test_a_deepspec_export_names_the_part(target, tmp_path):
    fields = dict(sequential_head="markov", head_rank=4, sample_from_anchor=True, target_layer_ids=[0, 2])
    drafter = tiny_drafter(target, reducer="fc", rope_parameters=dict(PART), **fields).float()
    told = export_dflash(drafter, tmp_path, "deepspec", target)
    assert "--speculative-draft-model-path" not in told
    again = load_drafter(tmp_path, target=target, dtype=torch.float32)
    for each in (drafter, again):
        check_rounds(each, target, tmp_path, (0.7,))


@pytest.mark.parametrize("kind", [Eagle3Drafter, SpecBlockDrafter])
@torch.no_grad()
def test_ours_of_entries_turn_the_part(qwen3_5, kind):
    """Keys of a layer, against pairs of channels turned as complex numbers."""
    drafter = kind.from_target(qwen3_5, rope_parameters=qwen3_5.config.rope_parameters).float()
    check_keys(drafter, {"partial_rotary_factor": 0.25})


@torch.no_grad()
def check_keys(drafter, rope, turns=None):
    """`turns` are the angles of a step, by pairs; plain RoPE's by default."""
    config, layer = drafter.config, drafter.layers[-1].self_attn
    half = int(config.head_dim * rope.get("partial_rotary_factor", 1.0)) // 2
    turns = config.rope_parameters["rope_theta"] ** -(torch.arange(half) / half) if turns is None else turns
    positions = torch.tensor([[0, 1, 2, 17]])
    hidden = torch.randn(1, 4, layer.k_proj.in_features)
    found, _ = layer.keys_values(hidden, drafter.rotary_emb(hidden, positions))
    plain = layer.k_norm(layer.k_proj(hidden).unflatten(-1, (-1, config.head_dim))).transpose(1, 2)
    pairs = torch.complex(plain[..., :half].double(), plain[..., half : 2 * half].double())
    scale = drafter.rotary_emb.attention_scaling
    pairs = pairs * torch.polar(torch.tensor(scale).double(), positions[0, :, None].double() * turns.double())
    expected = torch.cat([pairs.real, pairs.imag, plain[..., 2 * half :].double()], dim=-1)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-4)


KINDS = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "llama3": {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "longrope": {"factor": 4.0, "short_factor": [1.5] * 4, "long_factor": [4.0] * 4,
                 "original_max_position_embeddings": 64},
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_every_type_turns_the_part(target, kind):
    rope = {**PART, "rope_type": kind, **KINDS[kind]}
    drafter = tiny_drafter(target, reducer="fc", target_layer_ids=[0, 2], sliding_window=None, rope_parameters=rope)
    check_keys(drafter, rope, drafter.rotary_emb.inv_freq)
    if kind == "linear":
        check_keys(drafter, rope, 1e4 ** -(torch.arange(4) / 4) / 4.0)
    ids = prompt(9)
    drafter.bind(target)
    text = target.generate(ids, max_new_tokens=8, do_sample=False, assistant_model=drafter)
    drafter.unbind(target)
    assert torch.equal(text, target.generate(ids, max_new_tokens=8, do_sample=False))


def test_engines_are_told_the_part_or_refuse_it(target, tmp_path):
    tiny_drafter(target, reducer="fc", rope_parameters=dict(PART)).save_pretrained(tmp_path)
    assert VLLMConfig.from_pretrained(tmp_path).rope_parameters["partial_rotary_factor"] == 0.5
    Refusal(partial(SGLangConfig.from_pretrained, tmp_path), ("SGLang", "whole")).check()


def test_doctor_tries_all_of_a_head_where_a_file_names_a_part(target):
    """speculators wrote the factor of a target into drafters that it trained with all of a head (its issue 613)."""
    drafter = tiny_drafter(target, reducer="fc", target_layer_ids=[0, 2], rope_parameters=dict(PART))
    tried = variants(drafter.config, target)
    assert [1] == [c.rope_parameters["partial_rotary_factor"] for name, c in tried.items() if "rotary" in name]
    assert not any("rotary" in name for name in variants(tiny_drafter(target, reducer="fc").config, target))
