"""Other programs' layouts of drafters, as tables.

A line of a table is an [`Entry`]: how fields of a config.json become fields of ours, and ours theirs again. Loading
and exporting run the same lines. A field that no line knows is found by [`Layout.unknown`].
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from transformers import GenerationConfig, PreTrainedConfig

from ...drafters.configuration import DrafterConfig

Fields = dict[str, Any]
# Fields of any layout that do not change a drafter's output.
_HARMLESS = {
    # Bookkeeping, and how text is generated.
    *PreTrainedConfig().to_dict(), *vars(GenerationConfig()),
    "auto_map", "torch_dtype", "name_or_path", "use_cache", "tie_word_embeddings", "pretraining_tp",
    "attn_implementation", "_attn_implementation", "attention_backend", "speculators_version", "modal_type",
    # Training.
    "attention_dropout", "initializer_range", "gradient_checkpointing", "num_anchors", "ttt_length",
    "step_loss_decay", "loss_decay_gamma", "max_sequence_length", "embed_requires_grad", "output_router_logits",
    "router_aux_loss_coef", "aux_loss_alpha", "seq_aux",
    # A window that is off; heads of the target that a draft layer does not have.
    "max_window_layers", "num_nextn_predict_layers",
    # Experts and latent attention, copied from a target: a layer with them would have other tensors.
    "decoder_sparse_step", "first_k_dense_replace", "kv_lora_rank", "mlp_only_layers", "moe_intermediate_size",
    "moe_layer_freq", "n_group", "n_routed_experts", "n_shared_experts", "norm_topk_prob", "num_experts",
    "num_experts_per_tok", "num_local_experts", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
    "routed_scaling_factor", "scoring_func", "shared_expert_intermediate_size", "topk_group", "topk_method",
    "v_head_dim",
}  # fmt: skip
# Fields of any layout that change it, with the values that do not.
_CHANGES_DRAFTS: dict[str, tuple[Any, ...]] = {
    # Tokens at positions without a known one.
    "mask_token_id": (None,), "noise_token_id": (None,), "ptd_token_id": (None,),
    # Scales and caps: Granite's, Cohere's, MiniCPM's, Gemma's and others'.
    "attention_multiplier": (None,), "attention_value_scale": (1,), "attn_logit_softcapping": (None,),
    "clip_qkv": (None,), "dim_model_base": (None,), "embedding_multiplier": (1,), "input_embedding_scale": (1,),
    "logit_scale": (1,), "logits_scaling": (1,), "output_multiplier": (1,), "query_pre_attn_scalar": (None,),
    "residual_multiplier": (1,), "rotary_pct": (1,), "scale_depth": (None,), "scale_emb": (1,),
    # Functions.
    "attention_mode": ("gqa", "mha"), "norm_type": ("rms",),
}  # fmt: skip


class Given:
    """The fields of a config.json that some line of the table names. A call returns the first of some of them that is
    there; `None` if none is, or if no line names it."""

    def __init__(self, name: str, top: Fields, layers: Fields, inner: Fields, values: Fields) -> None:
        self.name = name  # the checkpoint's, for errors
        self.top = top  # all of the config.json
        self.layers = layers  # where the fields of its layers are: a section of it, or all of it
        self.inner = inner  # what the layout's sections for drafting hold
        self._values = values

    def __call__(self, *names: str) -> Any:
        return next((self._values[name] for name in names if name in self._values), None)

    @property
    def architectures(self) -> str:
        return " ".join(map(str, self.top.get("architectures") or ()))


class Entry(NamedTuple):
    """A line of a table."""

    names: tuple[str, ...]  # the fields of a config.json that it is about
    read: Callable[[Given], Fields] = lambda given: {}  # returns ours
    write: Callable[[Any], Fields] = lambda config: {}  # returns theirs; an inner dictionary is a section
    is_of_layers: bool = False  # whether they are where the fields of the layers are


def same(ours: str, *theirs: str, missing: Any = None, is_needed: bool = False) -> Entry:
    """Return the line of a field that has the same values as ours: of their names the first is written, and any read.
    It must be there, or `missing` is what a field that is missing or empty means."""

    def read(given: Given) -> Fields:
        value = given(*theirs)
        if value is None and is_needed:
            raise ValueError(f"config.json of {given.name} lacks `{theirs[0]}`, expected its value there.")
        return {ours: value if is_needed else value or missing}

    return Entry(theirs, read, lambda config: {theirs[0]: getattr(config, ours)})


def always(name: str, value: Callable[[Any], Any]) -> Entry:
    """Return the line of a field that is written by our configuration, and nothing is read from."""
    return Entry((), write=lambda config: {name: value(config)})


def written_if(holds: Callable[[Any], bool], entry: Entry) -> Entry:
    """Return a line that is written only of some configurations."""
    return entry._replace(write=lambda config: entry.write(config) if holds(config) else {})


def inside(section: str, *entries: Entry) -> tuple[Entry, ...]:
    """Return lines that are written in a section of the config.json."""

    def moved(entry: Entry) -> Entry:
        return entry._replace(write=lambda config: {section: inner} if (inner := entry.write(config)) else {})

    return tuple(map(moved, entries))


def marked(*marks: str) -> Callable[[Fields], bool]:
    """Return whether a config.json has one of these fields or architectures, which only one layout has."""
    return lambda fields: not {*marks}.isdisjoint([*fields, *map(str, fields.get("architectures") or ())])


@dataclass(frozen=True)
class Layout:
    """How another program's config.json describes a drafter."""

    fits: Callable[[Fields], bool]  # whether a config.json is in this layout
    config: type[PreTrainedConfig]  # the class of our configuration
    table: tuple[Entry, ...]  # how each of its fields is read and written
    layers_in: str = ""  # the section with the fields of its layers, if they are not at the top level
    # Sections with more fields, the later ones counting more, and what is known there; `None` for the table's fields.
    sections: Mapping[str, Collection[str] | None] = field(default_factory=dict)
    prefix: str = ""  # of fields at the top level that count more than any without
    defaults: Callable[[Fields], Fields] = lambda fields: {}  # what missing fields mean
    of_target: tuple[str, ...] = ()  # fields that are the target's where they are missing
    changes_drafts: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # with the values that do not
    ignores: Collection[str] = ()  # fields that change nothing in this layout
    is_sized_by_tensors: bool = False  # whether its config.json leaves sizes to its tensors, and says nothing else
    rename: Callable[[str], str | None] = lambda name: name  # our name of a tensor; `None` if it is not the drafter's
    tensor_name: Callable[[str], str] = lambda name: name  # their name of a tensor of ours
    # Sets what only the tensors say, by our configuration, the tensors and the config.json.
    complete: Callable[[Any, dict[str, torch.Tensor], Fields], None] = lambda config, tensors, fields: None
    copies_target: bool = False  # whether its files hold the target's embedding and LM head
    served: Callable[[Any, Any], str] = lambda config, folder: ""  # how engines serve what is in a folder

    def read(self, fields: Fields, name: str) -> DrafterConfig:
        """Return the configuration of a drafter, from its config.json."""
        values = {key: value for key, value in self.defaults(fields).items() if key not in fields}
        for place, known in self._places(fields, name):
            values |= {key: value for key, value in place.items() if key in known and value is not None}
        inner = {key: value for section in self.sections for key, value in (fields.get(section) or {}).items()}
        layers = fields[self.layers_in] if self.layers_in else {**self.defaults(fields), **_known(fields)}
        given = Given(name, fields, _known(layers), inner, values)
        ours: Fields = {}
        for entry in self.table:
            ours |= entry.read(given)
        self.unknown(fields, name)
        try:
            return cast(DrafterConfig, self.config(**ours))
        except ValueError as error:
            raise ValueError(f"config.json of {name}: {error}") from error

    def complete_from_target(self, config: PreTrainedConfig, fields: Fields, target: PreTrainedConfig) -> None:
        """Set what a config.json leaves to the target, by the target's configuration."""
        own = target.get_text_config(decoder=True)
        for name in self.of_target:
            if name not in fields:
                setattr(config, name, getattr(own, name))

    def write(self, config: PreTrainedConfig) -> Fields:
        """Return the config.json of a drafter."""
        fields: Fields = {}
        for entry in self.table:
            for name, value in entry.write(config).items():
                is_section = isinstance(value, dict) and name in (self.layers_in, *self.sections)
                fields[name] = {**fields.get(name, {}), **value} if is_section else value
        return fields

    def _places(self, fields: Fields, name: str) -> Iterator[tuple[Fields, Collection[str]]]:
        """Return the parts of a config.json with the fields that are known there. The later ones count more."""
        of_layers = {name for entry in self.table if entry.is_of_layers for name in entry.names}
        others = {name for entry in self.table if not entry.is_of_layers for name in entry.names}
        prefixed = {self.prefix + name for name in others if self.prefix}
        top = {key: value for key, value in fields.items() if key not in prefixed | {*self.sections, self.layers_in}}
        if self.layers_in:
            yield section(fields, self.layers_in, name), of_layers
            yield top, others
        else:
            yield top, of_layers | others
        for inner, known in self.sections.items():
            if fields.get(inner) is not None:
                yield section(fields, inner, name), others if known is None else known
        yield {key.removeprefix(self.prefix): fields[key] for key in fields.keys() & prefixed}, others

    def unknown(self, fields: Fields, name: str) -> Fields:
        """Return the numbers and texts of a config.json of which nothing is known: they may change what is drafted.

        What is certain to change it is refused: a known field with such a value, and an unknown one that switches
        something on, or lists or describes something. Tensors of other names or shapes are refused when they are read.
        """
        found: Fields = {}
        for place, known in () if self.is_sized_by_tensors else self._places(fields, name):
            for key, value in place.items():
                usual = self.changes_drafts.get(key, _CHANGES_DRAFTS.get(key) if value else None)
                is_known = key in known or key in _HARMLESS or key in self.ignores
                if is_known or value is None or (usual is not None and value in usual):
                    continue
                if usual is not None:
                    expected = ", ".join(map(repr, usual))
                    raise ValueError(f"`{key}` of {name} is {value!r}, which is not supported: expected {expected}.")
                if not value or key.startswith("_") or key.endswith("_token_id"):
                    continue
                if value is True or isinstance(value, (list, dict)):
                    raise ValueError(
                        f"`{key}` in the config.json of {name} is {value!r}, and nothing is known here of that field: "
                        "it may change what is drafted. Take it out if it does not."
                    )
                found[key] = value
        return found


def _known(fields: Fields) -> Fields:
    return {key: value for key, value in fields.items() if value is not None}


def section(fields: Fields, key: str, name: str) -> Fields:
    """Return a section of a config.json."""
    if not isinstance(fields.get(key), dict):
        raise ValueError(f"`{key}` in the config.json of {name} is {fields.get(key)!r}, expected a dictionary.")
    return cast(Fields, fields[key])
