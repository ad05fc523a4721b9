import copy
import json
import logging
import re

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    DeepseekV4Config,
    DeepseekV4ForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

from hf_hyperdflash import HyperDFlashConfig, HyperDFlashDrafter
from hf_hyperdflash.drafters.blocks.path import BlockPath
from hf_hyperdflash.drafters.parts.heads import HEADS
from hf_hyperdflash.drafters.parts.layers import block_inputs
from hf_hyperdflash.drafters.parts.reducers import HCGateReducer, stream_gates
from hf_hyperdflash.targets.registry import target_of
from hf_hyperdflash.training.data.blocks import block_mask, block_masks, previous_tokens

from ..conftest import prompt, tiny_drafter, tiny_target
from ..helpers import oracle_heads as oracle
from ..helpers.families import COMMON, GEMMA4, qwen3
from ..helpers.headed_drafters import headed, proposed


def count(module) -> int:
    return sum(p.numel() for p in module.parameters())


def test_parameter_counts_for_v4_flash():
    # Table 1: 65K against 67M.
    with torch.device("meta"):
        assert count(HCGateReducer(HyperDFlashConfig())) == 65_541
        assert count(HyperDFlashDrafter(HyperDFlashConfig(reducer="fc", num_hidden_layers=1)).fc) == 67_108_864


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_untrained_gate_is_the_targets_collapse(target, dtype):
    drafter = tiny_drafter(target, path_norm=False)
    residual = torch.randn(2, 5, 4, 32).to(dtype)
    assert torch.equal(drafter.hc_gate(residual), target.model.hc_head(residual))


def test_path_norm_follows_equation_1(target):
    drafter = tiny_drafter(target)
    head, residual = target.model.hc_head, torch.randn(1, 3, 4, 32)
    for t in range(3):
        h = residual[0, t]
        x = h.flatten() / (h.flatten().square().mean() + 1e-6).sqrt()
        y = torch.zeros(32)
        for j in range(4):
            alpha = torch.sigmoid(head.hc_fn[j] @ x * head.hc_scale[0] + head.hc_base[j]) + 1e-6
            y += alpha * h[j] / (h[j].square().mean() + 1e-6).sqrt()
        torch.testing.assert_close(drafter.hc_gate(residual)[0, t], y)


def test_a_path_of_zeros_adds_nothing(target):
    drafter, residual = tiny_drafter(target), torch.randn(1, 3, 4, 32)
    residual[:, :, 2] = 0
    alone = naive_gate(drafter.hc_gate, residual[0, 1])
    torch.testing.assert_close(drafter.hc_gate(residual)[0, 1], alone)


def test_a_gate_without_a_target_is_half_open_and_reads_its_input():
    config = HyperDFlashConfig(
        vocab_size=64, hidden_size=32, num_attention_heads=2, num_key_value_heads=1, head_dim=16, intermediate_size=32,
        num_hidden_layers=1, mask_token_id=1, initializer_range=0.2,
    )  # fmt: skip
    gate = HyperDFlashDrafter(config).hc_gate
    gates = stream_gates(torch.randn(1, 200, 4, 32), gate.hc_fn, gate.hc_base, gate.hc_scale, 1e-6, 1e-6)
    assert 0.4 < gates.mean() < 0.6 and gates.std() > 0.1


def test_fc_is_a_dense_projection_of_the_concatenated_paths(target):
    drafter = tiny_drafter(target, reducer="fc")
    residual = torch.randn(1, 2, 4, 32)
    projected = torch.stack([torch.cat(list(residual[0, t])) @ drafter.fc.weight.T for t in range(2)])
    expected = projected / (projected.square().mean(-1, keepdim=True) + 1e-6).sqrt() * drafter.hidden_norm.weight
    torch.testing.assert_close(drafter.reduce(residual)[0], expected)
    assert "fc.weight" in drafter.state_dict()  # the name z-lab's checkpoints use


def naive_gate(gate, paths, layer=0):
    """Eq. 1 over the paths of one layer, with that layer's gate."""
    m, d = paths.shape
    x = paths.flatten() / (paths.flatten().square().mean() + 1e-6).sqrt()
    y = torch.zeros(d)
    for j in range(m):
        row = layer * m + j
        alpha = torch.sigmoid(gate.hc_fn[row] @ x * gate.hc_scale[layer] + gate.hc_base[row]) + 1e-6
        y += alpha * paths[j] / (paths[j].square().mean() + 1e-6).sqrt()
    return y


@pytest.mark.parametrize("layers", [[-1], [1], [1, -1], [0, 1, -1]])
@pytest.mark.parametrize("reducer", ["hc_gate", "fc", "hybrid", "stream_mean"])
def test_every_reducer_over_every_source_follows_its_definition(target, reducer, layers):
    drafter = tiny_drafter(target, reducer=reducer, target_layer_ids=layers)
    with torch.no_grad():
        for part in drafter.parameters():  # gates that differ between layers, an `fc` that is not zero
            part.normal_(std=0.2)
    residual = torch.randn(1, 3, 4 * len(layers), 32)
    reduced = drafter.reduce(residual)
    for t in range(3):
        per_layer = [residual[0, t, 4 * i : 4 * i + 4] for i in range(len(layers))]
        if reducer == "hc_gate":
            y = sum(naive_gate(drafter.hc_gate, paths, i) for i, paths in enumerate(per_layer))
        elif reducer == "fc":
            y = drafter.fc.weight @ torch.cat([path for paths in per_layer for path in paths])
        elif reducer == "stream_mean":
            y = drafter.fc.weight @ torch.cat([sum(paths) / 4 for paths in per_layer])
        else:
            dense = [path for paths in (per_layer[:-1] or per_layer) for path in paths]
            dense = drafter.fc.weight @ torch.cat(dense)
            dense = dense / (dense.square().mean() + 1e-6).sqrt() * drafter.fc_norm.weight
            y = naive_gate(drafter.hc_gate, per_layer[-1]) + dense
        y = y / (y.square().mean() + 1e-6).sqrt() * drafter.hidden_norm.weight
        torch.testing.assert_close(reduced[0, t], y, atol=1e-5, rtol=1e-5)


def test_an_untrained_hybrid_is_the_papers_drafter(target):
    paper = tiny_drafter(target)
    hybrid = tiny_drafter(target, reducer="hybrid", target_layer_ids=[1, -1])
    assert not hybrid.fc_norm.weight.any() and hybrid.fc.weight.any()
    hybrid.load_state_dict(paper.state_dict(), strict=False)
    residual = torch.randn(1, 3, 8, 32)
    assert torch.equal(hybrid.reduce(residual), paper.reduce(residual[:, :, 4:]))


def test_every_layer_inherits_the_targets_gate(target):
    gate, head = tiny_drafter(target, target_layer_ids=[0, 1, -1]).hc_gate, target.model.hc_head
    for name in ("hc_fn", "hc_base", "hc_scale"):
        for part in getattr(gate, name).chunk(3):
            assert torch.equal(part, getattr(head, name))


def test_layers_that_are_not_there_are_refused(target):
    with pytest.raises(ValueError, match=r"layers \[3, -1\].* 0 to 2"):
        tiny_drafter(target, reducer="fc", target_layer_ids=[3, -1])


def test_gate_parameters_stay_float32(target, tmp_path):
    drafter = tiny_drafter(target, dtype=torch.bfloat16)
    assert drafter.hc_gate.hc_fn.dtype == torch.float32 and drafter.norm.weight.dtype == torch.bfloat16
    drafter.save_pretrained(tmp_path)
    for dtype in (torch.bfloat16, torch.float32):
        again = HyperDFlashDrafter.from_pretrained(tmp_path, dtype=dtype)
        assert again.hc_gate.hc_fn.dtype == torch.float32 and again.layers[0].mlp.up_proj.weight.dtype == dtype
        assert torch.equal(again.hc_gate.hc_fn, target.model.hc_head.hc_fn)


def test_rope_is_never_rounded(target, tmp_path):
    """A drafter in bfloat16 must see the positions that it sees after it was saved and loaded."""
    exact = tiny_drafter(target, dtype=torch.float32).rotary_emb.inv_freq
    made = tiny_drafter(target, dtype=torch.bfloat16)
    made.save_pretrained(tmp_path)
    loaded = HyperDFlashDrafter.from_pretrained(tmp_path, dtype=torch.bfloat16)
    cast = HyperDFlashDrafter.from_pretrained(tmp_path, dtype=torch.float32).to(torch.bfloat16)
    for drafter in (made, loaded, cast):
        assert drafter.dtype == torch.bfloat16
        assert drafter.rotary_emb.inv_freq.dtype == torch.float32 and torch.equal(drafter.rotary_emb.inv_freq, exact)


def test_fallback_is_chosen_with_a_logged_reason(target, caplog):
    with caplog.at_level(logging.WARNING):
        drafter = tiny_drafter(target, hidden_size=64)
    assert drafter.config.reducer == "fc" and "64 differs from the target's 32" in caplog.text
    with pytest.raises(ValueError, match="64 differs"):
        tiny_drafter(target, hidden_size=64, reducer="hc_gate")
    assert tiny_drafter(target).config.reducer == "hc_gate"


def test_from_target_fits_the_target(target):
    config = tiny_drafter(target, num_draft_tokens=4).config
    assert (config.vocab_size, config.target_hidden_size, config.target_hc_mult) == (64, 32, 4)
    assert config.block_size == 5 and config.rope_parameters["rope_theta"] == 10000.0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sliding_windw": 8}, "`sliding_windw` is no field of `HyperDFlashConfig`: did you mean `sliding_window`"),
        ({"zzz": 8}, "`zzz` is no field"),
        ({"hidden_size": "a"}, "`hidden_size` is 'a', expected an integer"),
        ({"head_dim": 0}, "`head_dim` is 0, expected at least 1"),
        ({"num_draft_tokens": "6"}, "`num_draft_tokens` is '6', expected an integer of at least 1"),
        ({"num_draft_tokens": 0}, "`num_draft_tokens` is 0, expected an integer of at least 1"),
        ({"num_draft_tokens": 10**9}, "`block_size` is 1000000001, expected at least 2 and at most 4096"),
        ({"num_hidden_layers": 10**9}, "`num_hidden_layers` is 1000000000, expected at least 1 and at most 1024"),
        ({"dtype": "float7"}, "`dtype` is 'float7', expected a dtype of weights or its name: bfloat16"),
        ({"dtype": "int8"}, "`dtype` is 'int8', expected a dtype of weights"),
        ({"dtype": "nn"}, "`dtype` is 'nn', expected a dtype of weights"),
        ({"dtype": 16}, "`dtype` is 16, expected a dtype of weights"),
        (
            {"tokenizer": 3, "mask_token_id": None},
            "`tokenizer` is 3, expected a tokenizer: load it with `AutoTokenizer",
        ),
    ],
)
def test_fields_that_are_none_are_refused(target, fields, message):
    with pytest.raises(ValueError, match=message):
        tiny_drafter(target, **fields)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("bfloat16", torch.bfloat16), (torch.float64, torch.float64), ("auto", torch.float32), (None, torch.float32)],
)
def test_a_dtype_is_given_by_name_too(target, dtype, expected):
    drafter = tiny_drafter(target, dtype=dtype)
    assert drafter.dtype == expected and drafter.hc_gate.hc_fn.dtype == torch.float32


def test_a_file_is_no_folder_to_save_in(drafter, tmp_path):
    (tmp_path / "file").write_text("kept")
    with pytest.raises(OSError, match="file is a file, expected a folder for the drafter"):
        drafter.save_pretrained(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "kept"


def test_a_drafter_is_no_target(target, drafter):
    for make in (HyperDFlashDrafter.from_target, drafter.bind):
        with pytest.raises(ValueError, match="is a HyperDFlashDrafter, a drafter"):
            make(drafter)


@pytest.mark.parametrize("reducer", ["hc_gate", "fc", "hybrid"])
def test_a_target_on_meta_gives_a_drafter_on_meta(reducer):
    """Sizes and counts for V4-Flash, without its weights."""
    layers, kinds = 3, ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
    with torch.device("meta"):
        target = DeepseekV4ForCausalLM(
            DeepseekV4Config(num_hidden_layers=layers, layer_types=kinds, mlp_layer_types=["moe"] * layers)
        )
    drafter = HyperDFlashDrafter.from_target(target, reducer=reducer, dtype=torch.bfloat16, num_hidden_layers=1)
    assert all(tensor.is_meta for tensor in [*drafter.parameters(), *drafter.buffers()])
    assert drafter.dtype == torch.bfloat16 and drafter.config.mask_token_id == 128799
    parts = {"hc_gate": 65_541, "fc": 67_108_864}
    assert all(count(getattr(drafter, name)) == size for name, size in parts.items() if hasattr(drafter, name))
    assert hasattr(drafter, reducer) or reducer == "hybrid"


def test_a_target_without_a_gate_on_meta():
    with torch.device("meta"):
        target = qwen3()
    drafter = tiny_drafter(target, target_layer_ids=[0, 2])
    assert drafter.config.reducer == "fc" and all(parameter.is_meta for parameter in drafter.parameters())


def test_the_window_is_one_that_engines_have_words_for(target):
    assert tiny_drafter(qwen3()).config.sliding_window is None
    assert tiny_drafter(target).config.sliding_window == 1024  # of `max_position_embeddings`
    assert tiny_drafter(target, sliding_window=None).config.sliding_window is None


def test_saves_only_its_own_safetensors(drafter, tmp_path):
    drafter.save_pretrained(tmp_path)
    data = {path.name for path in tmp_path.iterdir() if path.is_file() and path.suffix != ".py"}  # and the code
    assert data == {"config.json", "model.safetensors", "README.md"}
    names = set(load_file(tmp_path / "model.safetensors"))
    assert names == set(drafter.state_dict())
    assert not any("embed" in name or "lm_head" in name for name in names)
    again = HyperDFlashDrafter.from_pretrained(tmp_path, device_map="cpu")
    for name, value in again.state_dict().items():
        assert torch.equal(value, drafter.state_dict()[name]), name


def reference_forward(drafter, embeds, positions, residual, context_positions):
    """The block drafter, one query at a time, from the paper and Qwen3's equations."""
    config = drafter.config

    def rms(x, weight):
        return x / (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).sqrt() * weight

    def rope(x, position):
        half = config.head_dim // 2
        angle = position * 10000.0 ** (-torch.arange(half).float() / half)
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1)

    def convolved(module, normed, x, side):
        if not config.conv_kernel_size:
            return x
        weights = {name: value.double().numpy() for name, value in module.state_dict().items()}
        taps, group = config.conv_kernel_size, config.conv_group_size
        y = oracle.convolved(weights, normed.double().numpy(), x.double().numpy(), taps, group, side)
        return torch.from_numpy(y).float()

    feature = rms(drafter.hc_gate(residual[None])[0], drafter.hidden_norm.weight)
    hidden = embeds.clone()
    groups = config.num_attention_heads // config.num_key_value_heads
    for layer in drafter.layers:
        around, around_mlp = getattr(layer, "attention_conv", None), getattr(layer, "mlp_conv", None)
        attention, normed = layer.self_attn, rms(hidden, layer.input_layernorm.weight)
        x = convolved(around, normed, normed, 0)
        sources = [*zip(feature, context_positions), *zip(x, positions)]
        mixed = []
        for q_state, q_position in zip(x, positions):
            heads = []
            for head in range(config.num_attention_heads):
                span = slice(head * config.head_dim, (head + 1) * config.head_dim)
                kv_head = head // groups
                kv_span = slice(kv_head * config.head_dim, (kv_head + 1) * config.head_dim)
                q = rope(rms(attention.q_proj.weight[span] @ q_state, attention.q_norm.weight), q_position)
                keys = [
                    rope(rms(attention.k_proj.weight[kv_span] @ s, attention.k_norm.weight), p) for s, p in sources
                ]
                values = [attention.v_proj.weight[kv_span] @ s for s, _ in sources]
                scores = torch.stack([q @ k for k in keys]) / config.head_dim**0.5
                heads.append((scores.softmax(0)[:, None] * torch.stack(values)).sum(0))
            mixed.append(attention.o_proj.weight @ torch.cat(heads))
        hidden = hidden + convolved(around, normed, torch.stack(mixed), 1)
        normed = rms(hidden, layer.post_attention_layernorm.weight)
        hidden = hidden + convolved(around_mlp, normed, layer.mlp(convolved(around_mlp, normed, normed, 0)), 1)
    return rms(hidden, drafter.norm.weight)


def with_trained_convolutions(drafter):
    for name, parameter in drafter.named_parameters():
        if "_conv" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return drafter


@pytest.mark.parametrize("taps", [0, 2, 3])
@torch.no_grad()
def test_forward_equals_a_reference_written_query_by_query(target, taps):
    drafter = with_trained_convolutions(tiny_drafter(target, head_dim=8, conv_kernel_size=taps))
    residual, embeds = torch.randn(6, 4, 32), torch.randn(7, 32)
    context_positions, positions = torch.arange(3, 9), torch.arange(9, 16)
    expected = reference_forward(drafter, embeds, positions, residual, context_positions)
    for pending in (False, True):  # what is accepted goes in alone, or with the block
        context = drafter.new_context()
        drafter.extend(target_of(target), context, residual[None], context_positions[None], None)
        if not pending:
            drafter.flush_pending(context)
        found = drafter(embeds[None], positions[None], context, None, *(context.pending or ()))
        context.pending = None
        torch.testing.assert_close(found[0], expected, atol=1e-5, rtol=1e-4)
        assert len(context) == 6


FULL_FIRST, SLIDING_FIRST = (
    dict(layer_types=kinds, num_hidden_layers=2)
    for kinds in (["full_attention", "sliding_attention"], ["sliding_attention", "full_attention"])
)


@pytest.mark.parametrize(
    ("window", "fields"),
    [
        (None, {}), (5, {"conv_kernel_size": 3}), (5, {"hidden_size": 48}),
        (None, {"hidden_size": 48, "conv_kernel_size": 2}), (5, FULL_FIRST),
        (5, {"causal_layers": "sliding", **SLIDING_FIRST}), (5, {"causal_layers": "all", "window_from": "slot"}),
        (5, {"window_from": "slot", "causal_layers": "sliding", **FULL_FIRST}), (2, {"window_from": "slot"}),
    ],
)  # fmt: skip
@torch.no_grad()
def test_cached_context_equals_the_masked_training_layout(target, window, fields):
    """Generation adds context token by token and runs one block; training runs all blocks at once under a mask."""
    drafter = with_trained_convolutions(tiny_drafter(target, sliding_window=window, head_dim=16, **fields))
    residual, embeds = torch.randn(1, 150, 4, 32), torch.randn(1, 3 * 7, 32)
    anchors = torch.tensor([[1, 70, 149]])
    positions = (anchors.unsqueeze(-1) + torch.arange(7)).flatten(1)
    everywhere = torch.arange(150)[None]
    mask = block_masks(drafter.config, anchors, everywhere)
    together = drafter(embeds, positions, attention_mask=mask, residual=residual, residual_position_ids=everywhere)
    cache, filled = drafter.new_context(), 0
    for index, anchor in enumerate(anchors[0].tolist()):
        while filled < anchor:
            step = min(3, anchor - filled)
            span = slice(filled, filled + step)
            drafter.extend(target_of(target), cache, residual[:, span], torch.arange(150)[None, span], None)
            filled += step
        block = slice(7 * index, 7 * index + 7)
        alone = drafter(embeds[:, block], positions[:, block], cache, None, *cache.pending)
        cache.pending = None
        if "full_attention" not in drafter.config.kinds:
            assert len(cache) == min(anchor, window - (drafter.config.window_from == "slot"))
        torch.testing.assert_close(alone, together[:, block], atol=1e-5, rtol=1e-4)
        known = dict(residual=residual[:, :anchor], residual_position_ids=everywhere[:, :anchor])
        alone = drafter(embeds[:, block], positions[:, block], **known)  # nothing cached, nothing masked by the caller
        torch.testing.assert_close(alone, together[:, block], atol=1e-5, rtol=1e-4)


def test_num_draft_tokens_is_checked(drafter):
    drafter.num_draft_tokens = 2
    assert drafter.num_draft_tokens == 2
    for bad in (0, 7, True, "3"):
        with pytest.raises(ValueError, match="1 to 6"):
            drafter.num_draft_tokens = bad
    assert drafter.num_draft_tokens == 2


def test_gate_is_inherited_by_value(drafter):
    other = tiny_target(seed=0)
    assert torch.equal(drafter.hc_gate.hc_base, other.model.hc_head.hc_base)
    with torch.no_grad():
        drafter.hc_gate.hc_base.add_(1)
    assert not torch.equal(drafter.hc_gate.hc_base, other.model.hc_head.hc_base)


def test_forward_wants_one_kind_of_context(target, drafter):
    embeds, positions = torch.randn(1, 7, 32), torch.arange(7)[None]
    with pytest.raises(ValueError, match="either"):
        drafter(embeds, positions)


def test_the_gate_stays_float32_under_autocast(target):
    drafter = tiny_drafter(target)
    residual = torch.randn(1, 3, 4, 32)
    expected = drafter.hc_gate(residual)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(drafter.hc_gate(residual), expected)


# Sequential heads


@pytest.mark.parametrize("made", ["from_target", "from its configuration"])
@pytest.mark.parametrize("kind", HEADS)
def test_a_fresh_head_drafts_what_is_drafted_without(target, kind, made):
    plain, fields = tiny_drafter(target), dict(head_rank=8, confidence_head=True)
    for candidates in (None, 0):
        drafter = tiny_drafter(target, sequential_head=kind, head_candidates=candidates, **fields)
        if made != "from_target":
            drafter = HyperDFlashDrafter(drafter.config).eval()
        missing, unexpected = drafter.load_state_dict(plain.state_dict(), strict=False)
        assert not unexpected and {name.split(".")[0] for name in missing} == {drafter.head.key, "confidence_head"}
        assert any(parameter.any() for parameter in drafter.head.parameters())  # else nothing would ever be learned
        found, expected = (proposed(one, target, prompt(9))[0] for one in (drafter, plain))
        assert torch.equal(found.tokens, expected.tokens) and found.confidence.tolist() == [0.5] * 6
    sampled = []
    for one in (drafter, plain):
        torch.manual_seed(7)
        sampled.append(proposed(one, target, prompt(9), do_sample=True)[0])
    assert torch.equal(sampled[0].tokens, sampled[1].tokens)
    torch.testing.assert_close(sampled[0].q, sampled[1].q)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", HEADS)
def test_a_drafter_gets_heads_later(target, kind, dtype):
    plain = tiny_drafter(target, reducer="hybrid", target_layer_ids=[1, -1], dtype=dtype)
    with torch.no_grad():
        plain.norm.weight.normal_(1, 0.1)  # something learned
    before = {name: value.clone() for name, value in plain.state_dict().items()}
    grown = plain.with_heads(sequential_head=kind, head_rank=5, confidence_head=True)
    config = grown.config
    assert (config.sequential_head, config.head_rank, config.confidence_head) == (kind, 5, True)
    assert config.head_candidates == HEADS[kind].candidates_of(config.vocab_size, 0)
    assert {each.dtype for each in grown.head.parameters()} == {dtype} and grown.hc_gate.hc_fn.dtype == torch.float32
    assert grown.head is not None and plain.head is None and plain.config.sequential_head == "none"
    for name, value in grown.state_dict().items():
        if name in before:
            assert torch.equal(value, before.pop(name)), name
        else:
            assert name.split(".")[0] in (grown.head.key, "confidence_head")
    assert not before
    found, expected = (proposed(one, target, prompt(9))[0] for one in (grown, plain))
    assert torch.equal(found.tokens, expected.tokens)


@pytest.mark.parametrize("kind", HEADS)
def test_a_confidence_stays_what_it_was_when_a_head_is_added(target, kind):
    sure = tiny_drafter(target, confidence_head=True)
    with torch.no_grad():
        sure.confidence_head.proj.weight.normal_()
    grown = sure.with_heads(sequential_head=kind, head_rank=5)
    found, expected = (proposed(one, target, prompt(9))[0].confidence for one in (grown, sure))
    torch.testing.assert_close(found, expected)
    assert len(set(expected.tolist())) > 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sequential_head": "bigram"}, "`sequential_head` is 'bigram', expected one of"),
        ({"num_hidden_layers": 3}, "`num_hidden_layers` is not of a head: expected some of sequential_head"),
        ({"head_rank": 3}, "`head_rank` is 3, but of no new head: add `sequential_head`"),
        ({"confidence_reads_token": False}, "add `confidence_head`"),
        ({"sequential_head": "markov", "head_rank": 0}, "`head_rank` is 0, expected at least 1"),
    ],
)
def test_heads_that_cannot_be_given_are_refused(target, fields, message):
    with pytest.raises(ValueError, match=message):
        tiny_drafter(target).with_heads(**fields)


def test_a_head_is_given_once(target):
    drafter = tiny_drafter(target, sequential_head="markov", head_rank=4)
    with pytest.raises(ValueError, match=r"`sequential_head` is 'state', .* has one already \('markov'\)"):
        drafter.with_heads(sequential_head="state")
    sure = drafter.with_heads(confidence_head=True)
    assert torch.equal(sure.head.markov_w1.weight, drafter.head.markov_w1.weight)
    with pytest.raises(ValueError, match=r"`confidence_head` is True, but the drafter has one already \(True\)"):
        sure.with_heads(confidence_head=True)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"sample_from_anchor": True, "num_draft_tokens": 5},
        {"hidden_size": 48, "reducer": "fc"},
        {"draft_vocab_size": 30, "confidence_reads_token": False},
        {"conv_kernel_size": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["none", *HEADS])
@torch.no_grad()
def test_training_sees_what_is_drafted_from(target, kind, fields):
    """Blocks of two rows at once, whose tokens are known, against the drafting of each after the same tokens."""
    drafter = headed(target, kind, head_candidates=0, confidence_head=True, **fields)
    config, embed = drafter.config, target.get_input_embeddings()
    drafts, first = config.max_draft_tokens, 0 if config.sample_from_anchor else 1
    ids, anchors, everywhere = (
        torch.cat([prompt(24), prompt(24, 1)]),
        torch.tensor([[3, 17], [9, 5]]),
        torch.arange(24),
    )
    residual, previous = torch.randn(2, 24, 4, 32), previous_tokens(ids, anchors, drafts)
    block, positions = block_inputs(ids.gather(1, anchors), anchors, config.block_size, config.mask_token_id)
    mask = block_mask(anchors, everywhere.expand(2, -1), config.block_size)
    out = drafter(
        embed(block), positions, None, mask, residual, everywhere.expand(2, -1), previous, embed(previous)
    )  # fmt: skip
    assert out.states.shape == (2, 2, drafts, 32) and (out.vectors is None) == (drafter.head_table is None)
    seen = target_of(target)
    logits = drafter.to_full_vocabulary(seen, drafter.logits(seen, out.states, out.vectors))
    for row, of_row in enumerate(anchors.tolist()):
        for i, anchor in enumerate(of_row):
            context, slots = drafter.new_context(), slice(i * config.block_size, (i + 1) * config.block_size)
            drafter.extend(
                target_of(target), context, residual[row : row + 1, :anchor], everywhere[None, :anchor], None
            )
            drafter.flush_pending(context)
            states = drafter(embed(block[row : row + 1, slots]), positions[row : row + 1, slots], context)
            path = BlockPath(drafter, target_of(target), states[:, first:])
            for k in range(drafts):
                expected = path(k, ids[row, anchor + k][None], ids.new_zeros(1))
                torch.testing.assert_close(logits[row, i, k], expected.whole().logits[0], atol=1e-4, rtol=1e-3)
                sure = torch.sigmoid(out.confidence[row, i, k])
                torch.testing.assert_close(sure, expected.confidence[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", HEADS)
def test_a_drafter_with_a_head_is_saved_and_loaded(target, tmp_path, kind, dtype):
    drafter = headed(target, kind, head_candidates=5, confidence_head=True, conv_kernel_size=2, dtype=dtype)
    drafter.config.confidence_temperatures = [0.5, 2.0, 1.0, 1.5, 1.0, 3.0]
    drafter.save_pretrained(tmp_path)
    torch.manual_seed(1)
    expected = proposed(drafter, target, prompt(9), do_sample=True)[0]
    again = HyperDFlashDrafter.from_pretrained(tmp_path, dtype=dtype)
    assert {parameter.dtype for parameter in again.head.parameters()} == {dtype}
    torch.manual_seed(1)
    found = proposed(again, target, prompt(9), do_sample=True)[0]
    assert torch.equal(found.tokens, expected.tokens) and len(found.confidence) == 6
    torch.testing.assert_close(torch.stack(found.q), torch.stack(expected.q))
    torch.testing.assert_close(found.confidence, expected.confidence)


NAMES = {
    "markov": {"markov_head.markov_w1.weight", "markov_head.markov_w2.weight"},
    "gated_markov": {"markov_head.markov_w1.weight", "markov_head.markov_w2.weight", "markov_head.gate_proj.weight",
                     "markov_head.gate_proj.bias"},
    "recurrent": {"markov_head.markov_w1.weight", "markov_head.markov_w2.weight", "markov_head.joint_proj.weight",
                  "markov_head.joint_proj.bias"},
    "selector": {"candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook",
                 "candidate_selector.hidden_projection.weight"},
    "state": {"state_head.up_proj.weight", "state_head.down_proj.weight"},
}  # fmt: skip


@pytest.mark.parametrize("kind", HEADS)
def test_heads_have_the_names_that_checkpoints_have_and_are_missed(target, tmp_path, kind):
    drafter = tiny_drafter(target, sequential_head=kind, confidence_head=True, conv_kernel_size=2, num_hidden_layers=1)
    others = {"confidence_head.proj.weight", "confidence_head.proj.bias"} | {
        f"layers.0.{part}.{name}"
        for part in ("attention_conv", "mlp_conv")
        for name in ("base_kernel", "kernel_projection.weight")
    }
    plain = set(tiny_drafter(target, num_hidden_layers=1).state_dict())
    assert set(drafter.state_dict()) == plain | NAMES[kind] | others
    drafter.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for lost in (min(NAMES[kind]), "confidence_head.proj.weight", "layers.0.mlp_conv.base_kernel"):
        save_file({name: tensor for name, tensor in tensors.items() if name != lost}, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=rf"1 missing \({re.escape(lost)}\)") as caught:
            HyperDFlashDrafter.from_pretrained(tmp_path)
        assert "\n" not in str(caught.value)
    save_file(tensors, tmp_path / "model.safetensors")
    plain_config = json.loads((tmp_path / "config.json").read_text()) | {"sequential_head": "none"}
    (tmp_path / "config.json").write_text(json.dumps(plain_config))
    with pytest.raises(ValueError, match=rf"{len(NAMES[kind])} unexpected \({re.escape(min(NAMES[kind]))}"):
        HyperDFlashDrafter.from_pretrained(tmp_path)


@pytest.mark.parametrize("kind", HEADS)
def test_an_adapter_has_the_heads_whole(target, tmp_path, kind):
    """LoRA for the layers; heads are trained, saved and merged as they are."""
    drafter = headed(target, kind, confidence_head=True, head_candidates=5)
    start = copy.deepcopy(drafter)
    whole = [drafter.head.key, "confidence_head"]
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "o_proj"], modules_to_save=whole, init_lora_weights=False)
    wrapped = peft.get_peft_model(copy.deepcopy(drafter), config)
    trained = {name for name, parameter in wrapped.named_parameters() if parameter.requires_grad}
    assert len([name for name in trained if "lora_" not in name]) == len(NAMES[kind]) + 2
    with torch.no_grad():
        for name in sorted(trained):
            wrapped.get_parameter(name).normal_(std=0.4)
    wrapped.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(drafter), tmp_path).eval()
    merged = peft.PeftModel.from_pretrained(copy.deepcopy(drafter), tmp_path).merge_and_unload().eval()
    assert type(merged.head) is HEADS[kind]
    trees = []
    for one in (wrapped.get_base_model(), loaded.get_base_model(), merged, start):
        torch.manual_seed(2)
        trees.append(proposed(one, target, prompt(9), do_sample=True)[0])
    for other in trees[1:3]:
        assert torch.equal(other.tokens, trees[0].tokens)
        torch.testing.assert_close(torch.stack(other.q), torch.stack(trees[0].q), atol=1e-4, rtol=1e-3)
        torch.testing.assert_close(other.confidence, trees[0].confidence, atol=1e-4, rtol=1e-3)
    assert not torch.allclose(trees[3].confidence, trees[0].confidence, atol=1e-3)


@pytest.mark.parametrize(
    ("layers", "count", "expected"),
    [
        (36, 5, [1, 9, 17, 25, 33]),  # z-lab/Qwen3-8B-DFlash-b16's
        (30, 4, [1, 10, 18, 27]),
        (28, 1, [14]),
        (30, None, [1, 8, 14, 20, 27]),  # five layers by default
        (5, 3, [1, 2]),
        (3, 2, [-1]),
    ],
)
def test_of_a_target_with_one_stream_layers_all_over_it_are_read(caplog, layers, count, expected):
    with torch.device("meta"):
        target = LlamaForCausalLM(
            LlamaConfig(**COMMON, intermediate_size=48, num_hidden_layers=layers, num_key_value_heads=2)
        )
    given = {} if count is None else {"num_hidden_layers": count}
    with caplog.at_level(logging.WARNING):
        drafter = HyperDFlashDrafter.from_target(target, mask_token_id=1, **given)
    assert drafter.config.target_layer_ids == expected
    assert f"reads layers {', '.join(map(str, expected))} of the target's {layers}; `target_layer_ids`" in caplog.text
    chosen = HyperDFlashDrafter.from_target(target, mask_token_id=1, target_layer_ids=[0, 2], **given)
    assert chosen.config.target_layer_ids == [0, 2]


def test_layers_that_a_prompt_does_not_run_are_not_read_by_default():
    kinds = {"layer_types": ["sliding_attention", "full_attention"] * 5, "num_hidden_layers": 10}
    with torch.device("meta"):
        target = Gemma4ForCausalLM(
            Gemma4TextConfig(**{**GEMMA4, **kinds}, hidden_size_per_layer_input=8, num_kv_shared_layers=4)
        )
    ids = HyperDFlashDrafter.from_target(target, mask_token_id=1, num_hidden_layers=1).config.target_layer_ids
    assert ids == [3]  # the middle of six


def test_of_several_streams_the_last_residual_is_read(target, caplog):
    with caplog.at_level(logging.WARNING):
        assert tiny_drafter(target, reducer="fc").config.target_layer_ids == [-1]
    assert "reads layers" not in caplog.text
