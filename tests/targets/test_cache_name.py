"""The cache under all of its names: transformers renamed it in 5.24, remote code keeps the name that it has."""

import importlib.util
import logging
import warnings

import pytest
import torch
import transformers
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.generation.utils import GenerationMixin

from hf_hyperdflash import PromptLookupDrafter, bind, unbind
from hf_hyperdflash.targets.caches.name import CACHE, cache_argument, cache_of, renamed_cache

from ..conftest import prompt, tiny_drafter, tiny_target
from ..helpers.families import COMMON, DENSE
from ..helpers.refusals import Refusal

NAMES = ("cache", "past_key_values")


def tiny_llama(kind: type = LlamaForCausalLM):
    torch.manual_seed(3)
    return kind(LlamaConfig(**COMMON, **DENSE)).eval()


class OldNameInForward(LlamaForCausalLM):
    """With the `prepare_inputs_for_generation` that it inherits."""

    def forward(self, input_ids=None, past_key_values=None, **kwargs):
        return super().forward(input_ids, **{CACHE: past_key_values}, **kwargs)


class OldName(OldNameInForward):
    """As remote code that was written for transformers before 5.24."""

    def prepare_inputs_for_generation(self, input_ids, past_key_values=None, **kwargs):
        inputs = super().prepare_inputs_for_generation(input_ids, **{CACHE: past_key_values}, **kwargs)
        return renamed_cache(inputs, "past_key_values")


class NewNameInForward(LlamaForCausalLM):
    """With the `prepare_inputs_for_generation` that it inherits."""

    def forward(self, input_ids=None, cache=None, **kwargs):
        return super().forward(input_ids, **{CACHE: cache}, **kwargs)


class NewName(NewNameInForward):
    """As remote code that is written for transformers from 5.24 on."""

    def prepare_inputs_for_generation(self, input_ids, cache=None, **kwargs):
        return renamed_cache(super().prepare_inputs_for_generation(input_ids, **{CACHE: cache}, **kwargs), "cache")


def test_it_is_called_what_transformers_calls_it():
    is_new = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 24)
    assert CACHE == ("cache" if is_new else "past_key_values")
    assert cache_argument(LlamaForCausalLM.forward) == CACHE
    assert cache_argument(OldName.forward) == "past_key_values" and cache_argument(NewName.forward) == "cache"
    assert cache_argument(lambda **kwargs: None) == CACHE


@pytest.mark.parametrize("assisted", [False, True], ids=["plain", "drafted"])
@pytest.mark.parametrize("kind", [OldName, NewName, OldNameInForward, NewNameInForward])
def test_a_bound_model_gets_its_cache_by_its_own_name(kind, assisted):
    """Without it such a model makes a new cache in each step: its text would go on from the last token alone."""
    target, ids = tiny_llama(kind), prompt(9, 1)
    options = dict(max_new_tokens=12, do_sample=False)
    expected = tiny_llama().generate(ids, **options)
    bind(target)
    widths = []
    target.model.layers[0].register_forward_hook(lambda module, args, out: widths.append(args[0].shape[1]))
    cache = DynamicCache(config=target.config)
    options |= {"assistant_model": PromptLookupDrafter(target)} if assisted else {}
    out = target.generate(ids, **options, **{CACHE: cache}, return_dict_in_generate=True)
    assert torch.equal(out.sequences, expected)
    assert cache_of(out) is cache and cache.get_seq_length() == expected.shape[1] - 1  # one cache, filled once
    assert widths[0] == ids.shape[1] and sum(widths[1:]) >= 11
    assert all(width == 1 for width in widths[1:]) or assisted
    unbind(target)
    assert type(target) is kind


def test_a_bound_target_takes_both_names_and_transformers_has_nothing_to_warn_of(caplog):
    """Of names that it has given up, in rounds, plain steps, batches and second turns."""
    target, llama, ids = bind(tiny_target()), bind(tiny_llama()), prompt(9)
    logging.getLogger("transformers").addHandler(caplog.handler)
    try:
        with warnings.catch_warnings(), caplog.at_level("WARNING"):
            warnings.simplefilter("error", FutureWarning)
            for model, drafter in ((target, tiny_drafter(target)), (llama, PromptLookupDrafter(llama))):
                options = dict(do_sample=False, max_new_tokens=8)
                expected = model.generate(ids, **options)
                for name in NAMES:
                    given = {name: DynamicCache(config=model.config), "assistant_model": drafter}
                    out = model.generate(ids, **given, return_dict_in_generate=True, **options)
                    assert torch.equal(out.sequences, expected) and cache_of(out) is given[name]
                    model.generate(out.sequences, **given, **options)
                    assert given[name].get_seq_length() == expected.shape[1] + 7
                model.generate(ids.expand(2, -1), assistant_model=drafter, **options)
    finally:
        logging.getLogger("transformers").removeHandler(caplog.handler)
    assert not [record for record in caplog.messages if "deprecated" in record]


def test_two_caches_under_two_names_are_left_to_transformers():
    both = {"cache": 1, "past_key_values": 2}
    assert renamed_cache(both) is both
    assert renamed_cache({"past_key_values": 2, "input_ids": 3}, "cache") == {"cache": 2, "input_ids": 3}
    assert renamed_cache({"cache": 2}, "past_key_values") == {"past_key_values": 2}


def test_a_name_that_is_not_known_ends_in_one_line(monkeypatch):
    """Of this package, and of a drafter that was pushed before transformers renamed the cache again."""

    def prepare(self, input_ids, memory=None, **kwargs): ...

    def imported_anew(name):
        spec = importlib.util.find_spec(f"hf_hyperdflash.{name}")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    target = tiny_target()
    monkeypatch.setattr(GenerationMixin, "prepare_inputs_for_generation", prepare)
    words = transformers.__version__, "name for the cache", "hf-hyperdflash"
    Refusal(lambda: imported_anew("targets.caches.name"), words, ImportError).check()
    portable = imported_anew("portable.target")
    Refusal(lambda: portable.Target(target), words).check()
