"""How many greedy texts in bfloat16 part from those with a drafter, and how far apart the two tokens' scores were.

    python experiments/count_ties.py --target SmolLM2-135M-Instruct.Q4_1.gguf --drafter DRAFTER \
        --output ties

A forward over several tokens rounds otherwise than over one. Where a text parts, the target reads the text until
there again, token by token as plain decoding does, and the scores of the two tokens are compared: in steps of the
format, the distance from the larger score to the next number that the format has.
"""

from __future__ import annotations

import argparse
import datetime
from typing import Any

import torch
import transformers

from hf_hyperdflash import load_drafter, load_target, load_tokenizer
from hf_hyperdflash.benchmark.doctor.examine import PROMPTS
from hf_hyperdflash.benchmark.results import save_report
from hf_hyperdflash.benchmark.runner import hardware
from hf_hyperdflash.training.data.rows import encode_prompts


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--output")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--max_new_tokens", type=int, default=96)
    return parser.parse_args()


def parting(target: Any, alone: torch.Tensor, drafted: torch.Tensor, start: int) -> dict[str, Any] | None:
    """Return where two texts part, and the distance of the two tokens there; `None` if they do not."""
    length = min(alone.shape[1], drafted.shape[1])
    differs = (alone[0, :length] != drafted[0, :length]).nonzero()
    if not len(differs):
        return None
    place, cache = int(differs[0]), None
    with torch.no_grad():
        scores = target(alone[:, :start], use_cache=True)
        for token in alone[0, start:place]:
            cache = scores.past_key_values
            scores = target(token.view(1, 1), past_key_values=cache, use_cache=True)
    two = scores.logits[0, -1, [int(alone[0, place]), int(drafted[0, place])]]
    step = torch.finfo(two.dtype).eps * 2.0 ** int(two.abs().max().float().log2().floor())
    return {"token": place - start, "steps": float((two[0].float() - two[1].float()) / step)}


def main() -> None:
    arguments = parse_arguments()
    tokenizer = load_tokenizer(arguments.target)
    target: Any = load_target(arguments.target, dtype=arguments.dtype)
    drafter: Any = load_drafter(arguments.drafter, target=target)
    drafter.bind(target)
    chats = [{"messages": [{"role": "user", "content": text}]} for text in PROMPTS[: arguments.prompts]]
    found = []
    for ids in encode_prompts(tokenizer, chats):
        options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": arguments.max_new_tokens}
        alone = target.generate(ids, **options, do_sample=False)
        drafted = target.generate(ids, **options, do_sample=False, assistant_model=drafter)
        found.append(parting(target, alone, drafted, ids.shape[1]))
        print(found[-1], flush=True)
    parted = [one for one in found if one]
    near = sum(one["steps"] <= 1 for one in parted)
    facts = {
        "date": str(datetime.date.today()), "hardware": hardware("cpu"), "torch": torch.__version__,
        "transformers": transformers.__version__, "new tokens": arguments.max_new_tokens,
    }  # fmt: skip
    report = (
        "# Greedy texts with and without a drafter\n\n" + ", ".join(f"{k} {v}" for k, v in facts.items()) + ".\n\n"
    )
    report += "| dtype | texts | that part | of these at most one step apart | most steps |\n|---|---|---|---|---|\n"
    most = max((one["steps"] for one in parted), default=0)
    report += f"| {arguments.dtype} | {len(found)} | {len(parted)} | {near} | {most:.0f} |\n"
    print(report)
    save_report(report, arguments, **facts, texts=found)


if __name__ == "__main__":
    main()
