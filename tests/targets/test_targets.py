import copy
import json
import logging
import os
import pickle
import re
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PrefixTuningConfig, PromptEncoderConfig, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    CLIPVisionConfig,
    DeepseekV4ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Indexer

from hf_hyperdflash import DeepseekV4MTPDrafter, PromptLookupDrafter, bind, capture_residual, load_target, unbind
from hf_hyperdflash.decoding.bind import BoundTarget
from hf_hyperdflash.decoding.continuation import context_of
from hf_hyperdflash.targets.caches.name import cache_argument, cache_of
from hf_hyperdflash.targets.registry import is_bound, target_of
from hf_hyperdflash.targets.target import computable
from hf_hyperdflash.training.losses.objective import BlockObjective, teacher_states
from hf_hyperdflash.trees.tree import DraftTree

from ..conftest import half_right, half_right_about, mostly_nightly, prompt, tiny_drafter, tiny_target
from ..helpers.families import (
    COMMON,
    FAMILIES,
    REWINDABLE_QWEN4,
    deepseek_v4,
    falcon_h1,
    gemma3n,
    gemma4_e,
    glm5_next,
    granite_hybrid,
    qwen3,
    qwen3_next,
    qwen4_exp,
)
from ..helpers.headed_drafters import headed
from ..helpers.processes import python
from ..helpers.quantization import quantize_fp4, quantize_fp8
from ..helpers.training import losses, trainer_for
from ..helpers.tree_drafters import RandomTrees


def greedy(target, ids, **kwargs):
    return target.generate(ids, do_sample=False, max_new_tokens=12, **kwargs)


def test_bind_is_on_one_instance_and_undone(target, drafter):
    other, own, config = tiny_target(1), type(target), copy.deepcopy(target.config)
    assert drafter.bind(target) is None and drafter.bind(target) is None  # nothing for a notebook to print
    assert type(target) is not own and type(target).__name__ == own.__name__ and isinstance(target, own)
    assert own._is_stateful and type(other) is own
    drafter.unbind(target)
    assert type(target) is own
    drafter.unbind(target)
    assert type(target) is own
    assert target.config == config
    with pytest.raises(ValueError, match="stateful"):
        greedy(target, prompt(5), assistant_model=drafter)


def test_other_families_are_told_what_to_call(drafter):
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2))
    with pytest.raises(ValueError, match=r"gpt2 model: expected one of DeepSeek-V4.* docs/extending/family\.md"):
        drafter.bind(gpt2)
    with pytest.raises(ValueError, match=r"drafter\.bind\(target\)"):
        greedy(gpt2, prompt(5), assistant_model=drafter)
    with pytest.raises(ValueError, match=r"drafter\.bind\(target\)"):
        drafter.generate(prompt(5))


@pytest.mark.parametrize(
    ("fields", "values"),
    [({"vocab_size": 60}, "64.*60"), ({"hidden_size": 64}, "32.*64"), ({"hc_mult": 2}, "4.*2")],
)
def test_pairs_that_do_not_fit_name_both_values(drafter, fields, values):
    other = tiny_target(**fields)
    with pytest.raises(ValueError, match=values):
        drafter.bind(other)
    assert type(other) is DeepseekV4ForCausalLM
    bind(other)
    with pytest.raises(ValueError, match=values):
        greedy(other, prompt(5), assistant_model=drafter)


def test_a_mask_token_outside_the_vocabulary_is_refused(target, drafter):
    drafter.config.mask_token_id = 64  # as an edited config could; a fresh one is refused when it is made
    with pytest.raises(ValueError, match=r"mask token 64 .* vocabulary of 64"):
        drafter.bind(target)
    assert type(target) is DeepseekV4ForCausalLM


def test_a_target_stays_bound_as_long_as_a_drafter_has_bound_it(target, drafter):
    own, other, stranger = type(target), tiny_drafter(target), tiny_drafter(target)
    drafter.bind(target, as_default=True)
    other.bind(target)
    stranger.unbind(target)  # which never bound it
    drafter.unbind(target)
    ids = prompt(9)
    other.remember(None)
    expected = greedy(target, ids)  # with no default any more
    assert other.last_stats is None and drafter.last_stats is None
    assert torch.equal(greedy(target, ids, assistant_model=other), expected)
    other.unbind(target)
    assert type(target) is own
    for each in (drafter, other):
        each.bind(target)
    assert type(unbind(target)) is own  # at once
    drafter.bind(target)
    del each
    drafter.unbind(target)  # what unbinding at once has forgotten keeps it no longer
    assert type(target) is own


@pytest.mark.parametrize("wrapped", ["peft", "compiled", "parallel", "pipeline"])
def test_what_wraps_a_target_is_told_apart_from_it(target, drafter, wrapped):
    wrapper, place = {
        "peft": lambda: (get_peft_model(target, LoraConfig(target_modules=["o_b_proj"])), "get_base_model()"),
        "compiled": lambda: (torch.compile(target, backend="eager"), "_orig_mod"),
        "parallel": lambda: (torch.nn.DataParallel(target), "module"),
        "pipeline": lambda: (SimpleNamespace(model=target), "model"),
    }[wrapped]()
    with pytest.raises(ValueError, match=f"expected a model: pass what it wraps, its `{re.escape(place)}`"):
        drafter.bind(wrapper)


def test_another_name_only_warns(target, caplog):
    drafter = tiny_drafter(target, target_name_or_path="org/one")
    target.config._name_or_path = "org/two"
    with caplog.at_level(logging.WARNING):
        drafter.bind(target)
    assert "org/one" in caplog.text and "org/two" in caplog.text
    caplog.clear()
    target.config._name_or_path = "/some/where/one"
    with caplog.at_level(logging.WARNING):
        drafter.bind(target)
    assert not caplog.text


def test_copies_pickles_and_checkpoints_of_a_bound_target(target, drafter, tmp_path):
    ids = prompt(9)
    expected = greedy(target, ids)
    drafter.bind(target)
    for again in (copy.deepcopy(target), pickle.loads(pickle.dumps(target))):
        assert isinstance(again, BoundTarget) and again is not target
        assert torch.equal(greedy(again, ids, assistant_model=drafter), expected)
        assert type(unbind(again)) is DeepseekV4ForCausalLM
    target.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is DeepseekV4ForCausalLM and loaded.config.architectures == ["DeepseekV4ForCausalLM"]
    assert torch.equal(greedy(loaded, ids), expected)
    moved = target.to(torch.float64).to(torch.float32)
    assert isinstance(moved, BoundTarget)


def hooks_of(target):
    return [(name, list(m._forward_pre_hooks), list(m._forward_hooks)) for name, m in target.named_modules()]


class Interrupt(StoppingCriteria):
    def __init__(self, error):
        self.error, self.calls = error, 0

    def __call__(self, input_ids, scores, **kwargs):
        self.calls += 1
        if self.calls == 4:
            raise self.error
        return torch.zeros(1, dtype=torch.bool)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("broken")])
def test_nothing_stays_behind_after_an_interruption(target, drafter, error):
    drafter.bind(target)
    ids, hooks, config = prompt(9), hooks_of(target), copy.deepcopy(target.config.to_dict())
    expected = greedy(target, ids)
    with pytest.raises(type(error)):
        greedy(target, ids, assistant_model=drafter, stopping_criteria=StoppingCriteriaList([Interrupt(error)]))
    assert hooks_of(target) == hooks and target.config.to_dict() == config
    assert torch.equal(greedy(target, ids, assistant_model=drafter), expected)
    assert hooks_of(target) == hooks and target.config.to_dict() == config


def drafters_for(target, ids):
    """All kinds in turn, each partly right."""
    kinds = [tiny_drafter(target), half_right(target, ids, max_new_tokens=9), PromptLookupDrafter(target, 4)]
    if target.config.model_type == "deepseek_v4":
        kinds.append(DeepseekV4MTPDrafter(target.config).eval())
    return kinds


# Takes seconds: eight threads share two cores.
@pytest.mark.parametrize("family", mostly_nightly([deepseek_v4, qwen3_next]), ids=lambda family: family.__name__)
def test_many_threads_on_one_target(family):
    """Short texts, so that threads begin and end all the time while others run the same modules."""
    torch.manual_seed(0)
    target = family().eval()
    prompts = [torch.cat([prompt(6, seed)] * 2, dim=1) for seed in range(8)]
    expected = [greedy(target, ids)[:, :16] for ids in prompts]
    drafters = drafters_for(target, prompts[0])
    errors = []

    def work(index):
        for turn in range(12):
            drafter = drafters[(index + turn) % len(drafters)]
            try:
                drafter.bind(target) if hasattr(drafter, "bind") else bind(target)
                out = target.generate(prompts[index], do_sample=False, max_new_tokens=4, assistant_model=drafter)
                assert torch.equal(out, expected[index])
            except BaseException as error:
                errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # threads change places as often as can be
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not errors, errors[:3]


@pytest.mark.parametrize("family", [deepseek_v4, qwen3_next], ids=lambda family: family.__name__)
def test_one_thread_ends_while_another_is_inside_a_module(family):
    """The interleaving that crashes where hooks come and go with each call: torch has listed a module's hooks, and
    before it comes to ours another thread takes its own away."""
    torch.manual_seed(0)
    target, ids = family().eval(), prompt(12)
    expected = greedy(target, ids)
    drafter = half_right_about(target, expected[0])
    first_is_half_way, second_is_inside, first_is_done = (threading.Event() for _ in range(3))
    results = {}

    def inside(module, args):
        if threading.current_thread().name == "second" and not second_is_inside.is_set():
            second_is_inside.set()
            assert first_is_done.wait(60)

    for module in target.modules():  # a user's hooks, before ours
        if isinstance(module, DeepseekV4Indexer):
            module.register_forward_hook(lambda module, args, output: inside(module, args))
    for layer in target.model.layers if family is qwen3_next else ():
        for part in layer.children():
            part.register_forward_pre_hook(inside)
    drafter.bind(target)

    class Pause(BaseStreamer):
        def __init__(self):
            self.puts = 0

        def put(self, value):
            self.puts += 1
            if self.puts == 3:
                first_is_half_way.set()
                assert second_is_inside.wait(60)

        def end(self):
            pass

    def first():
        results["first"] = greedy(target, ids, assistant_model=drafter, streamer=Pause())
        first_is_done.set()

    def second():
        assert first_is_half_way.wait(60)
        results["second"] = greedy(target, ids, assistant_model=drafter)

    threads = [threading.Thread(target=run, name=run.__name__) for run in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert torch.equal(results["first"], expected) and torch.equal(results["second"], expected)


def test_no_hook_comes_or_goes_while_generating(target, drafter):
    drafter.bind(target)
    hooks, ids = hooks_of(target), prompt(9)

    class Watch(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            assert hooks_of(target) == hooks
            with capture_residual(target):
                assert hooks_of(target) == hooks
            return torch.zeros(1, dtype=torch.bool)

    greedy(target, ids, assistant_model=drafter, stopping_criteria=StoppingCriteriaList([Watch()]))
    unbind(target)
    assert not any(before or after for _, before, after in hooks_of(target))


def test_capturing_around_a_generation_sees_it(target, drafter):
    """A reader of one's own and the drafter's, in one thread."""
    ids = prompt(9)
    with capture_residual(target) as plain:
        greedy(target, ids)
    drafter.bind(target)
    with capture_residual(target) as captured:
        greedy(target, ids, assistant_model=drafter)
    torch.testing.assert_close(captured[0], plain[0])
    assert drafter.last_stats.rounds < len(captured) <= drafter.last_stats.rounds + 2


def test_a_pair_is_checked_once_for_as_long_as_it_is_bound(target, drafter, monkeypatch):
    checks = []
    check = type(drafter).check_target
    monkeypatch.setattr(type(drafter), "check_target", lambda self, t: checks.append(t) or check(self, t))
    for bind_it in (lambda: drafter.bind(target), lambda: bind(target)):
        bind_it()
        for _ in range(3):
            greedy(target, prompt(5), assistant_model=drafter)
        assert [checked.model for checked in checks] == [target]
        checks.clear()
        unbind(target)
    greedy(bind(copy.deepcopy(target)), prompt(5), assistant_model=drafter)
    assert len(checks) == 1  # another target


def test_residual_of_any_layers_is_captured(target):
    ids, passed = prompt(7), {}
    handles = [
        layer.register_forward_hook(lambda module, args, output, i=i: passed.update({i: output}))
        for i, layer in enumerate(target.model.layers)
    ]
    with torch.no_grad(), capture_residual(target, [0, 2, -1]) as residuals:
        target(ids)
    for handle in handles:
        handle.remove()
    assert torch.equal(residuals[0], torch.cat([passed[0], passed[2], passed[2]], dim=2))
    with capture_residual(target, []) as residuals:
        target(ids)
    assert residuals == [] and not any(layer._forward_hooks for layer in target.model.layers)


def test_residual_is_captured_and_gives_the_targets_logits(target):
    ids = prompt(7)
    with torch.no_grad(), capture_residual(target) as residuals:
        logits = target(ids).logits
    assert [tuple(r.shape) for r in residuals] == [(1, 7, 4, 32)]
    assert torch.equal(target.lm_head(teacher_states(target_of(target), residuals[0])), logits)
    target(ids)
    assert len(residuals) == 1


def test_plain_decoding_of_a_bound_target_keeps_the_stock_cache(target, drafter):
    drafter.bind(target)
    out = greedy(target, prompt(5), return_dict_in_generate=True)
    assert {type(layer).__module__ for layer in cache_of(out).layers} <= {
        "transformers.cache_utils",
        "transformers.models.deepseek_v4.modeling_deepseek_v4",
    }


def test_what_is_no_model_is_told_to_be_loaded(drafter):
    for thing, named in (("org/name", "'org/name'"), (None, "a NoneType"), (DeepseekV4ForCausalLM, "class")):
        for call in (bind, drafter.bind):
            with pytest.raises(ValueError, match=rf"The target is .*{named}.*, expected a model: load it"):
                call(thing)


def test_a_target_is_loaded_whole_and_finite(target, tmp_path):
    target.save_pretrained(tmp_path)
    assert torch.equal(load_target(tmp_path).lm_head.weight, target.lm_head.weight)
    load_target(tmp_path, num_hidden_layers=0)  # for its embedding and head alone
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(name for name in tensors if "wq_a" in name or "q_a_proj" in name)
    for change, said in ((torch.full_like(tensors[name], torch.nan), "not finite"), (None, "1 missing")):
        kept = {key: value for key, value in {**tensors, name: change}.items() if value is not None}
        save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match=said):
            load_target(tmp_path)


# Every family of targets


@pytest.fixture(params=FAMILIES, ids=lambda family: family.__name__)
def family(request):
    torch.manual_seed(0)
    return request.param().eval()


@pytest.mark.parametrize(("length", "chunk"), mostly_nightly([(23, 5), (23, None), (1, None)]))
def test_every_family_writes_its_own_text(family, length, chunk):
    ids, own = prompt(length), type(family)
    options = dict(do_sample=False, max_new_tokens=30, prefill_chunk_size=chunk)
    # Between chunks transformers loses a cache that the model makes itself.
    stock_chunk = None if family.config.model_type == "remote_v4" else chunk
    expected = family.generate(ids, **{**options, "prefill_chunk_size": stock_chunk})
    # How a prompt is cut says nothing of how often drafts are wrong.
    wrong = [tiny_drafter(family)] if chunk is None else []
    for drafter in (*wrong, half_right_about(family, expected[0])):
        drafter.bind(family)
        assert torch.equal(family.generate(ids, assistant_model=drafter, **options), expected)
        drafter.unbind(family)
        assert type(family) is own and not any(module._forward_hooks for module in family.modules())
    stats = drafter.last_stats
    assert stats.tokens == expected.shape[1] - length and 1 < stats.tau < 7
    assert len(set(stats.accepted)) > 1  # rounds ended in several places
    assert stats.tokens - 1 - sum(stats.emitted) in (0, 1)  # a last token without room for drafts is no round


def test_every_familys_cache_is_as_if_no_draft_had_been(family):
    ids = prompt(14)
    drafter = half_right(family, ids, max_new_tokens=24)
    drafter.bind(family)
    options = dict(do_sample=False, max_new_tokens=24, return_dict_in_generate=True)
    out = family.generate(ids, assistant_model=drafter, **options)
    cache, written = cache_of(out), out.sequences
    assert cache.get_seq_length() == written.shape[1] - 1 and drafter.last_stats.rounds > 1
    turn = torch.cat([written[:, -1:], prompt(9, seed=3)], dim=1)
    positions = torch.arange(written.shape[1] - 1, written.shape[1] + 9)[None]
    with torch.no_grad():
        own_name = cache_argument(type(family).forward)  # remote code's is its own
        after = family(turn, **{own_name: cache}, position_ids=positions, use_cache=True).logits
        whole = family(torch.cat([written[:, :-1], turn], dim=1)).logits[:, -10:]
    torch.testing.assert_close(after, whole, atol=1e-3, rtol=1e-3)


class Silent(PromptLookupDrafter):
    def propose(self, target, context, ids, position_ids, count, sampler):
        return DraftTree.chain(ids.new_empty(0))


@pytest.mark.parametrize("options", [{}, {"tree_budget": 8}], ids=["chain", "tree"])
def test_attentions_that_sdpa_does_not_compute_are_none_as_in_plain_decoding(options):
    target, ids = qwen3(), prompt(6)
    asked = dict(do_sample=False, max_new_tokens=12, return_dict_in_generate=True, output_attentions=True)
    assert target.config._attn_implementation == "sdpa"
    plain = target.generate(ids, **asked)
    drafter = half_right_about(target, plain.sequences[0])
    drafter.bind(target)
    assisted = target.generate(ids, assistant_model=drafter, **asked, **options)
    assert torch.equal(assisted.sequences, plain.sequences) and assisted.attentions == plain.attentions


def test_every_familys_windows_are_trimmed_by_rounds_that_draft_nothing(family):
    drafter = Silent(family)
    drafter.bind(family)
    options = dict(do_sample=False, max_new_tokens=24, return_dict_in_generate=True)
    out = family.generate(prompt(14), assistant_model=drafter, **options)
    layers = getattr(cache_of(out), "layers", [])  # remote code may keep its own
    windows = [layer for layer in layers if getattr(layer, "sliding_window", None)]
    assert all(layer.keys.shape[-2] < layer.sliding_window for layer in windows)


def test_every_family_shows_what_plain_decoding_shows(family):
    ids, options = prompt(6), dict(do_sample=False, max_new_tokens=24)
    if hasattr(family, "set_attn_implementation"):
        family.set_attn_implementation("eager")
    options |= dict(return_dict_in_generate=True, output_attentions=True, output_hidden_states=True)
    plain = family.generate(ids, **options)
    drafter = half_right_about(family, plain.sequences[0])
    drafter.bind(family)
    assisted = family.generate(ids, assistant_model=drafter, **options)
    assert torch.equal(assisted.sequences, plain.sequences)
    for shown, again in ((plain.attentions, assisted.attentions), (plain.hidden_states, assisted.hidden_states)):
        for step, same in zip(shown or (), again or (), strict=True):
            for one, other in zip(step or (), same or (), strict=True):
                torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-3)


def test_every_family_passes_its_residual(family):
    ids, streams = prompt(9), target_of(family).streams
    with torch.no_grad(), capture_residual(family, [1, -1]) as captured:
        logits = family(ids).logits
    assert captured[0].shape == (1, 9, 2 * streams, 64)
    states = teacher_states(target_of(family), captured[0][:, :, streams:])
    torch.testing.assert_close(target_of(family).logits(states), logits)
    some = torch.randint(0, 64, (9, 5))
    torch.testing.assert_close(target_of(family).logits_of(states[0], some), logits[0].gather(1, some))


def test_every_family_embeds_as_its_first_layer_reads(family):
    ids, read = prompt(9), []
    of = target_of(family)
    of.layers[0].register_forward_pre_hook(
        lambda module, args, kwargs: read.extend([*args, *kwargs.values()]), with_kwargs=True
    )
    with torch.no_grad():
        family(ids)
    for stream in read[0].reshape(1, 9, of.streams, 64).unbind(2):
        torch.testing.assert_close(of.embed(ids), stream)


def test_every_family_hands_its_gate_down_or_says_why_not(family, caplog):
    with caplog.at_level(logging.WARNING):
        drafter = tiny_drafter(family, path_norm=False)
    with torch.no_grad(), capture_residual(family) as captured:
        family(prompt(9))
    facts, residual = target_of(family), captured[0]
    if facts.gate():
        assert drafter.config.reducer == "hc_gate" and not caplog.text and facts.streams > 1
        norm_reads = []
        facts.norm.register_forward_pre_hook(lambda module, args: norm_reads.append(args[0]))
        facts.collapse(residual)
        torch.testing.assert_close(drafter.hc_gate(residual), norm_reads[0])
    else:
        assert drafter.config.reducer == "fc" and facts.why_ungated in caplog.text
        with pytest.raises(ValueError, match="cannot be used"):
            tiny_drafter(family, reducer="hc_gate")


def test_every_family_trains_a_drafter(family, tmp_path):
    drafter = tiny_drafter(family, num_hidden_layers=1)
    documents = Dataset.from_list([{"input_ids": prompt(24, i)[0].tolist(), "loss_mask": [1] * 24} for i in range(4)])
    before = [p.clone() for p in family.parameters()]
    trainer = trainer_for(
        tmp_path, family, drafter, documents, per_device_train_batch_size=4, max_steps=20, learning_rate=2e-2,
        num_anchors=8, warmup_steps=1,
    )  # fmt: skip
    trainer.train()
    falling = losses(trainer)
    assert falling[-1] < 0.92 * falling[0]
    assert all(torch.equal(old, new) for old, new in zip(before, family.parameters()))
    ids = prompt(12)
    expected = greedy(family, ids)
    drafter.eval().bind(family)
    assert torch.equal(greedy(family, ids, assistant_model=drafter), expected)


@pytest.mark.parametrize("family", [qwen3_next, granite_hybrid, falcon_h1], ids=lambda family: family.__name__)
def test_transformers_own_modes_work_on_running_states_but_not_as_assistant(family):
    torch.manual_seed(0)
    target, ids = family().eval(), prompt(12)
    ids = torch.cat([ids, ids[:, :7]], dim=1)
    expected = greedy(target, ids)
    bind(target)
    assert torch.equal(greedy(target, ids, prompt_lookup_num_tokens=4), expected)
    assistant = bind(family().eval())
    with pytest.raises(ValueError, match="has linear attention, which can take back the last forward only"):
        greedy(target, ids, assistant_model=assistant)


def test_layers_that_are_not_there_are_refused_and_others_come_in_any_order(target):
    ids = prompt(7)
    with torch.no_grad(), capture_residual(target, [0, -1]) as forth, capture_residual(target, [-1, 0]) as back:
        target(ids)
    assert torch.equal(torch.cat(forth[0].chunk(2, dim=2)[::-1], dim=2), back[0])
    for wrong in (99, -2):
        with pytest.raises(ValueError, match=f"`target_layer_ids` has {wrong}, but the target's layers are 0 to 2"):
            with capture_residual(target, [wrong]):
                pass


def test_a_multimodal_class_around_granite_scales_nothing():
    """Its head is its own; of Granite's text part it has the layers alone."""
    text = GraniteConfig(**{**COMMON, "vocab_size": 64}, intermediate_size=48, num_hidden_layers=2,
                         num_key_value_heads=2, logits_scaling=3.0, embedding_multiplier=2.0)  # fmt: skip
    vision = CLIPVisionConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
                              image_size=8, patch_size=4, projection_dim=16)  # fmt: skip
    target = LlavaNextForConditionalGeneration(LlavaNextConfig(vision_config=vision, text_config=text)).eval()
    states = torch.randn(1, 3, 64)
    torch.testing.assert_close(target_of(target).logits(states), target.get_output_embeddings()(states))


def test_images_are_refused():
    torch.manual_seed(0)
    target = glm5_next().eval()
    drafter = tiny_drafter(target)
    drafter.bind(target)
    with pytest.raises(ValueError, match=r"text only: leave .* out"):
        greedy(
            target, prompt(5), assistant_model=drafter, pixel_values=torch.zeros(4, 1176),
            image_grid_thw=torch.tensor([[1, 2, 2]]), mm_token_type_ids=torch.zeros(1, 5, dtype=torch.long),
        )  # fmt: skip


@pytest.mark.skipif(REWINDABLE_QWEN4, reason="this transformers can rewind it")
def test_a_state_that_nothing_rewinds_is_refused():
    with pytest.raises(ValueError, match=r"qwen_sparse_attention.* cannot be rewound"):
        bind(qwen4_exp())


def test_states_of_other_kinds_are_refused():
    target = qwen3_next()
    target.config.layer_types = ["hybrid", "full_attention", "linear_attention", "full_attention"]
    with pytest.raises(ValueError, match=r"has layers \(hybrid\) with a running state that cannot be rewound"):
        bind(target)


@pytest.mark.parametrize("kind", [PromptTuningConfig, PrefixTuningConfig, PromptEncoderConfig])
def test_virtual_tokens_are_refused(kind, tmp_path):
    """By the wrapper, by the target inside that generates for it, and by what was saved of it."""
    target, told = qwen3().eval(), r"tuned by PEFT's .*, whose virtual tokens are .* LoRA"
    target.config.pad_token_id = 0
    drafter = tiny_drafter(target)
    wrapped = get_peft_model(target, kind(task_type="CAUSAL_LM", num_virtual_tokens=3))
    with pytest.raises(ValueError, match=told):
        drafter.bind(wrapped)
    drafter.bind(wrapped.get_base_model())
    with pytest.raises(ValueError, match=told) as caught:
        wrapped.generate(input_ids=prompt(5), assistant_model=drafter, max_new_tokens=4, do_sample=False)
    assert "\n" not in str(caught.value)
    expected = greedy(target, prompt(5))  # as it is without the wrapper
    assert torch.equal(greedy(target, prompt(5), assistant_model=drafter), expected)
    wrapped.save_pretrained(tmp_path)
    with pytest.raises(OSError, match=r"prompt or prefix tuning, .* cannot be merged into a target"):
        load_target(tmp_path)


@pytest.mark.parametrize(
    ("family", "ids", "told"),
    [
        (gemma3n, [0], r"reads layers \[0\] of a gemma3n_text target, but each hands on 4 streams"),
        (gemma4_e, [-1], r"reads layers \[-1\] of .* from 2 on they .*`PromptLookupDrafter`.*some of 0 to 1"),
        (gemma4_e, [0, 2], r"reads layers \[0, 2\]"),
    ],
)
def test_layers_that_give_no_state_for_each_token_are_read_by_no_drafter(family, ids, told):
    """Before anything is made, and where a drafter of one's own binds."""
    torch.manual_seed(0)
    target = family().eval()
    reads, text = RandomTrees(target, [], target_layer_ids=tuple(ids)), prompt(12)
    for refused in (lambda: reads.bind(target), lambda: tiny_drafter(target, target_layer_ids=ids)):
        with pytest.raises(ValueError, match=told) as caught:
            refused()
        assert "\n" not in str(caught.value) and not is_bound(target)
    expected = greedy(target, text)
    others = [PromptLookupDrafter(target)]
    if family is gemma4_e:
        others.append(RandomTrees(target, [expected[0]], target_layer_ids=(0, 1)))
    for drafter in others:
        drafter.bind(target)
        assert torch.equal(greedy(target, text, assistant_model=drafter), expected)
        drafter.unbind(target)


def test_layers_that_run_several_times_are_refused():
    target = qwen3()
    target.config.n_recurrent_loops = 2  # as Dory's has
    with pytest.raises(ValueError, match="runs layers 2 times for each token"):
        bind(target)


def test_a_mean_needs_a_norm_after_it():
    if REWINDABLE_QWEN4:
        torch.manual_seed(0)
        with pytest.raises(ValueError, match="'mean_pool', but a qwen4_exp_text target has no norm"):
            BlockObjective(None, target_of(qwen4_exp()), SimpleNamespace(kl_teacher="mean_pool"))


# Native V4 in all its loadings


def test_compiled_layers_pass_their_residual():
    """Hooks that come after compilation run, and find what belongs to this capture."""
    target, ids = qwen3().eval(), prompt(9)
    with torch.no_grad(), capture_residual(target, [0, -1]) as expected:
        target(ids)
        target(ids[:, :5])
    for layer in target.model.layers:
        layer.compile(backend="eager", dynamic=True)
    with torch.no_grad():
        target(ids)  # compiled without a hook
        for _ in range(2):
            with capture_residual(target, [0, -1]) as captured:
                target(ids)
                target(ids[:, :5])
            for one, other in zip(captured, expected, strict=True):
                torch.testing.assert_close(one, other)


@pytest.mark.skipif(
    torch.__version__ < (2, 12), reason="earlier torch takes no function into a graph that has a branch out of it"
)
def test_a_bound_target_is_one_graph_where_nobody_reads_it():
    target, ids = qwen3().eval(), prompt(9)
    with torch.no_grad():
        expected = target(ids).logits
        bind(target)
        whole = torch.compile(target.model, backend="eager", fullgraph=True)
        torch.testing.assert_close(target.lm_head(whole(ids).last_hidden_state), expected)


@pytest.mark.nightly  # inductor compiles whole forwards
def test_a_graph_that_may_not_break_says_what_to_do():
    torch._dynamo.reset()
    target = qwen3().eval()
    drafter = tiny_drafter(target)
    drafter.bind(target)
    expected, own = greedy(target, prompt(5)), target.forward
    target.forward = torch.compile(own, backend="eager", fullgraph=True)
    with pytest.raises(
        torch._dynamo.exc.Unsupported, match=r"bound target: compile the target with `fullgraph=False`"
    ):
        greedy(target, prompt(5), assistant_model=drafter)
    target.forward = torch.compile(own, backend="eager", fullgraph=False)
    assert torch.equal(greedy(target, prompt(5), assistant_model=drafter), expected)
    torch._dynamo.reset()  # what was tried in vain is tried no more


def test_a_target_with_compiled_parts_writes_the_same_text(target, drafter):
    ids = prompt(9)
    expected = greedy(target, ids)
    for layer in target.model.layers:
        layer.mlp.compile(backend="eager", dynamic=True)
    drafter.bind(target)
    for _ in range(2):
        assert torch.equal(greedy(target, ids, assistant_model=drafter), expected)


def test_an_offloaded_target_writes_the_same_text(tmp_path):
    target = tiny_target(hidden_size=64)
    ids = prompt(20)
    expected = target.generate(ids, do_sample=False, max_new_tokens=20)
    drafts = half_right_about(target, expected[0])
    target.save_pretrained(tmp_path / "saved")
    for on_cpu in ([], ["model.embed_tokens", "model.layers.0", "model.norm"]):
        places = {f"model.{name}": "disk" for name, _ in target.model.named_children() if name != "layers"}
        places |= {"lm_head": "disk", **{f"model.layers.{i}": "disk" for i in range(3)}}
        spread = AutoModelForCausalLM.from_pretrained(
            tmp_path / "saved", device_map=places | dict.fromkeys(on_cpu, "cpu"),
            offload_folder=tmp_path / "offload", dtype=torch.float32,
        )  # fmt: skip
        assert spread.lm_head.weight.is_meta
        for drafter in (headed(spread, "state", head_candidates=5), drafts):
            drafter.bind(spread)
            out = spread.generate(ids, do_sample=False, max_new_tokens=20, assistant_model=drafter)
            assert torch.equal(out, expected) and drafter.last_stats.rounds
        assert spread.lm_head.weight.is_meta


@pytest.mark.parametrize("chunk", [4, 7, 16])
def test_a_prompt_in_chunks_reaches_the_drafter_whole_and_is_never_held_whole(chunk):
    """Far beyond the target's windows and the drafter's: memory is bounded by the chunk, the features are the same."""
    target = tiny_target(hidden_size=64)
    ids = prompt(150)
    contexts, largest = [], []
    for size in (None, chunk):
        drafter = tiny_drafter(target, sliding_window=32, target_layer_ids=[0, -1], reducer="hybrid")
        torch.manual_seed(1)
        for parameter in drafter.parameters():
            parameter.data.normal_(std=0.1)
        drafter.bind(target)
        seen, extend = [], drafter.extend

        def counting(target, context, residual, *rest, seen=seen, extend=extend):
            seen.append(residual.shape[1])
            extend(target, context, residual, *rest)

        drafter.extend = counting
        out = target.generate(ids, do_sample=False, max_new_tokens=3, assistant_model=drafter, prefill_chunk_size=size,
                              return_dict_in_generate=True)  # fmt: skip
        contexts.append(context_of(cache_of(out), drafter).layers)
        largest.append(seen)
    assert largest[0][0] == 150 and max(largest[1]) <= chunk and sum(largest[1]) == sum(largest[0])
    for one, other in zip(*contexts, strict=True):
        for states, again in zip(one, other, strict=True):
            torch.testing.assert_close(states, again, atol=1e-4, rtol=1e-4)


QUANTIZED = re.compile(r"\.(attn\.(wq_a|wq_b|wkv|wo_a|wo_b)|ffn\.(experts\.\d+|shared_experts)\.w\d)\.weight$")


@pytest.mark.parametrize("fp4_experts", [False, True])
def test_a_quantized_checkpoint_is_drafted_for(tmp_path, fp4_experts):
    """As DeepSeek ships V4: block-scaled FP8, and FP4 experts. Without a GPU transformers dequantizes it on
    loading."""
    source = tiny_target(hidden_size=64, moe_intermediate_size=64)
    source.save_pretrained(tmp_path)
    tensors, generator = load_file(tmp_path / "model.safetensors"), torch.Generator().manual_seed(1)
    values = {}
    for name in [name for name in tensors if QUANTIZED.search(name)]:
        if fp4_experts and ".experts." in name:
            tensors[name], scale, values[name] = quantize_fp4(tensors[name].shape, generator)
        else:
            tensors[name], scale, values[name] = quantize_fp8(tensors[name].shape, (128, 128), generator)
        tensors[name.removesuffix("weight") + "scale"] = scale.to(torch.float8_e8m0fnu)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    target = AutoModelForCausalLM.from_pretrained(tmp_path)
    layer = target.model.layers[1]
    assert torch.equal(layer.self_attn.q_a_proj.weight, values["model.layers.1.attn.wq_a.weight"])
    assert torch.equal(layer.mlp.experts.down_proj[2], values["model.layers.1.ffn.experts.2.w2.weight"])
    drafter, ids = tiny_drafter(target), prompt(20)
    assert drafter.hc_gate.hc_fn.dtype == torch.float32
    assert torch.equal(drafter.hc_gate.hc_fn, source.model.hc_head.hc_fn)
    expected = greedy(target, ids)
    for choice in (drafter, half_right_about(target, expected[0])):
        choice.bind(target)
        assert torch.equal(greedy(target, ids, assistant_model=choice), expected)


def test_quantized_heads_are_fed_in_the_drafters_own_dtype():
    states = torch.randn(1, 2, 8, dtype=torch.bfloat16)
    for dtype, expected in (
        (torch.float8_e4m3fn, torch.bfloat16),
        (torch.uint8, torch.bfloat16),
        (torch.float32,) * 2,
    ):
        assert computable(states, torch.zeros(4, 8).to(dtype)).dtype == expected


@torch.no_grad()
def test_logits_of_some_tokens_are_the_heads_whatever_its_weight_is():
    """Rows of a plain head, with its bias, in its dtype; of what has no rows to be read, all of the head's logits."""
    target = granite_hybrid()
    states, some, of = torch.randn(3, 64), torch.tensor([[5, 0, 63], [7, 7, 1], [2, 3, 4]]), target_of(target)

    def assert_the_heads(found=None):
        found = of.logits_of(states, some) if found is None else found
        torch.testing.assert_close(found, of.logits(states).gather(1, some), atol=1e-5, rtol=1e-4)

    target.lm_head = torch.nn.Linear(64, 64, bias=True)
    assert_the_heads()
    expected = of.logits_of(states, some)
    target.lm_head.to(torch.bfloat16)
    rounded = of.logits_of(states, some)
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.float(), expected, atol=0.05, rtol=0.05)
    target.lm_head.float()

    class Quantized(torch.nn.Module):
        """As `torch.nn.Linear`, but that its weight alone says nothing of what it computes."""

        def __init__(self, head, weight):
            super().__init__()
            self.head, self.weight, self.calls = [head], weight, 0

        def forward(self, states):
            self.calls += 1
            return self.head[0](states.float())

    plain = target.lm_head
    for weight in (
        torch.nn.Parameter(torch.zeros(64, 64).to(torch.float8_e4m3fn), requires_grad=False),
        torch.nn.Parameter(torch.zeros(64, 32, dtype=torch.uint8), requires_grad=False),
        type("Packed", (torch.nn.Parameter,), {})(torch.zeros(64, 64)),
        torch.nn.Parameter(torch.zeros(64, 64, device="meta")),
    ):
        target.lm_head = Quantized(plain, weight)
        found = of.logits_of(states, some)
        assert target.lm_head.calls == 1
        assert_the_heads(found)


TWO_RANKS = """
import os, sys
import torch, torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from tests.conftest import half_right_about, prompt
from tests.helpers.headed_drafters import headed
torch.set_num_threads(1)
plans = [{"tp_plan": "auto"}]
if hasattr(DistributedConfig(), "ep_size"):  # experts spread as whole experts
    plans.append({"distributed_config": DistributedConfig(tp_size=2, ep_size=2, tp_plan="auto")})
whole, ids = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval(), prompt(20)
options = dict(do_sample=False, max_new_tokens=20)
expected = whole.generate(ids, **options)
drafts = half_right_about(whole, expected[0])
for plan in plans:
    spread = AutoModelForCausalLM.from_pretrained(sys.argv[1], **plan).eval()
    for drafter in (headed(spread, "state", head_candidates=5), drafts):
        drafter.bind(spread)
        same = torch.equal(spread.generate(ids, assistant_model=drafter, **options), expected)
        sys.stdout.write(f"rank {dist.get_rank()} {list(plan)} {same} {drafter.last_stats.tau > 1}\\n")  # one piece
        sys.stdout.flush()
dist.barrier()
os._exit(0)  # torch's own threads abort an interpreter that ends by itself now and then
"""


@pytest.mark.nightly  # two processes import transformers
def test_a_target_spread_over_two_processes_writes_the_same_text(tmp_path):
    """Tensor- and expert-parallel: each rank drafts the same tokens and verifies them together with the other."""
    tiny_target(hidden_size=64).save_pretrained(tmp_path / "saved")
    (tmp_path / "run.py").write_text(TWO_RANKS)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = python(*launcher, tmp_path / "run.py", tmp_path / "saved", env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    found = re.findall(r"rank \d \[[^]]*\] (True|False) (True|False)", done.stdout)
    assert len(found) in (4, 8) and all(same == "True" for same, _ in found), done.stdout
    assert sum(some == "True" for _, some in found) >= len(found) // 2  # the drafts that were partly right
