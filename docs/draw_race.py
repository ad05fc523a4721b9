"""Draw the README's picture: SmolLM2 answers a question alone and with its drafter, each token when it came.

python docs/draw_race.py                  # writes docs/pictures/race.svg from the committed record
python docs/draw_race.py --record FILE    # runs the pair anew, writes FILE and draws that; first examples/smollm2.py
python docs/draw_race.py --check          # exit status 1 if the picture is not what this draws

Both ways are run in turn after a warm-up, `--pairs` times, so that drift of the machine cancels; the pair whose ratio
of times is the middle one is the record. Seconds are the processor's, of one thread. Every number of the picture is
the record's.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from html import escape
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from draw_concepts import MODELS, PICTURES, ROOT, STYLE, shown
from transformers.generation.streamers import BaseStreamer

from hf_hyperdflash import load_drafter, load_target
from hf_hyperdflash.benchmark.runner import environment
from hf_hyperdflash.hub.loading import default_dtype, load_tokenizer
from hf_hyperdflash.training.data.encoding import encode_prompts

RECORD, PICTURE = ROOT / "experiments" / "results" / "smollm2-135m" / "race" / "race.json", PICTURES / "race.svg"
TARGET, DRAFTER = ROOT / "downloads" / "SmolLM2-135M-Instruct.Q4_1.gguf", "smollm2-135m-hyperdflash"
PROMPT = "Write a Python function that counts the vowels in a text."
MAX_NEW_TOKENS, NODES = 96, 8

# The picture, in pixels, and in seconds the slower text and how long its end is shown.
WIDTH, TOP, PANES, CHARACTER, ROW, COLUMNS = 800, 162, (24, 412), 7.8, 26, 47
SLOWER, END = 10, 5
MOVING = (
    ".token{font:13px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}.big{font-size:28px;font-weight:600}"
    ".name,.asked{font-weight:600}.asked{font-size:17px}.small{font-size:12.5px}.live{visibility:hidden}"
    "@media(prefers-reduced-motion:reduce){*{animation:none!important}}"
)


# The run


class Times(BaseStreamer):
    """When each token came, in seconds from when `generate` was called."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.seconds: list[float] = []
        self.began = time.process_time()

    def put(self, value: torch.Tensor) -> None:
        if value.dim() == 1:  # not the prompt
            self.tokens += value.tolist()
            self.seconds.append(round(time.process_time() - self.began, 5))

    def end(self) -> None:
        pass


def pieces(tokenizer: Any, tokens: Sequence[int]) -> list[str]:
    """What each token adds to the text; one in the midst of a character adds nothing."""
    texts = [""]
    for end in range(1, len(tokens) + 1):
        text = tokenizer.decode(tokens[:end])
        texts.append(texts[-1] if text.endswith("\N{REPLACEMENT CHARACTER}") else text)
    return [after[len(before) :] for before, after in pairwise(texts)]


def record(count: int) -> dict[str, Any]:
    """A run of the pair, the middle one of `count`."""
    torch.set_num_threads(1)
    target = load_target(str(TARGET), dtype=default_dtype(str(TARGET), is_exact=False))
    tokenizer = load_tokenizer(str(TARGET), False)
    drafter = load_drafter(str(MODELS / DRAFTER), target=target)
    drafter.bind(target)
    prompt = encode_prompts(tokenizer, [{"messages": [{"role": "user", "content": PROMPT}]}])[0]

    def generate(assistant: Any) -> dict[str, Any]:
        times = Times()
        target.generate(
            prompt, assistant_model=assistant, do_sample=False, max_new_tokens=MAX_NEW_TOKENS, streamer=times,
            **({"tree_budget": NODES} if assistant else {}),
        )  # fmt: skip
        stats = drafter.last_stats if assistant else None
        rounds = {} if stats is None else {"written": stats.written, "emitted": stats.emitted}
        return {"tokens": times.tokens, "seconds": times.seconds, **rounds}

    pairs = [(generate(None), generate(drafter)) for _ in range(count + 1)][1:]
    pairs.sort(key=lambda pair: pair[0]["seconds"][-1] / pair[1]["seconds"][-1])
    plain, drafted = pairs[count // 2]
    if plain["tokens"] != drafted["tokens"]:
        raise SystemExit(f"The two texts part, in {target.dtype}: take another question.")
    return {
        "run": {**environment(target), "drafter": DRAFTER, "nodes": NODES, "prompt": PROMPT},
        "seconds_of_each_pair": [[one["seconds"][-1] for one in pair] for pair in pairs],
        "pieces": pieces(tokenizer, plain["tokens"]),
        "plain": plain,
        "drafted": drafted,
    }


# The picture


class Clock:
    """The moments of a picture that repeats itself: a class each, of what is seen from then on."""

    def __init__(self, run_seconds: float) -> None:
        self.slowed = max(1, round(SLOWER / run_seconds))
        self.period = round(run_seconds * self.slowed + END, 1)
        self.names: dict[str, str] = {}  # by keyframes

    def seen(self, begin: float, end: float | None = None) -> str:
        """The classes of what is seen from one second of the run on, up to another or to the end."""
        frames = f"0%{{visibility:hidden}}{self._share(begin)}{{visibility:visible}}"
        frames += "" if end is None else f"{self._share(end)}{{visibility:hidden}}"
        return f"a {self.names.setdefault(frames, f'm{len(self.names)}')}"

    def _share(self, seconds: float) -> str:
        return f"{100 * seconds * self.slowed / self.period:.2f}%"

    def style(self) -> str:
        rules = (
            f"@keyframes {name}{{{frames}}}.{name}{{animation-name:{name}}}" for frames, name in self.names.items()
        )
        return f".a{{animation:{self.period}s step-end infinite}}{''.join(rules)}"


def say(x: float, y: float, text: str, classes: str = "", more: str = "") -> str:
    kind = f' class="{classes}"' if classes else ""
    return f'<text x="{x:g}" y="{y:g}"{kind}{more}>{escape(text)}</text>'


def places(texts: Sequence[str]) -> Iterator[tuple[int, int]]:
    """The row and column at which each token begins: a new row after a line's end, and where there is no room."""
    row = column = 0
    for text in texts:
        if column + len(text) > COLUMNS:
            row, column = row + 1, 0
        yield row, column
        _, end, indentation = text.rpartition("⏎")
        row, column = (row + 1, len(indentation)) if end else (row, column + len(text))


def tokens(x: float, run: dict[str, Any], texts: Sequence[str], clock: Clock) -> Iterator[str]:
    """The text of a pane, a box for each token in the colour of who wrote it."""
    written = run.get("written") or [0] * len(texts)
    for text, by, seconds, (row, column) in zip(texts, written, run["seconds"], places(texts)):
        text = text[: text.rfind("⏎") + 1] or text  # indentation shows where the next token is
        left, top, word = x + CHARACTER * column, TOP + ROW * row, text.lstrip(" ")
        box = f'<rect x="{left:g}" y="{top}" width="{CHARACTER * len(text) - 1:g}" height="{ROW - 4}" rx="3" '
        inside = left + CHARACTER * (len(text) - len(word))
        width = f' textLength="{CHARACTER * len(word) - 1:g}" lengthAdjust="spacingAndGlyphs"'
        yield f'<g class="{clock.seen(seconds)}">{box}class="{"draft" if by else "target"}"/>'
        yield say(inside, top + 15.5, word, "token", width) + "</g>"


def counters(x: float, run: dict[str, Any], clock: Clock) -> Iterator[str]:
    """Tokens per second and tokens a round as they were after each round, alone after each token."""
    emitted, seconds = run.get("emitted"), run["seconds"]
    rounds = [1] * (len(seconds) - 1) if emitted is None else emitted
    ends = [one - 1 for one in accumulate(rounds, initial=1)]  # the first token is the prompt's forward's
    for k, (end, following) in enumerate(zip(ends, [*ends[1:], None])):
        until = None if following is None else seconds[following]
        seen = clock.seen(seconds[end], until) + (" live" if following else "")
        tau = say(x + 130, 122, f"{sum(rounds[:k]) / k:.2f}", "big") if emitted and k else ""
        yield f'<g class="{seen}">' + say(x, 122, f"{(end + 1) / seconds[end]:.0f}", "big") + tau + "</g>"
    yield "" if emitted else say(x + 130, 122, "1", "big")
    yield say(x, 142, "tokens per second", "quiet small")
    yield say(x + 130, 142, "tokens per forward" if emitted else "token per forward", "quiet small")


def draw(told: dict[str, Any]) -> str:
    """The picture of a record."""
    run, plain, drafted = told["run"], told["plain"], told["drafted"]
    texts = ["end" if piece.startswith(("<｜", "<|")) else shown(piece).replace("␣", " ") for piece in told["pieces"]]
    took = [one["seconds"][-1] for one in (plain, drafted)]
    clock, count = Clock(max(took)), len(texts)
    bottom = TOP + ROW * (1 + max(row for row, _ in places(texts)))
    parts = [say(PANES[0], 40, f"“{run['prompt']}”", "asked")]
    for x, name, one in zip(PANES, ("The target alone", "The same target with its drafter"), (plain, drafted)):
        parts += [say(x, 82, name, "name"), *counters(x, one, clock), *tokens(x, one, texts, clock)]
        faster = f": {took[0] / took[1]:.1f} times as fast" if one is drafted else ""
        end = one["seconds"][-1]
        parts += [say(x, bottom + 22, f"{count} tokens in {end:.2f} s{faster}", clock.seen(end))]
    y = bottom + 54
    for x, kind, what in zip(
        PANES, ("draft", "target"), ("a draft that the target accepted", "the target's own token")
    ):
        parts += [f'<rect x="{x}" y="{y - 12}" width="16" height="16" rx="3" class="{kind}"/>', say(x + 24, y, what)]
    versions = ", ".join(f"{name} {run['versions'][name].partition('+')[0]}" for name in ("torch", "transformers"))
    how = f"{run['target'].split('.')[0]}, temperature 0, {run['dtype']}, {run['hardware']}, 1 thread"
    slowed = f", slowed {clock.slowed} times" if clock.slowed > 1 else ""
    tree = f"trees of {run['nodes']} drafts, 11 million parameters"
    parts += [say(24, y + 30, f"A real run{slowed}: the same text in fewer forwards. The drafter: {tree}.", "small")]
    parts += [say(24, y + 50, how, "quiet small"), say(24, y + 68, f"{versions}, {run['date']}", "quiet small")]
    height = y + 86
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'role="img" font-family="ui-sans-serif, system-ui, sans-serif" font-size="15">\n'
        f"<title>One text, by the target alone and with its drafter, {took[0] / took[1]:.1f} times as fast</title>\n"
        f"<style>{STYLE}{MOVING}{clock.style()}</style>\n"
        f'<rect x=".5" y=".5" width="{WIDTH - 1}" height="{height - 1}" rx="8" class="card"/>'
    )
    return "\n".join([head, *parts, "</svg>", ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, metavar="FILE", help="run the pair anew, write this file and draw it")
    parser.add_argument("--pairs", type=int, default=15, help="of runs, with --record")
    parser.add_argument("--check", action="store_true", help="exit status 1 if the picture is not what this draws")
    args = parser.parse_args()
    if args.record:
        args.record.parent.mkdir(parents=True, exist_ok=True)
        args.record.write_text(json.dumps(record(args.pairs), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    svg = draw(json.loads((args.record or RECORD).read_text(encoding="utf-8")))
    if args.check:
        return int(not PICTURE.exists() or PICTURE.read_text(encoding="utf-8") != svg)
    PICTURE.write_text(svg, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
