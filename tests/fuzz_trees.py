"""Greedy text with draft trees against the target's own, over families, trees, chunks, turns, caches, processors,
interruptions and batches.

`python -m tests.fuzz_trees --cases 10000` runs seeds 0 to 9,999 and prints every difference; the tests run some
hundreds of them. A case is its seed: `--first 1234 --cases 1` runs that one again.

`--compiled inductor --cases 500 --log FILE` does so with compiled rounds over static caches: chains and trees of a few
widths, random ones and those of every kind of drafter, one prompt and padded batches, turn after turn, where a graph
that breaks or is compiled again is an error. Ten cases share their graphs, which take a minute to compile, and differ
in prompts, lengths, turns and processors. It goes on where FILE ends.

`--lookup` joins copies to the drafts of each eager case: of the text itself, and of documents that are right for a
while. Half of the cases draft with a kind that is trained, and some leave the amount to "auto".
"""

from __future__ import annotations

import argparse
import copy
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import CompileConfig, DynamicCache, PreTrainedModel, StaticCache
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

from hf_hyperdflash import HyperDFlashDrafter, Lookup, MedusaConfig, MedusaDrafter, bind
from hf_hyperdflash.drafters.saved import SavedDrafter
from hf_hyperdflash.targets.caches.name import CACHE, cache_of
from hf_hyperdflash.targets.registry import target_of

from .conftest import CSA, HCA, MIXES, perfect, prompt, tiny_target
from .helpers.families import ALSO_MASKED, FAMILIES
from .helpers.tree_drafters import RandomChains, RandomTrees
from .helpers.unrolled import unrolled

SHARE_GRAPHS = 10  # cases of compiled rounds
NEARLY_EQUAL = 1e-4  # between the logits of the two best tokens: whose order rounding may settle

PROCESSORS: list[dict[str, Any]] = [
    {}, {}, {},
    {"repetition_penalty": 1.3},
    {"no_repeat_ngram_size": 2},
    {"bad_words_ids": [[5], [6, 7]]},
    {"min_new_tokens": 9, "eos_token_id": [3, 4, 9, 17, 30, 44]},
    {"eos_token_id": [11, 23]},
]  # fmt: skip


def v4_mix(number: int) -> Callable[[], PreTrainedModel]:
    """DeepSeek-V4 with other layers, windows and choices of an indexer."""

    def made() -> PreTrainedModel:
        rates = [{CSA: 4, HCA: 8}, {CSA: 2, HCA: 4}, {CSA: 3, HCA: 6}][number % 3]
        return tiny_target(
            number, layer_types=MIXES[number], sliding_window=[4, 8, 16, 7, 5][number], compress_rates=rates,
            index_topk=[512, 2, 3, 512, 1][number], index_n_heads=32, hidden_size=64,
        )  # fmt: skip

    made.__name__ = f"deepseek_v4_{number}"
    return made


# Where indexers' scores tie, the text of these depends on how it is cut into forwards, with stock caches as well.
DEPEND_ON_CUTS = {"hunyuan_v4", "glm5_next"}
TARGETS = [made for made in (*FAMILIES, *map(v4_mix, range(len(MIXES)))) if made.__name__ not in DEPEND_ON_CUTS]


@cache
def bound(made: Callable[[], PreTrainedModel]) -> Any:
    torch.manual_seed(0)
    return bind(made().eval())


class Copying(random.Random):
    """The choices of a case whose drafts are joined by copies."""


def run_case(seed: int, lookup: bool = False) -> tuple[str, str | None]:
    """One case: a text turn after turn, one that is interrupted, or a padded batch.

    Args:
        seed: Of all that is chosen.
        lookup: Whether copies join the drafts.

    Returns:
        The target's name, and what differs; `None` if nothing does.
    """
    chance = (Copying if lookup else random.Random)(seed)
    made, way = chance.choice(TARGETS), chance.choice([turns, turns, turns, interruptions, batches])
    options = {"do_sample": False, "max_new_tokens": chance.randint(4, 24), **chance.choice(PROCESSORS)}
    return made.__name__, way(bound(made), options, chance)


def copies(target: Any, texts: list[torch.Tensor], chance: random.Random, drafter: Any) -> dict[str, Any]:
    """Return arguments of a call whose drafts copies join, and sometimes another drafter; nothing where none do.

    Args:
        target: The target.
        texts: What it will write, `[seq]` each.
        chance: The choices.
        drafter: The case's own.
    """
    if not isinstance(chance, Copying):
        return {"assistant_model": drafter}
    documents = []
    for text in texts:
        wrong = torch.rand(text.shape, generator=torch.Generator().manual_seed(chance.randrange(2**20))) < 0.1
        documents.append(torch.where(wrong, (text + 1) % 64, text))
    asked: dict[str, Any] = {"lookup": chance.choice([True, Lookup(documents), Lookup(documents)])}
    can_have_trees = target.config.model_type != "remote_v4"
    if chance.random() < 0.5 and target_of(target).tree_verification == "mask" and can_have_trees:
        drafter = chance.choice([*trained_kinds(target).values()])
        asked |= chance.choice([{}, {"num_assistant_tokens": "auto"}, {"tree_budget": 7}, {"tree_budget": "auto"}])
    return {"assistant_model": drafter, **asked}


def turns(target: Any, options: dict[str, Any], chance: random.Random) -> str | None:
    """One or two turns on one cache, the prompt in chunks or whole, with random trees or drafts often right."""
    is_remote, seed = target.config.model_type == "remote_v4", chance.randrange(2**20)
    # Where its indexer has to choose, stock V4's text depends on how a prompt is cut: there it is not cut.
    is_whole = is_remote or getattr(target.config, "index_topk", 512) < 512
    chunk = None if is_whole else chance.choice([None, None, 1, 3, 7])
    text, filled = prompt(chance.randint(1, 40), seed=seed), new_cache(target, chance)
    count = 1 if is_whole else chance.choice([1, 1, 2])
    keeps_cache = count > 1 or bool(seed % 2)  # else rounds run in inference mode
    for turn in range(count):
        options["attention_mask"] = torch.ones_like(text)  # else a padding token that was written would be hidden
        expected = target.generate(text, **options)
        if chance.random() < 0.3 or is_remote:
            wrong = torch.rand(expected[0].shape, generator=torch.Generator().manual_seed(seed)) < 0.3
            drafter: Any = perfect(target, torch.where(wrong, (expected[0] + 1) % 60 + 2, expected[0]))
            trees = {"tree_budget": None if is_remote else chance.choice([None, 1, 5, 12, 24])}
        else:
            drafter, trees = RandomTrees(target, [expected[0]], seed=seed, most=chance.choice([3, 8, 20])), {}
        out = target.generate(
            text, **{CACHE: filled}, return_dict_in_generate=keeps_cache, prefill_chunk_size=chunk, **options,
            **{**trees, **copies(target, [expected[0]], chance, drafter)},
        )  # fmt: skip
        written = out.sequences if keeps_cache else out
        if not torch.equal(written, expected):
            return f"turn {turn + 1}: {difference(target, written[0], expected[0], options)}"
        if not keeps_cache:
            break
        filled = chance.choice([cache_of(out), copy.deepcopy(cache_of(out))])
        text = torch.cat([expected, prompt(chance.randint(1, 9), seed=seed + 1)], dim=1)
    return None


class Stops(BaseStreamer):
    """Raises when it gets the `count`-th part of a text; the prompt is the first."""

    def __init__(self, count: int) -> None:
        self.count = count

    def put(self, value: torch.Tensor) -> None:
        self.count -= 1
        if self.count < 0:
            raise KeyboardInterrupt

    def end(self) -> None: ...


def interruptions(target: Any, options: dict[str, Any], chance: random.Random) -> str | None:
    """A text whose caller, or one of the target's layers, raises at some point. The caller goes on with what its cache
    holds, drafted or plain, or is told that nobody can."""
    is_remote, seed = target.config.model_type == "remote_v4", chance.randrange(2**20)
    ids, cache = prompt(chance.randint(1, 40), seed=seed), new_cache(target, chance)
    if cache is None:
        cache = DynamicCache(config=target.config.get_text_config(decoder=True))
    expected = target.generate(ids, **options)
    kind = RandomChains if is_remote or chance.random() < 0.3 else RandomTrees
    drafter, point = kind(target, [expected[0]], seed=seed, most=8), chance.randint(1, 8)
    at = int(chance.random() * len(target_of(target).layers))
    options = {**options, "attention_mask": torch.ones_like(ids), CACHE: cache}

    def interrupt(*_: Any) -> None:
        nonlocal point
        point -= 1
        if point < 0:
            raise KeyboardInterrupt

    is_callers = chance.random() < 0.5
    streamer = Stops(point) if is_callers else None
    hook = None if is_callers else target_of(target).layers[at].register_forward_hook(interrupt)
    try:
        target.generate(ids, streamer=streamer, **copies(target, [expected[0]], chance, drafter), **options)
        return None  # the text ended before
    except KeyboardInterrupt:
        length = int(cache.get_seq_length())
    finally:
        if hook is not None:
            hook.remove()
    end = expected.shape[1]
    if length < ids.shape[1] or length + 1 >= end:
        return None if length < end else f"the cache holds {length} tokens, and the text has {end}"
    del options["max_new_tokens"]
    seen = expected[:, : length + 1]
    options |= {"attention_mask": torch.ones_like(seen), "max_length": end}
    if "min_new_tokens" in options:  # which counts anew
        options["min_new_tokens"] = max(0, options["min_new_tokens"] - (seen.shape[1] - ids.shape[1]))
    again = target.generate(seen, assistant_model=drafter if chance.random() < 0.5 else None, **options)
    if torch.equal(again, expected):
        return None
    options.pop(CACHE)
    return f"after an interruption at {length}: {difference(target, again[0], expected[0], options)}"


def batches(target: Any, options: dict[str, Any], chance: random.Random) -> str | None:
    """Two to four prompts, padded on the left."""
    texts = [prompt(chance.randint(1, 30), seed=chance.randrange(2**20))[0] for _ in range(chance.randint(2, 4))]
    ids, mask = padded_on_the_left(texts)
    options = {**options, "pad_token_id": 0}
    padding = (mask == 0).sum(1).tolist()
    if "deepseek_v4" in target.config.model_type or target.config.model_type == "remote_v4":
        # Stock V4 compresses padding with the text. Ours does not: each text is what it is alone.
        options = {
            name: value for name, value in options.items() if name in ("do_sample", "max_new_tokens", "pad_token_id")
        }
        alone = [target.generate(text[None], **options)[0] for text in texts]
        expected = torch.stack([torch.nn.functional.pad(text, (count, 0)) for text, count in zip(alone, padding)])
    else:
        expected = target.generate(ids, attention_mask=mask, **options)  # some processors look at a batch's padding
    own = [text[count:] for text, count in zip(expected, padding)]
    kind = RandomChains if target.config.model_type == "remote_v4" or chance.random() < 0.4 else RandomTrees
    drafter = kind(target, own, seed=chance.randrange(2**20), most=chance.choice([3, 8, 20]))
    written = target.generate(ids, attention_mask=mask, **copies(target, own, chance, drafter), **options)
    for row, (found, own_mask) in enumerate(zip(written, mask)):
        if found.tolist() != expected[row].tolist():
            given = {**options, "attention_mask": own_mask[None]}
            return f"row {row + 1} of {len(texts)}: {difference(target, found, expected[row], given)}"
    return None


def new_cache(target: Any, chance: random.Random) -> Any:
    """Return a static cache for some of the targets that can have one, else `None`."""
    can = target_of(target).tree_verification == "mask" and chance.random() < 0.4
    return StaticCache(config=target.config.get_text_config(decoder=True), max_cache_len=120) if can else None


@cache
def trained_kinds(target: Any) -> dict[str, Any]:
    """Drafters whose drafts are seldom right: of blocks with a head and without, EAGLE-3, P-EAGLE, SpecBlock, Medusa
    heads."""
    layers = {"target_layer_ids": [0, -1]}
    blocks = {
        **layers, "num_draft_tokens": 5, "mask_token_id": 63, "num_hidden_layers": 2, "sliding_window": 6,
        "layer_types": ["full_attention", "sliding_attention"],
    }  # fmt: skip
    width = target.config.get_text_config(decoder=True).hidden_size
    torch.manual_seed(1)
    kinds: dict[str, Any] = {
        "state": HyperDFlashDrafter.from_target(target, sequential_head="state", **blocks),
        "none": HyperDFlashDrafter.from_target(target, window_from="slot", causal_layers="all", **blocks),
        "eagle3": unrolled("eagle3", target, max_blocks=4, draft_vocab_size=40, tree_width=3, **layers),
        "specblock": unrolled("specblock", target, block_size=2, max_blocks=3, **layers),
        "peagle": unrolled("peagle", target, max_blocks=4, num_hidden_layers=2, draft_vocab_size=40, **layers),
        "medusa": MedusaDrafter(MedusaConfig(medusa_num_heads=4, hidden_size=width, vocab_size=64)).eval(),
    }
    with torch.no_grad():
        kinds["state"].state_head.down_proj.weight.normal_(std=0.3)
        for parameter in kinds["medusa"].parameters():
            parameter.normal_(std=0.4)
    for drafter in kinds.values():
        drafter.bind(target)
    return kinds


@cache
def static_targets() -> list[Callable[[], PreTrainedModel]]:
    """Those that transformers says can be compiled without a break; LongCat-Flash loops over its experts."""
    masked = [made for made in (*TARGETS, *ALSO_MASKED) if target_of(bound(made)).tree_verification == "mask"]
    return [made for made in masked if bound(made)._can_compile_fullgraph]


def run_compiled_case(seed: int, backend: str) -> tuple[str, str | None]:
    """As [`run_case`], of compiled rounds, whose code is made by a backend of `torch.compile`."""
    graphs, chance = random.Random(seed // SHARE_GRAPHS), random.Random(seed)
    made = graphs.choice(static_targets())
    name, target = made.__name__, bound(made)
    config = CompileConfig(mode=None, fullgraph=True, backend=backend)
    config._compile_all_devices = True
    options: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "compile_config": config}
    how = graphs.choice(
        [{}, {"num_assistant_tokens": "auto"}, {"tree_budget": 5}, {"tree_budget": 12}, {"tree_budget": "auto"}]
    )
    kind, is_random = graphs.choice([*trained_kinds(target).values()]), graphs.random() < 0.3
    on_accelerator = graphs.random() < 0.6
    size = graphs.choice([1, 1, 3])
    turns = chance.choice([1, 2]) if size == 1 else 1
    texts = [prompt(chance.randint(1, 40), seed=seed + row)[0] for row in range(size)]
    filled = StaticCache(config=target.config.get_text_config(decoder=True), max_cache_len=120)
    for turn in range(turns):
        ids, mask = padded_on_the_left(texts)
        padding = (mask == 0).sum(1).tolist()
        asked = {
            **options,
            "max_new_tokens": chance.randint(4, 24),
            **chance.choice(PROCESSORS),
            "attention_mask": mask,
        }
        plain = {key: value for key, value in asked.items() if key != "compile_config"}
        expected = target.generate(ids, **plain)  # of the whole batch: some processors look at its padding
        drafter: Any = kind
        SavedDrafter._on_accelerator = on_accelerator  # type: ignore[assignment]  # as on an accelerator
        if is_random:
            own = [text[count:] for text, count in zip(expected, padding)]
            drafter = RandomTrees(target, own, seed=seed, most=12 if "tree_budget" in how else 6)
        where = {CACHE: filled} if size == 1 else {"cache_implementation": "static", "max_cache_len": 120}
        with torch._dynamo.config.patch(error_on_recompile=True):
            written = target.generate(ids, assistant_model=drafter, **asked, **how, **where)
        for row, (found, own_mask) in enumerate(zip(written, mask)):
            if found.tolist() != expected[row].tolist():
                differs = difference(target, found, expected[row], {**plain, "attention_mask": own_mask[None]})
                return name, f"compiled, turn {turn + 1}, row {row + 1} of {size}, {how}: {differs}"
        texts = [torch.cat([expected[0], prompt(chance.randint(1, 9), seed=seed + 9)[0]])]
    return name, None


def padded_on_the_left(texts: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return texts `[seq]` as a batch, and which of its tokens are no padding."""
    ids, mask = torch.zeros(2, len(texts), max(map(len, texts)), dtype=torch.long)
    for row, text in enumerate(texts):
        ids[row, -len(text) :], mask[row, -len(text) :] = text, 1
    return ids, mask


def difference(target: Any, found: torch.Tensor, expected: torch.Tensor, options: dict[str, Any]) -> str:
    """Where two texts part, and by how much the target preferred its token."""
    length = min(len(found), len(expected))
    at = int((found[:length] != expected[:length]).int().argmax()) if len(found) else 0
    mask = torch.ones_like(expected[None, :at])
    mask[:, : options["attention_mask"].shape[1]] = options["attention_mask"]
    scores = target.generate(
        expected[None, :at],
        return_dict_in_generate=True,
        output_scores=True,
        **{**options, "max_new_tokens": 1, "attention_mask": mask},
    ).scores[0][0]
    gap = float(scores.topk(2).values.diff().abs())
    kind = "nearly equal logits" if gap < NEARLY_EQUAL else "DIFFERENT"
    return f"{kind} at token {at}, where the two best are {gap:.1e} apart"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--compiled", metavar="BACKEND", help="of torch.compile: inductor, or eager for graphs alone")
    parser.add_argument("--lookup", action="store_true", help="join copies to the drafts of eager cases")
    parser.add_argument("--log", type=Path, help="a line a case; what is in it is not run again")
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    cases, wrong, began = Counter(), Counter(), time.perf_counter()
    logged = arguments.log.read_text().splitlines() if arguments.log and arguments.log.exists() else []
    known = {int(number): (name, differs or None) for number, name, differs in (line.split("\t") for line in logged)}
    for seed in range(arguments.first, arguments.first + arguments.cases):
        if seed in known:
            name, differs = known[seed]
        else:
            name, differs = (
                run_compiled_case(seed, arguments.compiled) if arguments.compiled else run_case(seed, arguments.lookup)
            )
        if arguments.log and seed not in known:
            with arguments.log.open("a") as log:
                log.write(f"{seed}\t{name}\t{differs or ''}\n")
        cases[name] += 1
        if differs is not None:
            wrong["nearly equal" if differs.find("DIFFERENT") < 0 else "different"] += 1
            print(f"case {seed}, {name}, {differs}", flush=True)
        if (seed + 1) % 500 == 0:
            print(f"{cases.total()} cases in {time.perf_counter() - began:.0f} s", flush=True)
    for made in static_targets() if arguments.compiled else TARGETS:
        how = target_of(bound(made)).tree_verification
        print(f"{cases[made.__name__]:6d} {made.__name__} ({how})")
    print(
        f"{cases.total()} cases: {wrong['different']} different, {wrong['nearly equal']} where two logits nearly tie"
    )
    sys.exit(wrong["different"] > 0)


if __name__ == "__main__":
    main()
