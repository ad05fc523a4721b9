"""A drafter of entries that goes on from states of its own: EAGLE-3, token by token, and SpecBlock, block by block.

Entry t is made of the target's residual after token t and the embedding of token t + 1. Its block has K slots, of
which slot k drafts token t + 2 + k. A later block goes on from a slot of an earlier one: that slot's state stands in
for the target's, the token that was chosen there is embedded. In every layer a slot sees all slots of the entries
before its own, those of the blocks that its block goes on from, up to where it does, and of its own block itself and
those before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from ...targets.attention_masks import attention_mask_for
from ...targets.registry import target_of
from ...targets.target import Target
from ...trees.tree import DraftTree
from ..parts.block_attention import AttentionSpan
from ..parts.heads import HeadOutput
from ..parts.layers import (
    ContextCache,
    ContextLayer,
    DrafterRMSNorm,
    HyperDFlashRotaryEmbedding,
    KeysValues,
    reset_reducer,
)
from ..parts.reducers import REDUCERS
from ..reading import ReadingDrafter, check_pair
from ..sampling import DraftSampler
from ..weights import named_dtype
from .configuration import UnrolledConfig

_ENTRIES_AT_ONCE = 256  # of a prompt: their mask is as large as the square of their slots
_FRESH_STATES = 8  # of which a new drafter is to be sure of nothing


class EntryContext(ContextCache):
    """Keys and values of the accepted tokens' entries, with what is drafted from behind them.

    Attributes:
        states: The last entry's, `[1, config.block_size, config.hidden_size]`; `None` before the first.
        position: Its true position, `[1, 1]`.
    """

    states: torch.Tensor | None = None
    position: torch.Tensor

    def __init__(self, layers: int) -> None:
        super().__init__([AttentionSpan()] * layers)


class UnrolledDrafter(ReadingDrafter):
    """What the drafters of entries share. A subclass has [`_begin`] and, where they differ, [`condition`], [`_layers`]
    and [`next_condition`].
    """

    config: UnrolledConfig
    layers: nn.ModuleList
    base_model_prefix = "drafter"
    _supports_sdpa = _supports_flex_attn = _supports_attention_backend = True
    _keep_in_fp32_modules_strict = ["hc_gate"]
    moves = True  # whether the slots of a later block stand behind those that it goes on from, for RoPE

    def __init__(self, config: UnrolledConfig) -> None:
        super().__init__(config)
        self.reducer = REDUCERS[config.reducer]
        for name, module in self.reducer.modules(config).items():
            self.add_module(name, module)
        self.norm = DrafterRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        if config.own_embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        if config.draft_vocab_size:
            self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
            self.register_buffer("draft_ids", torch.arange(config.draft_vocab_size))  # of the target's vocabulary
        self.rotary_emb = HyperDFlashRotaryEmbedding(config)  # type: ignore[arg-type]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        reset_reducer(module, self.config.initializer_range)

    @classmethod
    def from_target(
        cls, target: PreTrainedModel, *, dtype: torch.dtype | str | None = None, **config_fields: Any
    ) -> Any:
        """Build an untrained drafter fitted to a target, reading its paper's three layers where nothing else is said.

        Args:
            target: The model to draft for. It is read, not changed.
            dtype: Of the drafter's weights, or its name; the target's residual stream's by default.
            **config_fields: Any field of the drafter's configuration. With a `reducer` that has a gate, the gate is
                inherited from the target's `hc_head`; with a `draft_vocab_size` the drafter has so many of the rows of
                the target's LM head, the first ones ([`draft_only`] takes others); with `own_embedding` the target's.

        Raises:
            ValueError: If it is no target, there is no such field, or an embedding of its own is to be of another
                width than the target's.
        """
        kind, seen = cast(Any, cls.config_class), target_of(target)
        kind.check_fields(config_fields)
        fields = {**fields_of(seen), **config_fields}
        reducer = REDUCERS.get(str(config_fields.get("reducer")))
        if reducer is not None and reducer.has_gate and "target_layer_ids" not in config_fields:
            fields["target_layer_ids"] = [-1]
        config = kind(**fields)
        check_pair(config, seen, cls.__name__)
        if config.own_embedding and config.hidden_size != config.target_hidden_size:
            raise ValueError(
                f"`hidden_size` is {config.hidden_size} and `own_embedding` True, expected "
                f"{config.target_hidden_size}, the target's width: a new drafter's own embedding is the target's."
            )
        drafter: Any = cls(config)
        drafter = drafter.to(device=cls.device_for(seen), dtype=named_dtype(dtype) or seen.dtype)
        if config.has_gate:
            drafter.hc_gate.float().inherit(seen.gate())
        if config.draft_vocab_size:
            drafter.draft_only(seen, torch.arange(config.draft_vocab_size))
        if config.own_embedding:
            with torch.no_grad():
                drafter.embed_tokens.weight.copy_(seen.embed(torch.arange(config.vocab_size)[None])[0])
        is_tied = target.get_input_embeddings().weight is target.get_output_embeddings().weight
        if is_tied and drafter.device.type != "meta":
            states = torch.randn(_FRESH_STATES, config.hidden_size, generator=torch.Generator().manual_seed(0))
            states = states.to(drafter.device, drafter.dtype)
            drafter._flatten_logits(lambda: drafter.drafted_logits(seen, drafter.norm(states)))
        return drafter.eval()

    # What a subclass says

    def condition(self, residual: torch.Tensor) -> torch.Tensor:
        """Return what first blocks are conditioned on, `[batch, seq, config.hidden_size]`, from the target's residual
        streams `[batch, seq, config.num_streams, config.target_hidden_size]`."""
        return self.reducer.reduce(self, residual, self.dtype)

    def _begin(self, condition: torch.Tensor, embeds: torch.Tensor) -> torch.Tensor:
        """What the first layer reads, `[batch, blocks * config.block_size, ...]`, of conditions and embeddings
        `[batch, blocks, config.hidden_size]`."""
        raise NotImplementedError(f"A {type(self).__name__} has no `_begin`.")

    def _between(self, index: int, hidden: torch.Tensor) -> torch.Tensor:
        """What layer `index` reads of what the one before it returned."""
        return hidden

    def next_condition(self, states: torch.Tensor) -> torch.Tensor:
        """What a later block is conditioned on, of states `[..., config.hidden_size]`."""
        return states

    # Blocks

    def run(
        self,
        condition: torch.Tensor,
        embeds: torch.Tensor,
        positions: torch.Tensor,
        keys_values: Sequence[ContextLayer],
        mask: torch.Tensor | None,
        of_last: bool = False,
    ) -> torch.Tensor:
        """Blocks, one pass.

        Args:
            condition: `[batch, blocks, config.hidden_size]`.
            embeds: `[batch, blocks, config.target_hidden_size]`, of the tokens after.
            positions: `[batch, blocks]`, of their first slots.
            keys_values: For each layer, what adds the keys and values of the blocks to those they see.
            mask: Boolean `[batch, 1, blocks * config.block_size, keys]`, `True` where a slot may look; `None` for
                everywhere.
            of_last: Whether only the last block's states are wanted: of the others the last layer makes no more than
                keys and values.

        Returns:
            `[batch, blocks, config.block_size, config.hidden_size]`, or of one block.
        """
        hidden = self._begin(condition, embeds.to(condition.dtype))
        slots = torch.arange(self.config.block_size, device=positions.device)
        rotary = self.rotary_emb(hidden, (positions.unsqueeze(-1) + slots).flatten(1))
        kind, size = self.config._attn_implementation, self.config.block_size
        seen, before = None if mask is None else attention_mask_for(kind, mask, hidden.dtype), None
        for index, (layer, known) in enumerate(zip(self.layers, keys_values)):
            hidden = self._between(index, hidden)
            if of_last and index == len(self.layers) - 1:
                before, hidden = cast(Any, layer).attention_input(hidden[:, :-size]), hidden[:, -size:]
                seen = None if mask is None else attention_mask_for(kind, mask[:, :, -size:], hidden.dtype)
            hidden = layer(hidden, before, rotary, known, seen)
        return hidden.unflatten(1, (-1, self.config.block_size))

    def embed(self, target: Target, ids: torch.Tensor) -> torch.Tensor:
        """Embeddings of tokens, its own or the target's."""
        if self.config.own_embedding:
            return self.embed_tokens(ids.to(self.device))
        return target.embed(ids).to(self.device)

    # Training

    def forward(
        self,
        residual: torch.Tensor,
        position_ids: torch.Tensor,
        next_embeds: torch.Tensor,
        entries: torch.Tensor,
        later_embeds: torch.Tensor,
        slots: Sequence[int],
        head: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> HeadOutput:
        """First blocks of all entries and, from some of them, blocks that go on from each other.

        Args:
            residual: `[batch, seq, config.num_streams, config.target_hidden_size]`.
            position_ids: `[batch, seq]`, counting from 0 in every packed document.
            next_embeds: `[batch, seq, config.target_hidden_size]`, of the token after each; with `own_embedding` these
                tokens, `[batch, seq]`.
            entries: Which entries go on, `[batch, entries]`.
            later_embeds: Of the token that each later block goes on with,
                `[batch, entries, len(slots), config.target_hidden_size]`; with `own_embedding` these tokens.
            slots: From which slot of the block before it each later block goes on.
            head: The LM head, for what reads logits.

        Returns:
            States for the LM head, `[batch, entries, (1 + len(slots)) * config.block_size, config.hidden_size]`.
        """
        kept = [_Kept() for _ in self.layers]
        mask = entry_mask(position_ids, self.config.block_size)
        next_embeds, later_embeds = (self._embedded(each) for each in (next_embeds, later_embeds))
        first = self.run(self.condition(residual), next_embeds, position_ids + 1, kept, mask)
        rows = torch.arange(len(entries), device=entries.device).unsqueeze(-1)
        blocks, positions = [first[rows, entries]], position_ids.gather(1, entries) + 1
        for level, slot in enumerate(slots):
            positions = positions + (slot + 1 if self.moves else 0)
            mask = later_mask(entries, position_ids, self.config.block_size, slots[: level + 1])
            carried = self.next_condition(blocks[-1][:, :, slot])
            blocks.append(self.run(carried, later_embeds[:, :, level], positions, kept, mask))
        normed = self.norm(torch.cat(blocks, dim=2))
        head = self.lm_head if head is not None and self.config.draft_vocab_size else head
        return HeadOutput(normed, ranks=None if head is None else self._ranks(normed, head))

    def _embedded(self, given: torch.Tensor) -> torch.Tensor:
        return self.embed_tokens(given) if self.config.own_embedding else given

    def _ranks(self, normed: torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor | None:
        """A rank head's logits `[..., 4]` of normed states, if there is one."""
        return None

    # One sequence

    @property
    def _about_drafts(self) -> str:  # type: ignore[override]
        return (
            f" Its {self.config.max_blocks} blocks of {self.config.block_size} have no more: load it with a larger "
            "`max_blocks`."
        )

    def check_target(self, target: Target) -> None:
        """Raise a `ValueError` that names both values if the drafter does not fit `target`. One that reads a target's
        usual layers is told here which these are."""
        if self.config.usual_layers:
            self.config.target_layer_ids = usual_layers(target.config.num_hidden_layers)
        super().check_target(target)

    def check_trainable(self, target: Target) -> None:
        """Raise a `ValueError` if the drafter cannot be trained for `target`: what trains a model looks for this."""
        self.check_target(target)

    def new_context(self) -> EntryContext:
        """An empty context for one sequence."""
        return EntryContext(self.config.num_hidden_layers)

    @torch.no_grad()
    def extend(
        self,
        target: Target,
        context: EntryContext,
        residual: torch.Tensor,
        position_ids: torch.Tensor,
        next_ids: torch.Tensor,
    ) -> None:
        """Take in accepted tokens' entries."""
        size = self.config.block_size
        for start in range(0, residual.shape[1], _ENTRIES_AT_ONCE):
            part = slice(start, start + _ENTRIES_AT_ONCE)
            condition = self.condition(residual[:, part].to(self.device))
            positions = position_ids[:, part].to(self.device) + 1
            new = condition.shape[1] * size
            context.make_room(new, condition, self.config)
            mask = entry_mask(torch.arange(condition.shape[1], device=self.device)[None], size)
            mask = nn.functional.pad(mask, (context.visible(0, 0), 0), value=True)
            layers = [context.layer(index, 0) for index in range(len(self.layers))]
            embeds = self.embed(target, next_ids[:, part])
            states = self.run(condition, embeds, positions, layers, mask, of_last=True)
            context.advance(new)
            context.states, context.position = states[:, -1], positions[:, -1:]

    @torch.no_grad()
    def propose(
        self,
        target: Target,
        context: EntryContext,
        ids: torch.Tensor,
        position_ids: torch.Tensor,
        count: int,
        sampler: DraftSampler,
    ) -> DraftTree:
        """Draft after `ids`, nothing from an empty context."""
        if context.states is None:
            return DraftTree.chain(ids.new_empty(0))
        unrolling = Unrolling(self, target, context)
        try:
            return self._draft(target, unrolling, ids, count, sampler)
        finally:
            unrolling.discard()

    def _draft(
        self, target: Target, unrolling: Unrolling, ids: torch.Tensor, count: int, sampler: DraftSampler
    ) -> DraftTree:
        raise NotImplementedError(f"A {type(self).__name__} has no `_draft`.")

    def logits(self, target: Target, states: torch.Tensor) -> torch.Tensor:
        """Logits `[..., config.vocab_size]` of states `[..., config.hidden_size]`, which are normed here; those that
        cannot be drafted are minus infinity."""
        return self.to_full_vocabulary(self.drafted_logits(target, self.norm(states)))

    def drafted_logits(self, target: Target, normed: torch.Tensor) -> torch.Tensor:
        """Of normed states, `[..., config.draft_vocab_size or config.vocab_size]`."""
        return self.lm_head(normed) if self.config.draft_vocab_size else target.logits(normed)


class Unrolling:
    """The blocks of one round: the last entry's, which is number 0, and those that go on from it.

    Their keys lie behind the context's until [`discard`]. A tree grows by [`branch`], a chain by [`extend_chain`].

    Args:
        drafter: Whose blocks they are.
        target: For its embedding.
        context: Of the sequence.
    """

    def __init__(self, drafter: UnrolledDrafter, target: Target, context: EntryContext) -> None:
        self.drafter, self.target, self.context = drafter, target, context
        self.size = drafter.config.block_size
        self.states = cast(torch.Tensor, context.states)
        self._before = context.visible(0, 0) - self.size  # keys of the entries before the last
        self._written = self.size  # keys of blocks
        self._seen = torch.zeros(1, self.size, dtype=torch.bool, device=drafter.device)  # [blocks, keys of blocks]
        self._moved = self._seen.new_zeros(1, dtype=torch.long)

    def branch(self, blocks: torch.Tensor, slots: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Blocks that go on from others.

        Args:
            blocks: By number, from which, `[new]`.
            slots: From which of their slots, `[new]`.
            tokens: With which tokens, `[new]`.

        Returns:
            Their states, `[new, config.block_size, config.hidden_size]`. Their numbers are the next.
        """
        size, new = self.size, len(tokens)
        known = self._seen.shape[1]
        slot_of = torch.arange(known, device=slots.device)
        sees = self._seen[blocks]
        sees = sees | ((slot_of // size == blocks[:, None]) & (slot_of % size <= slots[:, None]))
        within = torch.ones(size, size, dtype=torch.bool, device=slots.device).tril()
        own = torch.eye(new, dtype=torch.bool, device=slots.device)[:, None, :, None] & within[None, :, None]
        mask = torch.cat([sees.repeat_interleave(size, dim=0), own.flatten(2).flatten(0, 1)], dim=-1)
        mask = nn.functional.pad(mask, (self._before, 0), value=True)[None, None]
        moved = self._moved[blocks] + slots + 1
        states = self._run(self.states[blocks, slots], moved, tokens, mask)
        self.states = torch.cat([self.states, states])
        self._moved = torch.cat([self._moved, moved])
        self._seen = torch.cat([self._seen, sees])
        self._seen = nn.functional.pad(self._seen, (0, new * size))
        return states

    def extend_chain(self, tokens: torch.Tensor) -> torch.Tensor:
        """The block that goes on from the last slot of the last one. It sees all that is there, which nothing has to
        be counted for.

        Args:
            tokens: With which token, `[1]`.

        Returns:
            Its states, `[1, config.block_size, config.hidden_size]`; those of the one before are no longer known.
        """
        mask = None
        if self.size > 1:
            within = torch.ones(self.size, self.size, dtype=torch.bool, device=tokens.device).tril()
            mask = nn.functional.pad(within, (self._before + self._written, 0), value=True)[None, None]
        self._moved = self._moved + self.size
        self.states = self._run(self.states[:, -1], self._moved, tokens, mask)
        return self.states

    def _run(
        self, states: torch.Tensor, moved: torch.Tensor, tokens: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        drafter, context, new = self.drafter, self.context, len(tokens) * self.size
        carried = drafter.next_condition(states)[None]
        positions = context.position + (moved if drafter.moves else 0 * moved)
        context.make_room(new, carried, drafter.config)
        layers = [context.layer(index, 0) for index in range(len(drafter.layers))]
        embeds = drafter.embed(self.target, tokens[None])
        found = drafter.run(carried, embeds, positions, layers, mask)[0]
        context.advance(new)
        self._written += new
        return found

    def discard(self) -> None:
        """Leave the context as it was."""
        self.context.advance(self.size - self._written)


class _Kept:
    """Keys and values of every level so far, in training."""

    def __init__(self) -> None:
        self.parts: list[KeysValues] = []

    def __call__(self, keys: torch.Tensor, values: torch.Tensor) -> KeysValues:
        self.parts.append((keys, values))
        if len(self.parts) == 1:
            return keys, values
        return torch.cat([part[0] for part in self.parts], dim=2), torch.cat([part[1] for part in self.parts], dim=2)


def entry_mask(position_ids: torch.Tensor, size: int) -> torch.Tensor:
    """Who sees whom among the first blocks of all entries, boolean `[batch, 1, seq * size, seq * size]`.

    Args:
        position_ids: `[batch, seq]`, counting from 0 in every packed document.
        size: Slots of a block.
    """
    length, device = position_ids.shape[1], position_ids.device
    at = torch.arange(length, device=device).expand_as(position_ids)
    before = _entries_before(at, position_ids)
    slots = torch.arange(size, device=device)
    own = torch.eye(length, dtype=torch.bool, device=device)[:, None, :, None] & (slots[:, None, None] >= slots)
    return (before[:, :, None, :, None] | own).flatten(3).flatten(1, 2).unsqueeze(1)


def later_mask(entries: torch.Tensor, position_ids: torch.Tensor, size: int, slots: Sequence[int]) -> torch.Tensor:
    """Who sees whom among later blocks that go on from each other, boolean
    `[batch, 1, entries * size, seq * size + len(slots) * entries * size]`: first all first blocks, then the later ones
    level by level, their own last.

    Args:
        entries: Which entries go on, `[batch, entries]`.
        position_ids: `[batch, seq]`, counting from 0 in every packed document.
        size: Slots of a block.
        slots: From which slot of the block before it each level goes on, to their own.
    """
    batch, count, device = *entries.shape, entries.device
    until = [torch.arange(size, device=device) <= slot for slot in slots]
    at_entry = entries.unsqueeze(-1) == torch.arange(position_ids.shape[1], device=device)
    of_first = _entries_before(entries, position_ids).unsqueeze(-1) | (at_entry.unsqueeze(-1) & until[0])
    parts = [of_first.flatten(2).repeat_interleave(size, dim=1)]
    same = torch.eye(count, dtype=torch.bool, device=device)
    for seen in until[1:]:
        of_path = (same.unsqueeze(-1) & seen).flatten(1)
        parts.append(of_path.repeat_interleave(size, dim=0).expand(batch, -1, -1))
    within = torch.ones(size, size, dtype=torch.bool, device=device).tril()
    of_itself = (same[:, None, :, None] & within[None, :, None, :]).flatten(2).flatten(0, 1)
    return torch.cat([*parts, of_itself.expand(batch, -1, -1)], dim=-1).unsqueeze(1)


def _entries_before(entries: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
    """Which entries lie before others in their document, boolean `[batch, entries, seq]`."""
    back = entries.unsqueeze(-1) - torch.arange(position_ids.shape[1], device=entries.device)
    return (back > 0) & (back <= position_ids.gather(1, entries).unsqueeze(-1))


def usual_layers(layers: int) -> list[int]:
    """The layers of a target that EAGLE-3 and SpecBlock read.

    Raises:
        ValueError: If it has too few for them to be three.
    """
    ids = [1, layers // 2 - 1, layers - 4]
    if ids != sorted(set(ids)):
        raise ValueError(
            f"The drafter reads the layers 1, n / 2 - 1 and n - 4, {ids} of this target's {layers}: expected a target "
            "of at least 8 layers, the drafter's own."
        )
    return ids


def fields_of(target: Target) -> dict[str, Any]:
    """What a target suggests of a drafter's configuration: heads and widths as its own, the three layers that EAGLE-3
    and SpecBlock read."""
    own = target.config
    head_dim = min(128, target.head_dim)
    heads = max(1, own.hidden_size // head_dim)
    layers = own.num_hidden_layers
    return {
        "vocab_size": own.vocab_size,
        "hidden_size": own.hidden_size,
        "head_dim": head_dim,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 4 if heads % 4 == 0 else heads,
        "intermediate_size": 3 * own.hidden_size,
        "rms_norm_eps": target.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": target.rope_theta},
        "max_position_embeddings": own.max_position_embeddings,
        "hc_eps": target.hc_eps,
        "target_layer_ids": usual_layers(layers) if layers > 7 else sorted({0, (layers - 1) // 2}),
        "target_hidden_size": own.hidden_size,
        "target_hc_mult": target.streams,
        "target_num_layers": layers,
        "target_model_type": own.model_type,
        "target_name_or_path": target.model.config._name_or_path,
        "target_revision": getattr(target.model.config, "_commit_hash", None) or "",
    }
