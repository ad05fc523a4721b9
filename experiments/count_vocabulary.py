"""What share of a target's answers a draft vocabulary covers: of answers like those it was chosen from, and of others.

    python experiments/count_vocabulary.py --target SmolLM2-135M-Instruct.Q4_1.gguf --answers greedy.jsonl.gz \
        --output draft-vocabulary

The answers are JSON lines with `source` and `messages`. For each source the most frequent tokens are counted in nine
tenths of its answers and in nine tenths of all others, and looked for in its last tenth. A token that the vocabulary
lacks is never drafted, so what is not covered is the share of first drafts that are certain to be rejected.
"""

from __future__ import annotations

import argparse
import datetime
import gzip
import json
from collections import Counter, defaultdict
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from hf_hyperdflash import load_tokenizer
from hf_hyperdflash.benchmark.results import save_report

SIZES = (1024, 2048, 4096, 8192, 16384)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--answers", required=True)
    parser.add_argument("--output", help="folder of report.md and results.json")
    return parser.parse_args()


def count_answers(path: Path, tokenizer: PreTrainedTokenizerBase) -> tuple[dict[str, Counter[int]], ...]:
    """The tokens of each source's answers: of nine tenths, and of the last tenth."""
    texts: dict[str, list[str]] = defaultdict(list)
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        for line in lines:
            row = json.loads(line)
            texts[row["source"]].append(row["messages"][-1]["content"])
    seen: dict[str, Counter[int]] = {}
    held_out: dict[str, Counter[int]] = {}
    for source, answers in texts.items():
        encoded = tokenizer(answers, add_special_tokens=False)["input_ids"]
        end = len(encoded) * 9 // 10
        for found, part in ((seen, encoded[:end]), (held_out, encoded[end:])):
            found[source] = Counter(token for ids in part for token in ids)
    return seen, held_out


def covered(counts: Counter[int], size: int, held_out: Counter[int]) -> float:
    """The share of held-out tokens that are among the `size` most frequent ones."""
    return sum(held_out[token] for token, _ in counts.most_common(size)) / held_out.total()


def main() -> None:
    arguments = parse_arguments()
    seen, held_out = count_answers(Path(arguments.answers), load_tokenizer(arguments.target))
    lines = [f"# Draft vocabularies\n\n{datetime.date.today()}, held-out tokens that are covered, %\n"]
    lines += ["| answers | chosen from | tokens counted |" + "".join(f" {size:,} |" for size in SIZES)]
    lines += ["|---|---|---:|" + "---:|" * len(SIZES)]
    shares = {}
    for source in seen:
        others = sum((counts for name, counts in seen.items() if name != source), Counter())
        for of, counts in {"all kinds": others + seen[source], "the other kinds": others}.items():
            found = [covered(counts, size, held_out[source]) for size in SIZES]
            shares[f"{source}, {of}"] = dict(zip(SIZES, found))
            cells = "".join(f" {100 * share:.1f} |" for share in found)
            lines.append(f"| {source} | {of} | {counts.total():,} |{cells}")
    report = "\n".join(lines) + "\n"
    print(report)
    save_report(report, arguments, date=str(datetime.date.today()), covered=shares)


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:  # what the user can mend
        raise SystemExit(f"Error: {' '.join(str(error).split())}") from None
