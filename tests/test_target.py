import copy
import logging
import pickle
import threading

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV4ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    StoppingCriteria,
    StoppingCriteriaList,
)

from hf_hyperdflash import bind, capture_residual, unbind
from hf_hyperdflash.target import BoundTarget, teacher_states

from .conftest import prompt, tiny_drafter, tiny_target


def greedy(target, ids, **kwargs):
    return target.generate(ids, do_sample=False, max_new_tokens=12, **kwargs)


def test_bind_is_on_one_instance_and_undone(target, drafter):
    other, own, config = tiny_target(1), type(target), copy.deepcopy(target.config)
    assert drafter.bind(target) is target and drafter.bind(target) is target
    assert type(target) is not own and type(target).__name__ == own.__name__ and isinstance(target, own)
    assert own._is_stateful and type(other) is own
    assert drafter.unbind(target) is target and type(target) is own
    assert drafter.unbind(target) is target
    assert target.config == config
    with pytest.raises(ValueError, match="stateful"):
        greedy(target, prompt(5), assistant_model=drafter)


def test_other_families_are_told_what_to_call(drafter):
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2))
    with pytest.raises(ValueError, match="gpt2 model: expected a DeepSeek-V4"):
        drafter.bind(gpt2)
    with pytest.raises(ValueError, match=r"drafter\.bind\(target\)"):
        greedy(gpt2, prompt(5), assistant_model=drafter)
    with pytest.raises(ValueError, match=r"drafter\.bind\(target\)"):
        drafter.generate(prompt(5))
    assert not hasattr(drafter, "generation_config")


@pytest.mark.parametrize(
    ("fields", "values"),
    [({"vocab_size": 80}, "64.*80"), ({"hidden_size": 64}, "32.*64"), ({"hc_mult": 2}, "4.*2")],
)
def test_pairs_that_do_not_fit_name_both_values(drafter, fields, values):
    other = tiny_target(**fields)
    with pytest.raises(ValueError, match=values):
        drafter.bind(other)
    assert type(other) is DeepseekV4ForCausalLM
    bind(other)
    # With different vocabularies transformers asks for both tokenizers before it gets to us.
    tokenizers = {"tokenizer": 1, "assistant_tokenizer": 1} if "vocab_size" in fields else {}
    with pytest.raises(ValueError, match=values):
        greedy(other, prompt(5), assistant_model=drafter, **tokenizers)


def test_a_mask_token_outside_the_vocabulary_is_refused(target, drafter):
    drafter.config.mask_token_id = 64  # as an edited config could; a fresh one is refused when it is made
    with pytest.raises(ValueError, match=r"mask token 64 .* vocabulary of 64"):
        drafter.bind(target)
    assert type(target) is DeepseekV4ForCausalLM


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


def test_two_threads_on_one_pair(target, drafter):
    prompts = [prompt(6, seed) for seed in range(4)]
    expected = [greedy(target, ids) for ids in prompts]
    drafter.bind(target)
    results = {}

    def work(index):
        for _ in range(3):
            results[index] = greedy(target, prompts[index], assistant_model=drafter)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, ids in enumerate(expected):
        assert torch.equal(results[index], ids)


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
    assert torch.equal(target.lm_head(teacher_states(target, residuals[0])), logits)
    target(ids)
    assert len(residuals) == 1


def test_plain_decoding_of_a_bound_target_keeps_the_stock_cache(target, drafter):
    drafter.bind(target)
    out = greedy(target, prompt(5), return_dict_in_generate=True)
    assert {type(layer).__module__ for layer in out.past_key_values.layers} <= {
        "transformers.cache_utils",
        "transformers.models.deepseek_v4.modeling_deepseek_v4",
    }


ONE_STREAM = [
    (LlamaConfig, LlamaForCausalLM, {}),
    (MistralConfig, MistralForCausalLM, {"sliding_window": 8}),
    (Gemma2Config, Gemma2ForCausalLM, {"sliding_window": 8}),
    (
        Gemma3TextConfig,
        Gemma3ForCausalLM,
        {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    ),
]


@pytest.mark.parametrize(("config", "model", "fields"), ONE_STREAM, ids=lambda value: getattr(value, "__name__", ""))
@pytest.mark.parametrize("layers", [[0], [-1], [0, -1]])
def test_targets_with_one_residual_stream(config, model, fields, layers):
    torch.manual_seed(0)
    shape = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "initializer_range": 0.2,
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
    }  # fmt: skip
    target = model(config(**shape, **fields)).eval()
    drafter = tiny_drafter(target, target_layer_ids=layers)
    assert (drafter.config.reducer, drafter.config.target_hc_mult) == ("fc", 1)
    ids = prompt(13)
    plain = greedy(target, ids)
    drafter.bind(target)
    assert torch.equal(greedy(target, ids, assistant_model=drafter), plain)
    assert drafter.last_stats.rounds and drafter.last_stats.tokens == 12
    with capture_residual(target, [-1]) as captured:
        logits = target(ids).logits
    heads = target.get_output_embeddings()(teacher_states(target, captured[0]))
    if config is not Gemma2Config:  # which caps its logits
        torch.testing.assert_close(heads, logits)
    drafter.unbind(target)
    assert type(target) is model
