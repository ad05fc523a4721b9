"""The pair that ships with the repository. Its script and the README's snippets: `tools/check_examples.py` and
`tools/check_snippets.py`."""

import runpy
import sys

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, pipeline
from transformers.dynamic_module_utils import check_imports

from hf_hyperdflash import DeepseekV4MTPDrafter, HyperDFlashDrafter
from hf_hyperdflash.training.features.fingerprint import short_fingerprint, target_fingerprint

from .conftest import MODELS, mostly_nightly

TARGET, DRAFTER = MODELS / "tiny-deepseek-v4", MODELS / "tiny-deepseek-v4-hyperdflash"
PROMPTS = [
    "Anna has 5 pencils. She buys 2 boxes with 6 pencils each. How many pencils does Anna have now?",
    "Write a Python function that returns the sum of two numbers.",
    "A train travels 60 miles per hour for 3 hours. How far does it go?\nPlease reason step by step, and put your "
    "final answer within \\boxed{}.",
]


@pytest.fixture(scope="module")
def shipped():
    target = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    drafter = HyperDFlashDrafter.from_pretrained(DRAFTER, dtype=torch.float32).eval()
    drafter.bind(target)
    return AutoTokenizer.from_pretrained(TARGET), target, drafter


# Takes seconds: the shipped pair writes whole answers, plainly and assisted.
@pytest.mark.parametrize("text", mostly_nightly(PROMPTS))
def test_same_text_in_fewer_rounds(shipped, text):
    tokenizer, target, drafter = shipped
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    plain = target.generate(**inputs, do_sample=False, max_new_tokens=100)
    assert torch.equal(target.generate(**inputs, do_sample=False, max_new_tokens=100, assistant_model=drafter), plain)
    assert drafter.last_stats.tau > 2
    lookup = target.generate(**inputs, do_sample=False, max_new_tokens=100, prompt_lookup_num_tokens=5)
    assert torch.equal(lookup, plain)


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("modeling_hyperdflash.py", "drafters.blocks.modeling_hyperdflash"),
        ("custom_generate/generate.py", "portable.generate"),
    ],
)
def test_without_the_package_the_folder_says_where_it_is(monkeypatch, name, module):
    for missing in ("hf_hyperdflash", f"hf_hyperdflash.{module}"):
        monkeypatch.setitem(sys.modules, missing, None)
    check_imports(DRAFTER / name)
    with pytest.raises(ImportError, match=r"`pip install -e \.` in the repository's root"):
        runpy.run_path(str(DRAFTER / name))


def test_the_folder_runs_by_itself(shipped):
    """`AutoModel` and `custom_generate` on the checkout's folder, whose code is the installed package's."""
    tokenizer, _, drafter = shipped
    target = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    inputs = tokenizer(PROMPTS[1], return_tensors="pt")
    options = dict(do_sample=False, max_new_tokens=20)
    plain, own = target.generate(**inputs, **options), type(target)
    recipe = dict(custom_generate=str(DRAFTER), assistant_model=str(DRAFTER), trust_remote_code=True)
    for budget in ({}, {"tree_budget": 12}):
        again = target.generate(**inputs, **options, **budget, **recipe)
        assert torch.equal(again, plain) and type(target) is own
    loaded = AutoModel.from_pretrained(DRAFTER, trust_remote_code=True, dtype=torch.float32)
    assert isinstance(loaded, HyperDFlashDrafter)
    assert all(torch.equal(value, drafter.state_dict()[name]) for name, value in loaded.state_dict().items())
    loaded.bind(target)
    assert torch.equal(target.generate(**inputs, **options, assistant_model=loaded), plain)
    assert loaded.last_stats.rounds


@pytest.mark.parametrize("kind", [HyperDFlashDrafter, DeepseekV4MTPDrafter])
def test_pipelines_take_a_drafter_when_they_are_made(shipped, kind):
    tokenizer = shipped[0]
    target = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    drafter = kind.from_target(target) if kind is DeepseekV4MTPDrafter else kind.from_pretrained(DRAFTER)
    chat, options = [{"role": "user", "content": PROMPTS[1]}], dict(do_sample=False, max_new_tokens=30)
    plain = pipeline("text-generation", model=target, tokenizer=tokenizer)(chat, **options)
    drafter.bind(target)
    assisted = pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=drafter)
    assert assisted(chat, **options) == plain
    assert drafter.last_stats.rounds
    called = pipeline("text-generation", model=target, tokenizer=tokenizer)(chat, assistant_model=drafter, **options)
    assert called == plain


def test_every_mechanism_of_v4_is_present(shipped):
    config = shipped[1].config
    assert config.hc_mult == 4 and config.hc_sinkhorn_iters == 20
    assert {"sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"} == set(
        config.layer_types
    )
    assert set(config.mlp_layer_types) == {"hash_moe", "moe"}


def test_the_drafter_names_the_targets_weights(shipped):
    """Written by hand where fingerprints changed since the drafter was trained: the weights are those of then."""
    _, target, drafter = shipped
    assert drafter.config.target_fingerprint == short_fingerprint(target_fingerprint(target))


def test_size():
    assert sum(path.stat().st_size for path in MODELS.rglob("*") if path.is_file()) < 45_000_000
