"""What each choice in training is worth, by real generation: one thing is changed at a time.

`original.jsonl` in the working folder has the prompts of `--answers` with the answers of the datasets that they are
from:

    python experiments/grids/choices.py answers.jsonl WORK_DIR/original.jsonl gsm8k.jsonl codealpaca.json
"""

import json
import sys
from pathlib import Path

from hf_hyperdflash.training.data.messages import to_messages
from hf_hyperdflash.training.data.rows import load_rows

ALL = "--eval_prompts 1000000"
CELLS = {
    "exact KL teacher, equal weights, own answers, bfloat16 cache": ALL,
    "no KL": f"{ALL} --kl_weight 0",
    "mean-pooled KL teacher (the paper's)": f"{ALL} --kl_teacher mean_pool",
    "decayed position weights, exp(-(k-1)/4)": f"{ALL} --loss_decay 4",
    "original answers instead of the target's own": f"{ALL} --dataset {{work_dir}}/original.jsonl",
    "float8 cache": f"{ALL} --feature_dtype float8",
    "online features": f"{ALL} --feature_source online",
}


def main(answers: str, output: str, *datasets: str) -> None:
    known = {}
    for dataset in datasets:
        for row in load_rows(dataset):
            question, answer = (message["content"] for message in to_messages(row)[:2])
            known[question.strip()] = answer
    with Path(output).open("w") as file:
        for row in load_rows(answers):
            asked, prompt = row["messages"][0]["content"].strip(), row["messages"][0]
            # A suffix may have been put after the question.
            answer = known.get(asked) or next((known[each] for each in known if asked.startswith(each)), None)
            if answer is None:
                raise SystemExit(
                    f"Error: no original answer to {asked[:80]!r}: name the datasets the prompts are from."
                )
            file.write(json.dumps({"messages": [prompt, {"role": "assistant", "content": answer}]}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
