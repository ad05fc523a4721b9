"""The pair that ships with the repository, and the README's first command on it."""

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, pipeline
from transformers.dynamic_module_utils import check_imports

from hf_hyperdflash import DeepseekV4MTPDrafter, HyperDFlashDrafter
from hf_hyperdflash.training.features.fingerprint import short_fingerprint, target_fingerprint

from .conftest import MODELS, mostly_nightly
from .helpers.processes import python

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


def test_mtp_head_is_in_the_checkpoint_and_dtypes_are_v4s():
    with safe_open(TARGET / "model.safetensors", "pt") as file:
        names = set(file.keys())
        dtypes = {name: file.get_slice(name).get_dtype() for name in names}
    mtp = {name for name in names if name.startswith("mtp.0.")}
    for part in ("enorm.weight", "hnorm.weight", "norm.weight", "e_proj.weight", "h_proj.weight", "hc_head_fn",
                 "hc_head_base", "hc_head_scale", "attn.wq_a.weight", "attn.attn_sink", "ffn.gate.bias",
                 "ffn.experts.3.w2.weight", "hc_attn_fn", "hc_ffn_scale"):  # fmt: skip
        assert f"mtp.0.{part}" in mtp
    assert {dtypes[name] for name in names if "hc_" in name} == {"F32"}
    assert dtypes["mtp.0.e_proj.weight"] == "BF16"


def test_the_gate_came_from_the_target(shipped):
    _, target, drafter = shipped
    assert drafter.config.reducer == "hybrid" and drafter.config.target_layer_ids == [1, 3, -1]
    cosine = torch.cosine_similarity(drafter.hc_gate.hc_fn.flatten(), target.model.hc_head.hc_fn.flatten(), dim=0)
    # Training moves it far: 0.07 are left. Four standard deviations of the cosine of two random gates.
    assert cosine > 4 / drafter.hc_gate.hc_fn.numel() ** 0.5


def test_the_drafter_names_the_targets_weights(shipped):
    """Written by hand where fingerprints changed since the drafter was trained: the weights are those of then."""
    _, target, drafter = shipped
    assert drafter.config.target_fingerprint == short_fingerprint(target_fingerprint(target))


def test_size():
    assert sum(path.stat().st_size for path in MODELS.rglob("*") if path.is_file()) < 45_000_000


@pytest.mark.nightly  # a script in a process of its own
def test_quickstart(tmp_path):
    script = Path(__file__).parent.parent / "examples" / "quickstart.py"
    picture = tmp_path / "acceptance.png"
    asked = ["--prompt", PROMPTS[0], "--max-new-tokens", "40", "--picture", picture]
    result = python(script, *asked, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "speedup" in result.stdout and "yes" in result.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_readmes_first_snippet(capsys, monkeypatch):
    monkeypatch.chdir(MODELS.parent.parent)
    exec(re.findall(r"```python\n(.*?)```", Path("README.md").read_text(), re.DOTALL)[0], {})
    text, _, tau = capsys.readouterr().out.strip().removesuffix(" tokens a round").rpartition(" ")
    assert "The number of marbles is 12 + 24 = 24 marbles." in text and float(tau) > 2  # docs/index.md's
