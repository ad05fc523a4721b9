"""Speculative decoding: draft, let the target verify, accept what the target would have written.

[`speculative_decoding`] is what transformers calls a `custom_generate` function: `generate` prepares the request, and
calls it instead of its own loop. Nothing of transformers is overridden.
"""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass, field
from typing import Any, cast
from weakref import WeakSet

import torch
from transformers import DynamicCache, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList, StopStringCriteria
from transformers.generation.configuration_utils import GenerationConfig
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ..drafters.sampling import stateless_types
from ..targets.rope_switch import check_restart, rope_switch_of
from .target import CACHE_NAME, INSTALL, Rewind, Target

# What this file does not do beside a drafter, by the setting that asks for it.
WITHOUT_THE_PACKAGE = {
    "tree_budget": "draft trees", "output_hidden_states": "hidden states", "output_attentions": "attention weights",
    "token_healing": "token healing",
}  # fmt: skip
# And what no drafter goes with.
OTHER_WAYS = (
    "penalty_alpha", "prompt_lookup_num_tokens", "use_mtp", "assistant_early_exit", "dola_layers", "synced_gpus",
    "assistant_ensemble_weight",
)  # fmt: skip


@dataclass
class Stats:
    """What a generation did."""

    rounds: int = 0  # forwards of the target that verified drafts
    tokens: int = 0  # new ones
    accepted: list[int] = field(default_factory=list)  # drafts of each round

    @property
    def tau(self) -> float:
        """Mean tokens per round: the accepted drafts, and the target's own."""
        return sum(self.accepted) / self.rounds + 1 if self.rounds else 0.0


class Drafts:
    """The drafts of one round, chosen one after the other as the request chooses its text.

    Args:
        ids: `[1, seq]`, the text.
        processors: The request's; those run on drafts that keep no state.
        do_sample: Whether tokens are drawn at random.
    """

    def __init__(self, ids: torch.Tensor, processors: LogitsProcessorList, do_sample: bool) -> None:
        self.ids, self.do_sample = ids, do_sample
        self.processors = LogitsProcessorList(each for each in processors if type(each) in stateless_types())
        self.q: list[torch.Tensor] = []  # what each was drawn from, [config.vocab_size]
        self.count = 0

    @property
    def tokens(self) -> list[int]:
        return self.ids[0, self.ids.shape[1] - self.count :].tolist()

    def choose(self, logits: torch.Tensor) -> torch.Tensor:
        """Draft one more token from the drafter's logits after the last one, `[1, config.vocab_size]`; return it,
        `[1, 1]`."""
        scores = self.processors(cast(Any, self.ids), cast(Any, logits.to(self.ids.device, torch.float32)))
        if self.do_sample:
            # Where processors leave nothing to draft, anything.
            self.q.append(scores[0].softmax(-1).nan_to_num(1 / scores.shape[-1]))
            token = torch.multinomial(self.q[-1][None], 1)
        else:
            token = scores.argmax(-1, keepdim=True)
        self.ids, self.count = torch.cat([self.ids, token], dim=1), self.count + 1
        return token


@torch.no_grad()
def speculative_decoding(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    drafter: Any,
    target: Target,
    num_drafts: int,
    text_streamer: Any = None,
    **model_kwargs: Any,
) -> torch.Tensor | GenerateDecoderOnlyOutput:
    """Write as `model.generate` would without a drafter, several tokens per forward.

    Greedy text is the target's own. Sampled text has the target's distribution (Leviathan et al., algorithm 1).

    Arguments are those of transformers' own loops, the drafter, the target as it sees it, the most drafts of a round,
    and the request's streamer, which transformers keeps from a custom function under its usual name.
    """
    cache, config = model_kwargs.pop(CACHE_NAME, None), generation_config
    text = Text(input_ids, model_kwargs.pop("attention_mask", None), model_kwargs.pop("position_ids", None))
    check_request(text, config, cache, model_kwargs)
    check_restart(target.config, text.ids.shape[1], config.max_length, text.padding)
    switch, do_sample = rope_switch_of(target.config), bool(config.do_sample)
    context, stats = drafter.new_context(), Stats()
    drafter.last_stats = stats
    shown: dict[str, list[torch.Tensor]] = {"scores": [], "logits": []}

    def forward(ids: torch.Tensor, start: int, stop: int, is_round: bool = True) -> Any:
        """Run the tokens from `start` to `stop` of `ids`, which may have drafts behind the text."""
        at, mask = text.positions(start, stop), {} if text.mask is None else {"attention_mask": text.mask_until(stop)}
        return target.forward(ids[:, :stop], stop - start, at, cache, is_round, **model_kwargs, **mask)

    def extend_context(read: dict[int, torch.Tensor], start: int, stop: int) -> None:
        """Give the drafter the tokens from `start` to `stop`, whose layers were read, and what follows each."""
        first, *others = read.values()
        residual = torch.cat([first, *(states.to(first.device) for states in others)], dim=2)[:, : stop - start]
        following = text.unpadded[:, start + 1 : stop + 1]
        drafter.extend(target, context, residual, text.text_positions(start, stop), following)

    # The prompt, in chunks where the caller asks for them.
    start, chunk = int(cache.get_seq_length()), config.prefill_chunk_size or text.end
    layer_ids = drafter.layers_read(target)
    for stop in [*range(start + chunk, text.end, chunk), text.end]:
        with target.reading(layer_ids) as read:
            outputs = forward(text.unpadded, start, stop, is_round=False)
        if stop < text.end:
            extend_context(read, start, stop)
            start = stop
    rewind, drafts, finished = Rewind(cache), Drafts(text.ids, logits_processor, do_sample), False
    width = 0  # of a round: the anchor and its drafts; the prompt's forward was none
    while True:
        # Accept, token by token: processors and criteria see each text once and in order, as without drafts.
        logits = outputs.logits[:, -1 - drafts.count :].to(text.ids.device, torch.float32)
        proposed, written, is_accepted = drafts.tokens, 0, True
        while is_accepted and not finished:  # the token after the last accepted draft is the target's own
            raw = logits[:, written]
            scores = logits_processor(cast(Any, text.ids), cast(Any, raw.clone()))
            token, is_accepted = next_token(scores[0], proposed[written:], drafts.q[written:], do_sample)
            text.append(token)
            written += 1
            for name, values in (("scores", scores), ("logits", raw)):
                if getattr(config, f"output_{name}"):
                    shown[name].append(values.clone())
            if text_streamer is not None:
                text_streamer.put(torch.tensor([token]))
            finished = bool(stopping_criteria(cast(Any, text.ids), cast(Any, tuple(shown["scores"]))).all())
        stats.tokens += written
        if width > 1:
            stats.rounds += 1
            stats.accepted.append(written - (not is_accepted))  # a text may end on a draft
        if width:
            # The anchor and the accepted drafts stay in the cache: as many tokens as were written after the anchor.
            stop = start + written
            if rewind.keep(written, width):
                forward(text.unpadded, start, stop)
        if finished:
            break
        extend_context(read, start, stop)

        # Draft what fits.
        start = text.end - 1
        draft_limit = min(num_drafts, config.max_length - text.ids.shape[1] - 1)
        if switch is not None:
            draft_limit = min(draft_limit, switch.max_drafts(1 + int(text.text_positions(start, text.end))))
        drafts = Drafts(text.ids, logits_processor, do_sample)
        if draft_limit > 0:
            anchor, position = text.unpadded[:, -1:], text.text_positions(start, text.end)
            drafter.draft(target, context, anchor, position, int(draft_limit), drafts)

        # Verify: one forward over the anchor and the drafts.
        width = 1 + drafts.count
        rewind.begin()
        with target.reading(layer_ids) as read:
            outputs = forward(drafts.ids[:, text.padding :], start, start + width)
    rewind.record(False)
    if text_streamer is not None:
        text_streamer.end()
    if not config.return_dict_in_generate:
        return text.ids
    kept: dict[str, Any] = {name: tuple(values) if values else None for name, values in shown.items()}
    kept[CACHE_NAME] = None if text.padding else cache  # padding is in the text and not in the cache: no turn fits
    return GenerateDecoderOnlyOutput(sequences=text.ids, **kept)  # type: ignore[arg-type]


def next_token(scores: torch.Tensor, drafts: list[int], q: list[torch.Tensor], do_sample: bool) -> tuple[int, bool]:
    """Return the text's next token, and whether it is the next draft.

    A draft x that was drawn from q is accepted with probability min(1, p(x) / q(x)). If it is not, the token is drawn
    from what p has more than q. So the token has the distribution p, whatever q is.

    Args:
        scores: The target's, processed, `[config.vocab_size]`.
        drafts: Those that have not been looked at.
        q: What they were drawn from.
    """
    if not do_sample:
        token = int(scores.argmax())
        return token, drafts[:1] == [token]
    p = scores.softmax(-1)
    if drafts:
        ratio = p[drafts[0]] / q[0][drafts[0]]
        if bool(torch.rand_like(ratio) < ratio):
            return drafts[0], True
        more = (p - q[0]).clamp(min=0)
        p = more if more.sum() > 0 else p  # where both are equal, rounding can leave nothing
    return int(torch.multinomial(p, 1)), False


class Text:
    """The tokens of a text, with their positions.

    The target does not see padding on the left, so that it cannot change what is written. Processors see it.

    Args:
        ids: `[1, seq]`, the prompt, tokens that are in the cache included.
        mask: `[1, seq]`, or `None` without padding.
        positions: Of its last tokens, `[1, tokens]`, or `[axes, 1, tokens]`; `None` for 0, 1, 2, ...
    """

    def __init__(self, ids: torch.Tensor, mask: torch.Tensor | None, positions: torch.Tensor | None) -> None:
        self.ids, self.padding = ids, 0 if mask is None else int((mask[0] != 0).long().argmax())
        is_whole = mask is None or bool(mask[0, self.padding :].all())
        self.mask = None if is_whole else cast(torch.Tensor, mask)[:, self.padding :]  # of a text with gaps
        known = torch.arange(self.end, device=ids.device)[None] if positions is None else positions[..., -self.end :]
        before = torch.arange(known.shape[-1] - self.end, 0, device=known.device)
        self._positions = torch.cat([known[..., :1] + before, known], dim=-1)

    def append(self, token: int) -> None:
        self.ids = torch.cat([self.ids, self.ids.new_tensor([[token]])], dim=1)

    @property
    def unpadded(self) -> torch.Tensor:
        """The text as the target sees it."""
        return self.ids[:, self.padding :]

    @property
    def end(self) -> int:
        """Tokens of `unpadded`."""
        return self.ids.shape[1] - self.padding

    def positions(self, start: int, stop: int) -> torch.Tensor:
        """Return the positions of some tokens of `unpadded`, and of drafts behind it."""
        if stop > self._positions.shape[-1]:  # twice as many as are needed, so that this is rare
            behind = torch.arange(1, stop + 1, device=self._positions.device)
            self._positions = torch.cat([self._positions, self._positions[..., -1:] + behind], dim=-1)
        return self._positions[..., start:stop]

    def mask_until(self, stop: int) -> torch.Tensor:
        mask = cast(torch.Tensor, self.mask)
        return torch.nn.functional.pad(mask, (0, max(stop - mask.shape[1], 0)), value=1)[:, :stop]

    def text_positions(self, start: int, stop: int) -> torch.Tensor:
        """Return [`positions`] as `[1, stop - start]`: text has the same on every axis."""
        positions = self.positions(start, stop)
        return positions[0] if positions.ndim == 3 else positions


def check_request(text: Text, config: GenerationConfig, cache: Any, model_kwargs: dict[str, Any]) -> None:
    """Raise a `ValueError` of one line if this loop cannot do what is asked."""
    if len(text.ids) > 1:
        raise ValueError(f"{len(text.ids)} texts were asked for, and the code in this folder writes one: {INSTALL}.")
    if cache is None:
        raise ValueError("`use_cache` is False, expected True: drafts are verified with a cache.")
    if type(cache) is not DynamicCache:
        raise ValueError(f"The cache is a {type(cache).__name__}, expected a DynamicCache: for others {INSTALL}.")
    held = cache.get_seq_length()
    if text.padding and held:
        raise ValueError(f"The text has {text.padding} of padding beside its cache, expected none: or {INSTALL}.")
    if text.end <= held:
        raise ValueError(f"The cache holds {held} tokens and the text has {text.end}, expected at least one more.")
    for name in ("inputs_embeds", "pixel_values", "input_features"):
        if model_kwargs.get(name) is not None:
            raise ValueError(f"`{name}` was passed, expected text alone, as `input_ids`: leave the drafter out.")


class BoundGenerate:
    """`target.generate` while a drafter is bound to the target: drafts for calls that name a drafter."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.target = model, Target(model)
        self.original: Any = model.generate
        # Usually a method of the class; a model that brings a `custom_generate` has it as its own attribute.
        self.own_attribute = {name: value for name, value in vars(model).items() if name == "generate"}
        self.drafters: WeakSet[Any] = WeakSet()
        self.default: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        kwargs = {**dict(zip(inspect.signature(self.original).parameters, args)), **kwargs}
        given = kwargs.get("generation_config")
        configs = [config for config in (given, self.model.generation_config) if config is not None]

        def setting(name: str) -> Any:
            values = [kwargs.get(name), *(getattr(config, name, None) for config in configs)]
            return next((value for value in values if value is not None), None)

        ways = [name for name in OTHER_WAYS if setting(name)] + ["num_beams"] * ((setting("num_beams") or 1) > 1)
        drafter: Any = kwargs.get("assistant_model", None if ways else self.default)
        if not hasattr(drafter, "draft") or kwargs.get("custom_generate") is not None:
            return self.original(**kwargs)
        if ways:
            raise ValueError(f"`{ways[0]}` is {setting(ways[0])!r} beside a drafter: leave one of the two out.")
        for name, what in WITHOUT_THE_PACKAGE.items():
            if setting(name):
                raise ValueError(f"`{name}` is {setting(name)!r}: for {what} with a drafter {INSTALL}.")
        kind = setting("cache_implementation")
        if kind not in (None, "dynamic", "offloaded"):
            raise ValueError(f"`cache_implementation` is {kind!r}: for other caches than dynamic ones {INSTALL}.")
        requested = kwargs.pop("num_assistant_tokens", None), getattr(given, "num_assistant_tokens", None)
        count = drafter.checked_count(*requested)
        own = {"drafter": drafter, "target": self.target, "num_drafts": count, "text_streamer": kwargs.get("streamer")}
        kwargs = {name: value for name, value in kwargs.items() if name not in ("assistant_model", "tree_budget")}
        # transformers gives a custom function no tokenizer, so that stop strings become a criterion here.
        stops, tokenizer = setting("stop_strings"), kwargs.pop("tokenizer", None)
        if stops is not None:
            if tokenizer is None:
                raise ValueError("`stop_strings` need `tokenizer`, expected the target's tokenizer beside them.")
            criterion = StopStringCriteria(stop_strings=stops, tokenizer=tokenizer)
            kwargs["stopping_criteria"] = StoppingCriteriaList([*(kwargs.get("stopping_criteria") or ()), criterion])
            kwargs.pop("stop_strings", None)
            if getattr(given, "stop_strings", None):
                kwargs["generation_config"] = copy.copy(given)
                kwargs["generation_config"].stop_strings = None
            if self.model.generation_config.stop_strings:  # which fills in what the caller's leaves open
                kwargs["stop_strings"] = None
        return self.original(custom_generate=speculative_decoding, **own, **kwargs)

    def release_if_unused(self) -> None:
        """Give the target back as it was, unless a drafter is bound to it."""
        if not self.drafters:
            for handle in self.target.handles:
                handle.remove()
            vars(self.model).pop("generate", None)
            vars(self.model).update(self.own_attribute)
