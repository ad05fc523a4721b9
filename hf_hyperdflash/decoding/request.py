"""One call of a bound target's `generate` as one value: what it asks for, of which target and drafter, and whether it
can be done."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, cast
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import distributed, nn
from transformers import LogitsProcessorList, PreTrainedModel
from transformers.cache_utils import Cache, StaticLayer, StaticSlidingWindowLayer
from transformers.generation.configuration_utils import GenerationConfig

from ..auto.copies import MAX_KNOWN, KnownStats
from ..auto.policies import MAX_AUTO_NODES, DraftingStats
from ..drafters.adapters import BASE, check_adapter, using
from ..drafters.base import AUTO, Drafter, Observer
from ..drafters.sampling import DraftRequest, DraftSampler
from ..drafters.without_weights.lookup import Lookup, shortened
from ..grammars.processor import grammar_of
from ..targets.caches.name import CACHE
from ..targets.caches.round_cache import layers_with_keys
from ..targets.hooks import OPEN_FORWARDS
from ..targets.registry import check_without_virtual_tokens, is_bound, is_drafter, target_of
from ..targets.target import RewindableCache, Target
from ..trees.tree import DraftTree

# Arguments that ask for another way to generate than our loop. With the first, transformers ignores a drafter. With a
# drafter, transformers would ignore the others. Both say nothing.
_WITHOUT_DRAFTS = "num_beams", "penalty_alpha", "custom_generate"
_INSTEAD_OF_DRAFTS = "prompt_lookup_num_tokens", "use_mtp", "assistant_early_exit", "dola_layers", "is_assistant"
_SHOWN = "output_hidden_states", "output_attentions"  # of which each text of a batch would have another length
_CACHE_STEP = 256  # of static caches' lengths: rounds are compiled anew for each length
MEDIA = "pixel_values", "mm_encoder_outputs", "input_features"  # prefixes of `generate`'s arguments
_MAX_AUTO_DRAFTS = 8  # with `num_assistant_tokens="auto"`, of a drafter that can draft any number
_HARMLESS = "transformers.", __package__.split(".")[0] + "."  # whose hooks and processors keep nothing
CONTEXT = "_hyperdflash_context"  # attribute of a cache: a drafter's context, for the next turn
MOST_NODES = 1024  # of a draft tree: the masks and scores of many more fill any memory


class PairFacts(NamedTuple):
    """What holds of a drafter with one target. It is kept with the target's binding and written into neither's
    configuration: the same drafter may be bound to other targets.

    Attributes:
        layer_ids: The layers of the target whose residual streams the drafter reads.
        vocab_size: The target's when the two were checked. Rows may be added to a bound target's embedding.
        stats: What "auto" knows of their rounds, by `do_sample`, and by the texts' adapters where there are some.
        known_stats: What is known of copies for them, by the same.
    """

    layer_ids: tuple[int, ...]
    vocab_size: int
    stats: dict[object, DraftingStats]
    known_stats: dict[object, KnownStats]


class CheckedPairs(WeakKeyDictionary[Drafter, PairFacts]):
    """The facts of a bound target's pairs, by drafter. A copy of the target has none: its drafters are others.

    Attributes:
        binders: The drafters that have bound the target and not unbound it: it stays bound while there are some.
    """

    def __init__(self) -> None:
        super().__init__()
        self.binders: WeakSet[Drafter] = WeakSet()

    def __deepcopy__(self, memo: dict[int, object]) -> CheckedPairs:
        return CheckedPairs()

    def __reduce__(self) -> tuple[type[CheckedPairs], tuple[()]]:
        return CheckedPairs, ()


@dataclass(frozen=True)
class Pair:
    """A drafter with one target, for one call. Only their `facts` outlive it, and these refer to neither.

    Attributes:
        adapter: Of the drafter's, for a text, or for each that is drafted for; [`~drafters.adapters.BASE`] for none,
            `None` where it has no adapters.
    """

    target: Target
    drafter: Drafter
    facts: PairFacts
    adapter: str | tuple[str, ...] | None = None

    @classmethod
    def checked(cls, target: Target, drafter: Drafter) -> Pair:
        """Return the pair of a target and a drafter.

        Raises:
            ValueError: If they do not fit ([`~drafters.base.Drafter.check_target`]). A bound target that is still as
                it was is not checked again.
        """
        known: CheckedPairs | None = getattr(target.hyperdflash_binding, "pairs", None)
        facts = None if known is None else known.get(drafter)
        if facts is None or facts.vocab_size != target.config.vocab_size:
            drafter.check_target(target)
            facts = PairFacts(tuple(drafter.layers_read(target)), target.config.vocab_size, {}, {})
            if known is not None:
                known[drafter] = facts
        return cls(target, drafter, facts)

    def extend(
        self,
        context: Any,
        residual: torch.Tensor | None,
        position_ids: torch.Tensor,
        next_ids: torch.Tensor,
    ) -> None:
        """Add accepted tokens to the drafter's context ([`~drafters.base.Drafter.extend`]). Of `residual`, which may
        have more layers than it reads, it is handed its own, the first."""
        if residual is not None:
            residual = residual[:, :, : len(self.facts.layer_ids) * self.target.streams]
        with self.adapted():
            self.drafter.extend(self.target, context, cast(torch.Tensor, residual), position_ids, next_ids)

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """Return the drafter's drafts for each text that asks for some.

        They are checked without a wait for the device: ids are read where they are on the host.

        Raises:
            ValueError: If they are not a draft tree of the target's vocabulary for each, naming the drafter's class.
        """
        if not requests:
            return []
        with self.adapted():
            drafted, vocab_size = self.drafter.draft(self.target, requests), self.target.config.vocab_size
        if not isinstance(drafted, (list, tuple)) or len(drafted) != len(requests):
            given = f"{len(drafted)} of them" if isinstance(drafted, (list, tuple)) else f"a {type(drafted).__name__}"
            raise ValueError(
                f"`draft` of the drafter, a {type(self.drafter).__name__}, returned {given}: expected a list of "
                f"{len(requests)} `DraftTree`s, one for each text that it was asked for."
            )
        for request, tree in zip(requests, drafted):
            if wrong := _wrong_with(tree, vocab_size):
                raise ValueError(
                    f"The drafter, a {type(self.drafter).__name__}, drafted {wrong}: expected a `DraftTree` of token "
                    f"ids from 0 to {vocab_size - 1}, each with the distribution `[{vocab_size}]` that it was drawn "
                    "from, or None."
                )
            if (depth := max(tree.depths, default=0)) > request.num_drafts:
                raise ValueError(
                    f"The drafter made {depth} drafts, one after the other, expected at most {request.num_drafts}, as "
                    "it was asked for."
                )
        return list(drafted)

    def scores_are_finite(self, request: DraftRequest) -> bool:
        """Return whether the drafter's scores of the next draft are finite. It is asked for one draft, and none is
        drawn."""
        admission = _AdmitsNone()
        sampler = DraftSampler(LogitsProcessorList(), do_sample=False, chain_admission=admission)
        with self.adapted():
            self.drafter.draft(self.target, [request._replace(sampler=sampler)])
        return admission.are_finite

    def adapted(self) -> AbstractContextManager[None]:
        """Let the drafter's forwards use the adapter inside the `with`."""
        return nullcontext() if self.adapter is None else using(self.adapter)


def draft_by_adapter(pairs: Sequence[Pair], requests: Sequence[DraftRequest]) -> list[DraftTree]:
    """Return the drafts for each text, made together where one pass can have the adapters of all."""
    adapters = [pair.adapter for pair in pairs]
    kinds = list(dict.fromkeys(adapters))
    if len(kinds) < 2:
        return pairs[0].draft(requests) if pairs else []
    # A drafter leaves out a text of whose context nothing is known.
    if getattr(pairs[0].drafter, "rows_are_texts", False) and all(each.context.end for each in requests):
        return replace(pairs[0], adapter=tuple(map(str, adapters))).draft(requests)
    drafted: dict[int, DraftTree] = {}
    for adapter in kinds:
        own = [index for index, known in enumerate(adapters) if known == adapter]
        drafted.update(zip(own, pairs[own[0]].draft([requests[index] for index in own])))
    return [drafted[index] for index in range(len(requests))]


class Request:
    """What one call of a bound target's `generate` asks for. It is made before transformers is entered, and nothing
    changes it: arguments and generation configurations stay the caller's.

    Args:
        model: The bound target.
        arguments: The call's, by name.
        default: The drafter of calls that name none.

    Attributes:
        other_way: The argument that asks for another way to generate than our loop; `None` if none does.
        assistant: A drafter, or transformers' own kind of assistant; `None` for none.
        drafter: The assistant, if it is a drafter.
        cache: The caller's; `None` if he passes none.
        ids: The prompts `[prompts, seq]`; `None` if there are none such.
        rows: How many texts are written.
        tree_budget: The most nodes of a draft tree, `"auto"` for what pays, `None` for chains.
        pair: The target with the drafter. A request without a drafter has no `pair`, `adapters`, `num_drafts` or
            `drafting_stats`.
        adapters: Of the drafter's, for each text, as in [`Pair`].
        num_drafts: The most drafts of a round, one after the other.
        drafting_stats: What "auto" knows of the pair, to draft what saves time; `None` to draft what is asked for.
        lookup: Whether to copy what followed the last tokens where they occurred before: of the text itself, and of a
            [`~drafters.without_weights.lookup.Lookup`].
        known_stats: What is known of such copies; `None` without.

    Raises:
        ValueError: If the drafter does not fit the target, or cannot draft as much as is asked for.
    """

    def __init__(self, model: PreTrainedModel, arguments: dict[str, Any], default: Drafter | None = None) -> None:
        self.model, self.arguments, self.target = model, arguments, target_of(model)
        given = arguments.get("generation_config"), model.generation_config
        self._configs: list[Any] = [config for config in given if config is not None]
        ways = {name: self.setting(name) for name in (*_WITHOUT_DRAFTS, *_INSTEAD_OF_DRAFTS)}
        ways["num_beams"] = (ways["num_beams"] or 1) > 1
        self.other_way = next((name for name, value in ways.items() if value), None)
        self.assistant: Any = arguments.get("assistant_model", None if self.other_way else default)
        self.drafter: Drafter | None = self.assistant if is_drafter(self.assistant) else None
        self.cache: Any = arguments.get(CACHE)
        ids = arguments.get("inputs")
        ids = arguments.get("input_ids") if ids is None else ids
        self.ids = ids if isinstance(ids, torch.Tensor) and ids.ndim == 2 else None
        texts = self.setting("num_return_sequences")
        # Without a prompt, transformers starts one with the target's first token.
        self.rows = (texts if type(texts) is int else 1) * (1 if self.ids is None else len(self.ids))
        self.tree_budget: int | Literal["auto"] | None = self.setting("tree_budget")
        processors = checked_processors(arguments.get("logits_processor"))
        self._grammars = [grammar for each in processors if (grammar := grammar_of(each)) is not None]
        lookup = self.setting("lookup")
        if not isinstance(lookup, (bool, Lookup, type(None))):
            raise ValueError(
                f"`lookup` is {shortened(lookup)}, expected True, False or a `Lookup`: for texts to copy from pass "
                "`Lookup(documents=[...])` with the token ids of each."
            )
        self.lookup: bool | Lookup = lookup or False
        if self.drafter is not None:
            self.pair, count = Pair.checked(self.target, self.drafter), self._num_assistant_tokens(self.drafter)
            max_drafts = self.drafter.max_draft_tokens or _MAX_AUTO_DRAFTS
            self.num_drafts = max_drafts if count == AUTO else cast(int, count)
            self.adapters = self._adapters(self.drafter)
            self.drafting_stats: DraftingStats | None = None
            own = sorted({adapter for adapter in self.adapters if adapter is not None})
            draws, facts = bool(self.setting("do_sample")), self.pair.facts
            kind = (draws, *own) if own else draws
            if AUTO in (count, self.tree_budget):
                self.drafting_stats = facts.stats.setdefault(kind, DraftingStats())
                # Not beside a fixed number of nodes, which every round has.
                self.lookup = self.tree_budget in (None, AUTO) if lookup is None else lookup
            self.known_stats = facts.known_stats.setdefault(kind, KnownStats()) if self.lookup else None

    @property
    def max_known(self) -> int:
        """The most drafts of a round that are known without the drafter, one after the other."""
        return MAX_KNOWN if self.lookup or self._grammars else 0

    def setting(self, name: str) -> Any:
        """Return what an argument, or else a generation configuration, the caller's before the target's, says."""
        said = [self.arguments.get(name), *(getattr(config, name, None) for config in self._configs)]
        return next((value for value in said if value is not None), None)

    def _num_assistant_tokens(self, drafter: Drafter) -> int | str:
        """Return `num_assistant_tokens`, or else the drafter's own number."""
        found = self.arguments.get("num_assistant_tokens")
        for config in self._configs:
            # Pipelines let transformers fill in all of its defaults. Then its 20 drafts are nobody's wish.
            defaults = config._get_default_generation_params()
            is_filled = all(getattr(config, key, None) is not None for key in defaults if defaults[key] is not None)
            is_default = is_filled and config.num_assistant_tokens == defaults.get("num_assistant_tokens")
            found = config.num_assistant_tokens if found is None and not is_default else found
        return drafter.num_draft_tokens if found is None else drafter.check_num_draft_tokens(found)

    def _adapters(self, drafter: Drafter) -> list[str | None]:
        """Return the adapter of each text: what `adapter` says, for each prompt or for all. A call that does not say
        takes the one that its cache's text has, or else the one that is set."""
        known, stored = getattr(drafter, "adapters", ()), getattr(self.cache, CONTEXT, None)
        given: Any = self.arguments.get("adapter")
        if "adapter" not in self.arguments and known:
            kept = stored.adapter if stored is not None and stored.drafter() is drafter else None
            given = next(iter(cast(Any, drafter).active_adapters()), None)
            given = kept if kept in (*known, BASE) else given
        prompts = 1 if self.ids is None else len(self.ids)
        each = list(given) if isinstance(given, (list, tuple)) else [given] * prompts
        if len(each) != prompts:
            raise ValueError(
                f"`adapter` has {len(each)} names for {prompts} prompt{'s' * (prompts != 1)}, expected one name, or "
                "None, for each: pass so many, or one name for all."
            )
        for name in each:
            if name not in (None, BASE):
                check_adapter(drafter, name)
        names = [(name or BASE) if known else None for name in each]
        return [names[row * prompts // self.rows] for row in range(self.rows)]

    # Before transformers is entered

    def check(self) -> None:
        """Raise a `ValueError` if the call asks for what cannot be done."""
        assistant, cache = self.assistant, self.cache
        if assistant is not None and not hasattr(assistant, "config") and "custom_generate" not in self.arguments:
            raise ValueError(
                f"`assistant_model` is {assistant!r}, expected a drafter: load it with `hf_hyperdflash.load_drafter` "
                "first."
            )
        check_tree_budget(self.tree_budget)
        self._check_lookup()
        for grammar in self._grammars:
            grammar.check(1 if self.ids is None else len(self.ids), self.target.config.vocab_size)
        if cache is not None:
            check_layers_agree(self.target, cache)
        if self.other_way in _WITHOUT_DRAFTS or (assistant is None and self.other_way in (None, "dola_layers")):
            return
        check_without_virtual_tokens(self.model)
        implementation = self.setting("cache_implementation")
        fitting = ["dynamic", "offloaded", *(["static"] if self.target.tree_verification == "mask" else [])]
        if implementation not in (None, "hybrid", *fitting):  # of "hybrid" transformers makes None
            raise ValueError(
                f"`cache_implementation` is {implementation!r}, but assisted generation has to rewind its cache, that "
                f"of a {self.target.config.model_type} target: leave it out, or use one of {fitting}."
            )
        if self.drafter is not None:
            self._check_drafting()
            if self.rows > 1:
                self._check_several_texts()
        elif self.other_way != "is_assistant":  # whose cache is transformers' own, and filled between its calls
            self._check_assistant()

    def _check_lookup(self) -> None:
        lookup = self.lookup
        if lookup and self.drafter is None:
            raise ValueError(
                f"`lookup` is {lookup!r}, but there is no drafter whose drafts it could join: pass `assistant_model`, "
                "for example a `PromptLookupDrafter`, or leave it out."
            )
        if isinstance(lookup, Lookup):
            lookup.check_vocabulary(self.target.config.vocab_size)

    def _check_drafting(self) -> None:
        if self.setting("use_cache") is False:
            raise ValueError("Assisted generation needs a cache: leave `use_cache` at True.")
        if self.other_way in _INSTEAD_OF_DRAFTS:
            raise ValueError(
                f"`{self.other_way}` is {self.setting(self.other_way)!r} beside a drafter, expected one of the two: "
                "leave it or `assistant_model` out."
            )
        count = self.setting("num_return_sequences")
        if count is not None and (type(count) is not int or count < 1):
            raise ValueError(f"`num_return_sequences` is {count!r}, expected a whole number of texts, at least 1.")
        if count is not None and count > 1 and not self.setting("do_sample"):
            raise ValueError(
                f"`num_return_sequences` is {count} and `do_sample` False: greedy texts of one prompt are all the "
                "same. Set `do_sample=True`, or leave `num_return_sequences` out."
            )
        chunk = self.setting("prefill_chunk_size")
        if chunk is not None and (type(chunk) is not int or chunk < 1):
            raise ValueError(
                f"`prefill_chunk_size` is {chunk!r}, expected a whole number of tokens, at least 1, or None for the "
                "prompt in one piece."
            )
        if (weight := self.setting("assistant_ensemble_weight")) is not None:
            raise ValueError(
                f"`assistant_ensemble_weight` is {weight}, expected None: HyperDFlash is lossless, it does not mix "
                "the drafter's distribution into the target's."
            )

        given, ids, cache = self.arguments, self.ids, self.cache
        if given.get("inputs_embeds") is not None:
            raise ValueError("HyperDFlash drafts from token ids: pass `input_ids`, not `inputs_embeds`.")
        is_media = {name: isinstance(value, torch.Tensor) or bool(value) for name, value in given.items()
                    if name.startswith(MEDIA)}  # fmt: skip
        if media := [name for name, is_given in is_media.items() if is_given]:
            raise ValueError(f"HyperDFlash drafts text only: leave {media} out, or pass `assistant_model=None`.")
        if ids is None:
            return
        length, mask, positions = ids.shape[1], cast(Any, given.get("attention_mask")), given.get("position_ids")
        if length == 0:
            raise ValueError(
                f"The prompt is empty: `input_ids` has the shape {list(ids.shape)}, expected at least one token in "
                "it. Pass a text, or the tokenizer's first token."
            )
        cached = 0 if cache is None else int(cache.get_seq_length())
        # transformers takes masks and positions of other shapes than the prompts'.
        has_mask = isinstance(mask, torch.Tensor) and mask.ndim == 2
        whole = mask.shape[1] if has_mask else length
        is_new_turn = cached and whole > length  # without what is in the cache, which is refused below
        if has_mask and (len(mask) != len(ids) or not (whole == length or is_new_turn)):
            raise ValueError(
                f"`attention_mask` has the shape {list(mask.shape)} and `input_ids` {list(ids.shape)}, expected a "
                "column for each token, what is in the cache included: pass the tokenizer's own mask, or leave it "
                "out."
            )
        new = length - cached
        if isinstance(positions, torch.Tensor) and not new <= positions.shape[-1] <= length:
            raise ValueError(
                f"`position_ids` has the shape {list(positions.shape)}, expected one for each of the {new} tokens "
                "that are not in the cache: pass so many, or leave it out."
            )
        keys = [getattr(layer, "keys", None) for layer in getattr(cache, "layers", ())]
        texts = max((len(own) for own in keys if own is not None), default=1)
        if texts > 1 and self.rows == 1:
            raise ValueError(
                f"`{CACHE}` holds {texts} texts and `input_ids` one: expected the cache of that text alone. Keep it "
                f"with `{CACHE}.batch_select_indices`."
            )
        if cached and (whole != length or length <= cached):
            raise ValueError(
                f"`{CACHE}` holds {cached} tokens and `input_ids` {length}: expected the whole sequence, what is "
                "in the cache and at least one new token. Concatenate the earlier output and the new turn."
            )

    def _check_several_texts(self) -> None:
        texts = f"{self.rows} texts"
        if self.cache is not None:
            raise ValueError(
                f"`{CACHE}` was passed for {texts}, which differ in length after drafts: pass the whole texts "
                "without it, or continue one text at a time."
            )
        if self.arguments.get("streamer") is not None:
            raise ValueError(
                f"`streamer` was passed for {texts}, and it streams one: leave it out, or pass one prompt."
            )
        if shown := [name for name in _SHOWN if self.setting(name)]:
            raise ValueError(
                f"`{shown[0]}` was asked for of {texts}, each in rounds of its own: pass one prompt for it."
            )
        mask = self.arguments.get("attention_mask")
        if mask is not None and not bool(mask[:, -1].all()):
            row = int(mask[:, -1].long().argmin())
            raise ValueError(
                f"`attention_mask` ends in padding in row {row}, expected it on the left: set "
                "`tokenizer.padding_side` to 'left'."
            )

    def _check_assistant(self) -> None:
        """Check that transformers' own loop does not go wrong with its assistant."""
        if getattr(self.assistant, "_is_stateful", False):
            raise ValueError(
                f"The assistant, a {type(self.assistant).__name__}, cannot rewind its cache. Call "
                "`hf_hyperdflash.bind(assistant_model)` first."
            )
        if is_bound(self.assistant) and target_of(self.assistant).has_running_state:
            raise ValueError(
                f"The assistant, a {type(self.assistant).__name__}, has linear attention, which can take back the "
                "last forward only, and an assistant runs several. Use a HyperDFlash drafter, or an assistant without "
                "linear attention."
            )
        if self.cache is not None and self.cache.get_seq_length() > 0:
            raise ValueError(
                "transformers' own assisted decoding would feed the prompt again on top of the "
                f"{self.cache.get_seq_length()} tokens in `{CACHE}`. Leave `{CACHE}` out, or use a HyperDFlash "
                "drafter, which continues correctly."
            )

    # Once transformers has prepared it

    def check_prepared(self, input_ids: torch.Tensor, synced_gpus: bool) -> None:
        """Raise a `ValueError` if our loop was given other texts than asked for, or cannot run on these ranks."""
        if len(input_ids) != self.rows:
            raise ValueError(
                f"Our loop was given {len(input_ids)} texts, expected {self.rows}: call `target.generate`, with a row "
                "of `input_ids` for each prompt."
            )
        if synced_gpus:
            raise ValueError(
                "`synced_gpus=True` is not supported with a HyperDFlash drafter: ranks that finish early would wait "
                "for forwards that never come. Gather the target's parameters (or use tensor parallelism) for "
                "generation."
            )

    def prepare_cache(self, cache: Cache, config: GenerationConfig) -> None:
        """Make a cache one that drafts can be taken back from.

        Raises:
            ValueError: If rounds cannot run on it.
        """
        if not is_static_attention_cache(cache):
            self.target.make_rewindable(cache, max(self.num_drafts, self.max_known))
            check_croppable(cache)
            return
        if self.target.tree_verification != "mask":
            raise ValueError(
                f"`{CACHE}` is a {type(cache).__name__}, in which drafts of a {self.target.config.model_type} target "
                "are not verified: leave it out, or pass a `DynamicCache(config=model.config)`."
            )
        if config.output_attentions:
            raise ValueError(
                "`output_attentions` was asked for over a static cache, in whose order of keys nobody could read "
                "them: leave `cache_implementation` out."
            )
        lengths = (layer.max_cache_len for layer in cache.layers if type(layer) is StaticLayer)
        length = min(lengths, default=config.max_length)
        if length < config.max_length - 1:
            raise ValueError(
                f"`{CACHE}` has room for {length} tokens, and the text may have {config.max_length}: expected at "
                f"least {config.max_length - 1}. Pass `max_cache_len={config.max_length - 1}`, or a smaller "
                "`max_new_tokens`."
            )

    def static_cache_length(self, config: GenerationConfig, length: int) -> int:
        """Return how long a static cache must be for a text of `length`: its last round needs columns behind it."""
        length = max(length, getattr(config, "max_cache_len", None) or 0)
        counts = MAX_AUTO_NODES, config.num_assistant_tokens, self.tree_budget
        positions = 1 + max(count for count in counts if isinstance(count, int))
        return math.ceil((length + positions) / _CACHE_STEP) * _CACHE_STEP

    def can_use_inference_mode(self, observer: Observer | None, called: Iterable[object]) -> bool:
        """Return whether nobody gets hold of what the rounds of a text compute, so that they run in torch's inference
        mode.

        Every operation is cheaper in it than in `no_grad`: a round of a small target takes some 7 % less. But autograd
        cannot use what it computes afterwards. A caller gets hold of that who asks for scores, or passes the
        cache, or a processor or criterion (`called`) that may keep what it is asked about. So does an observer.
        """
        return not (
            self.setting("return_dict_in_generate")
            or self.cache is not None
            or (observer is not None and observer.hears_rounds)
            or not all(type(each).__module__.startswith(_HARMLESS) for each in called)
            or not self._is_plain
        )

    @cached_property
    def _is_plain(self) -> bool:
        """Whether target and drafter keep nothing of a forward. Remote code may, and so do others' hooks, and what
        spreads weights over processes, or has tensors of its own for them."""
        if not type(self.model).__module__.startswith("transformers."):
            return False
        if distributed.is_available() and distributed.is_initialized():
            return False
        for model in (self.model, self.drafter):
            for module in model.modules() if isinstance(model, nn.Module) else ():
                if any(type(weight) not in (nn.Parameter, type(None)) for weight in module._parameters.values()):
                    return False
                for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
                    function = getattr(hook, "func", hook)  # of a partial
                    if not (getattr(function, "__module__", None) or "").startswith(_HARMLESS):
                        return False
        return True


def checked_processors(processors: Any) -> list[Any]:
    """Return a call's `logits_processor` as a list.

    Raises:
        ValueError: If it is none, or one of it cannot be called.
    """
    if processors is not None and not isinstance(processors, (list, tuple)):
        raise ValueError(
            f"`logits_processor` is a {type(processors).__name__}, expected a list of processors: pass it in one."
        )
    for number, each in enumerate(processors or ()):
        if isinstance(each, type) or not callable(each):
            given = f"the class {each.__name__}" if isinstance(each, type) else f"a {type(each).__name__}"
            raise ValueError(
                f"`logits_processor[{number}]` is {given}, expected a processor: pass a grammar as "
                "`[GrammarProcessor(grammar)]`."
            )
    return list(processors or ())


def check_tree_budget(budget: object) -> None:
    """Raise a `ValueError` unless a draft tree can have so many nodes, or `budget` is `"auto"` or `None`."""
    if budget not in (None, AUTO) and (type(budget) is not int or not 1 <= budget <= MOST_NODES):
        raise ValueError(
            f"`tree_budget` is {budget!r}, expected the most nodes of a draft tree, a whole number from 1 to "
            f"{MOST_NODES}, 'auto' for what pays, or None for one chain of drafts."
        )


def check_layers_agree(target: Target, cache: Cache) -> None:
    """Raise a `ValueError` if the layers of a target's cache hold different tokens: with it, other text would
    follow."""
    lengths = target.cached_lengths(cache)
    if len(lengths) > 1 or getattr(cache, OPEN_FORWARDS, False):
        raise ValueError(
            f"`{CACHE}` was interrupted inside a forward or while drafts were taken back: its layers hold "
            f"different tokens (of lengths {sorted(lengths)}), expected the same text in all. Start from a new cache."
        )
    for index, layer in enumerate(getattr(cache, "layers", ())):
        window, keys = getattr(layer, "sliding_window", None), getattr(layer, "keys", None)
        if window is None or keys is None:
            continue
        held, needed = keys.shape[-2] if keys.ndim == 4 else 0, min(int(layer.get_seq_length()), window - 1)
        if held < needed:
            raise ValueError(
                f"`{CACHE}` holds {held} keys of its layer {index}, expected the last {needed}: a `crop` of "
                "tokens that were not recorded lost the others. Start from a new cache."
            )


def is_static_attention_cache(cache: object) -> bool:
    """Return whether a cache is one of transformers' static ones whose layers are all of attention."""
    known = StaticLayer, StaticSlidingWindowLayer
    layers = layers_with_keys(cache)
    return bool(layers) and all(type(layer) in known for layer in layers)


def check_croppable(cache: object) -> RewindableCache:
    """Return a cache that drafts can be taken back from.

    Raises:
        ValueError: If it cannot.
    """
    if not (is_static_attention_cache(cache) or getattr(cache, "is_croppable", False)):
        raise ValueError(
            f"Assisted generation cannot rewind a {type(cache).__name__}: leave `cache_implementation` out. A cache "
            "of remote code needs `is_croppable = True` and a `crop(-n)` that takes back the last n tokens."
        )
    return cast(RewindableCache, cache)


class _AdmitsNone:
    """Admits no draft, and remembers whether what the drafter says of it is finite."""

    are_finite = True

    def is_open(self) -> bool:
        return True

    def admits(self, signal: float) -> bool:
        self.are_finite &= math.isfinite(signal)
        return False


def _wrong_with(tree: Any, vocab_size: int) -> str:
    """Return what of a tree cannot be verified, in words; empty if nothing."""
    # By its attributes: a copy of this code has a class of its own.
    names = "tokens", "parents", "q", "depths"
    if not (isinstance(tree, DraftTree) or all(hasattr(tree, name) for name in names)):
        return "None" if tree is None else f"a {type(tree).__name__}"
    tokens = tree.tokens
    if tokens.is_meta or tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
        return f"tokens of {tokens.dtype} on {tokens.device}"
    if tokens.device.type == "cpu":  # elsewhere to read them would be to wait
        outside = next((token for token in tokens.tolist() if not 0 <= token < vocab_size), None)
        if outside is not None:
            return f"the token {outside}"
    for q in tree.q or ():
        if q is not None and not (isinstance(q, torch.Tensor) and q.shape == (vocab_size,) and q.is_floating_point()):
            given = f"{q.dtype} {list(q.shape)}" if isinstance(q, torch.Tensor) else type(q).__name__
            return f"a distribution that is {given}"
    return ""
