"""Write the card of a shipped target from its configuration, weights and training record.

    python tools/target_card.py examples/models/tiny-deepseek-v4 --template model_cards/parts/tiny-deepseek-v4.md \
        --output model_cards/tiny-deepseek-v4.md
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from safetensors import safe_open

from hf_hyperdflash.hub.loading import check_target

LAST = 100  # steps over which the final losses are means


def facts(folder: Path) -> dict[str, Any]:
    check_target(str(folder))
    config = json.loads((folder / "config.json").read_text())
    training = json.loads((folder / "training.json").read_text())
    with safe_open(folder / "model.safetensors", "pt") as file:
        sizes = {name: math.prod(file.get_slice(name).get_shape()) for name in file.keys()}
    mtp = sum(size for name, size in sizes.items() if name.startswith("mtp."))
    end = [line for line in training["history"] if line["step"] > training["history"][-1]["step"] - LAST]
    return {
        "config": config,
        "training": training,
        "epochs": training["steps"] * training["batch_size"] * training["seq_length"] / training["tokens"],
        "parameters": (sum(sizes.values()) - mtp) / 1e6,
        "mtp_parameters": mtp / 1e6,
        "loss": sum(line["loss"] for line in end) / len(end),
        "mtp_loss": sum(line.get("mtp_loss", 0.0) for line in end) / len(end),  # where there is an MTP head
    }


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    parser.add_argument("--template", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    data = ModelCardData(
        license="apache-2.0",
        library_name="transformers",
        pipeline_tag="text-generation",
        language="en",
        datasets=["openai/gsm8k"],
        tags=["tiny"],
    )
    told = facts(args.target)
    data.tags = [told["config"]["model_type"], *(["hyper-connections"] if told["mtp_parameters"] else []), "tiny"]
    ModelCard.from_template(data, template_path=str(args.template), **told).save(args.output)


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:  # what the user can mend
        raise SystemExit(f"Error: {' '.join(str(error).split())}") from None
