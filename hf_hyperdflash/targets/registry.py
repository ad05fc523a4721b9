"""The families of targets, the choice of the family that a model belongs to, and what is read of a model by it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from .deepseek_v4 import FAMILIES as DEEPSEEK_V4
from .hooks import EMBEDDINGS, ResidualTap
from .hyper_connections import FAMILIES as HYPER_CONNECTIONS
from .plain import FAMILIES as PLAIN
from .target import Target

logger = logging.getLogger(__name__)

_RENAMED = 0.01  # of the tokens: a fine-tuned model's names for some that were reserved

# For each target, the numbers of tokens of drafters and its own that were found to fit: a line says so once.
_fitting: WeakKeyDictionary[PreTrainedModel, set[tuple[int, int]]] = WeakKeyDictionary()

# The first family that fits is chosen.
FAMILIES: tuple[type[Target], ...] = (*DEEPSEEK_V4, *HYPER_CONNECTIONS, *PLAIN, Target)


def target_of(model: PreTrainedModel | Target) -> Target:
    """Return a model as drafters and the loop see it; raise a `ValueError` if it belongs to no known family. For a
    bound model that is what `bind` made; a [`Target`] is returned as it is."""
    if isinstance(model, Target):
        return model
    binding = getattr(model, "__dict__", {}).get("hyperdflash_binding")
    if bound := getattr(binding, "target", None):
        return bound
    if is_drafter(model):
        raise ValueError(f"The target is a {type(model).__name__}, a drafter: pass the model that it drafts for.")
    check_without_virtual_tokens(model)
    if not isinstance(model, PreTrainedModel):
        given = repr(model) if isinstance(model, (str, type)) else f"a {type(model).__name__}"
        # PEFT, `torch.compile`, data parallelism and pipelines wrap a model.
        names = ("_orig_mod", "module", "model")
        inside = next((name for name in names if isinstance(getattr(model, name, None), PreTrainedModel)), "")
        if hasattr(model, "get_base_model") and not isinstance(model, type):
            inside = "get_base_model()"
        fix = f"pass what it wraps, its `{inside}`" if inside else "load it with `hf_hyperdflash.load_target` first"
        raise ValueError(f"The target is {given}, expected a model: {fix}.")
    # The module that runs the decoder layers.
    modules: tuple[Any, ...] = (model.get_decoder(), model.base_model, model)
    trunk: Any = next((part for part in modules if isinstance(getattr(part, "layers", None), nn.ModuleList)), None)
    family = next((family for family in FAMILIES if family.fits(model, trunk)), None) if trunk is not None else None
    if family is None:
        name = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
        known = ", ".join(family.title for family in FAMILIES[:-1])
        raise ValueError(
            f"The target is a {name} model: expected one of {known}, or a {Target.title}. Load the target with "
            "`AutoModelForCausalLM.from_pretrained(...)`; docs/extending/family.md says how a family is added."
        )
    return family(model, trunk)


def check_layers(target: Target, layer_ids: Sequence[int] = ()) -> None:
    """Raise a `ValueError` if a drafter cannot read these layers (-1 for the last) because their output is not one
    state for each token of a prompt, or if nothing can be drafted for the target at all."""
    own, count = target.config, len(target.layers)
    loops = max(getattr(own, name, 1) for name in ("n_recurrent_loops", "loop_num_passes"))
    if loops > 1:
        raise ValueError(
            f"A {own.model_type} target runs layers {loops} times for each token, and a drafter can neither read "
            "them nor be taken back from what its cache keeps of each time: generate with it as it is."
        )
    streams, shared = getattr(own, "altup_num_inputs", 1), getattr(own, "num_kv_shared_layers", 0) or 0
    why, fix = "", "Use prompt lookup (`PromptLookupDrafter`), which reads no layer"
    if streams > 1:
        why = f"each hands on {streams} streams (AltUp)"
    elif shared and any(i != EMBEDDINGS and i % count >= count - shared for i in layer_ids):
        why = f"from {count - shared} on they use keys of earlier ones, and only a prompt's last token runs them"
        fix += f", or read some of 0 to {count - shared - 1} (`target_layer_ids`)"
    if why and layer_ids:
        raise ValueError(f"The drafter reads layers {list(layer_ids)} of a {own.model_type} target, but {why}. {fix}.")


def check_vocabulary(config: PreTrainedConfig, target: Target, fix: str) -> None:
    """Raise a `ValueError` with a `fix` if the token ids of a drafter's configuration are not the target's. The target
    may have more: a fine-tuned one, to whose embedding rows were added, is taken to be a copy of the drafter's own
    unless something tells otherwise, and a line says so."""
    own, targets = config.get_text_config(decoder=True).vocab_size, target.config.vocab_size
    fitting = _fitting.setdefault(target.model, set())
    # Of a target that had as many, the ids are the same whatever was added since.
    why = "" if own >= targets or (own, own) in fitting else _why_others(config, target, own)
    if own > targets or why:
        raise ValueError(
            f"The drafter was made for a target with `vocab_size` {own}, but this target's is {targets}. {why}{fix}"
        )
    if own < targets and (own, targets) not in fitting:
        logger.warning(
            "The target has %d tokens and the drafter was made for %d: the first %d are taken to be the same, as of a "
            "fine-tuned target with more rows in its embedding.",
            targets,
            own,
            own,
        )
    fitting.add((own, targets))


def _why_others(config: PreTrainedConfig, target: Target, count: int) -> str:
    """Return what tells that a target with more tokens is no copy of a drafter's own, which has `count`, in a sentence
    and a space; `""` if nothing does."""
    own, model = target.config, target.model
    kind, layers = (getattr(config, f"target_{name}", None) for name in ("model_type", "num_layers"))
    if kind and kind != own.model_type:
        return f"It is a {own.model_type} model, not a {kind} one. "
    if layers and own.num_hidden_layers not in (0, layers):  # 0: it was loaded for its head alone
        return f"It has {own.num_hidden_layers} layers, not {layers}. "
    given = model.config._name_or_path or model.name_or_path
    for name in (config._name_or_path, getattr(config, "target_name_or_path", "")):
        are_same = _have_same_ids(name, count, given, own.vocab_size)
        if are_same is not None:
            return "" if are_same else "Its tokenizer gives other ids. "
    if own.vocab_size > count + count // 2:  # special tokens, and rows that pad to a multiple, are few
        return f"Where no tokenizers are here to be compared, it may have {count + count // 2} at most. "
    return ""


@functools.cache
def _have_same_ids(name: str, count: int, other: str, other_count: int) -> bool | None:
    """Return whether the tokenizer beside some weights, `other`, has the ids of the one beside `name`, and maybe more;
    `None` if one of them is not on this machine."""
    ours, theirs = tokenizer_at(name, count), tokenizer_at(other, other_count)
    if ours is None or theirs is None:
        return None
    ids, others = ours.get_vocab(), theirs.get_vocab()
    return sum(others.get(token) != id for token, id in ids.items()) <= _RENAMED * len(ids)


def tokenizer_at(name: str, vocab_size: int) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer beside weights of so many tokens, by their folder, GGUF file or Hub id, if it is on this
    machine."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if not name:
        return None
    path = Path(name)
    try:
        if path.suffix == ".gguf":  # `AutoTokenizer` goes through the whole file once more for its type
            found: Any = PreTrainedTokenizerFast.from_pretrained(
                path.parent, gguf_file=path.name, local_files_only=True
            )
        else:
            found = AutoTokenizer.from_pretrained(name, local_files_only=True, trust_remote_code=False)
        return found if 2 * len(found) > vocab_size else None  # where there is none, some kinds come with five tokens
    except Exception as error:  # whoever asks does without
        logger.info("No tokenizer was found in %s: %s", path.name, error)
        return None


def check_without_virtual_tokens(target: object) -> None:
    """Raise a `ValueError` if a target is wrapped by PEFT for prompt or prefix tuning, or generates for such a
    wrapper, which is how PEFT's `generate` runs it."""
    preparing = getattr(target, "prepare_inputs_for_generation", None)
    for wrapper in (target, getattr(preparing, "__self__", None)):
        tuning: Any = getattr(wrapper, "active_peft_config", None) if hasattr(wrapper, "get_base_model") else None
        if getattr(tuning, "is_prompt_learning", False):
            raise ValueError(
                f"The target is tuned by PEFT's {tuning.peft_type.value}, whose virtual tokens are in its cache and "
                "in no text, so that drafts have no place after them: generate without a drafter, or train a LoRA "
                "adapter and merge it (`merge_and_unload()`)."
            )


def is_bound(model: object) -> bool:
    """Return whether `model` is a bound target."""
    return hasattr(type(model), "bound_by")


def is_drafter(model: object) -> bool:
    """Return whether `model` has the methods of a [`~drafters.base.Drafter`], as wrapped ones have, too."""
    return all(callable(getattr(model, name, None)) for name in ("check_target", "extend", "draft", "bind"))


@contextmanager
def capture_residual(target: PreTrainedModel, target_layer_ids: Sequence[int] = (-1,)) -> Iterator[list[torch.Tensor]]:
    """Collect the residual streams of every forward that this thread runs inside the context.

    Args:
        target: The target. One that is not bound gets hooks for the time, which torch does not expect to go while
            another thread runs it: bind it where several threads do.
        target_layer_ids: After which layers: -1 is the last, whose streams are the pre-collapse residual. Empty
            for nothing.

    Yields:
        A list that grows by one tensor per forward, `[batch, seq, paths, config.hidden_size]` with `config.hc_mult`
        streams per layer, in the order of `target_layer_ids`.
    """
    seen, bound = target_of(target), getattr(vars(target).get("hyperdflash_binding"), "residual", None)
    tap = ResidualTap(seen.layers, seen.streams) if bound is None else bound
    capture = tap.new_capture(target_layer_ids)
    end = tap.captures.add(capture) if target_layer_ids else None
    try:
        yield capture.captured
    finally:
        if end is not None:
            end()
        for handle in tap.handles if bound is None else ():
            handle.remove()
