"""Drafts with the multi-token-prediction (MTP) heads of a target's own checkpoint.

Entry t consists of the target's state after token t and the embedding of token t + 1, and its head drafts token t + 2,
as of every drafter of entries ([`~drafters.unrolled.drafter`]). With several heads each token is an entry of all of
them: head k reads what head k - 1 made of the token before, so that its first k entries of a text count for nothing.
The decoder layers are the family's own, of transformers; what the families differ in is in [`families`].
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from ...targets.caches.name import CACHE
from ...targets.compiled import CompiledForwards
from ...targets.target import Target, attention_mask_for, computable
from ...trees.growth import DraftStep
from ...trees.tree import DraftTree
from ..parts.context import ContextColumns, DraftContext, padded_pending, rows_of
from ..parts.layers import ContextLayer, KeysValues
from ..reading import HiddenStateDrafter
from ..sampling import DraftRequest, draft_batch
from ..unrolled.drafter import UnrolledDrafter, entry_mask
from ..unrolled.layer_cache import LayerCache
from ..weights import check_source, named_dtype, resolve_subfolder, uninitialized, warn_of_untrained
from .checkpoint import HeadTensors, converted, heads_in, is_done
from .configuration import MTPConfig


class MTPHead(nn.Module):
    """One head: norms of its two inputs, their projection, decoder layers, and a norm."""

    def __init__(self, layers: Sequence[nn.Module], norm: nn.Module, width: int) -> None:
        super().__init__()
        self.enorm, self.hnorm, self.norm = (copy.deepcopy(norm) for _ in range(3))
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.layers = nn.ModuleList(layers)


class MTPDrafter(UnrolledDrafter):
    """Drafts one token at a time, or a tree of them, with the MTP heads that its target was trained with.

    Use `load_drafter(name_of_the_target, target=target)` or [`from_target`], `drafter.bind(target)` once, then
    `target.generate(**inputs, assistant_model=drafter)`. It is saved as its publisher does: the target's config.json,
    and the heads' tensors by the names that the target's checkpoint has.

    Args:
        config: Its configuration, which has the target's.
    """

    config: MTPConfig  # type: ignore[assignment]
    config_class = MTPConfig  # type: ignore[assignment]
    carries_code = False
    base_model_prefix = ""

    def __init__(self, config: MTPConfig) -> None:
        HiddenStateDrafter.__init__(self, config)  # its layers are the family's, with nothing of an `UnrolledNetwork`
        self.layer_config = config.layer_config()
        trunk = config.family.text_model(self.layer_config)
        self.layer_config, count = trunk.config, config.family.layers
        layers, norm = config.family.layers_of(trunk), trunk.norm if hasattr(trunk, "norm") else trunk.norm_f
        self.heads = nn.ModuleList(
            MTPHead(layers[first : first + count], norm, config.hidden_size)
            for first in range(0, config.num_hidden_layers, count)
        )
        self.rotary_emb: Any = getattr(trunk, "rotary_emb", None)  # type: ignore[assignment]
        self.post_init()
        self._keep_in_fp32_modules_strict = trunk._keep_in_fp32_modules_strict
        self._weight_conversions = config.family.rules(config.of_target())

    def _init_weights(self, module: nn.Module) -> None:
        """Leave a module as it was made: the family's model has initialized its layers."""

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True  # transformers looks for the experts' decorator in the source of a drafter's own file

    # Loading and saving, in the publisher's layout

    @classmethod
    def from_target(  # type: ignore[override]
        cls,
        target: PreTrainedModel | str | Path,
        *,
        num_draft_tokens: int | None = None,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str | None = None,
        revision: str | None = None,
        **hub_kwargs: Any,
    ) -> MTPDrafter:
        """Load the heads in a target's checkpoint; FP8 weights are dequantized.

        Args:
            target: A checkpoint's path or Hub id, or a loaded target: then its `config._name_or_path`. Only the files
                with tensors of the heads are downloaded.
            num_draft_tokens: The most drafted tokens per round; the number of heads, or 4 with one, if left out.
            dtype: Of the weights, or its name, except those that the family keeps in float32; by default the loaded
                target's, or the checkpoint's.
            device: By default the loaded target's LM head's, or the CPU.
            revision: Of the Hub repository.
            **hub_kwargs: For the Hub: `token`, `cache_dir`, `local_files_only`, ...

        Raises:
            ValueError: If the target has no MTP heads, or its tensors are not those of its configuration.
        """
        config, tensors = heads_in(target, revision=revision, **hub_kwargs)
        if isinstance(target, PreTrainedModel):
            head = cast(torch.Tensor, target.get_output_embeddings().weight)
            dtype, device = dtype or target.dtype, device or (None if head.is_meta else head.device)
        dtype = named_dtype(dtype) or tensors.config.dtype or named_dtype(config.dtype)
        made = MTPConfig.from_target_config(config, max_blocks=num_draft_tokens or 0)
        return cls._loaded(made, tensors, dtype, device)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load a drafter that `save_pretrained` wrote, whole and in safetensors.

        Args:
            pretrained_model_name_or_path: Folder or Hub id.
            *args: As of any model.
            **kwargs: Likewise: `dtype`, `device_map` for one device, fields of [`MTPConfig`], and for the Hub
                `revision`, `token`, `cache_dir`, ...

        Raises:
            ValueError: If it is a target or another model, or its tensors are not the drafter's.
            OSError: If it cannot be found or its weights are damaged.
        """
        name, kwargs = resolve_subfolder(pretrained_model_name_or_path, kwargs)
        check_source(name)
        own = {field: kwargs.pop(field) for field in ("max_blocks",) if field in kwargs}
        dtype, device_map = (kwargs.pop(option, None) for option in ("dtype", "device_map"))
        kwargs.pop("config", None)
        config = cls.config_class.from_pretrained(name, **own, **kwargs)
        if cls.__name__ not in (config.architectures or ()):
            raise ValueError(
                f"{name} is no drafter but a target, a {(config.architectures or ['model'])[0]}. The MTP heads in its "
                f"checkpoint are loaded by `load_drafter({str(name)!r})`."
            )
        tensors = HeadTensors(str(name), config.of_target(), cast(Any, kwargs))
        device = device_map.get("") if isinstance(device_map, Mapping) else device_map
        return cls._loaded(config, tensors, named_dtype(dtype) or named_dtype(config.dtype), device)

    @classmethod
    def _loaded(cls, config: MTPConfig, tensors: HeadTensors, dtype: Any, device: Any) -> MTPDrafter:
        config.dtype = dtype or torch.bfloat16
        drafter = uninitialized(cls, config, config.dtype)
        drafter._weight_conversions = [
            rule for rule in drafter._weight_conversions if not is_done(rule, tensors.weights)
        ]
        tensors.check_names(drafter.published(drafter.state_dict()))
        if str(device) == "meta":  # sizes and counts without weights
            return drafter.eval()
        drafter.to_empty(device=device or "cpu")
        if drafter.rotary_emb is not None:  # in no checkpoint
            drafter.rotary_emb = type(drafter.rotary_emb)(config=drafter.layer_config).to(device or "cpu")
        made = converted(tensors.readers(drafter.device), drafter._weight_conversions, drafter)
        tensors.copy(made, drafter.state_dict())
        warn_of_untrained(drafter.state_dict(), tensors.name)
        return drafter.eval()

    def published(self, state_dict: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return its tensors by the names of its publisher."""
        return revert_weight_conversion(self, dict(state_dict))

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load tensors by our names or by the publisher's, which a checkpoint of a training run has."""
        if not any(name.startswith("heads.") for name in state_dict):
            read = {name: (lambda value=value: value) for name, value in state_dict.items()}
            state_dict = dict(converted(read, self._weight_conversions, self))
        return super().load_state_dict(state_dict, *args, **kwargs)

    # The heads

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the layers; what the family keeps in float32 is so."""
        return cast(MTPHead, self.heads[0]).eh_proj.weight.dtype

    @property
    def device(self) -> torch.device:
        """The device of the layers."""
        return cast(MTPHead, self.heads[0]).eh_proj.weight.device

    def read(self, target: Target, residual: torch.Tensor) -> torch.Tensor:
        """Return the target's states after its final norm, `[batch, seq, 1, config.hidden_size]`."""
        like = target.output_head.weight
        return target.collapse(computable(residual, like).to(target.dtype)).to(residual.device).unsqueeze(2)

    def condition(self, residual: torch.Tensor) -> torch.Tensor:
        return residual.squeeze(2).to(self.device, self.dtype)

    def next_condition(self, states: torch.Tensor) -> torch.Tensor:
        """Return what the heads read of a token from the states that they made of the token before, `[...,
        config.num_heads * config.hidden_size]` each: a single head its own, others the one before them."""
        width = self.config.hidden_size
        return states if self.config.num_heads == 1 else torch.cat([states[..., :width], states[..., :-width]], dim=-1)

    def normed(self, states: torch.Tensor, level: int) -> torch.Tensor:
        """Return the states of the head that drafts the token `level` after the first one, for the LM head."""
        width, head = self.config.hidden_size, min(level, self.config.num_heads - 1)
        return states[..., head * width : (head + 1) * width]

    def run(
        self,
        condition: torch.Tensor,
        embeds: torch.Tensor,
        positions: torch.Tensor,
        keys_values: Sequence[ContextLayer],
        mask: Any,
        last_only: bool = False,
        before: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Run tokens through all heads.

        Args:
            condition: `[batch, tokens, config.hidden_size]`, the target's states, for entries; with several heads, for
                drafts, what [`next_condition`] returned.
            embeds: `[batch, tokens, config.hidden_size]`, of the tokens that follow.
            positions: `[batch, tokens]`, of these.
            keys_values: For each layer, the function that adds the tokens' keys and values to those that they see.
            mask: Boolean `[batch, 1, tokens, keys]`, `True` where a token sees a key; `None` for all.
            last_only: Whether to return the last token's states only.
            before: For entries, with several heads: the states of the entries before them, `[batch, config.num_heads *
                config.hidden_size]`, and at which token those go on, `[batch]`; zeros at the first if left out.

        Returns:
            `[batch, tokens, 1, config.num_heads * config.hidden_size]`, or of one token.
        """
        width, made = self.config.hidden_size, list[torch.Tensor]()
        known, embeds = iter(keys_values), embeds.to(condition.dtype)
        for number, head in enumerate(self.heads):
            if condition.shape[-1] > width:
                state = condition[..., number * width : (number + 1) * width]
            elif number:
                state = self._shifted(made[-1], number, before)
            else:
                state = condition
            made.append(self._run_head(number, cast(MTPHead, head), embeds, state, positions, known, mask))
        states = torch.cat(made, dim=-1).unsqueeze(2)
        return states[:, -1:] if last_only else states

    def _shifted(
        self, states: torch.Tensor, number: int, before: tuple[torch.Tensor, torch.Tensor] | None, more: int = 0
    ) -> torch.Tensor:
        """Return a head's states of the token before each, and before `more` that follow, for the next head."""
        width = self.config.hidden_size
        shifted = nn.functional.pad(states, (0, 0, 1, more - 1))
        if before is not None:
            rows = torch.arange(len(states), device=states.device)
            carried = before[0][:, (number - 1) * width : number * width]
            shifted = shifted.index_put((rows, before[1]), carried.to(states))
        return shifted

    def _run_head(
        self,
        number: int,
        head: MTPHead,
        embeds: torch.Tensor,
        state: torch.Tensor,
        positions: torch.Tensor,
        known: Iterator[ContextLayer],
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        hidden = head.eh_proj(torch.cat([head.enorm(embeds), head.hnorm(state)], dim=-1))
        for index, layer in enumerate(head.layers, number * len(head.layers)):
            kind, window = self._span(index)
            # A layer of experts alone takes none of them.
            cache = LayerCache(lambda keys, values: next(known)(keys, values), number, window)
            visible = mask if mask is None else cache.visible(mask)
            if visible is not None:
                visible = cast(Any, attention_mask_for(self.layer_config._attn_implementation, visible, hidden.dtype))
            hidden = layer(
                hidden,
                attention_mask=visible,
                position_ids=positions,
                position_embeddings=self._rotary(hidden, positions, kind),
                **{CACHE: cache},
            )
            hidden = hidden[0] if isinstance(hidden, tuple) else hidden
        return head.norm(hidden)

    def _span(self, index: int) -> tuple[str | None, int | None]:
        """Return the kind of a layer, and how many tokens it sees, itself included; `None` for all."""
        config = self.layer_config
        kind = (getattr(config, "layer_types", None) or [None] * (index + 1))[index]
        window = getattr(config, "sliding_window", None)
        return kind, window if kind in ("sliding_attention", None) else None

    def _rotary(self, like: torch.Tensor, positions: torch.Tensor, kind: str | None) -> Any:
        if self.rotary_emb is None:
            return None
        rope = getattr(self.layer_config, "rope_parameters", None) or {}
        by_kind = {"layer_type": kind} if isinstance(rope.get(kind), Mapping) else {}
        if hasattr(self.rotary_emb, "mrope_section"):  # of images there are three axes, which are one for text
            positions = positions.expand(3, -1, -1)
        return self.rotary_emb(like, position_ids=positions, **by_kind)

    def drafted_logits(self, target: Target, normed: torch.Tensor) -> torch.Tensor:
        return target.logits(normed)[..., : self.config.vocab_size]

    @cached_property
    def kept_shapes(self) -> list[tuple[torch.Size, torch.Size]]:
        """The heads and channels of each layer's keys and values of one token, as its attention keeps them: of some
        families both are of one narrow latent."""
        shapes: list[tuple[torch.Size, torch.Size]] = []

        def note(keys: torch.Tensor, values: torch.Tensor) -> KeysValues:
            shapes.append((keys.shape[1::2], values.shape[1::2]))
            return keys, values

        states = torch.zeros(1, 1, self.config.hidden_size, device=self.device, dtype=self.dtype)
        with torch.no_grad():
            self.run(states, states, states.new_zeros(1, 1, dtype=torch.long), [note] * 2**8, None)
        return shapes

    # Drafting and training

    def carried(self, contexts: Sequence[DraftContext]) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the states of each text's last entry, and at which pending token they go on."""
        if self.config.num_heads == 1:
            return None
        width, count = self.config.num_heads * self.config.hidden_size, max(each.new_count for each in contexts)
        none = torch.zeros(1, 1, width, device=self.device, dtype=self.dtype)
        states = [none if each.states is None else each.states for each in contexts]
        first = [min(count - each.new_count, count - 1) for each in contexts]
        return torch.cat(states)[:, 0], torch.tensor(first, device=self.device)

    def _draft_known(self, target: Target, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """Draft as other drafters of entries do; with several heads, chains in one pass of each head: it makes its
        entries of the pending tokens and its draft at once, as the heads before it have drafted by then."""
        contexts = [each.context for each in requests]
        is_chain = requests[0].sampler.tree_budget is None
        if self.config.num_heads == 1 or not is_chain or not all(each.new_count for each in contexts):
            return super()._draft_known(target, requests)
        residual, positions, ids = padded_pending(contexts, self.device)
        rows_of(self, contexts, ids.shape[1] + self.config.num_heads)  # which none of the passes then outgrows
        count, before = ids.shape[1], self.carried(contexts)
        state, embeds, positions = self.condition(self.read(target, residual)), self.embed(target, ids), positions + 1
        of_head, made = len(self.kept_shapes) // self.config.num_heads, list[torch.Tensor]()

        def run_next(drafts: int) -> torch.Tensor:
            number, tokens = len(made), count + drafts
            columns = ContextColumns.of(self, contexts, drafts)
            known = map(columns.layer, range(number * of_head, (number + 1) * of_head))
            states = self._shifted(made[-1], number, before, tokens - made[-1].shape[1]) if made else state
            head, mask = cast(MTPHead, self.heads[number]), columns.causal_mask(self.device)
            inputs = embeds[:, :tokens].to(state.dtype), states, positions[:, :tokens]
            made.append(self._run_head(number, head, *inputs, known, mask))
            return made[-1][:, -1]

        def step(k: int, tokens: torch.Tensor, rows: torch.Tensor) -> DraftStep:
            nonlocal embeds, positions
            if k:
                embeds = torch.cat([embeds, self.embed(target, tokens[:, None].to(self.device))], dim=1)
                positions = torch.cat([positions, positions[:, -1:] + 1], dim=1)
            return DraftStep(self.drafted_logits(target, run_next(k)), vocabulary=self.draft_vocabulary(target))

        trees = draft_batch(requests, step)
        while len(made) < self.config.num_heads:  # those that had nothing to draft
            run_next(0)
        states = torch.cat([each[:, count - 1 : count] for each in made], dim=-1)
        self._keep_entries(contexts, states, range(len(contexts)))
        return self._with_passes(trees)

    def entry_mask(self, position_ids: torch.Tensor) -> torch.Tensor:
        return entry_mask(position_ids, 1)  # a family's attention takes no mask in pieces

    def compiled_contexts(
        self,
        target: Target,
        contexts: Sequence[DraftContext],
        max_tokens: int,
        max_new: int,
        max_drafts: int,
        compiled: CompiledForwards,
    ) -> Sequence[DraftContext]:
        return []  # a family's layers may wait for the device, as experts that are looped over do

    @property
    def _about_drafts(self) -> str:  # type: ignore[override]
        if self.config.num_heads > 1:
            return f" It has {self.config.num_heads} heads."
        return " Its head is repeated: load it with a larger `max_blocks`."
