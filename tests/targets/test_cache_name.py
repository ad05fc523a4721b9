"""The cache under all of its names: transformers renamed it in 5.24, remote code keeps the name that it has."""

import logging
import os
import warnings

import pytest
import torch
import transformers
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from hf_hyperdflash import PromptLookupDrafter, bind, unbind
from hf_hyperdflash.targets.caches.name import CACHE, cache_argument, cache_of, renamed_cache

from ..conftest import prompt, tiny_drafter, tiny_target
from ..helpers.families import COMMON, DENSE
from ..helpers.processes import python

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


@pytest.mark.parametrize("name", NAMES)
def test_a_bound_target_takes_both_names(name):
    target, ids = bind(tiny_target()), prompt(9)
    options = dict(do_sample=False, max_new_tokens=8, assistant_model=tiny_drafter(target))
    expected = target.generate(ids, **options)
    cache = DynamicCache(config=target.config)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        assert torch.equal(target.generate(ids, **{name: cache}, **options), expected)
    assert cache.get_seq_length() == expected.shape[1] - 1


def test_transformers_has_nothing_to_warn_of(caplog):
    """Of names that it has given up, in rounds, plain steps, batches and a second turn."""
    target, llama = bind(tiny_target()), bind(tiny_llama())
    logging.getLogger("transformers").addHandler(caplog.handler)
    try:
        with warnings.catch_warnings(), caplog.at_level("WARNING"):
            warnings.simplefilter("error", FutureWarning)
            for model, drafter in ((target, tiny_drafter(target)), (llama, PromptLookupDrafter(llama))):
                ids, options = prompt(9), dict(do_sample=False, max_new_tokens=8)
                out = model.generate(ids, assistant_model=drafter, return_dict_in_generate=True, **options)
                model.generate(out.sequences, assistant_model=drafter, **{CACHE: cache_of(out)}, **options)
                model.generate(ids.expand(2, -1), assistant_model=drafter, **options)
                model.generate(ids, **options)
    finally:
        logging.getLogger("transformers").removeHandler(caplog.handler)
    assert not [record for record in caplog.messages if "deprecated" in record]


def test_two_caches_under_two_names_are_left_to_transformers():
    both = {"cache": 1, "past_key_values": 2}
    assert renamed_cache(both) is both
    assert renamed_cache({"past_key_values": 2, "input_ids": 3}, "cache") == {"cache": 2, "input_ids": 3}
    assert renamed_cache({"cache": 2}, "past_key_values") == {"past_key_values": 2}


def test_a_name_that_is_not_known_ends_in_one_line(tmp_path):
    """As the code of a drafter says it that was pushed before transformers renamed the cache again."""
    target = tiny_target()
    tiny_drafter(target).save_pretrained(tmp_path / "drafter")
    target.save_pretrained(tmp_path / "target")
    script = tmp_path / "run.py"
    script.write_text(
        "import sys\n"
        "sys.modules['hf_hyperdflash'] = None\n"
        "from transformers import AutoModel, AutoModelForCausalLM, GenerationMixin\n"
        "def prepare(self, input_ids, memory=None, **kwargs): ...\n"
        "GenerationMixin.prepare_inputs_for_generation = prepare\n"
        "drafter = AutoModel.from_pretrained('drafter', trust_remote_code=True)\n"
        "drafter.bind(AutoModelForCausalLM.from_pretrained('target'))\n"
    )
    done = python(script, cwd=tmp_path, env=os.environ | {"HF_HOME": str(tmp_path / "home")})
    assert done.returncode
    said = done.stderr.splitlines()[-1]
    assert "has a name for the cache that this file does not know" in said and "install hf-hyperdflash" in said
