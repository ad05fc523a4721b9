"""Every family of targets against every promise that holds for all of them. A new family is one more row of
`tests.helpers.families.FAMILIES`. Trees, batches, static caches and interruptions of them: tests/decoding."""

from __future__ import annotations

import logging

import pytest
import torch
from transformers import AutoModel, DynamicCache
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_hyperdflash import PromptLookupDrafter, bind, capture_residual, load_drafter
from hf_hyperdflash.targets.caches.name import cache_argument, cache_of
from hf_hyperdflash.targets.hooks import EMBEDDINGS
from hf_hyperdflash.targets.registry import target_of
from hf_hyperdflash.targets.target import Target
from hf_hyperdflash.training.losses.objective import teacher_states
from hf_hyperdflash.trees.tree import DraftTree

from ..conftest import half_right, half_right_about, mostly_nightly, prompt, tiny_drafter
from ..helpers.families import (
    DELTA_NET,
    FAMILIES,
    FULL,
    LINEAR,
    SLIDING,
    deepseek_v4,
    falcon_h1,
    granite_hybrid,
    llama,
    made,
    muse_glimmer,
    qwen3_next,
)
from ..helpers.released_layouts import assistant
from ..helpers.training import losses, rows, trainer_for, weights
from ..helpers.tree_drafters import RandomChains

# Families that no list names, one of each kind of cache.
OTHERS = {
    "olmo_hybrid": dict(intermediate_size=48, num_hidden_layers=3, layer_types=[LINEAR, FULL, LINEAR], **DELTA_NET),
    "lara_mini": dict(intermediate_size=48, num_hidden_layers=3, layer_types=[LINEAR, SLIDING, FULL],
                      sliding_window=8, **DELTA_NET),
    "afmoe": dict(intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=3, num_key_value_heads=2,
                  head_dim=16, num_experts=4, num_experts_per_tok=2, sliding_window=8,
                  layer_types=[SLIDING, FULL, SLIDING]),
    "deepseek_v32": dict(intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=3, num_key_value_heads=4,
                         q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16,
                         head_dim=8, index_topk=16, index_head_dim=16, index_n_heads=32, n_routed_experts=4,
                         num_experts_per_tok=2, n_group=1, topk_group=1),
    "minimax_m3_vl_text": dict(intermediate_size=48, num_hidden_layers=3, num_key_value_heads=2, head_dim=16,
                               layer_types=["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
                               mlp_layer_types=["dense"] * 3, index_n_heads=2, index_head_dim=16, index_block_size=4,
                               index_topk_blocks=2, index_local_blocks=1, rotary_dim=8, dense_intermediate_size=48),
}  # fmt: skip


@pytest.fixture(params=FAMILIES, ids=lambda family: family.__name__)
def target(request):
    torch.manual_seed(0)
    return request.param().eval()


class Silent(PromptLookupDrafter):
    def draft(self, target, requests):
        return [DraftTree.chain(each.ids.new_empty(0)) for each in requests]


@pytest.mark.parametrize(("length", "chunk"), mostly_nightly([(23, 5), (23, None), (1, None)]))
def test_it_writes_its_own_text_and_nothing_of_a_drafter_stays(target, length, chunk):
    ids, own, fields = prompt(length), type(target), target.config.to_dict()
    options = dict(do_sample=False, max_new_tokens=30, prefill_chunk_size=chunk)
    # Between chunks transformers loses a cache that the model makes itself.
    stock_chunk = None if target.config.model_type == "remote_v4" else chunk
    expected = target.generate(ids, **{**options, "prefill_chunk_size": stock_chunk})
    # How a prompt is cut says nothing of how often drafts are wrong.
    wrong = [tiny_drafter(target)] if chunk is None else []
    for drafter in (*wrong, half_right_about(target, expected[0])):
        drafter.bind(target)
        assert torch.equal(target.generate(ids, assistant_model=drafter, **options), expected)
        drafter.unbind(target)
        assert type(target) is own and target.config.to_dict() == fields
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in target.modules())
    stats = drafter.last_stats
    assert stats.tokens == expected.shape[1] - length and 1 < stats.tau < 7
    assert len(set(stats.accepted)) > 1  # rounds ended in several places
    assert stats.tokens - 1 - sum(stats.emitted) in (0, 1)  # a last token without room for drafts is no round


@pytest.mark.parametrize("drafts", ["some wrong", "none"])
def test_its_cache_is_as_if_no_draft_had_been(target, drafts):
    ids, options = prompt(14), dict(do_sample=False, max_new_tokens=24, return_dict_in_generate=True)
    drafter = Silent(target) if drafts == "none" else half_right(target, ids, max_new_tokens=24)
    drafter.bind(target)
    out = target.generate(ids, assistant_model=drafter, **options)
    cache, written = cache_of(out), out.sequences
    assert cache.get_seq_length() == written.shape[1] - 1 and drafter.last_stats.rounds > 1
    layers = getattr(cache, "layers", [])  # remote code may keep its own
    windows = [layer for layer in layers if getattr(layer, "sliding_window", None)]
    if drafts == "none":
        assert all(layer.keys.shape[-2] < layer.sliding_window for layer in windows)
    turn = torch.cat([written[:, -1:], prompt(9, seed=3)], dim=1)
    positions = torch.arange(written.shape[1] - 1, written.shape[1] + 9)[None]
    with torch.no_grad():
        own_name = cache_argument(type(target).forward)  # remote code's is its own
        after = target(turn, **{own_name: cache}, position_ids=positions, use_cache=True).logits
        whole = target(torch.cat([written[:, :-1], turn], dim=1)).logits[:, -10:]
    torch.testing.assert_close(after, whole, atol=1e-3, rtol=1e-3)


def test_it_shows_what_plain_decoding_shows(target):
    ids, options = prompt(6), dict(do_sample=False, max_new_tokens=24)
    if hasattr(target, "set_attn_implementation"):
        target.set_attn_implementation("eager")
    options |= dict(return_dict_in_generate=True, output_attentions=True, output_hidden_states=True)
    plain = target.generate(ids, **options)
    drafter = half_right_about(target, plain.sequences[0])
    drafter.bind(target)
    assisted = target.generate(ids, assistant_model=drafter, **options)
    assert torch.equal(assisted.sequences, plain.sequences)
    for shown, again in ((plain.attentions, assisted.attentions), (plain.hidden_states, assisted.hidden_states)):
        for step, same in zip(shown or (), again or (), strict=True):
            for one, other in zip(step or (), same or (), strict=True):
                torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-3)


@torch.no_grad()
def test_it_passes_its_residual(target):
    """What its layers hand on, in the order that is asked for, and what gives the target's logits."""
    ids, facts, passed = prompt(9), target_of(target), {}
    for i, layer in enumerate(facts.layers):
        layer.register_forward_hook(lambda module, args, output, i=i: passed.update({i: output}))
    with capture_residual(target, [1, 0, -1]) as captured, capture_residual(target, []) as nothing:
        logits = target(ids).logits
    (residual,) = captured
    outputs = [passed[i] if torch.is_tensor(passed[i]) else passed[i][0] for i in (1, 0, len(facts.layers) - 1)]
    assert torch.equal(residual, torch.cat([output.reshape(1, 9, facts.streams, 64) for output in outputs], dim=2))
    states = teacher_states(facts, residual[:, :, 2 * facts.streams :])
    torch.testing.assert_close(facts.logits(states), logits)
    some = torch.randint(0, 64, (9, 5))
    torch.testing.assert_close(facts.logits_of(states[0], some), logits[0].gather(1, some))
    target(ids)
    assert len(captured) == 1 and nothing == []  # of what is asked for, in forwards inside


@torch.no_grad()
def test_it_embeds_as_its_first_layer_reads(target):
    ids, facts, read = prompt(9), target_of(target), []
    facts.layers[0].register_forward_pre_hook(
        lambda module, args, kwargs: read.extend([*args, *kwargs.values()]), with_kwargs=True
    )
    with capture_residual(target, [EMBEDDINGS]) as captured:
        target(ids)
    norm = getattr(facts.input_embedding, "embed_norm", torch.nn.Identity())  # which no drafter reads
    for stream in read[0].reshape(1, 9, facts.streams, 64).unbind(2):
        torch.testing.assert_close(norm(facts.embed(ids)), stream)
    assert torch.equal(captured[0].flatten(), read[0].flatten())


def test_it_hands_its_gate_down_or_says_why_not(target, caplog):
    with caplog.at_level(logging.WARNING):
        drafter = tiny_drafter(target, path_norm=False)
    told = caplog.text  # before transformers says which kernels it does without
    with torch.no_grad(), capture_residual(target) as captured:
        target(prompt(9))
    facts, residual = target_of(target), captured[0]
    if facts.gate():
        assert drafter.config.reducer == "hc_gate" and not told and facts.streams > 1
        norm_reads = []
        facts.norm.register_forward_pre_hook(lambda module, args: norm_reads.append(args[0]))
        facts.collapse(residual)
        torch.testing.assert_close(drafter.hc_gate(residual), norm_reads[0])
    else:
        assert drafter.config.reducer == "fc" and facts.why_ungated in told
        with pytest.raises(ValueError, match="hc_gate"):
            tiny_drafter(target, reducer="hc_gate")


def test_it_trains_a_drafter_and_stays_as_it_is(target, tmp_path):
    drafter, before = tiny_drafter(target, num_hidden_layers=1), weights(target)
    trainer = trainer_for(tmp_path, target, drafter, rows(4), max_steps=8, per_device_train_batch_size=4,
                          learning_rate=2e-2, warmup_steps=1)  # fmt: skip
    trainer.train()
    assert losses(trainer)[-1] < losses(trainer)[0] and torch.equal(weights(target), before)


def test_transformers_own_dflash_loop_works_on_a_bound_target(tmp_path):
    """With an assistant of transformers', greedily and drawn, as on one that is not bound."""
    torch.manual_seed(0)
    target, ids = muse_glimmer().eval(), prompt(13)
    assistant(tmp_path)
    theirs = AutoModel.from_pretrained(tmp_path).eval()

    def texts():
        for options in (dict(do_sample=False), dict(do_sample=True, temperature=0.5)):
            torch.manual_seed(1)
            yield target.generate(ids, assistant_model=theirs, speculation_type="dflash", max_new_tokens=30, **options)

    unbound, plain = list(texts()), target.generate(ids, do_sample=False, max_new_tokens=30)
    drafter = load_drafter(tmp_path, target=target)
    drafter.bind(target)
    assert torch.equal(unbound[0], plain) and all(map(torch.equal, texts(), unbound))
    assert torch.equal(target.generate(ids, assistant_model=drafter, do_sample=False, max_new_tokens=30), plain)


@pytest.mark.parametrize(
    "family", [deepseek_v4, qwen3_next, granite_hybrid, falcon_h1], ids=lambda family: family.__name__
)
def test_transformers_own_prompt_lookup_works_on_a_bound_target(family):
    """Which transformers refuses where nothing rewinds its cache."""
    torch.manual_seed(0)
    target, ids, options = family().eval(), prompt(12), dict(do_sample=False, max_new_tokens=12)
    ids = torch.cat([ids, ids[:, :7]], dim=1)
    expected = target.generate(ids, **options)
    assert torch.equal(bind(target).generate(ids, prompt_lookup_num_tokens=4, **options), expected)


@pytest.mark.parametrize("model_type", OTHERS)
def test_another_family_that_is_accepted_writes_its_own_text(model_type):
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {model_type}")
    target = made(model_type, **OTHERS[model_type], attn_implementation="eager").eval()
    ids, options = prompt(13), dict(do_sample=False, max_new_tokens=24)
    text = target.generate(ids, **options)
    for drafter in (PromptLookupDrafter(target), RandomChains(target, [text[0]]), tiny_drafter(target)):
        drafter.bind(target)
        assert torch.equal(target.generate(ids, assistant_model=drafter, **options), text)
    assert torch.equal(target.generate(ids, prompt_lookup_num_tokens=3, **options), text)


@pytest.mark.parametrize("kind", sorted(DYNAMIC_LAYER_TYPE_MAPPING))
def test_a_kind_of_layer_is_rewindable_or_refused(kind, monkeypatch):
    """Also those that another model's module registers."""
    target = llama().eval()
    monkeypatch.setattr(Target, "layer_kinds", {kind})
    try:
        bind(target)
    except ValueError as error:
        assert kind in str(error)
    else:
        cache = DynamicCache()
        cache.layers.append(DYNAMIC_LAYER_TYPE_MAPPING[kind](sliding_window=8))
        target_of(target).make_rewindable(cache, 4)
        assert cache.is_croppable
