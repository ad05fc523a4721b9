"""Greedy text with drafters of every kind against the target's own: chains and trees, one text, turns and batches,
dynamic and static caches, processors; and of each case again what copies and a grammar make of it.

`python -m tests.fuzz_kinds --cases 200` runs seeds 0 to 199 of each kind and prints every difference; `--kinds NAME
...` runs some, `--log FILE` goes on where FILE ends. A case is its kind and its seed. The drafters are random, so that
half of the cases let the target write some tokens alone, which drafts often are then.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging

from hf_hyperdflash import GrammarProcessor, Lookup, bind
from hf_hyperdflash.targets.caches.name import CACHE, cache_of
from hf_hyperdflash.targets.registry import target_of

from .conftest import prompt
from .contracts.test_drafters import KINDS, MORE, of_own_checkpoint
from .fuzz_trees import PROCESSORS, difference, padded_on_the_left
from .helpers.grammars import Masking, random_table
from .helpers.mtp_targets import CARRIERS

HEADS = {f"mtp {family}": of_own_checkpoint(family) for family in CARRIERS if family in CONFIG_MAPPING}
ALL = KINDS | {name: made for name, made in MORE.items() if not name.startswith("mtp ")} | HEADS
SOME_TOKENS = {"suppress_tokens": [*range(2), *range(9, 64)]}


def pair_of(kind: str) -> tuple[Any, Any]:
    """A bound target, which no token ends, and its drafter."""
    torch.manual_seed(0)
    target, drafter = ALL[kind](Path(tempfile.mkdtemp()))
    target.generation_config.eos_token_id = None
    drafter.bind(bind(target.eval()))
    return target, drafter


def run_case(target: Any, drafter: Any, seed: int, is_joined: bool = False) -> tuple[int, str | None]:
    """One case.

    Args:
        target: The target.
        drafter: Its drafter.
        seed: Of all that is chosen.
        is_joined: Whether copies join the drafts, and a grammar constrains the text where no other processor could
            forbid all that it allows.

    Returns:
        How many drafts were accepted, and what differs; `None` if nothing does.
    """
    chance, seen = random.Random(seed), target_of(target)
    how = seen.tree_verification
    size, deepest = chance.choice([1, 1, 2, 4]), drafter.max_draft_tokens or 9
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": chance.randint(3, 16), "pad_token_id": 0}
    if not seen.skips_padding:
        options |= chance.choice(PROCESSORS)
    options |= SOME_TOKENS if chance.random() < 0.5 else {}
    way = chance.choice([
        {}, {"num_assistant_tokens": chance.randint(1, deepest)}, {"num_assistant_tokens": "auto"},
        {"tree_budget": chance.randint(1, 12)}, {"tree_budget": chance.randint(1, 12)}, {"tree_budget": "auto"},
    ])  # fmt: skip
    is_static = how == "mask" and chance.random() < 0.35
    where = {"cache_implementation": "static", "max_cache_len": 96, "disable_compile": True} if is_static else {}
    texts = [prompt(chance.randint(2, 30), seed=chance.randrange(2**20))[0] for _ in range(size)]
    ids, mask = padded_on_the_left(texts)
    can_constrain = not options.keys() & {"no_repeat_ngram_size", "bad_words_ids", "eos_token_id"}
    table = random_table(seed, most=6, vocab_size=9) if is_joined and can_constrain else None

    def plain(ids: torch.Tensor, **options: Any) -> torch.Tensor:
        grammar = {} if table is None else {"logits_processor": [Masking(table, ids.shape[1])]}
        return target.generate(ids, **options, **grammar)

    if seen.skips_padding:  # stock compresses padding with the text
        alone = [plain(text[None], **options)[0] for text in texts]
        whole = ids.shape[1] + options["max_new_tokens"]
        expected = torch.stack([torch.nn.functional.pad(text, (whole - len(text), 0)) for text in alone])
    else:
        expected = plain(ids, attention_mask=mask, **options)
    asked = {**options, **way, **where, "assistant_model": drafter}
    if is_joined:
        documents = [[token if chance.random() > 0.1 else 5 for token in text] for text in expected.tolist()]
        asked["lookup"] = chance.choice([True, Lookup(documents)])
    if table is not None:
        asked["logits_processor"] = [GrammarProcessor(table)]
        options["logits_processor"] = [Masking(table, ids.shape[1])]  # for what is told of a difference
    out = target.generate(ids, attention_mask=mask, return_dict_in_generate=size == 1, **asked)
    written, accepted = (out.sequences if size == 1 else out), sum(drafter.last_stats.accepted)
    for row, (found, text) in enumerate(zip(written, expected, strict=True)):
        if found.tolist() != text.tolist():
            told = {**options, "attention_mask": mask[row][None]}
            return accepted, f"row {row + 1} of {size}, {way | where}: {difference(target, found, text, told)}"
    if size > 1 or is_static or seen.skips_padding or chance.random() < 0.5:
        return accepted, None
    longer = torch.cat([expected, prompt(chance.randint(1, 9), seed=seed)], dim=1)
    options.pop("logits_processor", None)
    told = {**options, "attention_mask": torch.ones_like(longer)}  # else a padding token that was written is hidden
    expected = plain(longer, **told)
    found = target.generate(longer, **asked | told, **{CACHE: cache_of(out)})
    accepted += sum(drafter.last_stats.accepted)
    if torch.equal(found, expected):
        return accepted, None
    return accepted, f"second turn, {way}: {difference(target, found[0], expected[0], told)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=ALL, default=[*ALL], metavar="NAME")
    parser.add_argument("--cases", type=int, default=200, help="of each kind")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--log", type=Path, help="a line a case; what is in it is not run again")
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    warnings.filterwarnings("ignore", message="Unfeasible length")  # of texts shorter than a processor wants
    torch.set_num_threads(1)
    logged = arguments.log.read_text().splitlines() if arguments.log and arguments.log.exists() else []
    known = {tuple(line.split("\t")[:2]): line.split("\t")[2:] for line in logged}
    wrong = Counter[str]()
    for kind in arguments.kinds:
        pair, total = None, 0
        for seed in range(arguments.first, arguments.first + arguments.cases):
            if (kind, str(seed)) in known:
                accepted, differs = known[kind, str(seed)]
            else:
                pair = pair or pair_of(kind)
                accepted, differs = run_case(*pair, seed)
                joined, joined_differs = run_case(*pair, seed, is_joined=True)
                accepted, differs = accepted + joined, differs or joined_differs
                if arguments.log:
                    with arguments.log.open("a") as log:
                        log.write(f"{kind}\t{seed}\t{accepted}\t{differs or ''}\n")
            total += int(accepted)
            if differs:
                wrong["nearly equal" if differs.find("DIFFERENT") < 0 else "different"] += 1
                print(f"case {seed}, {kind}, {differs}", flush=True)
        print(f"{arguments.cases:6d} {kind}: {total} drafts accepted", flush=True)
    print(f"{wrong['different']} different, {wrong['nearly equal']} where two logits nearly tie")
    sys.exit(wrong["different"] > 0)


if __name__ == "__main__":
    main()
