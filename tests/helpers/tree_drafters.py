"""Drafters of random trees, of which a part is what the target will write."""

from __future__ import annotations

import random
from typing import Any

import torch

from hf_hyperdflash.drafters.base import Drafter
from hf_hyperdflash.trees.tree import DraftTree


class RandomTrees(Drafter):
    """Drafts trees of random shape.

    Args:
        target: Its vocabulary is drafted from.
        texts: `[seq]` each, what the target writes: nodes that follow one of them go on so half of the time.
        seed: Of the shapes and tokens.
        most: Nodes of a tree.
        depth: Of a tree.
        target_layer_ids: Whose residual is asked for; kept in `seen`, position by position.

    Attributes:
        contexts: Of each text, in the order of their making; each has a `seen` of its own.
    """

    def __init__(
        self,
        target: Any,
        texts: list[torch.Tensor],
        seed: int = 0,
        most: int = 12,
        depth: int = 6,
        target_layer_ids: tuple[int, ...] = (-1,),
    ) -> None:
        self.config, self.texts, self.most = target.config, [text.tolist() for text in texts], most
        self.max_draft_tokens, self.target_layer_ids = depth, target_layer_ids
        self.chance, self.seen, self.trees, self.contexts = random.Random(seed), [], [], []

    def new_context(self) -> Any:
        context = super().new_context()
        context.seen = []
        self.contexts.append(context)
        return context

    def extend(self, target: Any, context: Any, residual: Any, position_ids: Any, next_ids: Any) -> None:
        for seen in (self.seen, context.seen):
            seen.append((residual, position_ids, next_ids))

    def propose(self, target: Any, context: Any, ids: Any, position_ids: Any, count: int, sampler: Any) -> DraftTree:
        start, vocabulary = ids.shape[1], target.config.get_text_config(decoder=True).vocab_size
        prefixes: list[list[int]] = [ids[0].tolist()]  # of the anchor and each node
        parents: list[int] = []
        for _ in range(self.chance.randint(1, self.most)):
            parent = self.chance.choice([row for row, prefix in enumerate(prefixes) if len(prefix) < start + count])
            prefix = prefixes[parent]
            right = [
                text[len(prefix)] for text in self.texts if text[: len(prefix)] == prefix and len(text) > len(prefix)
            ]
            siblings = {other[-1] for other in prefixes[1:] if other[:-1] == prefix}
            token = right[0] if right and self.chance.random() < 0.7 else self.chance.randrange(vocabulary)
            if token in siblings:
                continue
            parents.append(parent - 1)
            prefixes.append([*prefix, token])
        tree = DraftTree(torch.tensor([prefix[-1] for prefix in prefixes[1:]], dtype=torch.long), tuple(parents))
        self.trees.append(tree)
        return tree


def is_wide(tree: DraftTree) -> bool:
    """Whether a tree has several paths."""
    return len(tree.paths) > 1


class RandomChains(RandomTrees):
    """Drafts one path of such a tree."""

    def propose(self, *args: Any) -> DraftTree:
        tree = super().propose(*args)
        chain = DraftTree.chain(tree.tokens[tree.paths[-1]] if len(tree) else tree.tokens)
        self.trees[-1] = chain
        return chain
