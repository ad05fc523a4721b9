"""What configurations, pairs and checkpoints of drafters refuse."""

from __future__ import annotations

import json
import os
from functools import cache, partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, PreTrainedConfig

from hf_hyperdflash import (
    DeepseekV4DSparkDrafter,
    DeepseekV4MTPDrafter,
    Drafter,
    Eagle3Config,
    Eagle3Drafter,
    HyperDFlashConfig,
    HyperDFlashDrafter,
    HyperDFlashTrainer,
    PromptLookupDrafter,
    SpecBlockConfig,
    load_drafter,
    load_target,
)
from hf_hyperdflash.drafters.deepseek_v4.checkpoint import dequantize
from hf_hyperdflash.drafters.deepseek_v4.configuration import DeepseekV4DSparkConfig
from hf_hyperdflash.drafters.parts.heads import run_heads
from hf_hyperdflash.drafters.saved import SavedDrafter
from hf_hyperdflash.drafters.weights import check_draft_ids
from hf_hyperdflash.hub.formats import FORMATS, check_expressible
from hf_hyperdflash.targets.registry import target_of

from ..conftest import MODELS, prompt, tiny_config, tiny_drafter, tiny_target
from ..helpers import families
from ..helpers.deepseek_checkpoints import dspark_fields, dspark_shapes, mtp_shapes, random_tensors, write
from ..helpers.headed_drafters import headed
from ..helpers.medusa import medusa, published
from ..helpers.refusals import Refusal
from ..helpers.unrolled import unrolled

SHAPE = {"vocab_size": 64, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
ROPE = {"rope_type": "default", "rope_theta": 1e4}

FIELDS = [
    (HyperDFlashConfig, {"reducer": "mean"}, "reducer 'mean' hc_gate fc"),
    (HyperDFlashConfig, {"hidden_size": 64, "target_hidden_size": 128}, "hidden_size 64 128 'fc'"),
    (HyperDFlashConfig, {"any_streams": True}, "reducer 'hc_gate' 'stream_mean'"),
    (HyperDFlashConfig, {"target_layer_ids": []}, "target_layer_ids [] [-1]"),
    (HyperDFlashConfig, {"target_layer_ids": [2, 1]}, "target_layer_ids [2, 1] ascending"),
    (HyperDFlashConfig, {"target_layer_ids": [-1, 2]}, "target_layer_ids [-1, 2] ascending"),
    (HyperDFlashConfig, {"target_layer_ids": [1, 1]}, "target_layer_ids [1, 1] once"),
    (HyperDFlashConfig, {"target_layer_ids": [-2, -1]}, "target_layer_ids [-2, -1] 0"),
    (HyperDFlashConfig, {"target_layer_ids": "1"}, "target_layer_ids '1' list"),
    (HyperDFlashConfig, {"target_layer_ids": [True]}, "target_layer_ids [True] numbers"),
    (HyperDFlashConfig, {"hidden_size": "64"}, "hidden_size '64' integer"),
    (HyperDFlashConfig, {"hidden_size": True}, "hidden_size True integer"),
    (HyperDFlashConfig, {"hidden_size": 0}, "hidden_size 0 1"),
    (HyperDFlashConfig, {"block_size": None}, "block_size None integer"),
    (HyperDFlashConfig, {"block_size": 1}, "block_size 1 2 anchor"),
    (HyperDFlashConfig, {"block_size": 4097}, "block_size 4097 4096"),
    (HyperDFlashConfig, {"num_attention_heads": 6, "num_key_value_heads": 4}, "num_attention_heads 6 multiple 4"),
    (HyperDFlashConfig, {"head_dim": 7}, "head_dim 7 even"),
    (HyperDFlashConfig, {"draft_vocab_size": 129281}, "draft_vocab_size 129281 129280"),
    (HyperDFlashConfig, {"hidden_act": "silo"}, "hidden_act 'silo' silu"),
    (HyperDFlashConfig, {"path_norm": "no"}, "path_norm 'no' True False"),
    (HyperDFlashConfig, {"hc_eps": "1e-6"}, "hc_eps '1e-6' number"),
    (HyperDFlashConfig, {"hc_eps": -1e-6}, "hc_eps -1e-06 0"),
    (HyperDFlashConfig, {"rms_norm_eps": float("inf")}, "rms_norm_eps inf finite"),
    (HyperDFlashConfig, {"rope_parameters": "default"}, "rope_parameters 'default' dictionary"),
    (HyperDFlashConfig, {"rope_parameters": {**ROPE, "rope_type": "spiral"}}, "rope_type 'spiral' default yarn"),
    (HyperDFlashConfig, {"rope_parameters": {**ROPE, "rope_theta": "1e4"}}, "rope_theta '1e4' positive"),
    (HyperDFlashConfig, {"rope_parameters": {**ROPE, "rope_theta": 0}}, "rope_theta 0 positive"),
    *(
        (HyperDFlashConfig, {"head_dim": 16, "rope_parameters": {**ROPE, "partial_rotary_factor": factor}},
         f"partial_rotary_factor {factor!r} 16")
        for factor in (0, 1.5, "0.5", 0.2, 0.1)
    ),
    (HyperDFlashConfig, {"rope_parameters": {**ROPE, "rope_type": "linear"}}, "rope_parameters 'linear' 128"),
    (HyperDFlashConfig, {"rope_parameters": {**ROPE, "rope_type": "longrope", "factor": 2.0}}, "'longrope' 128"),
    (HyperDFlashConfig, {"mask_token_id": 129280}, "mask_token_id 129280 vocabulary None"),
    (HyperDFlashConfig, {"mask_token_id": -1}, "mask_token_id -1 vocabulary"),
    (HyperDFlashConfig, {"sliding_window": 0}, "sliding_window 0 1 None"),
    (HyperDFlashConfig, {"sliding_window": "8"}, "sliding_window '8' integer None"),
    (HyperDFlashConfig, {"layer_types": ["full_attention"]}, "layer_types ['full_attention'] 5"),
    (HyperDFlashConfig, {"layer_types": ["wide_attention"] * 5}, "layer_types wide_attention sliding_attention"),
    (HyperDFlashConfig, {"layer_types": ["sliding_attention"] * 5}, "sliding_window None layer_types"),
    (HyperDFlashConfig, {"causal_layers": "full"}, "causal_layers 'full' 'none' 'sliding' 'all'"),
    (HyperDFlashConfig, {"window_from": "block"}, "window_from 'block' 'anchor' 'slot'"),
    (HyperDFlashConfig, {"sequential_head": "makrov"}, "sequential_head 'makrov' 'none' 'markov' 'state'"),
    (HyperDFlashConfig, {"head_rank": 0}, "head_rank 0 1 16384"),
    (HyperDFlashConfig, {"head_candidates": -1}, "head_candidates -1 0 whole"),
    (HyperDFlashConfig, {"head_candidates": 129281}, "head_candidates 129281 129280"),
    (HyperDFlashConfig, {"head_candidates": 31, "sequential_head": "state", "draft_vocab_size": 30}, "31 30 tokens"),
    (HyperDFlashConfig, {"sequential_head": "gru", "head_start": 6}, "head_start 6 correct"),
    (HyperDFlashConfig, {"head_start": -1}, "head_start -1 0 256"),
    (HyperDFlashConfig, {"conv_kernel_size": 1}, "conv_kernel_size 1 2 7"),
    (HyperDFlashConfig, {"conv_kernel_size": 8}, "conv_kernel_size 8 2 7"),
    (HyperDFlashConfig, {"conv_kernel_size": 2, "conv_group_size": 7}, "conv_group_size 7 divisor 4096"),
    (HyperDFlashConfig, {"confidence_temperatures": [1.0] * 6, "sample_from_anchor": True}, "temperatures 7"),
    *(
        (HyperDFlashConfig, {"confidence_temperatures": [1.0] * 5 + [last]}, f"confidence_temperatures {last!r} 6")
        for last in (0.0, float("inf"), "2")
    ),
    (HyperDFlashConfig, {"blok_size": 7}, "blok_size HyperDFlashConfig block_size"),
    (SpecBlockConfig, {"branching": [1, 2]}, "branching [1, 2] 4"),
    (SpecBlockConfig, {"branching": [1, 2, 3, 65]}, "branching 65 64"),
    (SpecBlockConfig, {"branching": [0, 0, 0, 0]}, "branching 0 above"),
    (SpecBlockConfig, {"rank_head": False, "branching": [2, 4, 10, 0]}, "branching 1"),
    (SpecBlockConfig, {"vocab_size": 12}, "12 20 rank_head=False"),
    (SpecBlockConfig, {"block_size": 0}, "block_size 0 1"),
    (SpecBlockConfig, {"target_hidden_size": 32}, "hidden_size 64 32 own_embedding"),
    (Eagle3Config, {"block_size": 2}, "block_size 2 1"),
    (Eagle3Config, {"fc_norm": True, "norm_before_fc": True}, "norm_before_fc fc_norm one"),
    (Eagle3Config, {"fc_norm": True, "reducer": "hybrid"}, "reducer 'hybrid' 'fc' 'stream_mean'"),
    (Eagle3Config, {"shift": "yes"}, "shift Eagle3Config"),
    (Eagle3Config, {"zzzzzz": 3}, "zzzzzz field"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "fields", "words"), FIELDS, ids=str)
def test_a_configuration_that_no_drafter_can_have(kind, fields, words):
    shape = {} if kind is HyperDFlashConfig else SHAPE
    Refusal(lambda: kind(**{**shape, **fields}), tuple(words.split())).check()


@cache
def v4(**fields):
    return tiny_target(**fields)


@cache
def v4_drafter():
    return tiny_drafter(v4())


@cache
def qwen3():
    return families.qwen3().eval()


def with_rows(rows):
    target = families.qwen3().eval()
    target.resize_token_embeddings(rows)
    return target


def own_mask():
    target = families.qwen3().eval()
    target.config.pad_token_id = None  # so that it has a mask vector
    return HyperDFlashDrafter.from_target(target, target_layer_ids=[0])


def set_drafts(drafter, number):
    drafter.num_draft_tokens = number


def eagle3(**fields):
    return Eagle3Drafter.from_target(qwen3(), **fields)


def dspark():
    config = DeepseekV4DSparkConfig.from_target_config(tiny_config(**dspark_fields()))
    return DeepseekV4DSparkDrafter(config)


def mtp():
    return DeepseekV4MTPDrafter(v4().config)


def specblock():
    return unrolled("specblock", qwen3(), block_size=3, max_blocks=2)


def others_of(drafter, ids):
    drafter.draft_others(target_of(qwen3()), torch.tensor(ids))


def narrow():
    fields = dict(target_hidden_size=64, vocab_size=64, target_layer_ids=[0, -1], target_hc_mult=1)
    return Eagle3Drafter(Eagle3Config(hidden_size=32, own_embedding=True, draft_vocab_size=20, **fields))


def llama():
    shape = dict(intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, hidden_size=32, vocab_size=64)
    return families.LlamaForCausalLM(LlamaConfig(**shape))


CALLS = {
    # Making one.
    "a field's name": (lambda: tiny_drafter(v4(), sliding_windw=8), "sliding_windw sliding_window"),
    "a size in words": (lambda: tiny_drafter(v4(), hidden_size="a"), "hidden_size 'a' integer"),
    "drafts in words": (lambda: tiny_drafter(v4(), num_draft_tokens="6"), "num_draft_tokens '6' 1"),
    "no drafts": (lambda: tiny_drafter(v4(), num_draft_tokens=0), "num_draft_tokens 0 1"),
    "a dtype of no name": (lambda: tiny_drafter(v4(), dtype="float7"), "dtype 'float7' bfloat16"),
    "a dtype of integers": (lambda: tiny_drafter(v4(), dtype="int8"), "dtype 'int8' bfloat16"),
    "a module for a dtype": (lambda: tiny_drafter(v4(), dtype="nn"), "dtype 'nn' bfloat16"),
    "a number for a dtype": (lambda: tiny_drafter(v4(), dtype=16), "dtype 16 bfloat16"),
    "no tokenizer": (lambda: tiny_drafter(v4(), tokenizer=3, mask_token_id=None), "tokenizer 3 AutoTokenizer"),
    "layers not there": (lambda: tiny_drafter(v4(), reducer="fc", target_layer_ids=[3, -1]), "[3, -1] 0 2"),
    "a gate of other width": (lambda: tiny_drafter(v4(), hidden_size=64, reducer="hc_gate"), "hc_gate 64 32 fc"),
    "a drafter for a target": (lambda: HyperDFlashDrafter.from_target(v4_drafter()), "HyperDFlashDrafter drafter"),
    "a width of its own embedding": (lambda: eagle3(hidden_size=32, draft_vocab_size=20), "hidden_size 32 64"),
    "a name for a target": (lambda: PromptLookupDrafter("org/name"), "target"),
    "n-grams of nothing": (lambda: PromptLookupDrafter(v4(), 3, 0), "max_matching_ngram_size 0 integer 1"),
    "n-grams in words": (lambda: PromptLookupDrafter(v4(), 3, "2"), "max_matching_ngram_size '2' integer"),
    # Heads.
    "an unknown head": (lambda: v4_drafter().with_heads(sequential_head="bigram"), "sequential_head 'bigram' markov"),
    "no field of a head": (lambda: v4_drafter().with_heads(num_hidden_layers=3), "num_hidden_layers sequential_head"),
    "a rank alone": (lambda: v4_drafter().with_heads(head_rank=3), "head_rank 3 sequential_head"),
    "what a confidence reads": (lambda: v4_drafter().with_heads(confidence_reads_token=False), "confidence_head"),
    "a second head": (
        lambda: headed(v4(), "markov").with_heads(sequential_head="state"), "sequential_head 'state' 'markov'"
    ),
    "a second confidence": (
        lambda: headed(v4(), "markov", confidence_head=True).with_heads(confidence_head=True), "confidence_head True"
    ),
    "heads of a DSpark drafter": (lambda: dspark().with_heads(sequential_head="state"), "sequential_head none"),
    "a head without embeddings": (
        lambda: run_heads(
            torch.randn(3, 64), torch.zeros(3, dtype=torch.long), None, headed(v4(), "state").head, None
        ),
        "embeds",
    ),
    # Numbers of drafts.
    **{
        f"{name} drafts {number!r}": (lambda make=make, number=number: set_drafts(make(), number), words)
        for name, make, numbers, words in (
            ("a block", v4_drafter, (0, -1, 7, True, "3"), "whole 1 6"),
            ("any number", mtp, (0, -1, 2.0, True, "2"), "whole 1"),
            ("a lookup", lambda: PromptLookupDrafter(v4()), (0, 2.5), "whole 1"),
            ("a DSpark block", dspark, (6,), "6 1 5"),
            ("Medusa", medusa, (0, 4), "whole 1 3"),
            ("blocks", specblock, (7,), "7 1 6 max_blocks"),
        )
        for number in numbers
    },
    # Drafting.
    "no context": (lambda: v4_drafter()(torch.randn(1, 7, 32), torch.arange(7)[None]), "context residual"),
    "a target that is not bound": (lambda: v4_drafter().generate(), "bind"),
    # Pairs.
    "fewer rows": (lambda: tiny_drafter(qwen3()).bind(with_rows(63)), "vocab_size 64 63"),
    "fewer rows for Medusa": (lambda: medusa("org/its-target").bind(with_rows(63)), "vocab_size 64 63 org/its-target"),
    "fewer rows for MTP": (lambda: mtp().bind(v4(vocab_size=48)), "vocab_size 64 48"),
    "fewer rows for DSpark": (lambda: dspark().bind(v4(vocab_size=48)), "vocab_size 64 48 DeepseekV4DSparkDrafter"),
    "another width": (lambda: v4_drafter().bind(v4(hidden_size=64)), "hidden_size 32 64"),
    "another width for MTP": (lambda: mtp().bind(v4(hidden_size=64)), "hidden_size 32 64"),
    "another width for Medusa": (lambda: medusa(width=32).bind(qwen3()), "hidden_size 32 64"),
    "other streams": (lambda: mtp().bind(v4(hc_mult=2)), "hc_mult 4 2"),
    "other streams for DSpark": (lambda: dspark().bind(v4(hc_mult=2)), "hc_mult 4 2"),
    "one stream": (lambda: mtp().bind(llama()), "hc_mult 4 1"),
    "too few layers": (lambda: dspark().bind(tiny_target(layer_types=["sliding_attention"])), "[0, 1, -1] 0"),
    "a drafter bound to a drafter": (lambda: v4_drafter().bind(v4_drafter()), "HyperDFlashDrafter drafter"),
    "a default that does not fit": (lambda: v4_drafter().bind(v4(hidden_size=64), as_default=True), "hidden_size 32"),
    # What cannot be trained.
    "training Medusa": (lambda: HyperDFlashTrainer(medusa(), qwen3()), "MedusaDrafter HyperDFlashDrafter"),
    "teaching Medusa": (lambda: medusa().adapt(qwen3()), "MedusaDrafter learn"),
    "training for more rows": (lambda: eagle3().check_trainable(target_of(with_rows(72))), "vocab_size 64 72"),
    "candidates of few tokens": (
        lambda: headed(qwen3(), "state", draft_vocab_size=30, head_candidates=5).check_trainable(target_of(qwen3())),
        "draft_vocab_size 30 head_candidates 5",
    ),
    # Layouts.
    **{
        f"a mask vector in {name}": (lambda name=name: check_expressible(own_mask().config, name, True), "mask vector")
        for name in FORMATS
    },
    # Vocabularies.
    **{
        f"draft ids {ids}": (lambda ids=ids: check_draft_ids(ids, 2, 64, "it"), "2 integers 0 63")
        for ids in map(torch.tensor, ([0.0, 1.0], [0, 64], [-1, 2], [3, 3], [1]))
    },
    "one token twice": (
        lambda: eagle3(draft_vocab_size=20).draft_only(target_of(qwen3()), torch.tensor([5] * 20)), "20 integers 63"
    ),
    "others twice": (lambda: others_of(eagle3(draft_vocab_size=20), [5, 5]), "2 integers 63"),
    "others of all": (lambda: others_of(eagle3(), [5, 6]), "Eagle3Drafter draft_vocab_size"),
    "others of other width": (lambda: others_of(narrow(), [5, 6]), "32 64 draft_vocab_size"),
    "others of a table": (
        lambda: others_of(headed(qwen3(), "markov", draft_vocab_size=20), [5, 6]), "table draft_vocab_size"
    ),
    # Checkpoints.
    "a target for MTP": (lambda: DeepseekV4MTPDrafter.from_pretrained(V4), "DeepseekV4ForCausalLM from_target"),
    "a target for a block": (lambda: HyperDFlashDrafter.from_pretrained(V4), "target deepseek_v4 hyperdflash"),
    "a target that was made": (lambda: DeepseekV4MTPDrafter.from_target(v4()), "checkpoint _name_or_path"),
    "None": (lambda: DeepseekV4MTPDrafter.from_target(None), "target None folder Hub"),
    "another grid of scales": (
        lambda: dequantize(torch.zeros(128, 300).to(torch.float8_e4m3fn), torch.ones(2, 2), (128, 128)),
        "[2, 2] [1, 3]",
    ),
    "scales without numbers": (
        lambda: dequantize(torch.zeros(4, 4), torch.ones(1, 1), (128, 128), "norm"), "norm [1, 1] none"
    ),
}  # fmt: skip
V4 = MODELS / "tiny-deepseek-v4"


@pytest.mark.parametrize("case", CALLS)
def test_a_call_that_cannot_be_meant(case):
    call, words = CALLS[case]
    Refusal(call, tuple(words.split())).check()


def test_a_drafter_without_a_draft_says_so():
    target, drafter = tiny_target(), Drafter()
    drafter.config = target.config
    drafter.bind(target)
    call = partial(target.generate, prompt(5), assistant_model=drafter, max_new_tokens=5)
    Refusal(call, ("Drafter", "`draft`"), NotImplementedError).check()


# Folders


def hyperdflash():
    return tiny_drafter(tiny_target())


def saved(make):
    """Writes a drafter with other tensors, and gives what loads it."""

    def written(folder, changed):
        drafter = make()
        drafter.save_pretrained(folder, with_code=False)
        tensors = changed(load_file(folder / "model.safetensors"))
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return partial(type(drafter).from_pretrained, folder, dtype=torch.bfloat16, device_map="cpu")

    return written


def checkpoint(kind, shapes):
    def written(folder, changed):
        config = tiny_config(**dspark_fields())
        return partial(kind.from_target, write(folder, config, changed(random_tensors(shapes(config)))))

    return written


def heads(folder, changed):
    return partial(load_drafter, published(folder, changed(medusa().state_dict())))


def without(*parts):
    return lambda t: {name: tensor for name, tensor in t.items() if not any(part in name for part in parts)}


def having(name, tensor):
    return lambda t: {**t, name: tensor}


BROKEN = torch.ones(32).index_fill(0, torch.tensor([3]), torch.nan)
SAVED = {"block": saved(hyperdflash), "saved MTP": saved(mtp), "saved DSpark": saved(dspark)}
FILES = {
    **SAVED, "Medusa": heads, "DSpark": checkpoint(DeepseekV4DSparkDrafter, dspark_shapes),
    "MTP": checkpoint(DeepseekV4MTPDrafter, mtp_shapes),
}  # fmt: skip
TENSORS = [
    *(
        (name, changed, words)
        for name in SAVED
        for changed, words in (
            (without("norm.weight"), "missing norm.weight"),
            (having("more.weight", torch.ones(2)), "1 unexpected more.weight"),
            (having("norm.weight", torch.ones(7)), "shape norm.weight [7] [32]"),
            (having("norm.weight", BROKEN), "finite norm.weight"),
            (having("norm.weight", BROKEN.nan_to_num(-torch.inf)), "finite norm.weight"),
        )
    ),
    ("DSpark", without("mtp"), "mtp.* original"),
    ("DSpark", without("markov_w2"), "1 missing mtp.2.markov_head.markov_w2.weight"),
    ("DSpark", without("mtp.1."), "missing unexpected mtp.2."),
    ("DSpark", without("mtp.0.main_proj"), "DeepseekV4DSparkDrafter DeepseekV4MTPDrafter.from_target"),
    ("DSpark", having("mtp.1.norm.weight", torch.ones(32)), "1 unexpected mtp.1.norm.weight"),
    ("DSpark", having("mtp.0.main_proj.weight", torch.ones(32, 32)), "main_proj [32, 32] [32, 96]"),
    ("DSpark", having("mtp.2.norm.weight", BROKEN), "finite mtp.2.norm.weight"),
    ("MTP", without("mtp"), "mtp.* original"),
    ("MTP", without("w1.weight"), "5 missing mtp.0.ffn. ..."),
    ("MTP", having("mtp.0.hnorm.scale", torch.ones(1)), "mtp.0.hnorm.weight [1] none"),
    ("MTP", having("mtp.0.nothing.scale", torch.ones(1)), "1 unexpected mtp.0.nothing.scale"),
    ("MTP", having("mtp.0.norm.weight", torch.ones(31)), "norm.weight [31] [32]"),
    ("MTP", having("mtp.0.e_proj.weight", torch.zeros(32, 32).to(torch.float8_e4m3fn)), "e_proj scale [1, 1]"),
    ("MTP", having("mtp.0.main_proj.weight", torch.zeros(2)), "DeepseekV4MTPDrafter DeepseekV4DSparkDrafter.from_"),
    ("Medusa", without("1.0.linear.bias"), "1 missing (1.0.linear.bias)"),
    ("Medusa", having("1.1.weight", torch.zeros(63, 64)), "shape 1.1.weight"),
    ("Medusa", having("0.1.weight", torch.zeros(64)), "shape"),
    ("Medusa", having("fc.weight", torch.zeros(2)), "1 unexpected (fc.weight)"),
    ("Medusa", having("2.1.weight", torch.full((64, 64), torch.nan)), "finite 2.1.weight"),
    ("Medusa", without("."), "model.safetensors"),
]


@pytest.mark.parametrize(("name", "changed", "words"), TENSORS, ids=lambda value: str(value) if value in FILES else "")
def test_tensors_that_are_not_the_configurations(name, changed, words, tmp_path):
    words = [*words.split(), str(tmp_path)] if name in SAVED else words.split()
    Refusal(
        FILES[name](tmp_path, changed), tuple(words), OSError if words == ["model.safetensors"] else ValueError
    ).check()


def edit_config(folder, **fields):
    known = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(known | fields))


class Payload:
    """What a pickle runs when it is read."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


def pickled(drafter, folder):
    drafter.save_pretrained(folder, with_code=False)
    os.remove(folder / "model.safetensors")
    torch.save({"norm.weight": Payload(folder / "ran")}, folder / "pytorch_model.bin")


@pytest.mark.parametrize("make", [hyperdflash, mtp, dspark], ids=lambda make: make.__name__)
def test_a_folder_that_is_no_drafter(make, tmp_path):
    drafter = make()
    load = type(drafter).from_pretrained
    for name in (tmp_path / "none", "./none", "a/b/c", "~/none"):
        Refusal(partial(load, name), ("folder", str(name).removeprefix("./"), "drafter"), OSError).check()
    (tmp_path / "file").write_text("kept")
    Refusal(partial(load, tmp_path / "file"), ("file", "folder"), OSError).check()
    Refusal(partial(drafter.save_pretrained, tmp_path / "file"), ("file", "folder"), OSError).check()
    assert (tmp_path / "file").read_text() == "kept"
    pickled(drafter, tmp_path / "pickled")
    Refusal(partial(load, tmp_path / "pickled"), ("model.safetensors", "pickle"), OSError).check()
    call = partial(load, tmp_path / "pickled", use_safetensors=False, weights_only=False)
    Refusal(call, ("use_safetensors", "False", "True")).check()
    assert not (tmp_path / "pickled" / "ran").exists()
    drafter.save_pretrained(tmp_path / "saved", with_code=False)
    Refusal(partial(load_target, str(tmp_path / "saved")), ("drafter", "target")).check()
    edit_config(tmp_path / "saved", num_attention_heads="four")
    Refusal(partial(load, tmp_path / "saved"), ("num_attention_heads",), (ValueError, OSError)).check()
    (tmp_path / "saved" / "config.json").write_text("{")
    Refusal(partial(load, tmp_path / "saved"), ("config.json",), OSError).check()


@pytest.mark.parametrize(
    "fields", [{"confidence_temperatures": [1.0, 0.0, 1.0, 1.0, 1.0]}, {"target_layer_ids": [-1, 0]}]
)
def test_a_configuration_is_looked_at_when_it_is_loaded(fields, tmp_path):
    dspark().save_pretrained(tmp_path, with_code=False)
    edit_config(tmp_path, **fields)
    Refusal(partial(DeepseekV4DSparkDrafter.from_pretrained, tmp_path), tuple(fields)).check()
    HyperDFlashConfig().save_pretrained(tmp_path)
    call = partial(HyperDFlashConfig.from_pretrained, tmp_path, sliding_window=0)
    Refusal(call, ("sliding_window", "0")).check()


# Checkpoints of DeepSeek-V4's

V4_FIELDS = [
    ({"block_size": 1}, "block_size 1 2"),
    ({"markov_rank": 0}, "head_rank 0 1"),
    ({"noise_token_id": 64}, "mask_token_id 64"),
    ({"target_layer_ids": [1, 0]}, "target_layer_ids [1, 0] ascending"),
]


@pytest.mark.parametrize(("fields", "words"), V4_FIELDS, ids=str)
def test_a_checkpoint_with_other_fields(fields, words, tmp_path):
    config = tiny_config(**dspark_fields())
    tensors = random_tensors(dspark_shapes(config))
    for name, value in fields.items():
        setattr(config, f"dspark_{name}", value)
    write(tmp_path, config, tensors)
    Refusal(partial(DeepseekV4DSparkDrafter.from_target, tmp_path), tuple(words.split())).check()


def test_a_checkpoint_of_another_kind(tmp_path):
    config = tiny_config(**dspark_fields())
    config.save_pretrained(tmp_path)
    Refusal(partial(DeepseekV4MTPDrafter.from_target, tmp_path), ("model.safetensors", "checkpoint")).check()
    # Before a shard is fetched.
    index = {name: "model-00001-of-00001.safetensors" for name in mtp_shapes(config)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    Refusal(partial(DeepseekV4DSparkDrafter.from_target, tmp_path), ("DeepseekV4DSparkDrafter",)).check()
    Refusal(partial(DeepseekV4MTPDrafter.from_target, tmp_path), ("model-00001-of-00001.safetensors",)).check()
    LlamaConfig().save_pretrained(tmp_path / "llama")
    Refusal(partial(DeepseekV4MTPDrafter.from_target, tmp_path / "llama"), ("llama", "deepseek_v4")).check()
    mtp().save_pretrained(tmp_path / "drafter", with_code=False)
    Refusal(partial(DeepseekV4MTPDrafter.from_target, tmp_path / "drafter"), ("drafter", "target")).check()
    target = tiny_target()
    target.config._name_or_path = str(tmp_path)
    Refusal(partial(DeepseekV4DSparkDrafter.from_target, target), ("DeepseekV4DSparkDrafter",)).check()
    write(tmp_path, config, random_tensors(dspark_shapes(config)))
    os.remove(tmp_path / "model.safetensors.index.json")
    Refusal(partial(DeepseekV4DSparkDrafter.from_target, target), ("dspark_block_size",)).check()


def test_heads_in_a_pickle_run_no_code(tmp_path):
    file, load = tmp_path / "medusa_lm_head.pt", partial(load_drafter, tmp_path)
    for content, word in (({"0.1.weight": Payload(tmp_path / "ran")}, "tensors"), ([1], "tensors")):
        published(tmp_path, content, file.name)
        Refusal(load, (word,), OSError).check()
        assert not (tmp_path / "ran").exists()
    file.write_bytes(b"PK\x03\x04 cut off")
    Refusal(load, ("medusa_lm_head.pt", "damaged"), OSError).check()
    os.remove(file)
    Refusal(load, ("weights",), OSError).check()
    Refusal(partial(load_target, str(published(tmp_path, medusa().state_dict()))), ("layout", "target")).check()


# Code


class Elsewhere(SavedDrafter):
    """Of a file that imports from above its folder."""

    config_class = PreTrainedConfig

    def __init__(self, config):
        super().__init__(config)
        self.weight = torch.nn.Parameter(torch.zeros(2))
        self.post_init()


def test_code_that_cannot_be_saved(tmp_path):
    nowhere = type("Nowhere", (SavedDrafter,), {"config_class": PreTrainedConfig})
    for kind, words in ((Elsewhere, ("test_drafters.py", "beside")), (nowhere, ("Nowhere", "file of its own"))):
        Refusal(partial(kind(PreTrainedConfig()).save_pretrained, tmp_path), words).check()
    assert not list(tmp_path.iterdir())
    Elsewhere(PreTrainedConfig()).save_pretrained(tmp_path, with_code=False)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "model.safetensors"}
