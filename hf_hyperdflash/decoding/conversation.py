"""A conversation: a text that is generated turn by turn, and the cache that stays between the turns."""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.generation.configuration_utils import GenerationConfig

from ..drafters.base import Drafter
from ..targets.caches.name import CACHE, renamed_cache
from ..targets.caches.snapshots import Snapshot, can_crop, crop, forgets, restore, take_snapshot
from ..targets.hooks import OPEN_FORWARDS
from ..targets.registry import is_bound, is_drafter
from .bind import BoundTarget, bind
from .request import CONTEXT, MEDIA, Pair, Request
from .rounds import TokenBuffer
from .sequence import StoredContext, load_context, note_gap, store_context, tokens_read

# Tokens before a prompt's end at which a cache that forgets is copied. The next prompt often has the text up to here,
# and then something else: a template writes an earlier answer without its reasoning, or without the marks by which a
# prompt asks for none.
_TAIL = 16


class Kept(NamedTuple):
    """What a conversation can go back to.

    Attributes:
        cache: The target's cache.
        stored: A copy of the drafter's context; `None` where the one that is in use can be cropped.
    """

    cache: Snapshot
    stored: StoredContext | None


class Conversation:
    """Generates one text turn by turn, and runs only what is new of each prompt through the target.

    `conversation.generate(**inputs, ...)` takes the arguments of `target.generate` and writes the same text. Each
    prompt is the whole text, as a chat template renders it. What it shares with the text so far, from the start,
    stays in the cache and in the drafter's context; what differs is taken back. So a prompt may repeat the answers,
    leave their reasoning out, have other tool results, or be of another chat.

    Where the cache forgets (sliding windows, linear attention, Mamba, DeepSeek-V4's compressors) it goes back to the
    last copy of those layers before the difference. Copies are made at the border of each turn.

    One thread at a time may use a conversation; any number of conversations may share a target. The target's weights,
    its adapters included, must stay the same.

    Args:
        target: The target. It is bound if it is not.
        drafter: The drafter of calls that pass no `assistant_model`; the target's default if left out.
        max_copies: How many copies of layers that forget are kept at most, spread over the text. Each is as large as
            the windows and running states; none is made where all layers are of full attention.

    Attributes:
        cached_tokens: How many tokens of the last call's prompt were not run again.

    Raises:
        ValueError: If the target cannot be bound, the drafter does not fit it, or `max_copies` is no whole number.
    """

    def __init__(self, target: PreTrainedModel, drafter: Drafter | None = None, max_copies: int = 4) -> None:
        if type(max_copies) is not int or max_copies < 0:
            raise ValueError(f"`max_copies` is {max_copies!r}, expected a whole number of at least 0.")
        if not (drafter is None or is_drafter(drafter)):
            given = repr(drafter) if isinstance(drafter, str) else f"a {type(drafter).__name__}"
            raise ValueError(
                f"`drafter` is {given}, expected a drafter behind the target: load it with `load_drafter` first."
            )
        if drafter is not None:
            drafter.bind(target)
        elif not is_bound(target):
            bind(target)
        self.target, self.drafter, self.max_copies = target, drafter, max_copies
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Forget the text, and free its memory."""
        self.cached_tokens = 0
        self._ids: list[int] = []  # whose beginning is in the cache
        self._cache: Any = None
        self._kept: list[Kept] = []
        self._is_long = False  # longer than where rotary frequencies change

    @property
    def length(self) -> int:
        """The tokens of the text so far."""
        return len(self._ids)

    def shared_tokens(self, input_ids: torch.Tensor) -> int:
        """Return how many of a prompt's tokens `[1, tokens]`, from the first on, are those of the text so far."""
        return _shared(self._ids, input_ids[0].tolist())

    @torch.no_grad()
    def generate(self, inputs: torch.Tensor | None = None, **options: Any) -> Any:
        """Generate as `target.generate` does with the same arguments, without running again what is in the cache.

        Args:
            inputs: The prompt `[1, tokens]`, or `input_ids` among the options: the whole text, without padding.
            **options: Those of `target.generate`.

        Returns:
            What `target.generate` returns.

        Raises:
            ValueError: If there are several texts, padding, or arguments by which a cache would be of another text,
                or another thread is generating with this conversation.
        """
        if not self._lock.acquire(blocking=False):
            raise ValueError(
                "The conversation is generating in another thread, expected one call after the other: make a "
                "`Conversation` for each thread."
            )
        try:
            return self._generate(renamed_cache(options if inputs is None else {"inputs": inputs, **options}))
        finally:
            self._lock.release()

    def _generate(self, options: dict[str, Any]) -> Any:
        bind(self.target)  # if it was unbound meanwhile
        if self.drafter is not None:
            options.setdefault("assistant_model", self.drafter)
        request = self._request(options)
        ids = _checked(request)
        request.check()
        options.setdefault("attention_mask", torch.ones_like(ids))  # a padding token is text here
        text = ids[0].tolist()
        pair = None
        if request.drafter is not None:
            pair = replace(request.pair, adapter=self._request({CACHE: self._cache, **options}).adapters[0])
        # A drafter that reads no layer learns a text from its tokens, whenever it is asked.
        branch = self._go_back(text, pair if pair is not None and pair.facts.layer_ids else None)
        cached, self._ids = self._length, text
        try:
            self._prefill(ids, branch, request, pair)
            out = cast(Any, type(self.target)).generate(self.target, **{CACHE: self._cache, **options})
        except BaseException:
            stored: StoredContext | None = getattr(self._cache, CONTEXT, None)
            if pair is not None and stored is not None and stored.context.end != self._length:
                setattr(self._cache, CONTEXT, None)  # it may be half extended
            raise
        finally:
            self.cached_tokens = cached
        self._ids = (out if isinstance(out, torch.Tensor) else out.sequences)[0].tolist()
        return out

    def _request(self, options: dict[str, Any]) -> Request:
        return Request(self.target, options, self._binding.default)

    @property
    def _binding(self) -> Any:
        return cast(BoundTarget, self.target).hyperdflash_binding

    @property
    def _length(self) -> int:
        """The tokens in the cache."""
        return 0 if self._cache is None else int(self._cache.get_seq_length())

    # Going back

    def _go_back(self, text: list[int], pair: Pair | None) -> int:
        """Take the cache back to the beginning that a new text shares with it, or to where it can go before that. With
        a drafter, its context ends at the same token.

        Returns:
            How many tokens of the new text could have stayed.
        """
        shared = _shared(self._ids, text)
        same = min(shared, self._length, len(text) - 1)
        # Drafters read a token together with the one that follows it.
        known = same if shared > same else max(0, same - 1)
        self._kept = [kept for kept in self._kept if kept.cache.length <= known]
        stored: StoredContext | None = getattr(self._cache, CONTEXT, None)
        near = same
        if pair is not None:
            near = min(known, stored.context.end) if stored is not None and stored.fits(pair) else 0
        places = [(near, None), *((kept.cache.length, kept) for kept in self._kept)]
        # Not if its layers hold different tokens, or if rotary frequencies depend on how long the text is.
        switch, was_long = self._binding.target.rope_switch, self._is_long
        self._is_long = switch is not None and len(text) > switch.length
        is_usable = not getattr(self._cache, OPEN_FORWARDS, False) and was_long == self._is_long
        is_usable &= not (self._is_long and switch.is_at_every_token)
        for length, kept in sorted(places, key=lambda place: -place[0]):
            if is_usable and length and self._goes_to(length, known, kept, stored, pair):
                return known
        self._cache, self._kept = None, []
        return known

    def _goes_to(
        self, length: int, known: int, kept: Kept | None, stored: StoredContext | None, pair: Pair | None
    ) -> bool:
        """Take the cache back to a length, and the drafter's context to that or to `known` tokens. Return whether both
        can go there; without a drafter, a context that cannot is forgotten."""
        cache, count = self._cache, self._length - length
        if kept is None and not can_crop(cache, count):
            return False
        if kept is not None and kept.stored is not None:
            stored = copy.deepcopy(kept.stored)
        if stored is not None and stored.context.end > (end := min(length, known)):
            crop_context = getattr(stored.context, "crop", None)
            stored = stored if crop_context is not None and crop_context(end) else None
        if pair is not None and not (stored is not None and stored.fits(pair) and stored.context.end == length):
            return False
        setattr(cache, OPEN_FORWARDS, 1)  # so that an interruption in here leaves a cache that nobody goes on with
        crop(cache, count) if kept is None else restore(cache, kept.cache)
        setattr(cache, CONTEXT, stored)
        setattr(cache, OPEN_FORWARDS, 0)
        return True

    # Running a prompt

    def _prefill(self, ids: torch.Tensor, branch: int, request: Request, pair: Pair | None) -> None:
        """Prepare the cache, and run a prompt up to the last place at which it is copied.

        Args:
            ids: The prompt.
            branch: Where it began to differ from the text before: others will differ there, too.
            request: The call's.
            pair: Of the drafter, if there is one.
        """
        target = self._binding.target
        if self._cache is None:
            self._cache = DynamicCache(config=target.config)
        target.make_rewindable(self._cache, 0 if pair is None else request.num_drafts)
        context = None
        if pair is not None:
            context = load_context(self._cache, pair)
            store_context(self._cache, pair, context)
        keeps_all = context is None or getattr(context, "keeps_all", False)
        can_copy = self.max_copies and not self._is_long
        if not can_copy or (keeps_all and not any(map(forgets, self._cache.layers))):
            return
        self._keep(keeps_all)
        chunk = request.setting("prefill_chunk_size")
        chunk = chunk if type(chunk) is int and chunk > 0 else None
        with self._binding.fusion.pausing(bool(request.setting("disable_compile"))):
            last = ids.shape[1] - _TAIL
            for cut in (branch, last):
                if cut - self._length >= _TAIL and (cut == last or last - cut >= _TAIL):
                    for end in [*range(self._length + (chunk or cut), cut, chunk or cut), cut]:
                        self._run(ids, end, pair, context)
                    self._keep(keeps_all)

    def _run(self, ids: torch.Tensor, end: int, pair: Pair | None, context: Any) -> None:
        """Run a prompt's tokens up to `end` that are not in the cache, and give them to the drafter."""
        binding, start, prompt = self._binding, self._length, TokenBuffer(ids, 0, None, None)
        model, config = binding.target.model, GenerationConfig()
        inputs: dict[str, Any] = {CACHE: self._cache, "use_cache": True, **prompt.inputs(start, end)}
        if model._supports_logits_to_keep():
            inputs["logits_to_keep"] = 1
        if start:  # by which transformers knows that the ids are all of the text
            inputs["attention_mask"] = torch.ones_like(ids[:, :end])
        capture = binding.residual.new_capture([] if pair is None else pair.facts.layer_ids)
        capture.last = None if pair is None else tokens_read(pair.drafter, context)
        with binding.capturing_forward(capture):
            model._prefill(ids[:, :end], config, inputs)
        if pair is None:
            return
        residual = next(iter(capture.pop()), None)
        first = context.end if residual is None else end - residual.shape[1]  # layers may run the last token alone
        note_gap(context, first, end)
        pair.extend(context, residual, prompt.text_positions(first, end), ids[:, first + 1 : end + 1])
        context.end = end

    def _keep(self, keeps_all: bool) -> None:
        """Copy what of the cache cannot be taken back, if there is no copy near. Of too many copies one goes whose
        neighbours are near each other."""
        last = self._kept[-1].cache.length if self._kept else 0
        if self._length < last + _TAIL:
            return
        stored = None if keeps_all else copy.deepcopy(getattr(self._cache, CONTEXT, None))
        self._kept.append(Kept(take_snapshot(self._cache), stored))
        if len(self._kept) > self.max_copies:
            lengths = [0, *(kept.cache.length for kept in self._kept)]
            gaps = [after - before for before, after in zip(lengths, lengths[2:])]
            del self._kept[gaps.index(min(gaps)) if gaps else 0]


def _shared(before: Sequence[int], text: Sequence[int]) -> int:
    """Return how many tokens two texts have in common from the first on."""
    return next(
        (place for place, (one, other) in enumerate(zip(before, text)) if one != other), min(len(before), len(text))
    )


def _checked(request: Request) -> torch.Tensor:
    """Return the one prompt of a call, `[1, tokens]`.

    Raises:
        ValueError: If there are several, or none, or what a conversation's cache cannot know of.
    """
    given, ids = request.arguments, request.ids
    if ids is None or request.rows != 1 or not ids.shape[1]:
        if ids is None:
            value = given.get("inputs", given.get("input_ids"))
            raise ValueError(
                f"A conversation's prompt is {'None' if value is None else f'a {type(value).__name__}'}, no tensor: "
                "expected token ids, [1, tokens]. Pass `**tokenizer.apply_chat_template(messages, "
                'add_generation_prompt=True, return_tensors="pt", return_dict=True)`.'
            )
        raise ValueError(
            f"The token ids of a conversation's prompt are of the shape {list(ids.shape)} for {request.rows} texts, "
            "expected one text, [1, tokens]: make a `Conversation` for each text, or call `target.generate`."
        )
    mask, implementation = given.get("attention_mask"), request.setting("cache_implementation")
    of_other_inputs = (*MEDIA, "position_ids", "inputs_embeds")
    is_wrong = {
        CACHE: request.cache is not None,
        "use_cache": request.setting("use_cache") is False,
        "cache_implementation": implementation not in (None, "hybrid"),  # of which transformers makes None
        "attention_mask": mask is not None
        and not (isinstance(mask, torch.Tensor) and mask.shape == ids.shape and bool(mask.all())),
        "assistant_model": request.assistant is not None and request.drafter is None,
        str(request.other_way): request.other_way is not None,
        **{name: value is not None for name, value in given.items() if name.startswith(of_other_inputs)},
    }
    for name in (name for name, wrong in is_wrong.items() if wrong):
        value = given.get(name, request.setting(name))
        shown = repr(value) if isinstance(value, (bool, int, float, str)) else f"a {type(value).__name__}"
        raise ValueError(
            f"`{name}` of a conversation is {shown}, expected none: it has a dynamic cache of its own, of one text's "
            "token ids without padding. Leave it out, or call `target.generate`."
        )
    return ids
