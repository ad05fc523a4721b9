"""DeepSeek-V4's own drafters, MTP and DSpark, against their definitions, written out entry by entry and slot by slot
from a checkpoint's tensors."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.version import Version
from transformers import (
    DeepseekV4Config,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

from hf_hyperdflash import DeepseekV4DSparkDrafter, DeepseekV4MTPDrafter, capture_residual
from hf_hyperdflash.drafters.deepseek_v4.configuration import DeepseekV4DSparkConfig
from hf_hyperdflash.drafters.parts.block_attention import AttentionSpan
from hf_hyperdflash.drafters.sampling import DraftRequest, DraftSampler
from hf_hyperdflash.targets.registry import target_of
from hf_hyperdflash.training.data.blocks import block_mask, previous_tokens

from ..conftest import prompt, tiny_config, tiny_target
from ..helpers.deepseek_checkpoints import (
    NOT_QUANTIZED,
    dspark_fields,
    dspark_shapes,
    mtp_shapes,
    quantized,
    random_tensors,
    write,
    write_shards,
)
from ..helpers.loops import proposed_by
from ..helpers.oracle_deepseek_v4 import NaiveDSpark, NaiveMTP

WINDOW, BLOCK = 8, 5
# The clamps of the experts' activations must matter.
FIELDS = dict(swiglu_limit=0.8, hc_sinkhorn_iters=5, n_routed_experts=6, sliding_window=WINDOW)
DRAWN = LogitsProcessorList([TemperatureLogitsWarper(0.7), TopKLogitsWarper(20)])


class Kind(NamedTuple):
    drafter: Any
    shapes: Any
    naive: Any
    streams: int
    most: int  # drafts that are asked for
    fields: dict


KINDS = {
    "mtp": Kind(DeepseekV4MTPDrafter, mtp_shapes, NaiveMTP, 4, 6, {}),
    "dspark": Kind(DeepseekV4DSparkDrafter, dspark_shapes, NaiveDSpark, 12, BLOCK, dspark_fields()),
}


def as_it_is(name, tensor):
    return tensor


class Pair:
    """A target, the drafter that a checkpoint of it has, and the oracle of the same tensors. `stored` says how a
    tensor is in the checkpoint, `dtype` what its configuration names."""

    def __init__(self, kind: Kind, folder, blocks=None, stored=as_it_is, dtype="float32", **fields) -> None:
        self.kind, fields = kind, {**FIELDS, **fields}
        self.config = tiny_config(**{**fields, **kind.fields})
        self.config.dtype = dtype
        self.tensors = random_tensors(kind.shapes(self.config, *([] if blocks is None else [blocks])))
        self.stored = {name: stored(name, tensor) for name, tensor in self.tensors.items()}
        self.target = tiny_target(**fields)
        self.drafter = kind.drafter.from_target(write(folder, self.config, self.stored))
        tables = self.target.get_input_embeddings().weight, self.target.get_output_embeddings().weight
        self.naive = kind.naive(self.tensors, self.config, *(table.detach() for table in tables))

    def entries(self, length, seed=0, first=0):
        """Residual, positions and ids `[1, length + 1]` of an accepted sequence; the last is the anchor."""
        generator = torch.Generator().manual_seed(seed)
        streams = getattr(self.drafter.config, "num_streams", self.drafter.config.hc_mult)
        residual = torch.randn(1, length, streams, 32, generator=generator)
        return residual, torch.arange(first, first + length + 1)[None], prompt(length + 1, seed)

    def extend(self, context, sequence, start, stop):
        (residual, positions, ids), span = sequence, slice(start, stop)
        following = ids[:, start + 1 : stop + 1]
        self.drafter.extend(target_of(self.target), context, residual[:, span], positions[:, span], following)

    def drafted(self, context, sequence, stop, count=None, processors=None):
        """A tree after the sequence's first `stop + 1` tokens."""
        _, positions, ids = (part[:, : stop + 1] for part in sequence)
        sampler = DraftSampler(processors or LogitsProcessorList(), processors is not None)
        request = DraftRequest(context, ids, positions, count or self.kind.most, sampler)
        return self.drafter.draft(target_of(self.target), [request])[0]

    def from_scratch(self, sequence, stop, **options):
        context = self.drafter.new_context()
        self.extend(context, sequence, 0, stop)
        return self.drafted(context, sequence, stop, **options)

    def said(self, sequence, stop, tokens):
        """The oracle's logits of each draft where these are drafted, and confidences, if it has any."""
        residual, positions, ids = (part[0] for part in sequence)
        return self.naive.said(residual[:stop], positions[: stop + 1], ids[: stop + 1], tokens)

    def assert_deepseeks(self, tree, sequence, stop, processors=None):
        tokens = tree.tokens.tolist()
        expected, confidence = self.said(sequence, stop, tokens)
        assert expected[expected.isfinite()].std() > 0.1 and tree.is_chain  # not blind
        if processors is None:
            assert tree.q is None and tokens == expected.argmax(-1).tolist()
        else:
            law = processors(None, expected).softmax(-1)
            torch.testing.assert_close(torch.stack(tree.q).double(), law, atol=1e-6, rtol=3e-4)
        if confidence is None:
            assert tree.confidence is None
        else:
            torch.testing.assert_close(tree.confidence.double(), confidence, atol=1e-5, rtol=1e-4)


@pytest.fixture(params=KINDS)
def kind(request):
    return KINDS[request.param]


@pytest.fixture
def pair(kind, tmp_path):
    return Pair(kind, tmp_path)


@pytest.mark.parametrize("length, first", [(1, 0), (7, 0), (8, 0), (9, 11), (30, 500)])
def test_drafts_are_deepseeks(pair, length, first):
    """Greedily, and drawn: a bias is added before the request's temperature, and `q` is what is drawn from."""
    sequence = pair.entries(length, seed=length, first=first)
    tree = pair.from_scratch(sequence, length)
    assert len(tree) == pair.kind.most and len(set(tree.tokens.tolist())) > 1
    pair.assert_deepseeks(tree, sequence, length)
    assert pair.from_scratch(sequence, length, count=2).tokens.tolist() == tree.tokens[:2].tolist()
    for processors in (LogitsProcessorList(), DRAWN):
        pair.assert_deepseeks(pair.from_scratch(sequence, length, processors=processors), sequence, length, processors)


@pytest.mark.parametrize(
    ("name", "fields", "shape", "blocks"),
    [
        ("dspark", dspark_fields(target_layer_ids=[1]), {}, 1),
        ("dspark", dspark_fields(block_size=2, target_layer_ids=[0, 2]), dict(hc_mult=2), 2),
        ("dspark", dspark_fields(block_size=7, markov_rank=1), dict(o_groups=1, routed_scaling_factor=2.5), 4),
        ("mtp", {}, dict(sliding_window=1), None),
    ],
    ids=["one block", "two streams", "four blocks", "a window of one"],
)
def test_drafters_of_other_sizes(tmp_path, name, fields, shape, blocks):
    """The number of blocks is that of the checkpoint, whatever its config says of MTP layers."""
    kind = KINDS[name]._replace(fields=fields, most=fields.get("dspark_block_size", 3))
    pair = Pair(kind, tmp_path, blocks, **shape)
    sequence, drawn = pair.entries(12), LogitsProcessorList()
    if name == "dspark":
        assert pair.drafter.num_draft_tokens == pair.drafter.max_draft_tokens == kind.most
        assert sequence[0].shape[2] == len(pair.config.dspark_target_layer_ids) * pair.config.hc_mult
    pair.assert_deepseeks(pair.from_scratch(sequence, 12, processors=drawn), sequence, 12, drawn)


@settings(max_examples=8, deadline=None)
@given(st.sampled_from(sorted(KINDS)), st.lists(st.integers(0, 13), min_size=1, max_size=6), st.sampled_from([0, 300]))
def test_round_by_round_drafts_are_deepseeks(tmp_path_factory, name, accepted, first):
    """However many tokens a round accepts, at once or one by one, within the window and beyond."""
    pair, accepted = Pair(KINDS[name], tmp_path_factory.mktemp("pair")), [1, *accepted]
    sequence, drawn = pair.entries(sum(accepted), first=first), LogitsProcessorList()
    context, done = pair.drafter.new_context(), 0
    for count in accepted:
        pair.extend(context, sequence, done, done + count)
        done += count
        tree = pair.drafted(context, sequence, done, processors=drawn)
        pair.assert_deepseeks(tree, sequence, done, drawn)


# As in training


def test_mtps_rows_are_deepseeks(tmp_path):
    pair = Pair(KINDS["mtp"], tmp_path)
    sequence = residual, _, ids = pair.entries(20)
    embeds, head = pair.target.get_input_embeddings()(ids[:, 1:]), pair.target.get_output_embeddings()
    logits = head(pair.drafter.collapse(pair.drafter(residual, embeds)))
    for stop in (1, 7, 9, 20):
        expected, _ = pair.said(sequence, stop, [0])
        torch.testing.assert_close(logits[:, stop - 1].double(), expected, atol=2e-5, rtol=1e-4)
    logits.square().mean().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in pair.drafter.parameters())


def test_dsparks_blocks_are_deepseeks(tmp_path):
    """Several blocks at once, each over its own window, and every parameter learns from them, with checkpoints of
    activations as without."""
    pair = Pair(KINDS["dspark"], tmp_path)
    drafter, embed = pair.drafter.train(), pair.target.get_input_embeddings()
    residual, positions, ids = pair.entries(24)
    anchors = torch.tensor([[1, 9, 23, -1]])
    first = anchors.clamp(min=0)
    blocks = torch.full((1, 4, BLOCK), pair.config.dspark_noise_token_id)
    blocks[:, :, 0] = ids[:, :-1].gather(1, first)
    previous = previous_tokens(ids, anchors, BLOCK)
    inputs = dict(
        block_embeds=embed(blocks.flatten(1)).detach(),
        position_ids=(first.unsqueeze(-1) + torch.arange(BLOCK)).flatten(1),
        attention_mask=block_mask(anchors, positions[:, :-1], BLOCK, AttentionSpan(WINDOW)),
        residual=residual,
        residual_position_ids=positions[:, :-1],
        previous_ids=previous,
        previous_embeds=embed(previous).detach(),
    )
    gradients = []
    for checkpointing in (False, True):
        drafter.zero_grad()
        if checkpointing:
            drafter.gradient_checkpointing_enable()
        out = drafter(**inputs)
        logits = pair.target.get_output_embeddings()(out.states) + out.vectors @ drafter.head_table.T
        for block, anchor in enumerate([1, 9, 23]):
            states = pair.naive.states(residual[0, :anchor], positions[0, : anchor + 1], int(ids[0, anchor]))
            for k in range(BLOCK):
                scores, confidence = pair.naive.scores(states[k], int(previous[0, block, k]))
                torch.testing.assert_close(logits[0, block, k].double(), scores, atol=2e-5, rtol=1e-4)
                torch.testing.assert_close(out.confidence[0, block, k].double(), confidence, atol=2e-5, rtol=1e-4)
        (logits[:, :3].square().mean() + out.confidence.square().mean()).backward()
        gradients.append({name: parameter.grad.clone() for name, parameter in drafter.named_parameters()})
    for name, gradient in gradients[0].items():
        assert gradient.abs().max() > 0 and torch.equal(gradient, gradients[1][name]), name


# Loading


@pytest.mark.parametrize(
    "block, scale_name, scale_dtype, fp4_experts",
    [
        (None, "scale", torch.float8_e8m0fnu, True),
        ((5, 7), "scale", torch.float8_e8m0fnu, False),
        ((16, 24), "weight_scale_inv", torch.float32, False),
        ((128, 128), "scale", torch.uint8, True),
    ],
)
def test_quantized_shards_are_dequantized(tmp_path, kind, block, scale_name, scale_dtype, fp4_experts):
    config = tiny_config(**{**FIELDS, **kind.fields}, moe_intermediate_size=64)
    if fp4_experts:
        config.expert_dtype = "fp4"
    if block is not None:
        config.quantization_config = {"quant_method": "fp8", "weight_block_size": list(block)}
    tensors = random_tensors(kind.shapes(config))
    stored, values = quantized(tensors, block or (128, 128), scale_name, scale_dtype, fp4_experts)
    # V4-Flash-Base repeats what is shared.
    copies = {"mtp.0.emb.tok_emb.weight": torch.zeros(64, 32), "mtp.0.head.weight": torch.zeros(64, 32)}
    drafter = kind.drafter.from_target(write_shards(tmp_path, config, stored | copies), dtype=torch.float32)
    assert_has(drafter, values)
    assert not {"quantization_config", "expert_dtype"} & drafter.config.to_dict().keys()


def assert_has(drafter, tensors):
    """Under DeepSeek's names."""
    state = drafter.deepseek_state_dict()
    assert state.keys() == tensors.keys()
    for name, value in tensors.items():
        assert state[name].dtype == value.dtype and torch.equal(state[name], value), name


FLOAT32 = ("hc_", "norm", "attn_sink", "gate.bias")


def test_bfloat16_keeps_what_v4_keeps_in_float32(tmp_path, kind):
    def stored(name, tensor):
        return tensor if any(part in name for part in FLOAT32) else tensor.to(torch.bfloat16)

    pair = Pair(kind, tmp_path, stored=stored, dtype=torch.bfloat16)
    assert pair.drafter.dtype == pair.drafter.config.dtype == torch.bfloat16 and not pair.drafter.training
    assert_has(pair.drafter, pair.stored)
    if Version(transformers.__version__) < Version("5.18"):
        return  # cannot run a bfloat16 V4
    sequence = pair.entries(12)
    tree = pair.from_scratch(sequence, 12, count=3, processors=LogitsProcessorList())
    expected, confidence = pair.said(sequence, 12, tree.tokens.tolist())
    laws = torch.stack(tree.q).double(), expected.softmax(-1)
    assert torch.nn.functional.cosine_similarity(*laws).min() > 0.98
    assert confidence is None or (tree.confidence - confidence).abs().max() < 0.1


@pytest.mark.parametrize("dtype", ["float16", "float32", None])
def test_numbers_are_the_checkpoints_where_nobody_says(tmp_path, dtype):
    assert Pair(KINDS["dspark"], tmp_path, dtype=dtype).drafter.dtype == getattr(torch, dtype or "bfloat16")


def test_from_a_loaded_target(pair, tmp_path):
    loaded = pair.target
    loaded.config = type(loaded.config).from_pretrained(tmp_path)
    loaded.config._name_or_path = str(tmp_path)
    loaded.set_experts_implementation("batched_mm")  # may be one for quantized experts only, which ours are not
    before = loaded.config.to_dict()
    again = pair.kind.drafter.from_target(loaded, num_draft_tokens=3)
    assert again.config._experts_implementation != "batched_mm" == loaded.config._experts_implementation
    assert loaded.config.to_dict() == before and again.num_draft_tokens == 3
    assert again.dtype == torch.float32 and again.device == loaded.device
    assert_has(again, pair.drafter.deepseek_state_dict())
    assert set(again.config.layer_types) == {"sliding_attention"} and set(again.config.mlp_layer_types) == {"moe"}
    assert again.target_layer_ids == ([-1] if pair.kind.drafter is DeepseekV4MTPDrafter else [0, 1, -1])
    if pair.kind.drafter is DeepseekV4DSparkDrafter:
        assert again.config.target_name_or_path == str(tmp_path)
    assert pair.kind.drafter.from_target(loaded, dtype="bfloat16").dtype == torch.bfloat16


def test_its_tensors_are_those_of_v4_flash_0731():
    """By their published number and by the shapes that several readers of the checkpoint found."""
    fields = dspark_fields(noise_token_id=128799, markov_rank=256, target_layer_ids=[40, 41, 42])
    config = DeepseekV4DSparkConfig.from_target_config(DeepseekV4Config(**fields))
    drafter = DeepseekV4DSparkDrafter._empty(config, torch.bfloat16, "meta")
    tensors, count = drafter.deepseek_state_dict(), [0, 0, 0]
    for name, tensor in tensors.items():
        has_scale = tensor.ndim == 2 and not any(part in name for part in NOT_QUANTIZED)
        count[int(name.split(".")[1])] += 1 + has_scale
    assert count == [1568, 1565, 1572]
    shapes = {
        "mtp.0.main_proj.weight": [4096, 12288],
        "mtp.2.confidence_head.proj.weight": [1, 4352],
        "mtp.2.markov_head.markov_w2.weight": [129280, 256],
        "mtp.1.attn.wkv.weight": [512, 4096],
        "mtp.2.hc_head_fn": [4, 16384],
    }
    assert {name: list(tensors[name].shape) for name in shapes} == shapes
    assert config.target_layer_ids == [40, 41, -1] and config.sliding_window == 128


# Use with a target


@pytest.mark.parametrize("length", [3, 26])
def test_generate_reads_the_targets_layers(pair, length):
    """Every draft is what DeepSeek's drafter makes of the target's states."""
    target, ids, options = pair.target, prompt(length), dict(do_sample=False, max_new_tokens=14)
    expected = target.generate(ids, **options)
    with torch.no_grad(), capture_residual(target, [0, 1, 2] if pair.kind.streams == 12 else [2]) as captured:
        target(expected)
    pair.drafter.bind(target)
    out, drafts = proposed_by(pair.drafter, target, ids, **options)
    assert torch.equal(out, expected) and len(drafts) > 2
    sequence, at = (captured[0], torch.arange(length + 15)[None], expected), length
    for tokens, accepted in zip(drafts, pair.drafter.last_stats.accepted):
        assert tokens == pair.said(sequence, at, tokens)[0].argmax(-1).tolist()
        at += 1 + accepted
