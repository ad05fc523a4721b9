"""DeepSeek's DSpark drafter against its definition, which `oracle_dspark.py` writes out slot by slot."""

import json

import pytest
import torch
import transformers
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.version import Version
from transformers import DeepseekV4Config, LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper

from hf_hyperdflash import DeepseekV4DSparkDrafter, DeepseekV4MTPDrafter
from hf_hyperdflash.drafters.deepseek_v4.configuration_dspark import DeepseekV4DSparkConfig
from hf_hyperdflash.drafters.parts.block_attention import AttentionSpan
from hf_hyperdflash.drafters.sampling import DraftSampler
from hf_hyperdflash.targets.registry import target_of
from hf_hyperdflash.training.data.blocks import block_mask, previous_tokens
from hf_hyperdflash.trees.acceptance import sample_index

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
from ..helpers.loops import in_transformers_loop, proposed_by
from ..helpers.oracle_dspark import NaiveDSpark
from ..helpers.training import losses, trainer_for

WINDOW, BLOCK = 8, 5
# The clamps of the experts' activations must matter.
FIELDS = dict(swiglu_limit=0.8, hc_sinkhorn_iters=5, n_routed_experts=6, sliding_window=WINDOW)
GREEDILY = DraftSampler(LogitsProcessorList(), False)


@pytest.fixture
def config():
    return tiny_config(**FIELDS, **dspark_fields())


@pytest.fixture
def tensors(config):
    return random_tensors(dspark_shapes(config))


@pytest.fixture
def target():
    return tiny_target(**FIELDS)


@pytest.fixture
def drafter(tmp_path, config, tensors):
    return DeepseekV4DSparkDrafter.from_target(write(tmp_path, config, tensors), dtype=torch.float32)


@pytest.fixture
def naive(config, tensors, target):
    return naive_for(tensors, config, target)


def naive_for(tensors, config, target):
    head = target.get_output_embeddings().weight.detach()
    return NaiveDSpark(tensors, config, target.get_input_embeddings().weight.detach(), head)


def entries(length, seed=0, first=0, streams=12):
    """Residual, positions and ids `[1, length + 1]` of an accepted sequence; the last is the anchor."""
    generator = torch.Generator().manual_seed(seed)
    residual = torch.randn(1, length, streams, 32, generator=generator)
    return residual, torch.arange(first, first + length + 1)[None], prompt(length + 1, seed)


def extend(drafter, target, context, sequence, start, stop):
    residual, positions, ids = sequence
    span = slice(start, stop)
    drafter.extend(target_of(target), context, residual[:, span], positions[:, span], ids[:, start + 1 : stop + 1])


def drafted(drafter, target, context, sequence, stop, count=BLOCK, sampler=GREEDILY):
    """A tree and the logits `[count, vocab_size]` it was drawn from, after the sequence's first `stop + 1` tokens."""
    logits = []

    class Listening(DraftSampler):
        def scored(self, prefixes, step):
            logits.append(step[0].float())
            return super().scored(prefixes, step)

    _, positions, ids = sequence
    listening = Listening(sampler.processors, sampler.do_sample)
    tree = drafter.propose(target_of(target), context, ids[:, : stop + 1], positions[:, : stop + 1], count, listening)
    return tree, torch.stack(logits)


def from_scratch(drafter, target, sequence, stop, **options):
    context = drafter.new_context()
    extend(drafter, target, context, sequence, 0, stop)
    return drafted(drafter, target, context, sequence, stop, **options)


def assert_deepseeks(tree, logits, naive, sequence, stop, choose=torch.argmax):
    residual, positions, ids = sequence
    anchor = int(ids[0, stop])
    tokens, expected, confidence = naive.draft(residual[0, :stop], positions[0, : stop + 1], anchor, len(tree), choose)
    assert tree.tokens.tolist() == tokens and tree.is_chain
    torch.testing.assert_close(logits.double(), expected, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(tree.confidence.double(), torch.sigmoid(confidence), atol=1e-5, rtol=1e-4)
    assert expected[expected.isfinite()].std() > 0.1  # not blind


# Drafts


@pytest.mark.parametrize("length, first", [(0, 4), (1, 0), (7, 0), (8, 0), (9, 11), (30, 0), (30, 500)])
def test_drafts_are_deepseeks(drafter, target, naive, length, first):
    sequence = entries(length, seed=length, first=first)
    tree, logits = from_scratch(drafter, target, sequence, length)
    assert tree.q is None and len(tree) == BLOCK
    assert_deepseeks(tree, logits, naive, sequence, length)
    fewer, _ = from_scratch(drafter, target, sequence, length, count=2)
    assert fewer.tokens.tolist() == tree.tokens[:2].tolist() and torch.equal(fewer.confidence, tree.confidence[:2])


@pytest.mark.parametrize(
    "fields, shape, blocks",
    [
        (dspark_fields(target_layer_ids=[1]), {}, 1),
        (dspark_fields(block_size=2, target_layer_ids=[0, 2]), dict(hc_mult=2), 2),
        (dspark_fields(block_size=7, markov_rank=1), dict(o_groups=1, routed_scaling_factor=2.5), 4),
    ],
    ids=["one block", "two streams", "four blocks"],
)
def test_drafters_of_other_sizes(tmp_path, fields, shape, blocks):
    """The number of blocks is that of the checkpoint, whatever its config says of MTP layers."""
    config = tiny_config(**FIELDS, **shape, **fields)
    tensors = random_tensors(dspark_shapes(config, blocks))
    drafter = DeepseekV4DSparkDrafter.from_target(write(tmp_path, config, tensors), dtype=torch.float32)
    target = tiny_target(**FIELDS, **shape)
    layers = len(config.dspark_target_layer_ids)
    assert drafter.num_draft_tokens == drafter.max_draft_tokens == config.dspark_block_size
    assert len(drafter.layers) == blocks and drafter.config.num_streams == layers * config.hc_mult
    sequence = entries(12, streams=layers * config.hc_mult)
    tree, logits = from_scratch(drafter, target, sequence, 12, count=drafter.max_draft_tokens)
    assert_deepseeks(tree, logits, naive_for(tensors, config, target), sequence, 12)


@settings(max_examples=10, deadline=None)
@given(accepted=st.lists(st.integers(1, 13), min_size=1, max_size=6), first=st.sampled_from([0, 300]))
def test_round_by_round_drafts_are_deepseeks(accepted, first):
    """However many tokens a round accepts, at once or one by one, within the window and beyond."""
    config = tiny_config(**FIELDS, **dspark_fields())
    target = tiny_target(**FIELDS)
    drafter = DeepseekV4DSparkDrafter._empty(
        DeepseekV4DSparkConfig.from_target_config(config), torch.float32, "cpu"
    ).eval()
    tensors = random_tensors(dspark_shapes(config), seed=3)
    for name, tensor in drafter.deepseek_state_dict().items():
        tensor.copy_(tensors[name])
    sequence = entries(sum(accepted), first=first)
    context, done = drafter.new_context(), 0
    for count in accepted:
        extend(drafter, target, context, sequence, done, done + count)
        done += count
        tree, logits = drafted(drafter, target, context, sequence, done)
        again, whole = from_scratch(drafter, target, sequence, done)
        assert tree.tokens.tolist() == again.tokens.tolist()
        torch.testing.assert_close(logits, whole, atol=1e-5, rtol=1e-5)
    assert len(context) == min(done, WINDOW)
    assert_deepseeks(tree, logits, naive_for(tensors, config, target), sequence, done)


@pytest.mark.parametrize("seed", range(4))
def test_drawn_drafts_are_deepseeks(drafter, target, naive, seed):
    """The bias is added before the request's temperature; what is drawn from is what verification gets."""
    processors = LogitsProcessorList([TemperatureLogitsWarper(0.7), TopKLogitsWarper(20)])
    sequence = entries(20, seed=seed)
    torch.manual_seed(seed)
    tree, logits = from_scratch(drafter, target, sequence, 20, sampler=DraftSampler(processors, True))

    def choose(scores):
        return sample_index(processors(None, scores[None].float()).softmax(-1))

    torch.manual_seed(seed)
    assert_deepseeks(tree, logits, naive, sequence, 20, choose)
    for q, scores in zip(tree.q, logits):
        torch.testing.assert_close(q, processors(None, scores[None]).softmax(-1)[0])
        assert (q > 0).sum() == 20


def test_confidence_is_calibrated_by_position(drafter, target):
    sequence = entries(10)
    before, _ = from_scratch(drafter, target, sequence, 10)
    drafter.config.confidence_temperatures = [0.5, 1.0, 2.0, 4.0, 8.0]
    after, _ = from_scratch(drafter, target, sequence, 10)
    expected = torch.sigmoid(torch.logit(before.confidence.double()) / torch.tensor([0.5, 1.0, 2.0, 4.0, 8.0]))
    torch.testing.assert_close(after.confidence.double(), expected, atol=1e-5, rtol=1e-4)
    assert (before.confidence / after.confidence - 1).abs().max() > 0.5


# Blocks as in training


def test_rows_as_in_training_are_deepseeks(drafter, target, naive, config):
    """Several blocks at once, each over its own window, and every parameter learns from them."""
    residual, positions, ids = entries(24)
    positions, anchors = positions[:, :-1], torch.tensor([[1, 9, 23, -1]])
    first = anchors.clamp(min=0)
    blocks = torch.full((1, 4, BLOCK), config.dspark_noise_token_id)
    blocks[:, :, 0] = ids[:, :-1].gather(1, first)
    at = first.unsqueeze(-1) + torch.arange(BLOCK)
    previous = previous_tokens(ids, anchors, BLOCK)
    out = drafter(
        target.get_input_embeddings()(blocks.flatten(1)),
        at.flatten(1),
        attention_mask=block_mask(anchors, positions, BLOCK, AttentionSpan(WINDOW)),
        residual=residual,
        residual_position_ids=positions,
        previous_ids=previous,
        previous_embeds=target.get_input_embeddings()(previous),
    )
    logits = target.get_output_embeddings()(out.states) + out.vectors @ drafter.head_table.T
    for block, anchor in enumerate([1, 9, 23]):
        states = naive.states(residual[0, :anchor], positions[0, : anchor + 1], int(ids[0, anchor]))
        for k in range(BLOCK):
            scores, confidence = naive.scores(states[k], int(previous[0, block, k]))
            torch.testing.assert_close(logits[0, block, k].double(), scores, atol=2e-5, rtol=1e-4)
            torch.testing.assert_close(out.confidence[0, block, k].double(), confidence, atol=2e-5, rtol=1e-4)
    (logits[:, :3].square().mean() + out.confidence.square().mean()).backward()
    for name, parameter in drafter.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name


def test_gradient_checkpointing_changes_nothing(drafter, target):
    """transformers takes a cache out of a checkpointed layer's arguments; the context is none."""
    residual, positions, ids = entries(12)
    inputs = dict(
        block_embeds=target.get_input_embeddings()(ids[:, -BLOCK:]).detach(),
        position_ids=positions[:, -1:] + torch.arange(BLOCK),
        attention_mask=block_mask(torch.tensor([[11]]), positions[:, :-1], BLOCK, AttentionSpan(WINDOW)),
        residual=residual,
        residual_position_ids=positions[:, :-1],
    )
    found = []
    for checkpointing in (False, True):
        drafter.train().zero_grad()
        if checkpointing:
            drafter.gradient_checkpointing_enable()
        out = drafter(**inputs)
        out.square().mean().backward()
        found.append((out.detach(), drafter.main_proj.weight.grad.clone()))
    assert all(torch.equal(a, b) for a, b in zip(*found)) and found[0][1].abs().max() > 0


# Loading


@pytest.mark.parametrize(
    "block, scale_name, scale_dtype, fp4_experts",
    [(None, "scale", torch.float8_e8m0fnu, True), ((5, 7), "weight_scale_inv", torch.float32, False)],
)
def test_quantized_shards_are_dequantized(tmp_path, target, block, scale_name, scale_dtype, fp4_experts):
    config = tiny_config(**{**FIELDS, "n_routed_experts": 3}, **dspark_fields(), moe_intermediate_size=64)
    if fp4_experts:
        config.expert_dtype = "fp4"
    if block is not None:
        config.quantization_config = {"quant_method": "fp8", "weight_block_size": list(block)}
    stored, values = quantized(
        random_tensors(dspark_shapes(config, 2)), block or (128, 128), scale_name, scale_dtype, fp4_experts
    )
    assert {"mtp.0.main_proj." + scale_name, "mtp.1.ffn.experts.2.w3." + scale_name} <= stored.keys()
    drafter = DeepseekV4DSparkDrafter.from_target(write_shards(tmp_path, config, stored), dtype=torch.float32)
    loaded = drafter.deepseek_state_dict()
    assert loaded.keys() == values.keys()
    for name, value in values.items():
        assert torch.equal(loaded[name], value), name
    assert not {"quantization_config", "expert_dtype"} & drafter.config.to_dict().keys()
    sequence = residual, positions, ids = entries(5)
    tree, logits = from_scratch(drafter, target, sequence, 5)
    naive = naive_for(values, config, target)
    tokens, expected, _ = naive.draft(residual[0], positions[0], int(ids[0, -1]), BLOCK)
    assert tree.tokens.tolist() == tokens
    torch.testing.assert_close(logits.double(), expected, atol=1e-3, rtol=1e-3)


FLOAT32 = ("hc_", "norm", "attn_sink", "gate.bias")


def test_bfloat16_keeps_what_v4_keeps_in_float32(tmp_path, config, tensors, target):
    stored = {
        name: t if any(part in name for part in FLOAT32) else t.to(torch.bfloat16) for name, t in tensors.items()
    }
    config.dtype = torch.bfloat16
    drafter = DeepseekV4DSparkDrafter.from_target(write(tmp_path, config, stored))
    assert drafter.dtype == drafter.config.dtype == torch.bfloat16 and not drafter.training
    for name, tensor in drafter.deepseek_state_dict().items():
        assert tensor.dtype == stored[name].dtype and torch.equal(tensor, stored[name]), name
    if Version(transformers.__version__) < Version("5.18"):
        return  # cannot run a bfloat16 V4
    sequence = residual, positions, ids = entries(12)
    tree, logits = from_scratch(drafter, target, sequence, 12)
    naive, token = naive_for(tensors, config, target), int(ids[0, 12])
    for k, state in enumerate(naive.states(residual[0], positions[0], token)):
        expected, confidence = naive.scores(state, token)
        drafted = logits[k].isfinite()
        assert torch.nn.functional.cosine_similarity(logits[k, drafted].double(), expected[drafted], dim=0) > 0.98
        assert abs(tree.confidence[k] - torch.sigmoid(confidence)) < 0.1
        token = int(tree.tokens[k])


def test_deepseek_names_there_and_back(drafter, tensors):
    state = drafter.deepseek_state_dict()
    assert state.keys() == tensors.keys()
    assert all(torch.equal(state[name], tensors[name]) for name in tensors)


def test_save_and_load_as_a_model_of_its_own(tmp_path, drafter, target):
    drafter.save_pretrained(tmp_path / "own")
    fields = json.loads((tmp_path / "own" / "config.json").read_text())
    assert fields["model_type"] == "deepseek_v4_dspark" and not any(name.startswith("dspark_") for name in fields)
    loaded = DeepseekV4DSparkDrafter.from_pretrained(tmp_path / "own")
    ours, theirs = drafter.state_dict(), loaded.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert torch.equal(drafter.rotary_emb.main_inv_freq, loaded.rotary_emb.main_inv_freq)
    sequence = entries(11)
    once, again = (from_scratch(each, target, sequence, 11) for each in (drafter, loaded))
    torch.testing.assert_close(once[1], again[1])  # experts may run another way, which rounds otherwise
    torch.testing.assert_close(once[0].confidence, again[0].confidence)


def test_from_a_loaded_target(tmp_path, config, target, drafter):
    target.config._name_or_path = str(tmp_path)  # where the drafter fixture has written
    before = target.config.to_dict()
    with pytest.raises(ValueError, match=r"has no `dspark_block_size`, expected the fields of its DSpark drafter"):
        DeepseekV4DSparkDrafter.from_target(target)
    target.config = config
    target.config._name_or_path = str(tmp_path)
    again = DeepseekV4DSparkDrafter.from_target(target, num_draft_tokens=3, dtype="bfloat16")
    assert again.num_draft_tokens == 3 and again.dtype == torch.bfloat16 and again.device == target.device
    assert again.config.target_layer_ids == [0, 1, -1] and again.config.target_name_or_path == str(tmp_path)
    assert {**config.to_dict(), **before} == config.to_dict()
    with pytest.raises(ValueError, match="cannot draft 6 tokens a round: expected a whole number from 1 to 5, or"):
        again.num_draft_tokens = 6


@pytest.mark.parametrize("dtype", ["float16", "float32", None])
def test_numbers_are_the_checkpoints_where_nobody_says(tmp_path, config, tensors, dtype):
    config.dtype = dtype
    drafter = DeepseekV4DSparkDrafter.from_target(write(tmp_path, config, tensors))
    assert drafter.dtype == getattr(torch, dtype or "bfloat16")


def without(tensors, *parts):
    return {name: tensor for name, tensor in tensors.items() if not any(part in name for part in parts)}


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda t: without(t, "mtp"), r"no `mtp\.\*` tensors"),
        (lambda t: without(t, "markov_w2"), r"1 missing \(mtp\.2\.markov_head\.markov_w2\.weight\)"),
        (lambda t: without(t, "mtp.1."), r"missing .* unexpected \(mtp\.2\."),
        (lambda t: without(t, "mtp.0.main_proj"), r"no DeepseekV4DSparkDrafter.*call `DeepseekV4MTPDrafter\.from_ta"),
        (lambda t: {**t, "mtp.1.norm.weight": torch.ones(32)}, r"1 unexpected \(mtp\.1\.norm"),
        (lambda t: {**t, "mtp.2.confidence_head.proj.bias": torch.ones(1)}, r"1 unexpected \(mtp\.2\.confidence"),
        (lambda t: {**t, "mtp.0.main_proj.weight": torch.ones(32, 32)}, r"shape \[32, 32\], expected \[32, 96\]"),
        (lambda t: {**t, "mtp.2.norm.weight": torch.full((32,), torch.nan)}, r"not finite: .*mtp\.2\.norm"),
    ],
)
def test_tensors_that_are_not_the_drafters(tmp_path, config, tensors, change, message):
    write(tmp_path, config, change(tensors))
    with pytest.raises(ValueError, match=message):
        DeepseekV4DSparkDrafter.from_target(tmp_path)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"block_size": 1}, "`block_size` is 1, expected at least 2"),
        ({"block_size": "5"}, "`block_size` is '5', expected an integer"),
        ({"markov_rank": 0}, "`head_rank` is 0, expected at least 1"),
        ({"noise_token_id": 64}, "`mask_token_id` is 64, outside the vocabulary of 64 tokens"),
        ({"target_layer_ids": 2}, "`target_layer_ids` is 2, expected a list of layer numbers"),
        ({"target_layer_ids": [1, 0]}, r"`target_layer_ids` is \[1, 0\], expected ascending"),
    ],
)
def test_configurations_that_make_no_drafter(tmp_path, config, tensors, fields, message):
    for name, value in fields.items():
        setattr(config, f"dspark_{name}", value)
    write(tmp_path, config, tensors)
    with pytest.raises(ValueError, match=message):
        DeepseekV4DSparkDrafter.from_target(tmp_path)


def test_a_saved_configuration_is_looked_at_too(tmp_path, drafter):
    drafter.save_pretrained(tmp_path / "own")
    fields = json.loads((tmp_path / "own" / "config.json").read_text())
    for wrong in ({"confidence_temperatures": [1.0, 0.0, 1.0, 1.0, 1.0]}, {"target_layer_ids": [-1, 0]}):
        (tmp_path / "own" / "config.json").write_text(json.dumps(fields | wrong))
        with pytest.raises(ValueError, match=f"`{next(iter(wrong))}` is .*, expected"):
            DeepseekV4DSparkDrafter.from_pretrained(tmp_path / "own")


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


def test_each_of_deepseeks_drafters_names_the_other(tmp_path, config, tensors):
    write(tmp_path, config, tensors)
    with pytest.raises(ValueError, match=r"no DeepseekV4MTPDrafter.*call `DeepseekV4DSparkDrafter\.from_target\("):
        DeepseekV4MTPDrafter.from_target(tmp_path)
    (tmp_path / "april").mkdir()
    write(tmp_path / "april", config, random_tensors(mtp_shapes(config)))
    with pytest.raises(ValueError, match=r"no DeepseekV4DSparkDrafter.*call `DeepseekV4MTPDrafter\.from_target\("):
        DeepseekV4DSparkDrafter.from_target(tmp_path / "april")
    with pytest.raises(ValueError, match=r"no drafter but a target.*`DeepseekV4DSparkDrafter\.from_target\("):
        DeepseekV4DSparkDrafter.from_pretrained(tmp_path)


def test_a_wrong_kind_is_refused_before_a_shard_is_fetched(tmp_path, config):
    config.save_pretrained(tmp_path)
    index = {name: "model-00001-of-00001.safetensors" for name in mtp_shapes(config)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    with pytest.raises(ValueError, match="carries no DeepseekV4DSparkDrafter"):
        DeepseekV4DSparkDrafter.from_target(tmp_path)
    with pytest.raises(ValueError, match=r"has no model-00001-of-00001\.safetensors"):
        DeepseekV4MTPDrafter.from_target(tmp_path)


# Use with a target


def test_bind_checks_the_pair(drafter, target):
    drafter.bind(target)
    drafter.unbind(target)
    with pytest.raises(ValueError, match=r"64, but this target's is 60.*`DeepseekV4DSparkDrafter\.from_target"):
        drafter.bind(tiny_target(vocab_size=60))
    with pytest.raises(ValueError, match=r"`hidden_size` 32, but this target's is 64"):
        drafter.check_target(target_of(tiny_target(hidden_size=64)))
    with pytest.raises(ValueError, match=r"`hc_mult` 4, but this target's is 2"):
        drafter.check_target(target_of(tiny_target(hc_mult=2)))
    with pytest.raises(ValueError, match=r"reads layers \[0, 1, -1\], but this target's are 0 to 0"):
        drafter.check_target(target_of(tiny_target(layer_types=["sliding_attention"])))


@pytest.mark.parametrize("length", [3, 26])
def test_generate_is_lossless_and_reads_the_targets_layers(drafter, target, naive, length):
    """In our loop and transformers' own: every draft is what DeepSeek's drafter makes of stock hidden states."""
    ids, options = prompt(length), dict(do_sample=False, max_new_tokens=14)
    expected = target.generate(ids, **options)
    with torch.no_grad():
        seen = [state[0] for state in stock_residuals(target, expected)]
    residual = torch.cat(seen, dim=1)
    drafter.bind(target)
    out, trees = proposed_by(drafter, target, ids, **options)
    assert torch.equal(out, expected) and torch.equal(in_transformers_loop(target, drafter, ids, **options), expected)
    stats, at = drafter.last_stats, length
    assert stats.draft_positions == BLOCK and stats.rounds == len(trees)
    for tree in trees:
        tokens, *_ = naive.draft(residual[:at], torch.arange(at + 1), int(expected[0, at]), len(tree))
        assert tree == tokens
        following = expected[0, at + 1 : at + 1 + len(tree)].tolist()
        accepted = next((k for k, (a, b) in enumerate(zip(tree, following)) if a != b), len(following))
        at += 1 + accepted
    torch.manual_seed(0)
    sampled = target.generate(ids, **{**options, "do_sample": True}, assistant_model=drafter)
    assert sampled.shape == expected.shape


def stock_residuals(target, ids):
    """The streams after each layer, by hooks of our own."""
    found = []
    handles = [layer.register_forward_hook(lambda m, a, out: found.append(out)) for layer in target.model.layers]
    target(ids, use_cache=False)
    for handle in handles:
        handle.remove()
    return found


# Training


def test_it_learns_to_draft_what_its_target_writes(tmp_path):
    """By DSpark's own loss, through the trainer that trains ours: bias and confidence among what learns."""
    fields = dspark_fields(block_size=3, target_layer_ids=[0, 2])
    target = tiny_target(**fields)
    drafter = DeepseekV4DSparkDrafter(DeepseekV4DSparkConfig.from_target_config(target.config, blocks=1))
    texts = [target.generate(prompt(6, seed), do_sample=False, max_new_tokens=18)[0].tolist() for seed in range(8)]
    rows = Dataset.from_list([{"input_ids": ids, "loss_mask": [0] * 6 + [1] * 18} for ids in texts])
    options = dict(recipe="dspark", max_steps=25, num_anchors=8, per_device_train_batch_size=4)
    trainer = trainer_for(tmp_path, target, drafter, rows, rows, **options)
    before, fresh = trainer.evaluate(), {name: p.detach().clone() for name, p in drafter.named_parameters()}
    trainer.train()
    after = trainer.evaluate()
    assert after["eval_loss"] < 0.8 * before["eval_loss"]
    assert sum(losses(trainer)[-5:]) < 0.8 * sum(losses(trainer)[:5])
    # Fresh, it accepts next to nothing.
    assert before["eval_teacher_forced_tau"] < 1.1 and after["eval_teacher_forced_tau"] > 1.3
    assert after["eval_expected_tau"] > before["eval_expected_tau"]
    assert not [name for name, p in drafter.named_parameters() if torch.equal(p, fresh[name])]
    drafter.bind(target)
    drafted = target.generate(prompt(6), assistant_model=drafter.eval(), do_sample=False, max_new_tokens=18)
    assert drafted[0].tolist() == texts[0] and drafter.last_stats.tau > 1.1


def test_it_learns_while_it_serves(target, drafter):
    drafter.bind(target)
    plain = target.generate(prompt(9), do_sample=False, max_new_tokens=20)
    before = {name: value.clone() for name, value in drafter.state_dict().items()}
    with drafter.adapt(target, policy="always", every=1, steps=8, rows=2, learning_rate=3e-3) as learning:
        for _ in range(6):
            text = target.generate(prompt(9), assistant_model=drafter, do_sample=False, max_new_tokens=20)
            assert torch.equal(text, plain)
    gains = [decision.gain for decision in learning.log[1:]]  # each judges the update before
    assert len(gains) == 5 and max(gains) > 0
    assert any(not torch.equal(value, before[name]) for name, value in drafter.state_dict().items())
