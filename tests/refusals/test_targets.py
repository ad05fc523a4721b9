"""What a target, its cache, and whoever binds, loads or reads it refuse."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, PrefixTuningConfig, PromptEncoderConfig, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
)
from transformers.cache_utils import Cache, DynamicSlidingWindowLayer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4CSACache, DeepseekV4HCACache

from hf_hyperdflash import PromptLookupDrafter, bind, capture_residual, load_target
from hf_hyperdflash.targets.caches.deepseek_v4 import (
    RewindableCSACacheLayer,
    RewindableHCACacheLayer,
    RewindableSlidingCacheLayer,
    make_rewindable,
)
from hf_hyperdflash.targets.caches.linear import RewindableLinearLayer, make_linear_rewindable
from hf_hyperdflash.targets.caches.name import CACHE
from hf_hyperdflash.targets.mask_token import find_mask_token
from hf_hyperdflash.targets.registry import is_bound, target_of
from hf_hyperdflash.training.losses.objective import BlockObjective

from ..conftest import prompt, tiny_config, tiny_drafter, tiny_target
from ..helpers.families import (
    FULL,
    LINEAR,
    REWINDABLE_QWEN4,
    gemma3n,
    gemma4_e,
    glm5_next,
    made,
    qwen3,
    qwen3_next,
    qwen4_exp,
)
from ..helpers.refusals import Refusal
from ..helpers.training import rows, trainer_for
from ..helpers.tree_drafters import RandomTrees

GREEDY = dict(do_sample=False, max_new_tokens=4)
INKLING = dict(
    intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=3, num_key_value_heads=2, head_dim=16,
    n_routed_experts=4, num_experts_per_tok=2, sliding_window_size=8, sliding_window=8, unpadded_vocab_size=64,
    layer_types=["hybrid_sliding", "hybrid", "hybrid_sliding"],
)  # fmt: skip
MINIMAX = dict(
    intermediate_size=48, num_hidden_layers=3, num_key_value_heads=2, head_dim=16, num_local_experts=4, block_size=8,
    layer_types=[LINEAR, FULL, LINEAR],
)  # fmt: skip


@cache
def drafter():
    return tiny_drafter(tiny_target())


def masked_with(token: int):
    made = tiny_drafter(tiny_target())
    made.config.mask_token_id = token  # as an edited config could; a fresh one is refused when it is made
    return made


def of_type(model_type: str, fields: dict) -> PreTrainedModel:
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {model_type}")
    return made(model_type, **fields)


def configured(family, **fields) -> PreTrainedModel:
    target = family()
    for name, value in fields.items():
        setattr(target.config, name, value)
    return target


def gpt2() -> PreTrainedModel:
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2))


def reads(layers: tuple[int, ...]):
    return lambda target: RandomTrees(target, [], target_layer_ids=layers).bind(target)


# The target, what is done with it, and the words.
UNBINDABLE = {
    "an architecture without layers": (gpt2, bind, ("gpt2", "DeepSeek-V4", "docs/extending/family.md")),
    "an assistant of such a target": (
        gpt2, lambda target: target.generate(prompt(5), assistant_model=drafter(), **GREEDY), ("drafter.bind(target)",)
    ),
    "fewer tokens": (lambda: tiny_target(vocab_size=60), lambda target: drafter().bind(target), ("64", "60")),
    "wider states": (lambda: tiny_target(hidden_size=64), lambda target: drafter().bind(target), ("32", "64")),
    "fewer streams": (lambda: tiny_target(hc_mult=2), lambda target: drafter().bind(target), ("4", "2")),
    "a mask token that is none": (tiny_target, lambda target: masked_with(64).bind(target), ("mask token 64",)),
    "a wrapper of PEFT": (
        tiny_target,
        lambda target: drafter().bind(get_peft_model(target, LoraConfig(target_modules=["o_b_proj"]))),
        ("get_base_model()",),
    ),
    "a compiled model": (
        tiny_target, lambda target: drafter().bind(torch.compile(target, backend="eager")), ("_orig_mod",)
    ),
    "a parallel model": (tiny_target, lambda target: drafter().bind(torch.nn.DataParallel(target)), ("`module`",)),
    "a pipeline": (tiny_target, lambda target: drafter().bind(SimpleNamespace(model=target)), ("`model`",)),
    "a name": (tiny_target, lambda _: bind("org/name"), ("'org/name'", "load_target")),
    "nothing": (tiny_target, lambda _: drafter().bind(None), ("NoneType", "load_target")),
    "a class": (tiny_target, lambda target: bind(type(target)), ("class", "load_target")),
    "a drafter": (tiny_target, lambda _: bind(drafter()), ("HyperDFlashDrafter", "drafts for")),
    "layers that run twice": (lambda: configured(qwen3, n_recurrent_loops=2), bind, ("2 times",)),  # as Dory's do
    "states of an unknown kind": (
        lambda: configured(qwen3_next, layer_types=["hybrid", FULL, LINEAR, FULL]), bind, ("(hybrid)", "rewound")
    ),
    "Inkling's states": (
        lambda: of_type("inkling_text", INKLING), bind, ("(hybrid, hybrid_sliding)", "rewound", "taken back")
    ),
    "Inkling 2's states": (
        lambda: of_type("inkling2_text", INKLING),
        lambda target: PromptLookupDrafter(target).bind(target),
        ("(hybrid, hybrid_sliding)", "rewound"),
    ),
    "a cache that the model makes itself": (
        lambda: of_type("minimax", MINIMAX), bind, ("a cache of its own", "rewound", "taken back")
    ),
    "layers of several streams": (gemma3n, reads((0,)), ("[0]", "gemma3n_text", "4 streams")),
    "layers that no prompt runs": (gemma4_e, reads((-1,)), ("[-1]", "PromptLookupDrafter", "0 to 1")),
    "some of them": (
        gemma4_e, lambda target: tiny_drafter(target, target_layer_ids=[0, 2]), ("[0, 2]", "target_layer_ids")
    ),
    "nothing to fuse": (qwen3, lambda target: bind(target, fuse=True), ("`fuse`", "hyper-connections")),
}  # fmt: skip
if not REWINDABLE_QWEN4:
    UNBINDABLE["an indexer's positions"] = (qwen4_exp, bind, ("qwen_sparse_attention", "rewound"))


@pytest.mark.parametrize("name", UNBINDABLE)
def test_a_target_is_refused_in_one_line_and_stays_as_it_was(name):
    made, call, words = UNBINDABLE[name]
    target = made()
    own = type(target)
    Refusal(call, words).check(target)
    assert type(target) is own and not is_bound(target)


def read_layers(ids: list[int]) -> None:
    with capture_residual(tiny_target(), ids):
        pass


def assisted_by_linear_attention(folder: Path) -> None:
    target, assistant = bind(qwen3_next().eval()), bind(qwen3_next().eval())
    target.generate(prompt(5), assistant_model=assistant, **GREEDY)


def with_images(folder: Path) -> None:
    target = glm5_next().eval()
    drafter = tiny_drafter(target)
    drafter.bind(target)
    target.generate(
        prompt(5), assistant_model=drafter, pixel_values=torch.zeros(4, 1176), **GREEDY,
        image_grid_thw=torch.tensor([[1, 2, 2]]), mm_token_type_ids=torch.zeros(1, 5, dtype=torch.long),
    )  # fmt: skip


def with_virtual_tokens(kind: type, where: str, folder: Path) -> None:
    target = configured(qwen3, pad_token_id=0).eval()
    own = tiny_drafter(target)
    wrapped = get_peft_model(target, kind(task_type="CAUSAL_LM", num_virtual_tokens=3))
    if where == "bound":
        own.bind(wrapped)
    elif where == "saved":
        wrapped.save_pretrained(folder)
        load_target(folder)
    own.bind(wrapped.get_base_model())
    expected = target.generate(prompt(5), **GREEDY)  # as it is without the wrapper
    assert torch.equal(target.generate(prompt(5), assistant_model=own, **GREEDY), expected)
    wrapped.generate(input_ids=prompt(5), assistant_model=own, **GREEDY)


def over_its_restart(length: int, new: int, folder: Path) -> None:
    small = dict(intermediate_size=48, num_hidden_layers=2, num_key_value_heads=2, original_max_position_embeddings=24)
    target = bind(made("phi3", **small).eval())
    target.generate(prompt(length), assistant_model=PromptLookupDrafter(target), do_sample=False, max_new_tokens=new)


def load_changed(change, folder: Path) -> None:
    """A target one of whose tensors is another, or is not there."""
    tiny_target().save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if "wq_a" in name or "q_a_proj" in name)
    tensors[name] = change(tensors[name])
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    load_target(folder)


def in_float16(run, folder: Path) -> None:
    tiny_target().half().save_pretrained(folder)
    run(folder)


def train_in_float16(folder: Path) -> None:
    half = AutoModelForCausalLM.from_pretrained(folder, dtype="float16")
    trainer_for(folder / "run", half, tiny_drafter(half), rows(2))


V4_LAYERS = {
    "sliding": lambda: RewindableSlidingCacheLayer(5, max_rewind=4),
    "HCA": lambda: RewindableHCACacheLayer(tiny_config(), max_rewind=4),
    "CSA": lambda: RewindableCSACacheLayer(tiny_config(), max_rewind=4),
}


def fed(layer, count: int):
    keys = torch.zeros(1, 1, count, 3)
    layer.update(keys, keys)
    return layer


def cropped(kind: str, count: int, recording: bool, folder: Path) -> None:
    layer = V4_LAYERS[kind]()
    layer.record_past = recording
    fed(layer, 9).crop(count)


def cropped_linear(count: int, folder: Path) -> None:
    target = bind(qwen3_next().eval())
    cache = make_linear_rewindable(DynamicCache(config=target.config))
    with torch.no_grad():
        target(prompt(9), use_cache=True, **{CACHE: cache})
    next(layer for layer in cache.layers if isinstance(layer, RewindableLinearLayer)).crop(count)


def make_foreign_rewindable(kind: type, given: object, folder: Path) -> None:
    make_rewindable(Cache(layers=[type("Foreign", (kind,), {"_layer_type": None})(given)]))


def make_cropped_rewindable(folder: Path) -> None:
    """A stock layer whose own crop lost keys."""
    layer = DynamicSlidingWindowLayer(5)
    layer.activate_past_recording()
    fed(layer, 12)
    for _ in range(2):
        layer.crop(-2)
    make_rewindable(Cache(layers=[layer]))


def make_uneven_rewindable(folder: Path) -> None:
    """A stock layer whose own crop left the compressor what it has seen."""
    layer, projections = DeepseekV4CSACache(tiny_config()), torch.zeros(1, 3, 4)
    layer.store_compression_weights("compressor", projections, projections)
    fed(layer, 3).crop(-2)
    make_rewindable(Cache(layers=[layer]))


def update_with_other_values(folder: Path) -> None:
    keys = torch.zeros(1, 1, 2, 3)
    V4_LAYERS["sliding"]().update(keys, keys.clone())


VIRTUAL = [PromptTuningConfig, PrefixTuningConfig, PromptEncoderConfig]
REFUSED = {
    "a drafter of a target with more tokens": Refusal(
        lambda _: bind(tiny_target(vocab_size=60)).generate(prompt(5), assistant_model=drafter(), **GREEDY),
        ("64", "60"),
    ),
    "a drafter alone": Refusal(lambda _: drafter().generate(prompt(5)), ("drafter.bind(target)",)),
    "an assistant with linear attention": Refusal(assisted_by_linear_attention, ("linear attention",)),
    "layers beyond the last": Refusal(lambda _: read_layers([99]), ("99", "0 to 2", "-1")),
    "layers before the first": Refusal(lambda _: read_layers([0, -2]), ("-2", "0 to 2")),
    "images": Refusal(with_images, ("text only", "leave")),
    **{
        f"{kind.__name__}, {where}": Refusal(partial(with_virtual_tokens, kind, where), words, error)
        for kind in VIRTUAL
        for where, words, error in (
            ("bound", ("PEFT", "virtual tokens", "LoRA"), ValueError),
            ("inside", ("PEFT", "virtual tokens", "LoRA"), ValueError),
            ("saved", ("prompt or prefix tuning", "merge"), OSError),
        )
    },
    "a text over a restart of its cache": Refusal(partial(over_its_restart, 10, 15), ("25", "max_length=24")),
    "one token over it": Refusal(partial(over_its_restart, 24, 1), ("25", "max_length=24")),
    "weights that are not finite": Refusal(
        partial(load_changed, lambda tensor: torch.full_like(tensor, torch.nan)), ("not finite",)
    ),
    "weights that are missing": Refusal(partial(load_changed, lambda tensor: None), ("1 missing",)),
    "float16, loaded": Refusal(partial(in_float16, partial(load_target, dtype="float16")), ("float16", "float32")),
    "float16, the checkpoint's own": Refusal(partial(in_float16, load_target), ("float16", "float32")),
    "float16, bound": Refusal(
        partial(in_float16, lambda folder: bind(AutoModelForCausalLM.from_pretrained(folder, dtype="float16"))),
        ("float16", "float32"),
    ),
    "float16, trained": Refusal(partial(in_float16, train_in_float16), ("float16", "cannot run")),
    "a tokenizer that is none": Refusal(
        lambda _: find_mask_token(tiny_target(), "words"), ("`tokenizer`", "'words'", "AutoTokenizer")
    ),
    **{
        f"a crop by {count} of a {kind} layer, {'recording' if recording else 'not recording'}": Refusal(
            partial(cropped, kind, count, recording), words, error
        )
        for kind in V4_LAYERS
        for count, recording, words, error in (
            (1, True, ("positive", "(1)"), ValueError),
            (-10, True, ("10", "holds 9"), ValueError),
            (-5, True, ("5", "last 4 of the 9", "`max_rewind`"), RuntimeError),
            (-1, False, ("1", "last 0 of the 9", "`activate_past_recording`"), RuntimeError),
        )
    },
    "a crop of linear attention by less than nothing": Refusal(partial(cropped_linear, 1), ("positive", "(1)")),
    "a crop of more than its last forward": Refusal(
        partial(cropped_linear, -1), ("1 tokens", "of 0 recorded tokens"), RuntimeError
    ),
    **{
        f"a reach of {value!r}": Refusal(
            lambda _, value=value, made=made: made(value), ("`max_rewind`", repr(value), "at least 1")
        )
        for value, made in (
            (0, lambda value: RewindableSlidingCacheLayer(5, max_rewind=value)),
            (-1, lambda value: RewindableHCACacheLayer(tiny_config(), max_rewind=value)),
            (1.5, lambda value: RewindableCSACacheLayer(tiny_config(), max_rewind=value)),
            (True, lambda value: make_rewindable(DynamicCache(config=tiny_config()), value)),
            (None, lambda value: make_rewindable(DynamicCache(config=tiny_config()), value)),
        )
    },
    "values that are not the keys": Refusal(update_with_other_values, ("(1, 1, 2, 3)", "same tensor")),
    "no cache": Refusal(lambda _: make_rewindable(()), ("tuple", "DynamicCache"), TypeError),
    "somebody's sliding layer": Refusal(
        partial(make_foreign_rewindable, DynamicSlidingWindowLayer, 5), ("Foreign", "DynamicCache"), TypeError
    ),
    "somebody's compressed layer": Refusal(
        partial(make_foreign_rewindable, DeepseekV4HCACache, tiny_config()), ("Foreign", "DynamicCache"), TypeError
    ),
    "a layer that lost keys": Refusal(make_cropped_rewindable, ("8 tokens", "last 2", "expected 4")),
    "a compressor that saw more than its layer": Refusal(make_uneven_rewindable, ("of 1 tokens", "seen 3")),
}
if REWINDABLE_QWEN4:
    REFUSED["a mean that no norm follows"] = Refusal(
        lambda _: BlockObjective(None, target_of(qwen4_exp()), SimpleNamespace(kl_teacher="mean_pool")),
        ("'mean_pool'", "qwen4_exp_text", "hc_head"),
    )


@pytest.mark.parametrize("refusal", REFUSED.values(), ids=REFUSED)
def test_it_is_refused_in_one_line(refusal: Refusal, tmp_path: Path):
    refusal.check(tmp_path)
