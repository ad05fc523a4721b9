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
from hf_hyperdflash.targets.registry import is_bound, target_of
from hf_hyperdflash.targets.vocabulary import find_mask_token
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
    "a cache that the model makes itself": (
        lambda: made("minimax", **MINIMAX), bind, ("a cache of its own", "rewound", "taken back")
    ),
    "layers of several streams": (gemma3n, reads((0,)), ("[0]", "gemma3n_text", "4 streams")),
    "layers that no prompt runs": (gemma4_e, reads((-1,)), ("[-1]", "PromptLookupDrafter", "0 to 1")),
    "some of them": (
        gemma4_e, lambda target: tiny_drafter(target, target_layer_ids=[0, 2]), ("[0, 2]", "target_layer_ids")
    ),
    "nothing to fuse": (qwen3, lambda target: bind(target, fuse=True), ("`fuse`", "hyper-connections")),
}  # fmt: skip
if not REWINDABLE_QWEN4:
    UNBINDABLE["an indexer's positions"] = (
        qwen4_exp,
        bind,
        (max(target_of(qwen4_exp()).layer_kinds - {"linear_attention"}), "rewound"),
    )


@pytest.mark.parametrize("name", UNBINDABLE)
def test_a_target_is_refused_in_one_line_and_stays_as_it_was(name):
    made, call, words = UNBINDABLE[name]
    target = made()
    own = type(target)
    Refusal(call, words).check(target)
    assert type(target) is own and not is_bound(target)


def read_layers(ids: list[int], folder: Path) -> None:
    with capture_residual(tiny_target(), ids):
        pass


def in_float16(run, folder: Path) -> None:
    tiny_target().half().save_pretrained(folder)
    run(folder)


def train_in_float16(folder: Path) -> None:
    half = AutoModelForCausalLM.from_pretrained(folder, dtype="float16")
    trainer_for(folder / "run", half, tiny_drafter(half), rows(2))


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


def cropped_linear(count: int, folder: Path) -> None:
    target = bind(qwen3_next().eval())
    cache = make_linear_rewindable(DynamicCache(config=target.config))
    with torch.no_grad():
        target(prompt(9), use_cache=True, **{CACHE: cache})
    next(layer for layer in cache.layers if isinstance(layer, RewindableLinearLayer)).crop(count)


V4_LAYERS = {
    "sliding": partial(RewindableSlidingCacheLayer, 5),
    "HCA": partial(RewindableHCACacheLayer, tiny_config()),
    "CSA": partial(RewindableCSACacheLayer, tiny_config()),
}


def fed(layer, count: int):
    keys = torch.zeros(1, 1, count, 3)
    layer.update(keys, keys)
    return layer


def cropped(kind: str, count: int, recording: bool, folder: Path) -> None:
    layer = V4_LAYERS[kind](max_rewind=4)
    layer.record_past = recording
    fed(layer, 9).crop(count)


def reaching(kind: str | None, value: object, folder: Path) -> None:
    make_rewindable(DynamicCache(config=tiny_config()), value) if kind is None else V4_LAYERS[kind](max_rewind=value)


def foreign(kind: type, given: object):
    return type("Foreign", (kind,), {"_layer_type": None})(given)


def without_keys():
    """A stock layer whose own crop lost keys."""
    layer = DynamicSlidingWindowLayer(5)
    layer.activate_past_recording()
    fed(layer, 12)
    for _ in range(2):
        layer.crop(-2)
    return layer


def uneven():
    """A stock layer whose own crop left the compressor what it has seen."""
    layer, projections = DeepseekV4CSACache(tiny_config()), torch.zeros(1, 3, 4)
    layer.store_compression_weights("compressor", projections, projections)
    fed(layer, 3).crop(-2)
    return layer


def made_rewindable(layer, folder: Path) -> None:
    """Whose cache stays as it was, other layers too."""
    cache = Cache(layers=[DynamicSlidingWindowLayer(5), layer()])
    before = list(cache.layers)
    try:
        make_rewindable(cache)
    finally:
        assert cache.layers == before


VIRTUAL, FOREIGN = ("PEFT", "virtual tokens", "LoRA"), ("Foreign", "DynamicCache")
REFUSED = {
    "a drafter alone": Refusal(lambda _: drafter().generate(prompt(5)), ("drafter.bind(target)",)),
    "an assistant with linear attention": Refusal(assisted_by_linear_attention, ("linear attention",)),
    "layers beyond the last": Refusal(partial(read_layers, [99]), ("99", "0 to 2", "-1")),
    "layers before the first": Refusal(partial(read_layers, [0, -2]), ("-2", "0 to 2")),
    "images": Refusal(with_images, ("text only", "leave")),
    "prompt tuning, bound": Refusal(partial(with_virtual_tokens, PromptTuningConfig, "bound"), VIRTUAL),
    "prefix tuning, inside": Refusal(partial(with_virtual_tokens, PrefixTuningConfig, "inside"), VIRTUAL),
    "an encoder of prompts, saved": Refusal(
        partial(with_virtual_tokens, PromptEncoderConfig, "saved"), ("prompt or prefix tuning", "merge"), OSError
    ),
    "a text over a restart of its cache": Refusal(partial(over_its_restart, 10, 15), ("25", "max_length=24")),
    "one token over it": Refusal(partial(over_its_restart, 24, 1), ("25", "max_length=24")),
    "weights that are not finite": Refusal(
        partial(load_changed, lambda tensor: torch.full_like(tensor, torch.nan)), ("not finite",)
    ),
    "weights that are missing": Refusal(partial(load_changed, lambda tensor: None), ("1 missing",)),
    **{
        f"float16, {how}": Refusal(partial(in_float16, run), ("float16", word))
        for how, run, word in (
            ("loaded", partial(load_target, dtype="float16"), "float32"),
            ("the checkpoint's own", load_target, "float32"),
            ("bound", lambda folder: bind(AutoModelForCausalLM.from_pretrained(folder, dtype="float16")), "float32"),
            ("trained", train_in_float16, "cannot run"),
        )
    },
    "a tokenizer that is none": Refusal(
        lambda _: find_mask_token(target_of(tiny_target()), "words"), ("`tokenizer`", "'words'", "AutoTokenizer")
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
        f"a reach of {value!r}": Refusal(partial(reaching, kind, value), ("`max_rewind`", repr(value), "at least 1"))
        for kind, value in (("sliding", 0), ("HCA", -1), ("CSA", 1.5), (None, True), (None, None))
    },
    "values that are not the keys": Refusal(
        lambda _: V4_LAYERS["sliding"](4).update(*torch.zeros(2, 1, 1, 2, 3)), ("(1, 1, 2, 3)", "same tensor")
    ),
    "no cache": Refusal(lambda _: make_rewindable(()), ("tuple", "DynamicCache"), TypeError),
    **{
        name: Refusal(partial(made_rewindable, layer), words, error)
        for name, layer, words, error in (
            ("somebody's sliding layer", partial(foreign, DynamicSlidingWindowLayer, 5), FOREIGN, TypeError),
            ("somebody's compressed layer", partial(foreign, DeepseekV4HCACache, tiny_config()), FOREIGN, TypeError),
            ("a layer that lost keys", without_keys, ("8 tokens", "last 2", "expected 4"), ValueError),
            ("a compressor that saw more than its layer", uneven, ("of 1 tokens", "seen 3"), ValueError),
        )
    },
}
if REWINDABLE_QWEN4:
    REFUSED["a mean that no norm follows"] = Refusal(
        lambda _: BlockObjective(None, target_of(qwen4_exp()), SimpleNamespace(kl_teacher="mean_pool")),
        ("'mean_pool'", "qwen4_exp_text", "hc_head"),
    )


@pytest.mark.parametrize("refusal", REFUSED.values(), ids=REFUSED)
def test_it_is_refused_in_one_line(refusal: Refusal, tmp_path: Path):
    refusal.check(tmp_path)
