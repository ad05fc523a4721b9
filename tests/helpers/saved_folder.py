"""What the code in a saved drafter's folder does, in a process in which `hf_hyperdflash` cannot be imported.

`promises(folder)` runs there; it imports nothing of the package itself. The folder has `target`, `drafter` and
`tokenizer`.
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


class Recorded:
    """What a call shows while it runs: the tokens of its streamer, and what its processor and its criterion see."""

    def __init__(self) -> None:
        from transformers import LogitsProcessor, StoppingCriteria
        from transformers.generation.streamers import BaseStreamer

        recorded = self
        self.tokens, self.processed, self.judged = list[int](), list[int](), list[int]()

        class Streamer(BaseStreamer):
            def put(self, value: torch.Tensor) -> None:
                recorded.tokens += value.flatten().tolist()

            def end(self) -> None:
                recorded.tokens.append(-1)

        class NotTheLast(LogitsProcessor):
            """Forbids the last token again, as no processor of transformers does."""

            def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
                recorded.processed.append(ids.shape[1])
                return scores.index_fill(1, ids[0, -1:], -torch.inf)

        class Until(StoppingCriteria):
            def __call__(self, ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
                recorded.judged.append(ids.shape[1])
                return torch.full((1,), ids.shape[1] >= 29)

        self.options = dict(streamer=Streamer(), logits_processor=[NotTheLast()], stopping_criteria=[Until()])


def promises(folder: Path) -> dict[str, Any]:
    """What it does: `True` for each promise that holds, the drafts of a greedy text, and what is refused."""
    target, drafter = load(folder)
    from transformers import AutoTokenizer, GenerationConfig, StaticCache, StoppingCriteria

    most, greedy = min(64, target.config.get_text_config().vocab_size), dict(do_sample=False, max_new_tokens=24)
    ids, told = prompt(13, most), dict[str, Any](kind=type(drafter).__name__)
    unbound, plain, place = target.generate, target.generate(ids, **greedy), str(folder / "drafter")
    recipe = dict(custom_generate=place, assistant_model=place, trust_remote_code=True)
    told["by a recipe"] = torch.equal(target.generate(ids, **greedy, **recipe), plain)
    told["which is undone"] = "generate" not in vars(target)
    hooks = count_hooks(target)
    drafter.bind(target)
    told["hooks for the time"] = count_hooks(target) > hooks
    drafts: list[list[int]] = []
    own_draft = type(drafter).draft

    def draft(self: Any, *args: Any) -> None:
        own_draft(self, *args)
        drafts.append(args[-1].tokens)

    type(drafter).draft = draft

    def written(*args: Any, **options: Any) -> Any:
        drafts.clear()
        return target.generate(*args, assistant_model=drafter, **options)

    told["greedy"] = torch.equal(written(ids, **greedy), plain)
    told["drafts"], told["accepted"] = list(drafts), drafter.last_stats.accepted
    told["drafted"] = drafter.last_stats.rounds > 0 and drafter.last_stats.tokens == 24
    told["fewer drafts"] = torch.equal(written(ids, num_assistant_tokens=2, **greedy), plain)
    told["two at most"] = max(map(len, drafts)) <= 2
    told["by a recipe, bound"] = torch.equal(target.generate(ids, **greedy, **recipe), plain)
    told["which is not undone"] = "generate" in vars(target)

    class Recipe(StoppingCriteria):
        """Calls the recipe with the bound drafter, in the middle of a text of the recipe's own."""

        def __call__(self, ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            target.generate(ids, **greedy, **recipe | {"assistant_model": drafter})
            return torch.full((1,), True)

    target.generate(ids, stopping_criteria=[Recipe()], **greedy, **recipe)
    told["still bound"] = torch.equal(written(ids, **greedy), plain)

    # The text as without a drafter: lengths at which windows fill, a text that goes on from a cache of its first turn.
    first = written(ids, return_dict_in_generate=True, **greedy)
    name = next(name for name in ("cache", "past_key_values") if getattr(first, name, None) is not None)
    longer = torch.cat([first.sequences, prompt(5, most, seed=1)], dim=1)
    whole = dict(attention_mask=torch.ones_like(longer))  # else tokens like padding are taken for some
    told["another turn"] = torch.equal(
        written(longer, **{name: getattr(first, name)}, **whole, **greedy), unbound(longer, **whole, **greedy)
    )
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    end = tokenizer.decode(plain[0, 19:21])
    for what, text, options in [
        *((f"{length} tokens", prompt(length, most, seed=length), {}) for length in (1, 8, 31)),
        ("a gap", ids, dict(attention_mask=(torch.arange(13) != 5).long()[None])),
        ("processors of transformers", ids, dict(repetition_penalty=1.3, no_repeat_ngram_size=3)),
        ("an end", ids, dict(eos_token_id=int(plain[0, 20]))),
        ("a stop string", ids, dict(stop_strings=end)),
        ("one in a configuration", ids, dict(generation_config=GenerationConfig(stop_strings=[end]))),
        ("one of the target's own", ids, {}),
    ]:
        target.generation_config.stop_strings = [end] if what == "one of the target's own" else None
        options |= dict(tokenizer=tokenizer, **greedy)
        one, other = written(text, **options), unbound(text, **options)
        told[what] = torch.equal(one, other) and (what[:3] != "one" or one.shape[1] < 13 + 24)
    target.generation_config.stop_strings = None
    told["chunks"] = torch.equal(written(ids, prefill_chunk_size=4, **greedy), plain)
    padded, mask = torch.cat([torch.zeros_like(ids[:, :3]), ids], dim=1), (torch.arange(16) >= 3).long()[None]
    with_padding = dict(attention_mask=mask, return_dict_in_generate=True, **greedy)
    of_padded, drafted = unbound(padded, **with_padding), written(padded, **with_padding)
    told["padding"] = torch.equal(drafted.sequences[:, 3:], plain)
    told["no cache of a padded text"] = getattr(drafted, name) is None

    ours, theirs = Recorded(), Recorded()
    one, other = written(ids, **ours.options, **greedy), unbound(ids, **theirs.options, **greedy)
    told["a processor and a criterion"] = torch.equal(one, other) and one.shape[1] == 29
    told["each text once"] = (ours.processed, ours.judged) == (theirs.processed, theirs.judged)
    told["a streamer"] = ours.tokens == theirs.tokens
    shown = dict(return_dict_in_generate=True, output_scores=True, output_logits=True, **greedy)
    one, other = written(ids, **shown), unbound(ids, **shown)
    told["scores"] = all(
        torch.allclose(*pair, atol=1e-4)
        for name in ("scores", "logits")
        for pair in zip(getattr(one, name), getattr(other, name), strict=True)
    )
    sampled = []
    for _ in range(2):
        torch.manual_seed(1)
        sampled.append(written(ids, do_sample=True, max_new_tokens=9))
    told["a seed"] = torch.equal(*sampled) and sampled[0].shape[1] == 22
    drafter.bind(target, as_default=True)
    drafts.clear()
    told["as default"] = torch.equal(target.generate(ids, **greedy), plain) and bool(drafts)
    told["but not for beams"] = target.generate(ids, num_beams=2, **greedy).shape == plain.shape

    known = {name: getattr(of_padded, name), "attention_mask": torch.nn.functional.pad(mask, (0, 25), value=1)}
    after_padded, refused = torch.cat([of_padded.sequences, ids[:, :1]], dim=1), dict[str, str]()
    asked: dict[str, tuple[torch.Tensor, dict[str, Any]]] = {
        "trees": (ids, dict(tree_budget=8)),
        "trees in a configuration": (ids, dict(generation_config=GenerationConfig(tree_budget=8))),
        "auto": (ids, dict(num_assistant_tokens="auto")),
        "batches": (ids.expand(2, -1), {}),
        "several of one": (ids, dict(do_sample=True, num_return_sequences=2)),
        "static": (ids, dict(cache_implementation="static")),
        "a cache with padding": (after_padded, known),
        "hidden states": (ids, dict(output_hidden_states=True, return_dict_in_generate=True)),
        # These the package does not do either.
        "(beams)": (ids, dict(num_beams=2)),
        "(none)": (ids, dict(num_assistant_tokens=0)),
        "(no cache)": (ids, dict(use_cache=False)),
        "(code of others)": (ids, recipe | {"assistant_model": "org/other"}),
    }
    if not hasattr(target.config, "compress_rates"):  # of which transformers has no static cache
        static = StaticCache(config=target.config.get_text_config(), max_cache_len=64)
        asked["a static cache"] = ids, {name: static}
    if drafter.max_draft_tokens:
        asked["(too many)"] = ids, dict(num_assistant_tokens=10**6)
    for what in (*asked, "learning"):
        try:
            if what == "learning":
                drafter.adapt(target)
            else:
                text, options = asked[what]
                target.generate(text, **greedy | {"assistant_model": drafter} | options)
            refused[what] = ""
        except ValueError as error:
            refused[what] = str(error)
    told["refused"] = refused
    drafter.unbind(target)
    told["unbound"] = torch.equal(target.generate(ids, **greedy), plain) and "generate" not in vars(target)
    told["no hook stays"] = count_hooks(target) == hooks
    told["without the package"] = not any(name.partition(".")[0] == "hf_hyperdflash" for name in sys.modules)
    return told


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
