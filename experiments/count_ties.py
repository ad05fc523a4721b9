"""How many greedy texts part from those with a drafter, where, and how far apart the two tokens' scores were there.

    python experiments/count_ties.py --target SmolLM2-135M-Instruct.Q4_1.gguf --drafter DRAFTER --data SUITES \
        --output ties                                                              # in bfloat16
    python experiments/count_ties.py --target ... --drafter ... --data SUITES --output exact --dtype float32 \
        --limit 79 --batch_size 8 --max_new_tokens 40                              # 504 prompts of seven suites

A forward over several tokens rounds otherwise than over one. Where a text parts, the target reads the text until
there again, token by token as plain decoding does, and the scores of the two tokens are compared: in steps of the
format, the distance from the larger score to the next number that the format has. With `--batch_size` both texts are
written in padded batches. Each prompt is kept in `texts.jsonl`, so that a run that was killed goes on.
"""

from __future__ import annotations

import argparse
import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from hf_hyperdflash import load_drafter, load_target, load_tokenizer
from hf_hyperdflash.benchmark.results import save_report
from hf_hyperdflash.benchmark.runner import hardware
from hf_hyperdflash.benchmark.suites import load_suite, suite_title, suites_in
from hf_hyperdflash.targets.caches.name import CACHE, cache_of
from hf_hyperdflash.training.data.encoding import encode_prompts

Found = dict[str, Any]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--data", required=True, help="folder of prompt suites")
    parser.add_argument("--output", required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--limit", type=int, default=8, help="prompts of each suite")
    parser.add_argument("--batch_size", type=int, default=1)
    parser.add_argument("--max_new_tokens", type=int, default=96)
    return parser.parse_args()


def written(target: Any, prompts: Sequence[torch.Tensor], count: int, pad: int, **options: Any) -> list[torch.Tensor]:
    """The new tokens of each prompt, without padding after the end."""
    longest = max(ids.shape[1] for ids in prompts)
    ids = torch.cat([torch.nn.functional.pad(each, (longest - each.shape[1], 0), value=pad) for each in prompts])
    mask = torch.stack([torch.arange(longest) >= longest - each.shape[1] for each in prompts]).long()
    texts = target.generate(
        ids, attention_mask=mask, max_new_tokens=count, do_sample=False, pad_token_id=pad, **options
    )
    ends = torch.as_tensor(target.generation_config.eos_token_id).view(-1)
    found = []
    for text in texts[:, longest:]:
        at_end = torch.isin(text, ends.to(text)).nonzero()
        found.append(text[: int(at_end[0]) + 1] if len(at_end) else text)
    return found


def parting(target: Any, prompt: torch.Tensor, alone: torch.Tensor, drafted: torch.Tensor) -> Found | None:
    """Where two texts part, and the distance of the two tokens there; `None` if they do not."""
    if torch.equal(alone, drafted):
        return None
    place = next(i for i, (one, other) in enumerate(zip(alone, drafted)) if one != other)
    with torch.no_grad():
        scores = target(prompt, use_cache=True)
        for token in alone[:place]:
            scores = target(token.view(1, 1), **{CACHE: cache_of(scores)}, use_cache=True)
    two = scores.logits[0, -1, [int(alone[place]), int(drafted[place])]]
    step = torch.finfo(two.dtype).eps * 2.0 ** int(two.abs().max().float().log2().floor())
    return {"token": place, "steps": abs(float(two[0] - two[1])) / step}


def compare(arguments: argparse.Namespace) -> list[Found]:
    """Compare the texts of each prompt that is not in `texts.jsonl` yet, and return what is known of all."""
    path = Path(arguments.output) / "texts.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    done = {(each["suite"], each["prompt"]) for each in found}
    tokenizer = load_tokenizer(arguments.target)
    target: Any = load_target(arguments.target, dtype=arguments.dtype)
    drafter: Any = load_drafter(arguments.drafter, target=target)
    drafter.bind(target)
    pad, count = target.generation_config.pad_token_id or 0, arguments.max_new_tokens
    with path.open("a") as file:
        for suite in suites_in(arguments.data):
            turns = load_suite(suite, arguments.data, arguments.limit)
            chats = [{"messages": [{"role": "user", "content": text}]} for text, *_ in turns]
            encoded = [(n, ids) for n, ids in enumerate(encode_prompts(tokenizer, chats)) if (suite, n) not in done]
            for start in range(0, len(encoded), arguments.batch_size):
                numbers, prompts = zip(*encoded[start : start + arguments.batch_size])
                alone = written(target, prompts, count, pad)
                drafted = written(target, prompts, count, pad, assistant_model=drafter)
                for number, *texts in zip(numbers, prompts, alone, drafted):
                    parted = parting(target, *texts)
                    found.append({"suite": suite, "prompt": number, "tokens": len(texts[1]), "parted": parted})
                    print(json.dumps(found[-1]), file=file, flush=True)
    return found


def main() -> None:
    arguments = parse_arguments()
    found = compare(arguments)
    facts = {
        "date": str(datetime.date.today()), "hardware": hardware("cpu"), "torch": torch.__version__,
        "transformers": transformers.__version__, "most new tokens": arguments.max_new_tokens,
        "texts in a batch": arguments.batch_size,
    }  # fmt: skip
    lines = ["# Greedy texts with and without a drafter", "", ", ".join(f"{k} {v}" for k, v in facts.items()) + "."]
    lines += ["", "| dtype | suite | texts | tokens | that part | of these at most one step apart | most steps |"]
    lines += ["|---|---|---:|---:|---:|---:|---:|"]
    for suite in [*dict.fromkeys(each["suite"] for each in found), "all"]:
        texts = [each for each in found if suite in (each["suite"], "all")]
        steps = [each["parted"]["steps"] for each in texts if each["parted"]]
        near, most = sum(one <= 1 for one in steps), f"{max(steps):.0f}" if steps else ""
        counts = f"{len(texts)} | {sum(each['tokens'] for each in texts):,} | {len(steps)} | {near} | {most}"
        lines.append(f"| {arguments.dtype} | {suite_title(suite)} | {counts} |")
    report = "\n".join(lines) + "\n"
    print(report)
    save_report(report, arguments, **facts, texts=found)


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:  # what the user can mend
        raise SystemExit(f"Error: {' '.join(str(error).split())}") from None
