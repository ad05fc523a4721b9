"""What the code in a saved drafter's folder does, in a process in which `hf_hyperdflash` cannot be imported.

`promises(folder)` runs there; it imports nothing of the package itself. The folder has `target` and `drafter`, and
`tokenizer` where stop strings are asked about.
"""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path
from typing import Any

import torch


class Refusing:
    """Finds no module of the package, as where it is not installed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] == "hf_hyperdflash":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def load(folder: Path) -> tuple[Any, Any]:
    sys.meta_path.insert(0, Refusing())
    import transformers
    from transformers import AutoConfig, AutoModel

    torch.set_num_threads(1)
    kind = getattr(transformers, AutoConfig.from_pretrained(folder / "target").architectures[0])
    target = kind.from_pretrained(folder / "target", dtype=torch.float32).eval()
    options = dict(trust_remote_code=True, dtype=torch.float32)
    return target, AutoModel.from_pretrained(folder / "drafter", **options).eval()


def count_hooks(target: torch.nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in target.modules())


def prompt(length: int, vocabulary: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(2, vocabulary, (1, length), generator=torch.Generator().manual_seed(seed))


def promises(folder: Path) -> dict[str, Any]:
    """What it does: `True` for each promise that holds, the drafts of a greedy text, and what is refused."""
    target, drafter = load(folder)
    from transformers import GenerationConfig, LogitsProcessor, StaticCache, StoppingCriteria
    from transformers.generation.streamers import BaseStreamer

    class Streamer(BaseStreamer):
        def __init__(self) -> None:
            self.tokens: list[int] = []

        def put(self, value: torch.Tensor) -> None:
            self.tokens += value.flatten().tolist()

        def end(self) -> None:
            self.tokens.append(-1)

    class NotTheLast(LogitsProcessor):
        """Forbids the last token again, and remembers what it was called with, as no processor of transformers."""

        def __init__(self) -> None:
            self.lengths: list[int] = []

        def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            self.lengths.append(ids.shape[1])
            return scores.index_fill(1, ids[0, -1:], -torch.inf)

    class Until(StoppingCriteria):
        def __init__(self, length: int) -> None:
            self.length, self.lengths = length, list[int]()

        def __call__(self, ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            self.lengths.append(ids.shape[1])
            return torch.full((1,), ids.shape[1] >= self.length)

    size, greedy = target.config.get_text_config().vocab_size, dict(do_sample=False, max_new_tokens=24)
    ids, told = prompt(13, min(64, size)), dict[str, Any](kind=type(drafter).__name__)
    plain_generate, plain = target.generate, target.generate(ids, **greedy)
    place = str(folder / "drafter")
    recipe = dict(custom_generate=place, assistant_model=place, trust_remote_code=True)
    told["by a recipe"] = torch.equal(target.generate(ids, **greedy, **recipe), plain)
    told["which is undone"] = "generate" not in vars(target)

    drafter.bind(target)
    recorded: list[list[int]] = []
    own_draft = type(drafter).draft

    def draft(self: Any, *args: Any) -> None:
        own_draft(self, *args)
        recorded.append(args[-1].tokens)

    type(drafter).draft = draft

    def written(*args: Any, **options: Any) -> Any:
        recorded.clear()
        return target.generate(*args, assistant_model=drafter, **options)

    told["greedy"] = torch.equal(written(ids, **greedy), plain)
    told["drafts"], told["accepted"] = list(recorded), drafter.last_stats.accepted
    told["drafted"] = drafter.last_stats.rounds > 0 and drafter.last_stats.tokens == 24
    told["fewer drafts"] = torch.equal(written(ids, num_assistant_tokens=2, **greedy), plain)
    told["two at most"] = max(map(len, recorded)) <= 2
    told["by a recipe, bound"] = torch.equal(target.generate(ids, **greedy, **recipe), plain) and "generate" in vars(
        target
    )

    class Recipe(Until):
        """Calls the recipe with the bound drafter, in the middle of a text of the recipe's own."""

        def __call__(self, ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            target.generate(ids, **greedy, **recipe | {"assistant_model": drafter})
            return super().__call__(ids, scores)

    target.generate(ids, stopping_criteria=[Recipe(15)], **greedy, **recipe)
    told["still bound"] = torch.equal(written(ids, **greedy), plain)

    # Lengths at which windows fill, and a text that goes on from a cache of its first turn.
    lengths = []
    for length in (1, 8, 31):
        text = prompt(length, min(64, size), seed=length)
        lengths.append(torch.equal(written(text, **greedy), plain_generate(text, **greedy)))
    told["lengths"] = all(lengths)
    first = written(ids, return_dict_in_generate=True, **greedy)
    cache = next(
        getattr(first, name) for name in ("cache", "past_key_values") if getattr(first, name, None) is not None
    )
    name = next(name for name in ("cache", "past_key_values") if getattr(first, name, None) is not None)
    longer = torch.cat([first.sequences, prompt(5, min(64, size), seed=1)], dim=1)
    whole = dict(attention_mask=torch.ones_like(longer), **greedy)  # else tokens like padding are taken for some
    told["another turn"] = torch.equal(written(longer, **{name: cache}, **whole), plain_generate(longer, **whole))
    told["chunks"] = torch.equal(written(ids, prefill_chunk_size=4, **greedy), plain)

    padded = torch.cat([torch.zeros_like(ids[:, :3]), ids], dim=1)
    mask = (torch.arange(padded.shape[1]) >= 3).long()[None]
    told["padding"] = torch.equal(written(padded, attention_mask=mask, **greedy)[:, 3:], plain)
    with_padding = target.generate(padded, attention_mask=mask, return_dict_in_generate=True, **greedy)
    padded_cache = getattr(with_padding, name)
    padded_whole = dict(attention_mask=torch.nn.functional.pad(mask, (0, 25), value=1), **greedy)
    shown = written(padded, attention_mask=mask, return_dict_in_generate=True, **greedy)
    told["no cache of a padded text"] = getattr(shown, name) is None

    gap = dict(attention_mask=(torch.arange(13) != 5).long()[None], **greedy)
    told["a gap"] = torch.equal(written(ids, **gap), plain_generate(ids, **gap))

    streamers, processors, criteria = (
        [kind() for _ in range(2)] for kind in (Streamer, NotTheLast, lambda: Until(29))
    )
    own = [
        generate(ids, streamer=streamer, logits_processor=[processor], stopping_criteria=[criterion], **greedy)
        for generate, streamer, processor, criterion in zip((plain_generate, written), streamers, processors, criteria)
    ]
    told["a processor and a criterion"] = torch.equal(*own)
    told["each text once"] = (
        processors[0].lengths == processors[1].lengths and criteria[0].lengths == criteria[1].lengths
    )
    told["a streamer"] = streamers[0].tokens == streamers[1].tokens
    options = dict(**greedy, repetition_penalty=1.3, no_repeat_ngram_size=3)
    told["processors of transformers"] = torch.equal(written(ids, **options), plain_generate(ids, **options))
    shown = dict(return_dict_in_generate=True, output_scores=True, output_logits=True, **greedy)
    ours, theirs = written(ids, **shown), plain_generate(ids, **shown)
    told["scores"] = all(
        torch.allclose(one, other, atol=1e-4)
        for name in ("scores", "logits")
        for one, other in zip(getattr(ours, name), getattr(theirs, name), strict=True)
    )
    told["an end"] = torch.equal(
        written(ids, eos_token_id=int(plain[0, 20]), **greedy),
        plain_generate(ids, eos_token_id=int(plain[0, 20]), **greedy),
    )

    torch.manual_seed(1)
    sampled = written(ids, do_sample=True, max_new_tokens=9)
    torch.manual_seed(1)
    told["a seed"] = torch.equal(written(ids, do_sample=True, max_new_tokens=9), sampled) and sampled.shape[1] == 22

    drafter.bind(target, as_default=True)
    recorded.clear()
    told["as default"] = torch.equal(target.generate(ids, **greedy), plain) and bool(recorded)
    told["but not for beams"] = target.generate(ids, num_beams=2, **greedy).shape == plain.shape

    several, refused = ids.expand(2, -1), dict[str, str]()
    calls = {}
    if not hasattr(target.config, "compress_rates"):  # of which transformers has no static cache
        static = StaticCache(config=target.config.get_text_config(), max_cache_len=64)
        calls["a static cache"] = lambda: written(ids, **{name: static}, **greedy)
    if drafter.max_draft_tokens:
        calls["(too many)"] = lambda: written(ids, num_assistant_tokens=10**6, **greedy)
    for what, call in {
        **calls,
        "trees": lambda: written(ids, tree_budget=8, **greedy),
        "trees in a configuration": lambda: written(ids, GenerationConfig(tree_budget=8, **greedy)),
        "auto": lambda: written(ids, num_assistant_tokens="auto", **greedy),
        "batches": lambda: written(several, **greedy),
        "several of one": lambda: written(ids, do_sample=True, num_return_sequences=2, max_new_tokens=4),
        "static": lambda: written(ids, cache_implementation="static", **greedy),
        "learning": lambda: drafter.adapt(target),
        "a cache with padding": lambda: written(
            torch.cat([with_padding.sequences, ids[:, :1]], dim=1), **{name: padded_cache}, **padded_whole
        ),
        "hidden states": lambda: written(ids, output_hidden_states=True, return_dict_in_generate=True, **greedy),
        # These the package does not do either.
        "(beams)": lambda: written(ids, num_beams=2, **greedy),
        "(none)": lambda: written(ids, num_assistant_tokens=0, **greedy),
        "(no cache)": lambda: written(ids, use_cache=False, **greedy),
        "(code of others)": lambda: target.generate(ids, **recipe | {"assistant_model": "org/other"}),
    }.items():
        try:
            call()
            refused[what] = ""
        except ValueError as error:
            refused[what] = str(error)
    told["refused"] = refused
    drafter.unbind(target)
    told["unbound"] = torch.equal(target.generate(ids, **greedy), plain) and "generate" not in vars(target)
    hooks = [count_hooks(target)]
    drafter.bind(target)
    hooks.append(count_hooks(target))
    drafter.unbind(target)
    told["hooks for the time"] = hooks[0] < hooks[1] and count_hooks(target) == hooks[0]
    told["without the package"] = not any(name.partition(".")[0] == "hf_hyperdflash" for name in sys.modules)
    return told


def stopped(folder: Path) -> dict[str, Any]:
    """Texts that stop strings end, in an argument and in a configuration, with a drafter and without."""
    target, drafter = load(folder)
    from transformers import AutoTokenizer, GenerationConfig

    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    ids, greedy = prompt(9, 64), dict(do_sample=False, max_new_tokens=24)
    text = tokenizer.decode(target.generate(ids, **greedy)[0, 15:17])
    asked = [
        dict(stop_strings=text, **greedy),
        dict(generation_config=GenerationConfig(stop_strings=[text], **greedy)),
        dict(generation_config=GenerationConfig(**greedy)),  # with stop strings of the target's own
    ]

    def texts(**options: Any) -> list[Any]:
        written = []
        for number, each in enumerate(asked):
            target.generation_config.stop_strings = [text] if number == 2 else None
            written.append(target.generate(ids, tokenizer=tokenizer, **options, **each).tolist())
        return written

    plain = texts()
    drafter.bind(target)
    return {
        "plain": plain,
        "drafted": texts(assistant_model=drafter),
        "rounds": drafter.last_stats.rounds,
    }


def law(folder: Path) -> dict[str, float]:
    """How far the law of the saved drafter's text is from the target's."""
    return furthest_from_the_law(*load(folder))


def furthest_from_the_law(target: Any, drafter: Any, **way: Any) -> dict[str, float]:
    """How far the probability of any sampled text is from the target's, by every way that the draws can go."""
    from tests.helpers.enumerated_draws import every_outcome

    ids, size = prompt(5, 8), target.config.get_text_config().vocab_size
    options = dict(do_sample=True, top_k=3, temperature=0.7, max_new_tokens=3, num_assistant_tokens=2, **way)
    expected = dict.fromkeys(product(range(size), repeat=3), 1.0)
    memo: dict[tuple[int, ...], torch.Tensor] = {}
    for text in expected:
        for k in range(3):
            if text[:k] not in memo:
                with torch.no_grad():
                    logits = target(torch.cat([ids, torch.tensor([text[:k]], dtype=torch.long)], dim=1)).logits[0, -1]
                logits = logits.float() / 0.7
                memo[text[:k]] = logits.masked_fill(logits < logits.topk(3).values[-1], -torch.inf).softmax(-1)
            expected[text] *= float(memo[text[:k]][text[k]])
    drafter.bind(target)
    found = dict.fromkeys(expected, 0.0)
    accepted = 0
    for probability, text in every_outcome(lambda: target.generate(ids, assistant_model=drafter, **options)):
        found[tuple(text[0, 5:].tolist())] += probability
        accepted += sum(drafter.last_stats.accepted)
    return {"furthest": max(abs(found[text] - expected[text]) for text in expected), "accepted": accepted}
