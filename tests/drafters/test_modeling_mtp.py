"""The native MTP drafter against DeepSeek's definition, written out here entry by entry from a checkpoint's
tensors."""

import pytest
import torch
import transformers
from packaging.version import Version
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessorList,
)
from transformers.masking_utils import create_sliding_window_causal_mask

from hf_hyperdflash.decoding.bind import BoundTarget, capture_residual
from hf_hyperdflash.drafters.deepseek_v4.checkpoint import dequantize
from hf_hyperdflash.drafters.deepseek_v4.modeling_mtp import DeepseekV4MTPDrafter, sliding_mask
from hf_hyperdflash.drafters.sampling import DraftRequest, DraftSampler
from hf_hyperdflash.targets.caches.name import CACHE, cache_of
from hf_hyperdflash.targets.registry import target_of

from ..conftest import MODELS, prompt, tiny_config, tiny_target
from ..helpers.deepseek_checkpoints import mtp_shapes, quantized, random_tensors, write, write_shards
from ..helpers.oracle_deepseek_v4 import NaiveBlock

TARGET = MODELS / "tiny-deepseek-v4"
WINDOW = 8
# The clamps of the experts' activations must matter.
FIELDS = dict(swiglu_limit=0.8, hc_sinkhorn_iters=5, n_routed_experts=6, sliding_window=WINDOW)


# The oracle


class NaiveMTP(NaiveBlock):
    """DeepSeek-V4's MTP block for one entry at a time."""

    def __init__(self, tensors, config, embed, head):
        super().__init__(tensors, "mtp.0.", config)
        self.embed, self.head = embed.double(), head.double()

    def logits(self, residual, next_ids, positions, drafts):
        """Logits of the first draft and after each of `drafts`; `residual` is `[seq, hc_mult, hidden]`."""
        keys, logits = [], []
        for state, token, position in zip(residual.double(), next_ids, positions):
            out = self.entry(state, token, int(position), keys)
        logits.append(self.read(out))
        for step, token in enumerate(drafts, start=1):
            out = self.entry(out, token, int(positions[-1]) + step, keys)
            logits.append(self.read(out))
        return torch.stack(logits)

    def entry(self, state, token, position, keys):
        e = self.w["e_proj.weight"] @ self.norm(self.embed[token], "enorm.weight")
        x = torch.stack([e + self.w["h_proj.weight"] @ self.norm(path, "hnorm.weight") for path in state])
        read, put = self.mix(x, "hc_attn")
        read = self.norm(read, "attn_norm.weight")
        keys.append(self.key(read, position))
        x = put(self.attention(read, position, keys[-self.config.sliding_window :]))
        read, put = self.mix(x, "hc_ffn")
        return put(self.experts(self.norm(read, "ffn_norm.weight")))

    def read(self, x):
        return self.head @ self.norm(self.collapse(x), "norm.weight")


@pytest.fixture
def config():
    return tiny_config(**FIELDS)


@pytest.fixture
def tensors(config):
    return random_tensors(mtp_shapes(config))


@pytest.fixture
def target():
    return tiny_target(**FIELDS)


@pytest.fixture
def drafter(tmp_path, config, tensors):
    return DeepseekV4MTPDrafter.from_target(write(tmp_path, config, tensors), dtype=torch.float32)


@pytest.fixture
def naive(config, tensors, target):
    return NaiveMTP(tensors, config, target.get_input_embeddings().weight, target.get_output_embeddings().weight)


def entries(length, seed=0, first=0):
    """Residual, positions and ids `[1, length + 1]` of an accepted sequence."""
    generator = torch.Generator().manual_seed(seed)
    residual = torch.randn(1, length, 4, 32, generator=generator)
    return residual, torch.arange(first, first + length + 1)[None], prompt(length + 1, seed)


def extend(drafter, target, context, sequence, start, stop):
    residual, positions, ids = sequence
    span = slice(start, stop)
    drafter.extend(target_of(target), context, residual[:, span], positions[:, span], ids[:, start + 1 : stop + 1])


def drafted(drafter, target, context, sequence, stop, count):
    """Tokens and logits `[count, vocab_size]` of one greedy draft after the sequence's first `stop + 1` tokens."""
    logits = []

    class Listening(DraftSampler):
        def scored(self, prefixes, step):
            assert step.shape == (1, 64) and step.dtype == torch.float32
            logits.append(step[0])
            return super().scored(prefixes, step)

    _, positions, ids = sequence
    sampler = Listening(LogitsProcessorList(), False)
    tree = drafter.propose(target_of(target), context, ids[:, : stop + 1], positions[:, : stop + 1], count, sampler)
    assert tree.is_chain and tree.q is None
    return tree.tokens.tolist(), torch.stack(logits) if logits else None


# The block


@pytest.mark.parametrize("length, first", [(1, 0), (3, 0), (7, 0), (8, 0), (9, 11), (30, 0), (30, 500)])
def test_drafts_are_deepseeks(drafter, target, naive, length, first):
    sequence = residual, positions, ids = entries(length, seed=length, first=first)
    context = drafter.new_context()
    extend(drafter, target, context, sequence, 0, length)
    tokens, logits = drafted(drafter, target, context, sequence, length, 6)
    expected = naive.logits(residual[0], ids[0, 1:], positions[0, :-1], tokens[:-1])
    torch.testing.assert_close(logits.double(), expected, atol=2e-5, rtol=1e-4)
    assert expected.std() > 0.1 and len(set(tokens)) > 1  # neither blind nor constant


def test_rows_as_in_training_are_deepseeks(drafter, target, naive):
    residual, positions, ids = entries(20)
    embeds = target.get_input_embeddings()(ids[:, 1:])
    logits = target.get_output_embeddings()(drafter.collapse(drafter(residual, embeds)))
    for stop in (1, 7, 9, 20):
        expected = naive.logits(residual[0, :stop], ids[0, 1 : stop + 1], positions[0, :stop], [])[0]
        torch.testing.assert_close(logits[0, stop - 1].double(), expected, atol=2e-5, rtol=1e-4)
    again = drafter(residual, embeds, positions[:, :-1], attention_mask=sliding_mask(20, 0, WINDOW, residual))
    assert torch.equal(target.get_output_embeddings()(drafter.collapse(again)), logits)
    logits.square().mean().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in drafter.parameters())


@pytest.mark.parametrize("past, queries", [(0, 2), (0, 30), (3, 4), (3, 9), (20, 5), (20, 12)])
def test_the_mask_is_v4s_own(drafter, past, queries):
    cache = DynamicCache(config=drafter.config)
    like = torch.zeros(1, queries, 32)
    if past:
        keys = torch.zeros(1, 1, past, 16)
        cache.update(keys, keys, 0)
    expected = create_sliding_window_causal_mask(
        config=drafter.config,
        inputs_embeds=like,
        attention_mask=None,
        **{CACHE: cache},
        position_ids=torch.arange(past, past + queries)[None],
    )
    assert torch.equal(sliding_mask(queries, min(past, WINDOW - 1), WINDOW, like), expected)
    assert sliding_mask(1, past, WINDOW, like) is None


# Drafting


@pytest.mark.parametrize("length", [3, 7, 30])
def test_drafting_leaves_the_context_as_it_was(drafter, target, length):
    sequence, context = entries(length), drafter.new_context()
    extend(drafter, target, context, sequence, 0, length)
    context.end = length
    before = (context.keys.clone(), context.streams.clone())
    once = drafted(drafter, target, context, sequence, length, 12)  # longer than the window
    assert torch.equal(context.keys, before[0]) and torch.equal(context.streams, before[1])
    assert context.end == length and len(context) == min(length, WINDOW - 1)
    twice = drafted(drafter, target, context, sequence, length, 12)
    assert once[0] == twice[0] and torch.equal(once[1], twice[1])
    fewer = drafted(drafter, target, context, sequence, length, 2)
    assert torch.equal(fewer[1], once[1][:2])


@pytest.mark.parametrize("prompt_length", [2, 19])
def test_rounds_with_rejections_equal_drafting_from_scratch(drafter, target, naive, prompt_length):
    sequence = residual, positions, ids = entries(prompt_length + 25)
    context, done = drafter.new_context(), 0
    for accepted in [prompt_length, 1, 4, 1, 1, 0, 7, 2, 9]:
        extend(drafter, target, context, sequence, done, done + accepted)
        done += accepted
        tokens, logits = drafted(drafter, target, context, sequence, done, 4)
        fresh = drafter.new_context()
        extend(drafter, target, fresh, sequence, 0, done)
        again, whole = drafted(drafter, target, fresh, sequence, done, 4)
        assert tokens == again
        torch.testing.assert_close(logits, whole, atol=1e-5, rtol=1e-5)
    expected = naive.logits(residual[0, :done], ids[0, 1 : done + 1], positions[0, :done], tokens[:-1])
    torch.testing.assert_close(logits.double(), expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("budget", [None, 7])
def test_a_batch_drafts_for_each_sequence_what_it_would_alone(drafter, target, budget):
    """Of contexts that are shorter than the window, and longer; each text's level in one pass with the others'."""
    target.lm_head.weight.data *= 30  # so that a tree is deep
    requests, sampler = [], DraftSampler(LogitsProcessorList(), False, budget)
    for length, count in ((3, 4), (WINDOW + 9, 2), (0, 3), (WINDOW - 2, 4)):
        sequence = _, positions, ids = entries(length, seed=length)
        context = drafter.new_context()
        extend(drafter, target, context, sequence, 0, length)
        requests.append(DraftRequest(context, ids, positions, count, sampler))
    alone = [drafter.propose(target_of(target), *each) for each in requests]
    calls = []
    drafter.block.register_forward_hook(lambda module, args, out: calls.append(len(out)))
    together = drafter.propose_batch(target_of(target), requests)
    assert [(tree.tokens.tolist(), tree.parents, tree.passes) for tree in together] == [
        (tree.tokens.tolist(), tree.parents, tree.passes) for tree in alone
    ]
    assert [len(tree) for tree in together] == ([4, 2, 0, 4] if budget is None else [7, 7, 0, 7])
    assert len(calls) == 3 and (budget is not None or calls == [3, 3, 3])  # of paths


def test_nothing_known_nothing_drafted(drafter, target):
    sequence, context = entries(4), drafter.new_context()
    assert drafted(drafter, target, context, sequence, 0, 3) == ([], None)
    extend(drafter, target, context, sequence, 0, 0)
    assert context.keys is None and context.end == 0


def test_a_long_context_keeps_only_the_window(drafter, target):
    sequence, context = entries(200), drafter.new_context()
    extend(drafter, target, context, sequence, 0, 200)
    assert context.keys.shape == (1, 1, WINDOW - 1, 16) and context.streams.shape == (1, 1, 4, 32)
    assert context.keys.untyped_storage().nbytes() <= 2 * WINDOW * 16 * 4
    assert context.streams.untyped_storage().nbytes() == context.streams.nbytes


def test_a_window_of_one_keeps_no_keys(tmp_path):
    config = tiny_config(**{**FIELDS, "sliding_window": 1})
    drafter = DeepseekV4MTPDrafter.from_target(
        write(tmp_path, config, random_tensors(mtp_shapes(config))), dtype=torch.float32
    )
    target, sequence, context = tiny_target(**FIELDS), entries(5), drafter.new_context()
    extend(drafter, target, context, sequence, 0, 5)
    assert len(context) == 0 and len(drafted(drafter, target, context, sequence, 5, 3)[0]) == 3


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
def test_quantized_shards_are_dequantized(tmp_path, target, block, scale_name, scale_dtype, fp4_experts):
    config = tiny_config(**FIELDS, moe_intermediate_size=64)
    if block is not None:
        config.quantization_config = {"quant_method": "fp8", "weight_block_size": list(block)}
    tensors = random_tensors(mtp_shapes(config))
    stored, values = quantized(tensors, block or (128, 128), scale_name, scale_dtype, fp4_experts)
    drafter = DeepseekV4MTPDrafter.from_target(write_shards(tmp_path, config, stored), dtype=torch.float32)
    loaded = drafter.deepseek_state_dict()
    assert loaded.keys() == values.keys()
    for name, value in values.items():
        assert torch.equal(loaded[name], value), name
    assert getattr(drafter.config, "quantization_config", None) is None
    naive = NaiveMTP(values, config, target.get_input_embeddings().weight, target.get_output_embeddings().weight)
    sequence = residual, positions, ids = entries(5)
    context = drafter.new_context()
    extend(drafter, target, context, sequence, 0, 5)
    expected = naive.logits(residual[0], ids[0, 1:], positions[0, :-1], [])
    torch.testing.assert_close(
        drafted(drafter, target, context, sequence, 5, 1)[1].double(), expected, atol=1e-4, rtol=1e-4
    )


FLOAT32 = ("hc_", "norm", "attn_sink", "gate.bias")


def test_bfloat16_keeps_what_v4_keeps_in_float32(tmp_path, config, tensors, target):
    stored = {
        name: t if any(part in name for part in FLOAT32) else t.to(torch.bfloat16) for name, t in tensors.items()
    }
    config.dtype = torch.bfloat16
    drafter = DeepseekV4MTPDrafter.from_target(write(tmp_path, config, stored))
    assert drafter.dtype == drafter.config.dtype == torch.bfloat16 and not drafter.training
    for name, tensor in drafter.deepseek_state_dict().items():
        assert tensor.dtype == stored[name].dtype and torch.equal(tensor, stored[name]), name
    if Version(transformers.__version__) < Version("5.18"):
        return  # cannot run a bfloat16 V4
    sequence, context = entries(12), drafter.new_context()
    extend(drafter, target, context, sequence, 0, 12)
    assert context.keys.dtype == context.streams.dtype == torch.bfloat16
    tokens, logits = drafted(drafter, target, context, sequence, 12, 3)
    exact = NaiveMTP(tensors, config, target.get_input_embeddings().weight, target.get_output_embeddings().weight)
    expected = exact.logits(sequence[0][0], sequence[2][0, 1:], sequence[1][0, :-1], tokens[:-1])
    assert torch.nn.functional.cosine_similarity(logits.double(), expected).min() > 0.98


def test_deepseek_names_there_and_back(tmp_path, drafter, tensors):
    state = drafter.deepseek_state_dict()
    assert state.keys() == tensors.keys()
    assert all(torch.equal(state[name], tensors[name]) for name in tensors)
    save_file(state, tmp_path / "again.safetensors")  # views of one expert tensor are fine


def test_save_and_load_as_a_model_of_its_own(tmp_path, drafter):
    drafter.save_pretrained(tmp_path / "own")
    loaded, report = DeepseekV4MTPDrafter.from_pretrained(tmp_path / "own", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    ours, theirs = drafter.state_dict(), loaded.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert torch.equal(drafter.rotary_emb.main_inv_freq, loaded.rotary_emb.main_inv_freq)


def test_from_a_loaded_target(tmp_path, config, tensors, target, drafter):
    target.save_pretrained(tmp_path / "target")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    with pytest.raises(ValueError, match=r"`save_pretrained` drops them.*original checkpoint"):
        DeepseekV4MTPDrafter.from_target(loaded)
    loaded.config._name_or_path = str(tmp_path)  # where the drafter fixture has written
    loaded.set_experts_implementation("batched_mm")  # may be one for quantized experts only, which ours are not
    before = loaded.config.to_dict()
    again = DeepseekV4MTPDrafter.from_target(loaded, num_draft_tokens=5)
    assert again.config._experts_implementation != "batched_mm" == loaded.config._experts_implementation
    assert loaded.config.to_dict() == before and again.num_draft_tokens == 5
    assert again.dtype == torch.float32 and again.device == loaded.device
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), drafter.parameters()))
    assert again.config.layer_types == ["sliding_attention"] and again.config.mlp_layer_types == ["moe"]
    with pytest.raises(ValueError, match="was not loaded from a checkpoint"):
        DeepseekV4MTPDrafter.from_target(target)


def test_copies_of_what_the_target_shares_are_left_alone(tmp_path, config, tensors):
    copies = {"mtp.0.emb.tok_emb.weight": torch.zeros(64, 32), "mtp.0.head.weight": torch.zeros(64, 32)}
    drafter = DeepseekV4MTPDrafter.from_target(write(tmp_path, config, {**tensors, **copies}))
    assert drafter.deepseek_state_dict().keys() == tensors.keys()


def without(tensors, *parts):
    return {name: tensor for name, tensor in tensors.items() if not any(part in name for part in parts)}


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda t: without(t, "mtp"), r"no `mtp\.\*` tensors"),
        (lambda t: without(t, "w1.weight"), r"7 missing \(mtp\.0\.ffn\.[^,]*(, [^,]*){3}, \.\.\.\)"),
        (lambda t: {**t, "mtp.0.other.weight": torch.zeros(2)}, r"1 unexpected \(mtp\.0\.other"),
        (lambda t: {**t, "mtp.0.hnorm.scale": torch.ones(1)}, r"`mtp\.0\.hnorm\.weight`.* expected none"),
        (lambda t: {**t, "mtp.0.nothing.scale": torch.ones(1)}, r"1 unexpected \(mtp\.0\.nothing\.scale"),
        (lambda t: {**t, "mtp.0.norm.weight": torch.ones(31)}, r"norm\.weight` .* shape \[31\], expected \[32\]"),
        (
            lambda t: {**t, "mtp.0.e_proj.weight": torch.zeros(32, 32).to(torch.float8_e4m3fn)},
            r"e_proj.*has no scale, expected one of shape \[1, 1\]",
        ),
    ],
)
def test_tensors_that_are_not_the_blocks(tmp_path, config, tensors, change, message):
    write(tmp_path, config, change(tensors))
    with pytest.raises(ValueError, match=message):
        DeepseekV4MTPDrafter.from_target(tmp_path)


def test_a_scale_of_another_grid_is_refused():
    with pytest.raises(ValueError, match=r"scale of shape \[2, 2\], expected one of shape \[1, 3\]"):
        dequantize(torch.zeros(128, 300).to(torch.float8_e4m3fn), torch.ones(2, 2), (128, 128))


def test_other_checkpoints_are_refused(tmp_path, config):
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"no model\.safetensors, expected a checkpoint in safetensors"):
        DeepseekV4MTPDrafter.from_target(tmp_path)
    (tmp_path / "llama").mkdir()
    LlamaConfig().save_pretrained(tmp_path / "llama")
    with pytest.raises(ValueError, match="is a llama model, expected deepseek_v4"):
        DeepseekV4MTPDrafter.from_target(tmp_path / "llama")


# Use with a target


def test_none_is_no_checkpoint():
    with pytest.raises(ValueError, match="The name of the target is None, expected a folder or a Hub id"):
        DeepseekV4MTPDrafter.from_target(None)


def test_number_of_drafts(drafter):
    assert drafter.num_draft_tokens == 3 and drafter.last_stats is None and drafter.target_layer_ids == [-1]
    drafter.num_draft_tokens = 17
    assert drafter.num_draft_tokens == 17
    for wrong in (0, -1, 2.0, True, "2"):
        with pytest.raises(ValueError, match="expected a whole number of at least 1"):
            drafter.num_draft_tokens = wrong
    assert drafter.num_draft_tokens == 17
    drafter.num_draft_tokens = None
    assert drafter.num_draft_tokens == 3


def test_bind_checks_the_pair(drafter, target):
    own = type(target)
    assert drafter.bind(target) is None and isinstance(target, BoundTarget)  # nothing for a notebook to print
    drafter.unbind(target)
    assert type(target) is own
    with pytest.raises(ValueError, match=r"`vocab_size` 64, but this target's is 48"):
        drafter.bind(tiny_target(vocab_size=48))
    with pytest.raises(ValueError, match=r"`hidden_size` 32, but this target's is 64"):
        drafter.check_target(target_of(tiny_target(hidden_size=64)))
    with pytest.raises(ValueError, match=r"`hc_mult` 4, but this target's is 2"):
        drafter.check_target(target_of(tiny_target(hc_mult=2)))
    llama = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    with pytest.raises(ValueError, match=r"hc_mult` 4, but this target.s is 1"):
        drafter.check_target(target_of(LlamaForCausalLM(llama)))


def test_the_shipped_target_accepts_its_own_mtps_drafts():
    """Teacher-forced along the target's own greedy text: every anchor, two drafts."""
    target = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    drafter = DeepseekV4MTPDrafter.from_target(target)
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    chat = [{"role": "user", "content": "Anna has 5 pencils. She buys 2 boxes with 6 pencils each. How many now?"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    with torch.no_grad():
        ids = target.generate(**inputs, do_sample=False, max_new_tokens=48)
        with capture_residual(target) as residuals:
            target(ids)
    positions = torch.arange(ids.shape[1])[None]
    context, done, accepted = drafter.new_context(), 0, []
    greedily = DraftSampler(LogitsProcessorList(), False)
    for anchor in range(inputs["input_ids"].shape[1], ids.shape[1] - 2):
        extend(drafter, target, context, (residuals[0], positions, ids), done, anchor)
        done = anchor
        tree = drafter.propose(
            target_of(target), context, ids[:, : anchor + 1], positions[:, : anchor + 1], 2, greedily
        )
        accepted.append((tree.tokens == ids[0, anchor + 1 : anchor + 3]).long().cumprod(0))
    first, second = torch.stack(accepted).float().mean(0).tolist()
    assert first > 0.5 and second > 0.2, (first, second)


@pytest.mark.parametrize("count", [1, 3, 6])
def test_generate_is_lossless_and_counts_its_rounds(count):
    target = AutoModelForCausalLM.from_pretrained(MODELS / "tiny-deepseek-v4", dtype=torch.float32).eval()
    drafter = DeepseekV4MTPDrafter.from_target(target, num_draft_tokens=count)
    ids = prompt(90, vocab_size=2000)  # longer than the window of 64
    options = dict(do_sample=False, max_new_tokens=30, eos_token_id=None)
    expected = target.generate(ids, **options)
    drafter.bind(target)
    out = target.generate(ids, **options, assistant_model=drafter, return_dict_in_generate=True)
    assert torch.equal(out.sequences, expected)
    stats = drafter.last_stats
    assert stats.tokens == 30 and stats.draft_positions == count and 1 < stats.tau <= count + 1
    second = torch.cat([expected, prompt(5, seed=7, vocab_size=2000)], dim=1)
    again = target.generate(second, **options, assistant_model=drafter, **{CACHE: cache_of(out)})
    assert torch.equal(again, target.generate(second, **options))
    torch.manual_seed(0)
    sampled = target.generate(ids, **{**options, "do_sample": True}, assistant_model=drafter)
    assert sampled.shape == expected.shape
