"""Draw the draft trees of a generation: every node, by which pass it was drafted, and what the target accepted.

    python examples/draw_trees.py --prompt "Write a Python function to add two numbers." --output trees.png

Needs matplotlib: pip install "hf-hyperdflash[benchmark]".
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from hf_hyperdflash import load_drafter, load_target, load_tokenizer
from hf_hyperdflash.decoding.stats import VerifiedTree, keep_trees
from hf_hyperdflash.training.data.encoding import encode_prompts
from hf_hyperdflash.trees.tree import ANCHOR, DraftTree

MODELS = Path(__file__).parent / "models"
ACCEPTED, REJECTED, OWN = "#0072B2", "#B5B5B5", "#D55E00"
OF_PASSES = (
    "white",
    "#FBE8A6",
    "#CDE9D9",
    "#F6D0DD",
    "#D5D9F2",
    "#E9D3B8",
    "#D9EDF7",
    "#E5E5E5",
)  # first, second, ...


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=str(MODELS / "tiny-deepseek-v4"), help="path or Hub id")
    parser.add_argument("--drafter", default=str(MODELS / "tiny-deepseek-v4-hyperdflash"), help="path or Hub id")
    parser.add_argument(
        "--prompt", default="Tom has 12 marbles and buys 3 bags with 8 marbles each. How many has he now?"
    )
    parser.add_argument("--tree-budget", type=int, default=16, help="most nodes of a tree")
    parser.add_argument("--rounds", type=int, default=4, help="how many rounds are drawn, the first ones")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--seed", type=int, default=0, help="of sampling")
    parser.add_argument("--output", type=Path, default=Path("trees.png"))
    arguments = parser.parse_args()
    for name in ("tree_budget", "rounds"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(arguments, name)}, expected at least 1.")
    if arguments.output.is_dir():
        parser.error(
            f"--output is {arguments.output}, a folder: expected a file, for example {arguments.output}/trees.png."
        )
    if arguments.temperature < 0:
        parser.error(f"--temperature is {arguments.temperature}, expected 0 (greedy) or above.")
    return arguments


def rounds_of(arguments: argparse.Namespace, target: Any, tokenizer: Any, drafter: Any) -> list[VerifiedTree]:
    """Generate, and keep what was drafted and accepted."""
    ids = encode_prompts(tokenizer, [{"messages": [{"role": "user", "content": arguments.prompt}]}])[0]
    torch.manual_seed(arguments.seed)
    sampling = (
        {"do_sample": True, "temperature": arguments.temperature} if arguments.temperature else {"do_sample": False}
    )
    with keep_trees():
        target.generate(
            ids,
            assistant_model=drafter,
            tree_budget=arguments.tree_budget,
            max_new_tokens=(drafter.num_draft_tokens + 1) * arguments.rounds + 1,
            **sampling,
        )
    return [kept for kept in drafter.last_stats.trees if len(kept.drafts)][: arguments.rounds]


def indices_among(tree: DraftTree) -> dict[int, float]:
    """How high each node is drawn: leaves one below the other, a parent in the middle of its children."""
    heights: dict[int, float] = {}
    leaves = 0

    def place(node: int) -> float:
        nonlocal leaves
        below = [place(child) for child in tree.children.get(node, ())]
        if not below:
            leaves += 1
        heights[node] = sum(below) / len(below) if below else -float(leaves)
        return heights[node]

    place(ANCHOR)
    return heights


def draw(figure: Figure, rounds: list[VerifiedTree], tokenizer: Any) -> None:
    """A panel per round."""
    heights = [max(len(kept.drafts.paths), 2) for kept in rounds]
    for axes, (number, kept) in zip(
        figure.subplots(len(rounds), height_ratios=heights, squeeze=False)[:, 0], enumerate(rounds, start=1)
    ):
        tree, accepted = kept.drafts, kept.accepted
        places, depths = indices_among(tree), (*tree.depths, 0)  # the anchor's is the last
        for node, parent in enumerate(tree.parents):
            colour = ACCEPTED if node in accepted else REJECTED
            ends = [depths[parent], depths[node]], [places[parent], places[node]]
            axes.plot(*ends, color=colour, linewidth=2 if node in accepted else 1, zorder=1)
            token = tokenizer.decode([int(tree.tokens[node])])
            drafted_in = 1 if tree.passes is None else tree.passes[node]
            label(axes, depths[node], places[node], token, colour, OF_PASSES[(drafted_in - 1) % len(OF_PASSES)])
        label(axes, 0, places[ANCHOR], "anchor", "black")
        last = accepted[-1] if accepted else ANCHOR
        axes.annotate(
            "" if kept.own is None else f"+ {shown(tokenizer.decode([kept.own]))}",
            (depths[last], places[last]),
            (0, 7),
            textcoords="offset points",
            color=OWN,
            fontsize=7,
            ha="center",
            va="bottom",
        )
        axes.set(xlim=(-0.6, max(depths) + 0.6), ylim=(min(places.values()) - 0.9, -0.1), yticks=[])
        passes = max(tree.passes or (1,))
        told = f"Round {number}: {len(tree)} nodes on {len(tree.paths)} paths, {len(accepted)} of them accepted"
        told += f"; {passes} passes of the drafter, one colour each" if passes > 1 else "; one pass of the drafter"
        axes.set_title(told, fontsize=9, loc="left")
        axes.spines[["top", "right", "left", "bottom"]].set_visible(False)
        axes.set_xticks(range(max(depths) + 1), range(max(depths) + 1), fontsize=7)
    axes.set_xlabel(
        "tokens after the anchor (framed blue: accepted; grey: rejected; orange: written by the target)", fontsize=8
    )


def shown(token: str) -> str:
    """A token that can be seen, whatever it is."""
    return token.replace("\n", "\\n").replace("$", r"\$").replace(" ", "·") or "''"


def label(axes: Any, x: float, y: float, token: str, colour: str, filled: str = "white") -> None:
    box = {"boxstyle": "round,pad=0.2", "facecolor": filled, "edgecolor": colour}
    axes.text(x, y, shown(token), ha="center", va="center", fontsize=7, bbox=box, zorder=2)


def main() -> None:
    arguments = parse_args()
    target = load_target(arguments.target, dtype="float32")  # bfloat16 needs transformers 5.20, and is slower here
    drafter = load_drafter(arguments.drafter, target=target).eval()
    drafter.bind(target)
    tokenizer = load_tokenizer(arguments.target)
    rounds = rounds_of(arguments, target, tokenizer, drafter)
    if not rounds:
        raise SystemExit("The text was over before a tree was drafted: try another prompt.")
    figure = Figure(
        figsize=(9, 0.5 + sum(0.5 + 0.27 * len(kept.drafts.paths) for kept in rounds)), layout="constrained"
    )
    draw(figure, rounds, tokenizer)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(arguments.output, dpi=130)
    print(f"{arguments.output}: {len(rounds)} rounds, {sum(len(kept.tokens) for kept in rounds)} tokens.")


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:  # what the user can mend
        raise SystemExit(f"Error: {' '.join(str(error).split())}") from None
    except KeyboardInterrupt:
        raise SystemExit("Stopped. Nothing is written.") from None
