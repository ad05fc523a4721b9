import copy
import logging

import peft
import pytest
import torch
from transformers import (
    DeepseekV4Config,
    DeepseekV4ForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessorList,
)

from hf_hyperdflash import Eagle3Drafter, HyperDFlashConfig, HyperDFlashDrafter, SpecBlockDrafter
from hf_hyperdflash.drafters.parts.heads import HEADS
from hf_hyperdflash.drafters.parts.layers import block_inputs
from hf_hyperdflash.drafters.parts.reducers import stream_gates
from hf_hyperdflash.drafters.sampling import DraftRequest, DraftSampler
from hf_hyperdflash.targets.registry import target_of
from hf_hyperdflash.training.data.blocks import block_mask, block_masks, previous_tokens

from ..conftest import prompt, tiny_drafter, tiny_target
from ..helpers import oracle_dflash
from ..helpers.families import COMMON, GEMMA4, qwen3
from ..helpers.headed_drafters import headed, learned, proposed, residual_before


def count(module) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_untrained_gate_is_the_targets_collapse(target, dtype):
    drafter = tiny_drafter(target, path_norm=False)
    residual = torch.randn(2, 5, 4, 32).to(dtype)
    found, head = drafter.hc_gate(residual), target.model.hc_head
    assert torch.equal(found, head(residual))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(drafter.hc_gate(residual), found)
    gate = tiny_drafter(target, target_layer_ids=[0, 1, -1]).hc_gate
    for name in ("hc_fn", "hc_base", "hc_scale"):
        assert all(torch.equal(part, getattr(head, name)) for part in getattr(gate, name).chunk(3))
    with torch.no_grad():
        gate.hc_base.add_(1)
    assert torch.equal(head.hc_base, tiny_target().model.hc_head.hc_base)  # inherited by value


def test_a_gate_without_a_target_is_half_open_and_reads_its_input():
    config = HyperDFlashConfig(
        vocab_size=64, hidden_size=32, num_attention_heads=2, num_key_value_heads=1, head_dim=16, intermediate_size=32,
        num_hidden_layers=1, mask_token_id=1, initializer_range=0.2,
    )  # fmt: skip
    gate = HyperDFlashDrafter(config).hc_gate
    gates = stream_gates(torch.randn(1, 200, 4, 32), gate.hc_fn, gate.hc_base, gate.hc_scale, 1e-6, 1e-6)
    assert 0.4 < gates.mean() < 0.6 and gates.std() > 0.1


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
    residual[:, 1, 2] = 0  # a path of zeros adds nothing
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


@pytest.mark.parametrize("kind", [HyperDFlashDrafter, Eagle3Drafter, SpecBlockDrafter])
def test_what_is_computed_in_float32_is_never_rounded(target, kind, tmp_path):
    """A gate, and the positions that a drafter in bfloat16 sees."""
    fields = dict(reducer="hc_gate", head_dim=16)
    exact, made = (kind.from_target(target, dtype=dtype, **fields) for dtype in (torch.float32, torch.bfloat16))
    made.save_pretrained(tmp_path, with_code=False)
    loaded, cast = (kind.from_pretrained(tmp_path, dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
    assert cast.layers[0].mlp.up_proj.weight.dtype == torch.float32
    for drafter in (made, loaded, cast.to(torch.bfloat16)):
        assert drafter.dtype == torch.bfloat16 and drafter.rotary_emb.inv_freq.dtype == torch.float32
        assert torch.equal(drafter.rotary_emb.inv_freq, exact.rotary_emb.inv_freq)
        assert drafter.config.num_streams == 4 and drafter.target_layer_ids == [-1]
    for drafter in (made, loaded):
        assert torch.equal(drafter.hc_gate.hc_fn, target.model.hc_head.hc_fn)
        assert drafter.hc_gate.hc_fn.dtype == torch.float32


def test_from_target_fits_the_target(target, caplog):
    config = tiny_drafter(target, num_draft_tokens=4).config
    assert (config.vocab_size, config.target_hidden_size, config.target_hc_mult) == (64, 32, 4)
    assert config.block_size == 5 and config.rope_parameters["rope_theta"] == 10000.0
    assert config.reducer == "hc_gate" and not caplog.messages
    assert tiny_drafter(target, hidden_size=64).config.reducer == "fc"
    assert any("64" in line and "32" in line for line in caplog.messages)
    # A window that engines have words for.
    assert tiny_drafter(qwen3()).config.sliding_window is None
    assert config.sliding_window == 1024  # of `max_position_embeddings`
    assert tiny_drafter(target, sliding_window=None).config.sliding_window is None


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("bfloat16", torch.bfloat16), (torch.float64, torch.float64), ("auto", torch.float32), (None, torch.float32)],
)
def test_a_dtype_is_given_by_name_too(target, dtype, expected):
    drafter = tiny_drafter(target, dtype=dtype)
    assert drafter.dtype == expected and drafter.hc_gate.hc_fn.dtype == torch.float32


@pytest.mark.parametrize("reducer", ["hc_gate", "fc", "hybrid"])
def test_a_target_on_meta_gives_a_drafter_on_meta(reducer):
    """Sizes and counts for V4-Flash, without its weights: 65K against 67M in the paper's table 1."""
    layers, kinds = 3, ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
    with torch.device("meta"):
        target = DeepseekV4ForCausalLM(
            DeepseekV4Config(num_hidden_layers=layers, layer_types=kinds, mlp_layer_types=["moe"] * layers)
        )
        plain = qwen3()
    drafter = HyperDFlashDrafter.from_target(target, reducer=reducer, dtype=torch.bfloat16, num_hidden_layers=1)
    assert all(tensor.is_meta for tensor in [*drafter.parameters(), *drafter.buffers()])
    assert drafter.dtype == torch.bfloat16 and drafter.config.mask_token_id == 128799
    parts = {"hc_gate": 65_541, "fc": 67_108_864}
    assert all(count(getattr(drafter, name)) == size for name, size in parts.items() if hasattr(drafter, name))
    assert hasattr(drafter, reducer) or reducer == "hybrid"
    drafter = tiny_drafter(plain, target_layer_ids=[0, 2])
    assert drafter.config.reducer == "fc" and all(parameter.is_meta for parameter in drafter.parameters())


def states_of_oracle(drafter, embeds, residual):
    """A block's states `[queries, config.target_hidden_size]` by the oracle of DFlash, from embeddings `[queries,
    config.target_hidden_size]` and the residual of all tokens before it."""
    config, weights = drafter.config, drafter.state_dict()
    slides = [kind == "sliding_attention" for kind in config.kinds]
    causal = {"none": [False] * len(slides), "sliding": slides, "all": [True] * len(slides)}[config.causal_layers]
    windows = [config.sliding_window if each else None for each in slides]
    read = oracle_dflash.Drafter(config.to_dict(), weights, [], 1, 7, causal, windows, config.window_from == "anchor")
    if "embed_proj.weight" not in weights:
        return oracle_dflash.body(read, embeds, drafter.reduce(residual)[0])
    states = oracle_dflash.body(read, embeds @ weights["embed_proj.weight"].T, drafter.reduce(residual)[0])
    return states @ weights["head_proj.weight"].T


FULL_FIRST, SLIDING_FIRST = (
    dict(layer_types=kinds, num_hidden_layers=2)
    for kinds in (["full_attention", "sliding_attention"], ["sliding_attention", "full_attention"])
)


@pytest.mark.parametrize(
    ("window", "fields"),
    [
        (None, {"head_dim": 8}), (5, {"conv_kernel_size": 3, "conv_group_size": 8}), (5, {"hidden_size": 48}),
        (None, {"hidden_size": 48, "conv_kernel_size": 2}), (5, FULL_FIRST),
        (5, {"causal_layers": "sliding", **SLIDING_FIRST}), (5, {"causal_layers": "all", "window_from": "slot"}),
        (5, {"window_from": "slot", "causal_layers": "sliding", **FULL_FIRST}), (2, {"window_from": "slot"}),
    ],
)  # fmt: skip
@torch.no_grad()
def test_blocks_are_the_oracles_in_training_and_in_generation(target, window, fields):
    """Generation adds context token by token and runs one block; training runs all blocks at once under a mask."""
    drafter = tiny_drafter(target, **{"sliding_window": window, "head_dim": 16, **fields})
    for name, parameter in drafter.named_parameters():
        if "_conv" in name:
            parameter.normal_(std=0.3)
    seen, ids, residual, everywhere = target_of(target), prompt(150), torch.randn(1, 150, 4, 32), torch.arange(150)
    anchors = torch.tensor([[1, 70, 149]])
    block, positions = block_inputs(ids.gather(1, anchors), anchors, 7, 1)
    embeds, masks = seen.embed(block), block_masks(drafter.config, anchors, everywhere[None])
    together = drafter(
        embeds, positions, attention_mask=masks, residual=residual, residual_position_ids=everywhere[None]
    )
    context, filled = drafter.new_context(), 0
    for index, anchor in enumerate(anchors[0].tolist()):
        while filled < anchor:
            span = slice(filled, filled := min(filled + 3, anchor))
            drafter.extend(
                seen, context, residual[:, span], everywhere[None, span], ids[:, span.start + 1 : filled + 1]
            )
        is_short = "full_attention" not in drafter.config.kinds
        assert context.window == (window - (drafter.config.window_from == "slot") if is_short else None)
        own, known = slice(7 * index, 7 * index + 7), residual[:, :anchor]
        expected = states_of_oracle(drafter, embeds[0, own], known)
        alone = drafter(
            embeds[:, own], positions[:, own], residual=known, residual_position_ids=everywhere[None, :anchor]
        )
        for found in (together[0, own], alone[0]):
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
        sampler = DraftSampler(LogitsProcessorList(), do_sample=True)
        ahead = everywhere[None, : anchor + 1]
        (tree,) = drafter.draft(seen, [DraftRequest(context, ids[:, : anchor + 1], ahead, 6, sampler)])
        logits = seen.logits(expected[1:]).index_fill(1, torch.tensor([1]), -torch.inf)  # what masks is never drafted
        torch.testing.assert_close(torch.stack(tree.q), logits.softmax(-1), atol=1e-6, rtol=1e-4)


@torch.no_grad()
def test_a_block_knows_distances_alone(target):
    """So a window whose positions are clamped to those that the drafter was trained at is the window itself."""
    drafter = tiny_drafter(target, sliding_window=5, num_hidden_layers=2)
    seen, ids, residual = target_of(target), prompt(900), torch.randn(1, 899, 4, 32)
    sampler, drawn = DraftSampler(LogitsProcessorList(), do_sample=True), []
    for positions in (torch.arange(900)[None], (torch.arange(900)[None] - 894).clamp(min=0)):
        context = drafter.new_context()
        drafter.extend(seen, context, residual, positions[:, :-1], ids[:, 1:])
        (tree,) = drafter.draft(seen, [DraftRequest(context, ids, positions, 6, sampler)])
        drawn.append(torch.stack(tree.q))
    assert positions[0, -1] == 5
    torch.testing.assert_close(*drawn, atol=1e-5, rtol=1e-3)
    context = drafter.new_context()  # which tells other distances apart
    drafter.extend(seen, context, residual, positions[:, :-1] // 2, ids[:, 1:])
    (tree,) = drafter.draft(seen, [DraftRequest(context, ids, positions, 6, sampler)])
    assert (torch.stack(tree.q) - drawn[0]).abs().max() > 1e-4


# Sequential heads


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", HEADS)
def test_a_new_head_changes_no_draft(target, kind, dtype):
    """Whether a drafter is made with it or gets it later. All else stays, and there is something to learn."""
    target.config.pad_token_id = None  # so that it has a mask vector
    options = dict(reducer="hybrid", target_layer_ids=[1, -1], dtype=dtype, num_hidden_layers=2)
    plain = HyperDFlashDrafter.from_target(target, **options).eval()
    with torch.no_grad():
        plain.norm.weight.normal_(1, 0.1)  # something learned
    fields = dict(sequential_head=kind, head_rank=5, confidence_head=True)
    grown, before = plain.with_heads(**fields), plain.state_dict()
    config = grown.config
    assert (config.sequential_head, config.head_rank, config.confidence_head) == (kind, 5, True)
    assert config.head_candidates == HEADS[kind].candidates_of(config.vocab_size, 0)
    assert plain.head is None and plain.config.sequential_head == "none"
    made = HyperDFlashDrafter.from_target(target, **options, **fields, head_candidates=0).eval()
    again = HyperDFlashDrafter(made.config).to(dtype).eval()
    again.hc_gate.float()
    for drafter in (made, again):
        missing, unexpected = drafter.load_state_dict(before, strict=False)
        assert not unexpected and {name.split(".")[0] for name in missing} == {drafter.head.key, "confidence_head"}
    expected = proposed(plain, target, prompt(9))[0].tokens
    for drafter in (grown, made, again):
        tensors = drafter.state_dict()
        assert all(torch.equal(tensors[name], value) for name, value in before.items())
        assert {parameter.dtype for parameter in drafter.head.parameters()} == {dtype}
        assert drafter.hc_gate.hc_fn.dtype == torch.float32
        assert any(parameter.any() for parameter in drafter.head.parameters())  # else nothing is ever learned
        found = proposed(drafter, target, prompt(9))[0]
        assert torch.equal(found.tokens, expected) and found.confidence.tolist() == [0.5] * 6


@pytest.mark.parametrize("kind", HEADS)
def test_what_is_learned_stays_when_another_head_is_added(target, kind):
    sure = tiny_drafter(target, confidence_head=True)
    with torch.no_grad():
        sure.confidence_head.proj.weight.normal_()
    grown = sure.with_heads(sequential_head=kind, head_rank=5)
    found, expected = (proposed(one, target, prompt(9))[0].confidence for one in (grown, sure))
    torch.testing.assert_close(found, expected)
    assert len(set(expected.tolist())) > 1
    drafter = headed(target, kind)
    again = drafter.with_heads(confidence_head=True).head.state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in drafter.head.state_dict().items())


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
    seen, config, drafts = target_of(target), drafter.config, drafter.max_draft_tokens
    rows, lengths = [prompt(18), prompt(10, 1)], torch.tensor([[17], [9]])
    residual, everywhere = residual_before(drafter, 18), torch.arange(24).expand(2, -1)
    trees = [proposed(drafter, target, row, do_sample=True)[0] for row in rows]
    texts = torch.zeros(2, 24, dtype=torch.long)
    for text, row, tree in zip(texts, rows, trees):
        text[: row.shape[1] + drafts] = torch.cat([row[0], tree.tokens])
    block, positions = block_inputs(texts.gather(1, lengths), lengths, config.block_size, config.mask_token_id)
    mask, previous = block_mask(lengths, everywhere, config.block_size), previous_tokens(texts, lengths, drafts)
    of_all = torch.cat([residual, torch.randn(1, 6, *residual.shape[2:])], dim=1).expand(2, -1, -1, -1)
    out = drafter(seen.embed(block), positions, None, mask, of_all, everywhere, previous, seen.embed(previous))
    assert out.states.shape == (2, 1, drafts, 32) and (out.vectors is None) == (drafter.head_table is None)
    logits = drafter.to_full_vocabulary(seen, drafter.logits(seen, out.states, out.vectors))
    for row, tree in enumerate(trees):
        known = logits[row, 0].index_fill(1, torch.tensor([1]), -torch.inf)
        torch.testing.assert_close(known.softmax(-1), torch.stack(tree.q), atol=1e-5, rtol=1e-3)
        torch.testing.assert_close(torch.sigmoid(out.confidence[row, 0]), tree.confidence, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", HEADS)
def test_an_adapter_has_heads_and_mask_vector_whole(target, tmp_path, kind):
    """LoRA for the layers; these are trained, saved and merged as they are."""
    target.config.pad_token_id = None  # so that it has a mask vector
    made = HyperDFlashDrafter.from_target(target, num_hidden_layers=1)
    drafter = learned(made.with_heads(sequential_head=kind, confidence_head=True, head_candidates=5)).eval()
    whole = [drafter.head.key, "confidence_head", "mask_embedding"]
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "o_proj"], modules_to_save=whole, init_lora_weights=False)
    wrapped = peft.get_peft_model(copy.deepcopy(drafter), config)
    trained = {name for name, parameter in wrapped.named_parameters() if parameter.requires_grad}
    assert len([name for name in trained if "lora_" not in name]) == len(drafter.head.state_dict()) + 3
    with torch.no_grad():
        for name in sorted(trained):
            wrapped.get_parameter(name).normal_(std=0.4)
    wrapped.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(drafter), tmp_path).eval()
    merged = peft.PeftModel.from_pretrained(copy.deepcopy(drafter), tmp_path).merge_and_unload().eval()
    trees = [
        proposed(one, target, prompt(9))[0]
        for one in (wrapped.get_base_model(), loaded.get_base_model(), merged, drafter)
    ]
    for other in trees[1:3]:
        assert torch.equal(other.tokens, trees[0].tokens)
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
    assert ", ".join(map(str, expected)) in caplog.text and str(layers) in caplog.text
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
    assert tiny_drafter(tiny_target(), reducer="fc").config.target_layer_ids == [-1]  # of several streams the last
