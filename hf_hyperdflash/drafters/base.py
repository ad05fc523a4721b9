"""The base class of drafters: the few methods that the loop calls, and what all drafters have in common."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, cast
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from ..targets.compiled import CompiledForwards
from ..targets.target import Target
from ..targets.vocabulary import check_vocabulary
from ..trees.tree import DraftTree
from ..upper import upper
from .sampling import Context, DraftRequest

if TYPE_CHECKING:
    from ..decoding.stats import SpeculationStats

AUTO: Final = "auto"  # `num_assistant_tokens`, `tree_budget`: what pays for itself


class _LastStats(threading.local):
    """The statistics of this thread's last generation with each drafter; gone with the thread."""

    def __init__(self) -> None:
        self.by_drafter: WeakKeyDictionary[Drafter, SpeculationStats | None] = WeakKeyDictionary()


_last_stats = _LastStats()


class Observer:
    """Hears of the sequences that are generated with a drafter, whose `observer` it is: to learn from them, or to
    measure. A subclass has the methods that it needs.

    Attributes:
        target_layer_ids: Whose residual streams it is given with accepted tokens, the drafter's first; `None` for the
            drafter's alone.
    """

    target_layer_ids: Sequence[int] | None = None

    def begin(self, target: PreTrainedModel, do_sample: bool) -> Observer | None:
        """Return who hears of the sequence that begins; `None` for nobody."""
        return self

    def add_tokens(
        self, residual: torch.Tensor, position_ids: torch.Tensor, next_ids: torch.Tensor, is_written: bool
    ) -> None:
        """Hear of accepted tokens with their residual, as the drafter does ([`Drafter.extend`]).

        Args:
            residual: `[1, new, streams, config.hidden_size]` of `target_layer_ids`.
            position_ids: True positions, `[1, new]`.
            next_ids: The token that follows each, `[1, new]`.
            is_written: Whether the target wrote them; else they belong to the prompt.
        """

    def add_round(self, context: Context, tree: DraftTree, logits: torch.Tensor, accepted: list[int]) -> None:
        """Hear what the target said about a round. With an observer that has this method no round runs in inference
        mode, in which nothing can be kept to learn from ([`~decoding.request.Request`]).

        Args:
            context: The drafter's, of the sequence.
            tree: What was drafted.
            logits: The target's, after the anchor and after each node, `[nodes + 1, config.vocab_size]`, float32.
            accepted: Nodes from the anchor on.
        """

    def end(self, stats: SpeculationStats) -> None:
        """Hear that the sequence has ended."""

    @property
    def hears_rounds(self) -> bool:
        """Whether it may keep what it is told of a round."""
        return getattr(self.add_round, "__func__", None) is not Observer.add_round


class Drafter:
    """Drafts for a target: `drafter.bind(target)` once, then `target.generate(**inputs, assistant_model=drafter)`.

    A drafter is a subclass with [`draft`]. One that reads the target has `target_layer_ids`, [`extend`], and
    [`new_context`] for what it keeps of a sequence; one with a check of its own [`check_target`]. Several threads may
    draft with one: everything that belongs to a sequence is in its context.

    Attributes:
        config: The drafter's own, or the target's: `generate` compares vocabularies.
        target_layer_ids: The layers whose residual streams it reads, as in [`~targets.registry.capture_residual`];
            empty for none.
        reads_each_token: Whether it reads the residual streams of every accepted token, and not of the last one alone.
        max_draft_tokens: The most tokens that one round can draft; `None` for any number.
        observer: Hears of what is generated with it, while it learns for example ([`adapt`]); `None` for nobody.
    """

    config: PreTrainedConfig
    target_layer_ids: Sequence[int] = ()
    reads_each_token: bool = True
    max_draft_tokens: int | None = None
    observer: Observer | None = None

    # The four methods of a drafter: each has `draft`, and those of the other three that it needs

    def check_target(self, target: Target) -> None:
        """Raise a `ValueError` that names both values if the drafter does not fit `target`: if its layers cannot be
        read, token ids do not mean the same, or sizes differ ([`target_sizes`]). A subclass with a check of its own
        calls this one, too. A check changes neither: the drafter may be bound to other targets."""
        layer_ids = self.layers_read(target)  # raises where a target has too few layers to choose from
        name, kind = (getattr(self.config, f"target_{what}", "") for what in ("name_or_path", "model_type"))
        whose = f", {name}" if name else f", a {kind} model" if kind else ""
        make = f" `{type(self).__name__}.from_target(target)` makes one," if hasattr(self, "from_target") else ""
        fix = (
            f"Load the drafter's own target{whose}, or a drafter of this one:{make} `hf-hyperdflash drafters TARGET` "
            "lists the published ones."
        )
        check_vocabulary(self.config, target, fix)
        found = {"hidden_size": target.config.hidden_size, "hc_mult": target.streams}
        for what, size in self.target_sizes().items():
            if size != found[what]:
                raise ValueError(
                    f"The drafter was made for a target with `{what}` {size}, but this target's is {found[what]}. "
                    + fix
                )
        target.check_layers(layer_ids, self.reads_each_token)

    def new_context(self) -> Context:
        """Return the context of a new sequence. It has an attribute `end`, 0 at first, in which the loop counts the
        tokens that [`extend`] has added. One with a `window` gets no more than so many of a prompt's tokens, the last
        ones: the residual of others is not kept."""
        return EmptyContext()

    def extend(
        self,
        target: Target,
        context: Any,
        residual: torch.Tensor,
        position_ids: torch.Tensor,
        next_ids: torch.Tensor,
    ) -> None:
        """Add accepted tokens to a context; it is called for every drafter, also for one that reads no layer.

        The first token of a text follows no other, so that only [`~drafters.sampling.DraftRequest.ids`] have it.

        Args:
            target: The target, for its embedding.
            context: The sequence's, which is changed.
            residual: `[1, new, streams, config.hidden_size]` of `target_layer_ids`, `None` if they are empty.
            position_ids: The tokens' true positions, `[1, new]`.
            next_ids: The token that follows each, `[1, new]`.
        """

    def draft(self, target: Target, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """Return a draft tree for each text, at most as deep as it asks for; the contexts stay as they were.

        A drafter that was written for one text at a time may have `propose(target, context, ids, position_ids,
        num_drafts, sampler)` instead: it is asked for one after the other.

        Args:
            target: The target, for its embedding and LM head.
            requests: One for each text, of which none asks for nothing. All are of one kind, chains or trees of the
                same budget, drawn or not; who admits the drafts of a chain one by one has one text alone.
        """
        propose = getattr(self, "propose", None)
        if propose is None:
            raise NotImplementedError(f"A {type(self).__name__} has no `draft`.")
        return [propose(target, *each[:5]) for each in requests]

    # What a base of drafters may say, too

    def target_sizes(self) -> dict[str, int]:
        """Return the `hidden_size` and the `hc_mult`, the number of residual streams, that a target must have; those
        that do not matter are left out."""
        return {}

    def layers_read(self, target: Target) -> Sequence[int]:
        """Return the layers of a target whose residual streams it reads: `target_layer_ids`, unless a subclass chooses
        them by the target."""
        return self.target_layer_ids

    def compiled_contexts(
        self,
        target: Target,
        contexts: Sequence[Any],
        max_tokens: int,
        max_new: int,
        max_drafts: int,
        compiled: CompiledForwards,
    ) -> Sequence[Context]:
        """Let passes over a batch's contexts run compiled until their `compiled` is `None`. Return these contexts;
        none where a drafter has none such.

        Args:
            target: The target.
            contexts: Of each text, after the prompt.
            max_tokens: The most tokens that a text may have.
            max_new: The most tokens that a round adds to it.
            max_drafts: The most nodes of a round's tree, or drafts of its chain.
            compiled: Calls functions compiled, `compiled(function, *arguments)`.
        """
        return []

    # Use with a target

    def bind(self, target: PreTrainedModel, as_default: bool = False) -> bool:
        """Check that the drafter fits `target` and prepare that one instance for assisted generation.

        Afterwards `target.generate(**inputs, assistant_model=drafter)` drafts with it, `num_assistant_tokens` a round.
        With `tree_budget` a round is a draft tree of at most that many nodes, 1024 at most, and of that depth. With
        more nodes, more tokens are accepted a round, and the round takes longer: each node needs more experts of a
        mixture of experts, and next to nothing of a dense target, which waits for its weights.

        Either may be `"auto"`: as many drafts or nodes as save time, and none where none do. The time and the tokens
        of rounds are measured during generation, on this machine and for these texts, and remembered until the target
        is unbound. Random draws then depend on time, too: pass numbers where a seed must give the same text again.

        Only that instance changes: its class becomes a subclass, and its layers get hooks that do nothing outside our
        forwards. [`unbind`] undoes both.

        Args:
            target: The target.
            as_default: Whether `target.generate` drafts with it where no `assistant_model` is passed, until the target
                is unbound or gets another default: for tools that call `generate` themselves. A call with
                `assistant_model=None` then generates without drafts, and a call for another way (beams, prompt
                lookup, `custom_generate`) goes that way.

        Returns:
            Whether this drafter was not bound to the target before.

        Raises:
            ValueError: If drafter and target do not fit, naming both values.
        """
        return upper("bind_with")(target, self, as_default)

    def unbind(self, target: PreTrainedModel) -> None:
        """Undo [`bind`]. When the last drafter that has bound `target` unbinds it, `target` gets its own class back;
        `hf_hyperdflash.unbind(target)` gives it back at once."""
        upper("unbind_from")(target, self)

    def generate(self, *args: object, **kwargs: object) -> None:
        """Raise an error: a drafter does not generate, but a target that is not bound calls this.

        Raises:
            ValueError: Always, with the calls to use instead.
        """
        raise ValueError(
            "A HyperDFlash drafter works only through a target that is bound to it. Call `drafter.bind(target)` "
            "once, then `target.generate(**inputs, assistant_model=drafter)`."
        )

    def adapt(self, target: PreTrainedModel, **options: Any) -> Any:
        """Learn while serving: from now on, or inside a `with`, between generations with `target`.

        Every verification shows what the target would have written, at no cost. So the drafter follows when the kind
        of text changes, or when the target was fine-tuned. The text stays the target's own. It is off by default: an
        update takes time at the end of a request, and memory for three times the drafter's parameters in float32. See
        [`~training.adaptation.learner.AdaptationConfig`].

        Args:
            target: The target that it serves.
            **options: Fields of [`~training.adaptation.learner.AdaptationConfig`].

        Returns:
            An [`~training.adaptation.adapt.Adaptation`], with `stop()`, `reset()` to the weights that the drafter
            came with, and `log`, the decision after each request. [`save_pretrained`] saves the drafter as it is at
            that time.

        Raises:
            ValueError: If the drafter cannot learn, or there is no such option.
        """
        return upper("adapt")(self, target, **options)

    _supports_logits_to_keep = generate  # which transformers asks an assistant before that

    @property
    def num_draft_tokens(self) -> int | str:
        """The number of tokens drafted per round where `generate` gets no `num_assistant_tokens`; `"auto"` for as many
        as save time. Set it to `None` for the drafter's default: the most that it can draft, if there is a most."""
        return vars(self).get("_num_draft_tokens") or self.max_draft_tokens or self._usual_drafts

    @num_draft_tokens.setter
    def num_draft_tokens(self, value: int | str | None) -> None:
        vars(self)["_num_draft_tokens"] = None if value is None else self.check_num_draft_tokens(value)

    def check_num_draft_tokens(self, value: int | str) -> int | str:
        """Return `value` if this drafter can draft that many tokens per round, or if it is `"auto"`.

        Raises:
            ValueError: If not.
        """
        maximum, is_count = self.max_draft_tokens, type(value) is int
        if value == AUTO or (is_count and 1 <= cast(int, value) <= (maximum or cast(int, value))):
            return value
        numbers = f"from 1 to {maximum}" if maximum else "of at least 1"
        advice = self._about_drafts if is_count and cast(int, value) > 0 else ""
        if is_count and value == 0:
            advice = " Leave `assistant_model` out for plain generation."
        raise ValueError(
            f"This drafter cannot draft {value!r} tokens a round: expected a whole number {numbers}, or 'auto'."
            + advice
        )

    _about_drafts = ""  # for the message: why there are no more drafts, and what to do for more
    _usual_drafts = 1  # of a drafter that can draft any number

    # Statistics belong to a generation, and this is where a thread finds those of its last one

    @property
    def last_stats(self) -> SpeculationStats | None:
        """The statistics of this thread's last `generate` with the drafter; `None` before the first, and where that
        one could not draft (beams, for example, are transformers' own)."""
        return _last_stats.by_drafter.get(self)

    def _remember(self, stats: SpeculationStats | None) -> None:
        """Make `stats` this thread's last."""
        _last_stats.by_drafter[self] = stats


class EmptyContext:
    """The context of a drafter that keeps nothing of a sequence.

    Attributes:
        end: The number of tokens of the sequence that were added.
    """

    end = 0

    @property
    def keeps_all(self) -> bool:
        """Whether [`crop`] reaches any length: unless a drafter has written something of its own into it."""
        return vars(self).keys() <= {"end"}

    def crop(self, end: int) -> bool:
        """Go back to the first `end` tokens of the sequence; return whether it could."""
        if can_crop := self.end >= end and self.keeps_all:
            self.end = end
        return can_crop
