"""JSON by schema with xgrammar, llguidance and outlines-core: constrained plain decoding beside drafts, in turns.

    python experiments/agents/measure_grammars.py --target examples/models/tiny-deepseek-v4 \\
        --drafter examples/models/tiny-deepseek-v4-hyperdflash --dtype float32 --output grammars

`schemas.json` has ten schemas with five prompts each. Of each library every prompt is written plain, with drafts that
"auto" chooses, with `--drafts` ones and with trees of `--nodes`, and then in batches of four with four schemas; each
text is compared with the plain one. Float32 shows that the texts are equal: with bfloat16 two tokens often have the
same score. At last `--samples` texts of a short schema at temperature 1, half of them from chains and half from trees,
are compared with their exact probabilities by a chi-square test.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from shared import HERE, Rows, arguments_of, facts_of, head, load_pair, rates, run, timed

from hf_hyperdflash import GrammarProcessor
from hf_hyperdflash.benchmark.intervals import interval
from hf_hyperdflash.benchmark.results import save_report
from hf_hyperdflash.grammars.states import state_of
from hf_hyperdflash.training.data.encoding import encode_prompts

PLAIN, AUTO, CHAIN, TREE = "plain", "auto", "chain", "tree"
BATCH, FEW = 4, 5  # texts; texts of a cell of the test that are expected at least
DICE, EYES = "Throw two dice.", {"type": "integer", "minimum": 1, "maximum": 6}
DRAWN = {
    "type": "object", "required": ["first", "second"], "additionalProperties": False,
    "properties": {"first": EYES, "second": EYES},
}  # fmt: skip


def of_xgrammar(tokenizer: Any, size: int) -> Callable[[dict[str, Any]], Any]:
    import xgrammar

    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=size)
    compiler = xgrammar.GrammarCompiler(info, max_threads=1)
    return lambda schema: compiler.compile_json_schema(schema, any_whitespace=False)


def of_llguidance(tokenizer: Any, size: int) -> Callable[[dict[str, Any]], Any]:
    from llguidance import LLMatcher
    from llguidance.hf import from_tokenizer

    known, compact = from_tokenizer(tokenizer, n_vocab=size), {"x-guidance": {"whitespace_flexible": False}}
    return lambda schema: LLMatcher(known, LLMatcher.grammar_from_json_schema({**schema, **compact}))


def of_outlines(tokenizer: Any, size: int) -> Callable[[dict[str, Any]], Any]:
    from outlines_core import Index, Vocabulary
    from outlines_core.json_schema import build_regex_from_schema
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    byte_of, vocabulary = {letter: byte for byte, letter in bytes_to_unicode().items()}, {}
    for token, number in tokenizer.get_vocab().items():
        if number not in tokenizer.all_special_ids and all(letter in byte_of for letter in token):
            vocabulary.setdefault(bytes(byte_of[letter] for letter in token), []).append(number)
    known = Vocabulary(tokenizer.eos_token_id, vocabulary)

    def bounded(schema: Any) -> Any:
        """The library knows of numbers how many digits they have, not how large they are."""
        if not isinstance(schema, dict):
            return schema
        digits = {"maxDigits": len(str(schema["maximum"]))} if "maximum" in schema else {}
        return {name: bounded(value) for name, value in schema.items()} | digits

    return lambda schema: Index(build_regex_from_schema(json.dumps(bounded(schema)), whitespace_pattern=""), known)


LIBRARIES = {"xgrammar": of_xgrammar, "llguidance": of_llguidance, "outlines-core": of_outlines}


def parse_arguments() -> argparse.Namespace:
    parser = arguments_of(__doc__)
    parser.add_argument("--libraries", nargs="+", default=list(LIBRARIES), choices=list(LIBRARIES))
    parser.add_argument("--prompts", type=int, default=50, help="of all schemas together")
    parser.add_argument("--ways", nargs="+", default=[AUTO, CHAIN, TREE], choices=[AUTO, CHAIN, TREE])
    parser.add_argument("--drafts", type=int, default=5)
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--samples", type=int, default=400, help="texts of the chi-square test; 0 for none")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    schemas = json.loads((HERE / "schemas.json").read_text(encoding="utf-8"))
    # A prompt of each schema, then the second of each: four that follow each other have four schemas.
    cases = [(name, prompt) for prompts in zip(*(of["prompts"] for of in schemas.values()))
             for name, prompt in zip(schemas, prompts)][: arguments.prompts]  # fmt: skip
    target, tokenizer, drafters = load_pair(arguments, 4)
    facts = facts_of(target)
    rows = Rows(arguments, "ways", "drafts", "nodes")
    ids = [encode(tokenizer, schemas[name]["schema"], prompt) for name, prompt in cases]
    asked = {AUTO: {"num_assistant_tokens": "auto"}, CHAIN: {"num_assistant_tokens": arguments.drafts}}
    asked[TREE] = {"num_assistant_tokens": arguments.drafts, "tree_budget": arguments.nodes}
    ways: dict[str, dict[str, Any]] = {PLAIN: {}}
    ways |= {way: {"assistant_model": of, **asked[way]} for of, way in zip(drafters, arguments.ways)}
    size, names = target.config.vocab_size, list(ways)
    (short,) = encode_prompts(tokenizer, [{"messages": [{"role": "user", "content": DICE}]}])
    for library in arguments.libraries:
        compile_ = LIBRARIES[library](tokenizer, size)
        grammars = {name: compile_(schemas[name]["schema"]) for name in dict.fromkeys(name for name, _ in cases)}
        for way in names:
            timed(target.generate, ids[0], 16, logits_processor=[GrammarProcessor(grammars[cases[0][0]])], **ways[way])
        for number, (name, _) in enumerate(cases):
            if rows.has(library=library, prompt=number):
                continue
            figures, texts = {}, {}
            for way in [*names[number % len(names) :], *names[: number % len(names)]]:
                processors = [GrammarProcessor(grammars[name])]
                figures[way], texts[way] = timed(
                    target.generate, ids[number], arguments.tokens, logits_processor=processors, **ways[way]
                )
            same = {way: texts[way] == texts[PLAIN] for way in names}
            rows.add(
                library=library, schema=name, prompt=number, methods=figures, same=same, output=texts[PLAIN],
                text=tokenizer.decode(texts[PLAIN], skip_special_tokens=True),
            )  # fmt: skip
            print(library, number + 1, rows.rows[-1]["text"], same, flush=True)
        plain = {row["prompt"]: row["output"] for row in rows.rows if row["library"] == library and "output" in row}
        for start in range(0, len(cases), BATCH):
            batch = [number % len(cases) for number in range(start, start + BATCH)]
            if rows.has(library=library, batch=batch):
                continue
            written = generate_batch(
                target, [ids[number] for number in batch], [grammars[cases[number][0]] for number in batch],
                assistant_model=drafters[-1], max_new_tokens=arguments.tokens, do_sample=False, **asked[AUTO],
            )  # fmt: skip
            ends = end_tokens(target)
            same = [until(ends, text) == plain[number] for number, text in zip(batch, written)]
            rows.add(library=library, batch=batch, same=same)
            print(library, "batch", batch, same, flush=True)
        if arguments.samples and not rows.has(library=library, is_law=True):
            ways_drawn = [asked[CHAIN], asked[TREE]]
            rows.add(library=library, is_law=True, **law(
                target, short, compile_(DRAWN), arguments.samples,
                [{"assistant_model": drafters[-1], **each} for each in ways_drawn],
            ))  # fmt: skip
            print(library, rows.rows[-1], flush=True)
    write(rows.rows, facts, arguments)


def encode(tokenizer: Any, schema: dict[str, Any], prompt: str) -> torch.Tensor:
    text = f"{prompt}\n\nAnswer with a JSON object of this schema:\n{json.dumps(schema)}"
    (ids,) = encode_prompts(tokenizer, [{"messages": [{"role": "user", "content": text}]}])
    return ids


def generate_batch(target: Any, prompts: list[torch.Tensor], grammars: list[Any], **options: Any) -> list[list[int]]:
    """Return the new tokens of several prompts, padded on the left, each with its own grammar."""
    width, padding = max(ids.shape[1] for ids in prompts), target.generation_config.pad_token_id
    ids = torch.cat([torch.nn.functional.pad(each, (width - each.shape[1], 0), value=padding) for each in prompts])
    mask = torch.cat([
        torch.nn.functional.pad(torch.ones_like(each), (width - each.shape[1], 0)) for each in prompts
    ])  # fmt: skip
    output = target.generate(ids, attention_mask=mask, logits_processor=[GrammarProcessor(grammars)], **options)
    return output[:, width:].tolist()


def end_tokens(target: Any) -> list[int]:
    ends = target.generation_config.eos_token_id
    return ends if isinstance(ends, list) else [ends]


def until(ends: list[int], text: list[int]) -> list[int]:
    """Return a text up to its end token, without the padding behind it."""
    return text[: next((place + 1 for place, token in enumerate(text) if token in ends), len(text))]


@torch.no_grad()
def exact_law(target: Any, ids: torch.Tensor, grammar: Any, rare: float) -> dict[tuple[int, ...], float]:
    """Return beginnings of texts that are not rarer than `rare`, by the target's own forwards, and how probable it is
    that a text has each of them and no longer one."""
    found, open_, ends = {}, [((), 1.0, state_of(grammar).fork())], end_tokens(target)
    while open_:
        tokens, chance, state = open_.pop()
        found[tokens] = chance
        if tokens and tokens[-1] in ends:
            continue
        allowed = state.allowed(target.config.vocab_size).nonzero()[:, 0]
        p = torch.ones(1)
        if len(allowed) > 1:
            text = torch.cat([ids, torch.tensor([tokens], dtype=torch.long)], dim=1)
            p = target(text).logits[0, -1, allowed].float().softmax(-1)
        for token, each in zip(allowed.tolist(), p.tolist()):
            if chance * each >= rare:
                own = state.fork()
                own.advance(token)
                open_.append(((*tokens, token), chance * each, own))
                found[tokens] -= chance * each
    return found


def law(target: Any, ids: torch.Tensor, grammar: Any, samples: int, ways: list[dict[str, Any]]) -> dict[str, Any]:
    """Compare how often sampled texts begin in each way with its exact probability; rare beginnings count together."""
    expected = exact_law(target, ids, grammar, FEW / samples)
    counts: Counter[tuple[int, ...]] = Counter()
    torch.manual_seed(0)
    while counts.total() < samples:
        for way in ways:
            written = generate_batch(
                target, [ids] * BATCH, [grammar] * BATCH, do_sample=True, top_k=0, max_new_tokens=64, **way
            )
            for text in written:
                beginnings = (tuple(text[:length]) for length in range(len(text), -1, -1))
                counts[next(each for each in beginnings if each in expected)] += 1
    drawn = counts.total()
    cells = [(counts[text], chance * drawn) for text, chance in expected.items() if chance * drawn >= FEW]
    rest = drawn - sum(seen for seen, _ in cells), drawn - sum(mean for _, mean in cells)
    cells += [rest] if rest[1] >= FEW else []
    statistic, freedom = sum((seen - mean) ** 2 / mean for seen, mean in cells), len(cells) - 1
    p = torch.special.gammaincc(torch.tensor(freedom / 2), torch.tensor(statistic / 2)).item() if freedom > 0 else None
    return {"samples": drawn, "cells": cells, "chi_square": statistic, "p": p}


def write(rows: list[dict[str, Any]], facts: dict[str, Any], arguments: argparse.Namespace) -> None:
    lines = [
        "| | speed, times constrained plain (95 %) | after the first token | tau | texts as plain, alone "
        "| in batches of four | chi-square, temperature 1 |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    figures: dict[str, Any] = {}
    for library in arguments.libraries:
        own = [row for row in rows if row["library"] == library]
        alone = [row for row in own if "methods" in row]
        drawn = next((row for row in own if row.get("is_law")), None)
        same = [each for row in alone for way, each in row["same"].items() if way != PLAIN]
        batched = [each for row in own if "batch" in row for each in row["same"]]
        for way in arguments.ways:
            whole, after = (
                interval(rates(alone, way, clock) / rates(alone, PLAIN, clock)) for clock in ("cpu", "decoding_cpu")
            )
            of = [row["methods"][way] for row in alone]
            tau = sum(each["tokens"] - 1 for each in of) / max(sum(each["rounds"] for each in of), 1)
            found = {"whole": whole._asdict(), "after_first": after._asdict(), "tau": tau}
            figures.setdefault(library, {})[way] = found
            cells = [f"{library}, {way}", f"{whole.value:.2f} ({whole.low:.2f} to {whole.high:.2f})"]
            cells += [f"{after.value:.2f} ({after.low:.2f} to {after.high:.2f})", f"{tau:.2f}"]
            cells += [f"{sum(row['same'][way] for row in alone)} of {len(alone)}"]
            cells += [f"{sum(batched)} of {len(batched)}" if way == AUTO else ""]
            is_first = drawn is not None and drawn["p"] is not None and way == arguments.ways[0]
            cells += [
                f"p = {drawn['p']:.2f}, {drawn['samples']} texts, {len(drawn['cells'])} cells" if is_first else ""
            ]
            lines.append(f"| {' | '.join(cells)} |")
        figures[library] |= {"same": sum(same) + sum(batched), "compared": len(same) + len(batched), "law": drawn}
    about = (
        f"{len({row['prompt'] for row in rows if 'methods' in row})} prompts of {arguments.prompts}, at most "
        f"{arguments.tokens} new tokens, greedy but for the test; chains of {arguments.drafts} drafts, trees of "
        f"{arguments.nodes} nodes; CPU-seconds. Texts as plain: "
        + ", ".join(f"{name} {of['same']} of {of['compared']}" for name, of in figures.items())
        + "."
    )
    report = "\n\n".join([head("JSON by schema", facts), about, "\n".join(lines)]) + "\n"
    print(report)
    save_report(report, arguments, facts=facts, libraries=figures)


if __name__ == "__main__":
    run(main)
