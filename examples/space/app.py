"""Plain and assisted text side by side, as they are written: a Hugging Face Space, or a page on your own machine.

    python examples/space/app.py
    python examples/space/app.py --target Qwen/Qwen3-8B --drafter z-lab/Qwen3-8B-DFlash-b16

Needs gradio: pip install -r examples/space/requirements.txt. Without names it takes the variables TARGET and DRAFTER
(a Space's settings have them), then what the repository has: its small pair, and SmolLM2 once `examples/smollm2.py`
has fetched it.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from functools import cache
from html import escape
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import gradio as gr
from transformers.generation.streamers import BaseStreamer
from views import text_html, tree_html, tree_text  # beside this file, which is where Python looks first

from hf_hyperdflash.cli.display.text import Piece, Pieces
from hf_hyperdflash.cli.session import Session
from hf_hyperdflash.decoding.stats import SpeculationStats, VerifiedTree, keep_trees
from hf_hyperdflash.training.data.encoding import encode_prompts

HERE = Path(__file__).resolve().parent
SHIPPED = {  # targets and drafters, from the folder of models; the second target is there once smollm2.py has run
    "tiny DeepSeek-V4": ("tiny-deepseek-v4", "tiny-deepseek-v4-hyperdflash"),
    "SmolLM2-135M-Instruct": ("../../downloads/SmolLM2-135M-Instruct.Q4_1.gguf", "smollm2-135m-hyperdflash"),
}
PROMPTS = [
    "Tom has 12 marbles and gives 5 to his sister. How many are left?",
    "Write a Python function that adds two numbers.",
    "A train travels 60 miles an hour for 3 hours. How far does it go?",
]
MOST_NODES = 512  # more take minutes on a CPU
ALONE, ASSISTED = "Target alone", "With the drafter"
ALL, CHAIN = "all that it can", "no tree, one chain"
ABOUT = """# Speculative decoding, side by side
On the left the target writes alone, one token a forward. On the right a drafter helps it: the same text in fewer
forwards. One after the other, so that neither slows the other down."""
TINY = " The tiny model is seldom right; what counts is how its text comes about."
HINT = "Click a token of the assisted text to see the draft tree of the round that wrote it."
FIRST = "No round wrote this token: the first comes with the prompt, and where one alone is left nothing is drafted."
KEY = "The first row is what the text got; hollow is what was drafted in vain."
CSS = """
.plain {white-space: pre-wrap; overflow-wrap: anywhere; line-height: 1.6}
[data-token] {cursor: pointer}
.picked {outline: 2px solid var(--body-text-color)}
.tree {overflow-x: auto}
"""
PICK = """element.addEventListener('click', event => {
  const piece = event.target.closest('[data-token]');
  if (!piece) return;
  element.querySelectorAll('.picked').forEach(other => other.classList.remove('picked'));
  piece.classList.add('picked');
  trigger('select', {index: Number(piece.dataset.token), value: piece.textContent});
});"""


class Pair(NamedTuple):
    target: Any
    tokenizer: Any
    drafter: Any


@cache
def pair_of(target: str, drafter: str) -> Pair:
    session = Session(target)
    session.check([(drafter, None)])
    model, tokenizer, drafters = session.load([drafter])
    pair = Pair(model, tokenizer, drafters[drafter])
    for assistant in (None, pair.drafter):  # what happens once only is no part of what is measured
        model.generate(ids_of(pair, PROMPTS[0]), assistant_model=assistant, max_new_tokens=16)
    return pair


def ids_of(pair: Pair, prompt: str) -> Any:
    return encode_prompts(pair.tokenizer, [{"messages": [{"role": "user", "content": prompt}]}])[0].to(
        pair.target.device
    )


class Side(BaseStreamer):
    """One of the two texts: written in a thread, looked at meanwhile."""

    def __init__(self, pair: Pair, drafter: Any = None) -> None:
        self.pair, self.drafter, self.stats = pair, drafter, SpeculationStats()
        self.maker, self.pieces = Pieces(pair.tokenizer), list[Piece]()
        self.tokens, self.seconds = -1, 0.0  # the prompt is put first
        self.is_over = self.is_stopped = False
        self.error: Exception | None = None

    def put(self, value: Any) -> None:
        if self.is_stopped:
            raise InterruptedError
        self.tokens += 1
        if not self.tokens:
            return
        if self.drafter:
            self.stats = self.drafter.last_stats
        writer = (self.stats.written[-1], self.stats.by_head[-1]) if self.drafter else (0,)
        piece = self.maker.add(int(value), *writer)
        self.pieces += [piece] if piece else []
        self.seconds = time.perf_counter() - self.began

    def end(self) -> None:
        self.seconds, self.is_over = time.perf_counter() - self.began, True

    def _generate(self, ids: Any, options: dict[str, Any]) -> None:
        self.began = time.perf_counter()
        try:
            with keep_trees():
                self.pair.target.generate(ids, assistant_model=self.drafter, streamer=self, **options)
        except Exception as error:
            self.error = error

    def write(self, ids: Any, options: dict[str, Any]) -> Iterator[None]:
        """A few times a second it can be looked at; whoever stops looking stops it."""
        thread = Thread(target=self._generate, args=(ids, options))
        thread.start()
        try:
            while thread.is_alive():
                thread.join(0.15)
                yield
        finally:
            self.is_stopped = True
            thread.join()
        if self.error is not None:
            raise self.error
        yield  # the whole text: it may have ended while somebody looked at it

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)


def numbers_of(side: Side, plain: Side | None = None, is_greedy: bool = True) -> str:
    """What stands above a text; above the assisted one, how it compares with the plain one."""
    told = [f"**{side.rate:.1f} tokens/s**", f"{side.tokens} tokens"] if side.seconds else ["waits for its turn"]
    if plain is not None and side.seconds:
        tau = f"accepted length (tau) **{side.stats.tau:.2f}**"
        told[1:] = [f"**{side.rate / plain.rate:.2f}×**", tau, f"{side.stats.rounds} rounds"]
    if plain is not None and side.is_over:
        same = "the same text" if side.text == plain.text else "not the same text: two tokens nearly tied"
        told += [same if is_greedy else "drawn at random"]
    return f"### {ALONE if plain is None else ASSISTED}\n{' · '.join(told)}"


def drafts_of(pair: Pair, drafts: str, nodes: str) -> dict[str, Any]:
    """`generate`'s options for what stands in the two fields.

    Raises:
        ValueError: If it is neither a number nor auto.
    """
    options: dict[str, Any] = {}
    if drafts not in ("", ALL):
        options["num_assistant_tokens"] = pair.drafter.check_num_draft_tokens(number_or_text(drafts))
    if nodes not in ("", CHAIN):
        options["tree_budget"] = number_or_text(nodes)
        if options["tree_budget"] not in ("auto", *range(1, MOST_NODES + 1)):
            raise ValueError(
                f"The tree budget is {nodes!r}, expected the most nodes of a tree, 1 to {MOST_NODES}, or auto."
            )
    return options


def number_or_text(text: str) -> int | str:
    return int(text) if text.strip().isdecimal() else text.strip()


def prompt_ids(pair: Pair, prompt: str, new_tokens: int) -> Any:
    """The prompt as tokens.

    Raises:
        ValueError: If it is empty, or too long for the target.
    """
    if not prompt.strip():
        raise ValueError("The prompt is empty, expected what to ask.")
    ids, longest = ids_of(pair, prompt), getattr(pair.target.config, "max_position_embeddings", None)
    if longest and ids.shape[1] + new_tokens > longest:
        raise ValueError(
            f"The prompt has {ids.shape[1]} tokens and {new_tokens} new ones are asked for: the target was made for "
            f"{longest} together. Shorten the prompt."
        )
    return ids


def compare(pair: Pair, prompt: str, temperature: float, drafts: str, nodes: str, new_tokens: int) -> Iterator[tuple]:
    """Write the text twice; each time the numbers and text of both sides, and what a click looks at."""
    ids, own = prompt_ids(pair, prompt, int(new_tokens)), drafts_of(pair, drafts, nodes)
    shared: dict[str, Any] = {"max_new_tokens": int(new_tokens), "do_sample": temperature > 0}
    shared |= {"temperature": temperature} if temperature else {}
    plain, assisted = Side(pair), Side(pair, pair.drafter)
    for side, options in (plain, shared), (assisted, shared | own):
        for _ in side.write(ids, options):
            left = numbers_of(plain), f'<div class="plain">{escape(plain.text)}</div>'
            right = numbers_of(assisted, plain, not temperature), text_html(assisted.pieces)
            yield *left, *right, (pair.tokenizer, assisted.stats.trees), HINT


def tree_of(looked_at: tuple[Any, list[VerifiedTree]] | None, event: gr.SelectData) -> str:
    """The round that wrote the token that was clicked."""
    tokenizer, trees = looked_at or (None, [])
    for number, kept in enumerate(trees, start=1):
        if event.index in kept.tokens:
            return f"<p>Round {number} of {len(trees)}: {tree_text(kept)}. {KEY}</p>{tree_html(kept, tokenizer)}"
    return FIRST if trees else HINT


def page(pairs: dict[str, tuple[str, str]]) -> gr.Blocks:
    """The app, for pairs of a target and a drafter by their names."""

    def run(name: str, *asked: Any) -> Iterator[tuple]:
        try:
            yield from compare(pair_of(*pairs[name]), *asked)
        except (ValueError, OSError, ImportError) as error:
            raise gr.Error(in_one_line(error), print_exception=False) from None

    with gr.Blocks(title="hf_hyperdflash", analytics_enabled=False) as blocks:
        gr.Markdown(ABOUT + TINY * (next(iter(SHIPPED)) in pairs))
        prompt = gr.Textbox(PROMPTS[0], label="Prompt", lines=2)
        gr.Examples([[prompt] for prompt in PROMPTS], prompt)
        with gr.Row():
            name = gr.Dropdown(list(pairs), label="Target and its drafter", visible=len(pairs) > 1)
            temperature = gr.Slider(0, 1.5, 0, step=0.1, label="Temperature")
            drafts = gr.Dropdown([ALL, "auto", "2", "4", "8"], label="Drafts a round", allow_custom_value=True)
            nodes = gr.Dropdown([CHAIN, "auto", "8", "16", "32", "64"], label="Tree budget", allow_custom_value=True)
            new_tokens = gr.Slider(16, 512, 128, step=16, label="New tokens")
        with gr.Row():
            button, stop = gr.Button("Write", variant="primary"), gr.Button("Stop")
        sides = []
        with gr.Row():
            for title, picked in (ALONE, None), (ASSISTED, PICK):
                with gr.Column():
                    sides += [
                        gr.Markdown(f"### {title}"),
                        gr.HTML(container=True, padding=True, min_height=190, js_on_load=picked),
                    ]
        looked_at, tree = gr.State(), gr.HTML(HINT, elem_classes="tree")
        asked = [name, prompt, temperature, drafts, nodes, new_tokens]
        running = gr.on([button.click, prompt.submit], run, asked, [*sides, looked_at, tree], show_progress="hidden")
        stop.click(None, cancels=running)
        sides[-1].select(tree_of, looked_at, tree, show_progress="hidden")
    return blocks


def in_one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def pairs_of(target: str | None, drafter: str | None) -> dict[str, tuple[str, str]]:
    """What is asked for, or what ships with the repository: beside this file, or one folder up.

    Raises:
        ValueError: If there is nothing to show.
    """
    if target and drafter:
        return {f"{target} with {drafter}": (target, drafter)}
    if target or drafter:
        raise ValueError(f"The target is {target} and the drafter {drafter}: expected both names, or neither.")
    models = next((folder for folder in (HERE / "models", HERE.parent / "models") if folder.is_dir()), None)
    if models is None:
        raise ValueError("No model is named and none is here: give TARGET and DRAFTER.")
    pairs = {title: tuple(models / name for name in pair) for title, pair in SHIPPED.items()}
    return {title: (str(target), str(drafter)) for title, (target, drafter) in pairs.items() if target.exists()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=os.environ.get("TARGET"), help="path or Hub id")
    parser.add_argument("--drafter", default=os.environ.get("DRAFTER"), help="path or Hub id")
    arguments = parser.parse_args()
    try:
        pairs = pairs_of(arguments.target, arguments.drafter)
        pair_of(*next(iter(pairs.values())))
    except (ValueError, OSError, ImportError) as error:
        raise SystemExit(f"Error: {in_one_line(error)}") from None
    fonts = {"font": ["ui-sans-serif", "system-ui", "sans-serif"], "font_mono": ["ui-monospace", "monospace"]}
    page(pairs).launch(theme=gr.themes.Default(**fonts), css=CSS, footer_links=["api", "gradio", "settings"])


if __name__ == "__main__":
    main()
