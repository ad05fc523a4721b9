"""Tokens in the colours of who wrote them."""

import io

import pytest
import torch
from rich.console import Console
from transformers import AutoTokenizer

from hf_hyperdflash import load_drafter, load_target
from hf_hyperdflash.cli.who_wrote import COLOURS, TARGET, WhoWrote, style_of

from ..conftest import MODELS, half_right, prompt, tiny_target


@pytest.mark.parametrize("budget", [None, 9])
def test_every_token_has_a_writer(budget):
    target = tiny_target()
    drafter = half_right(target, prompt(9), max_new_tokens=30)
    drafter.bind(target)
    target.generate(
        prompt(9), assistant_model=drafter, do_sample=False, max_new_tokens=30, num_assistant_tokens=4,
        tree_budget=budget,
    )  # fmt: skip
    stats = drafter.last_stats
    assert len(stats.written) == stats.tokens == 30
    rounds, place = [], 1
    for emitted, accepted in zip(stats.emitted, stats.accepted):
        rounds.append((stats.written[place : place + emitted], accepted))
        place += emitted
    assert stats.written[0] == 0 and any(accepted for _, accepted in rounds)
    for written, accepted in rounds:
        assert written in (list(range(1, accepted + 1)) + [0], list(range(1, accepted + 1)))  # the text may have ended


def test_what_is_printed_is_the_text_in_colours():
    target = load_target(str(MODELS / "tiny-deepseek-v4"), dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(MODELS / "tiny-deepseek-v4")
    drafter = load_drafter(MODELS / "tiny-deepseek-v4-hyperdflash", target=target)
    drafter.bind(target)
    chat = [{"role": "user", "content": "Write a Python function that prints 'héllo 世界' twice.\n"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    shown, plain = io.StringIO(), io.StringIO()
    options = {"assistant_model": drafter, "max_new_tokens": 60, "do_sample": False}
    for file, terminal in ((shown, True), (plain, False)):  # whose width breaks no line
        console = Console(file=file, force_terminal=terminal, width=40, color_system="256" if terminal else None)
        text = target.generate(**inputs, streamer=WhoWrote(tokenizer, drafter, console), **options)
    answer = tokenizer.decode(text[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    told, _, legend = plain.getvalue().rpartition("\n\n")
    assert told == answer
    most = max(drafter.last_stats.written)
    assert legend.strip() == "  ".join(["target", *(f"draft {position}" for position in range(1, most + 1))])
    pieces = shown.getvalue()
    for position in range(most + 1):
        probe = Console(file=io.StringIO(), force_terminal=True, color_system="256")
        colour = probe.get_style(style_of(position)).render("|", color_system=probe._color_system).split("|")[0]
        assert (colour in pieces.rpartition("\n\n")[0]) == (position in drafter.last_stats.written)


def test_characters_of_several_tokens_are_printed_once():
    class Bytes:
        def decode(self, ids, **kwargs):
            return bytes(ids).decode(errors="replace")

    class Told:
        class last_stats:
            written = [2]

    file = io.StringIO()
    streamer = WhoWrote(Bytes(), Told, Console(file=file, highlight=False))
    streamer.put(torch.tensor([[1, 2, 3]]))
    for byte in "a世\nb".encode():
        streamer.put(torch.tensor([byte]))
    assert file.getvalue() == "a世\nb"


def test_far_positions_share_the_last_colour():
    assert style_of(0) == TARGET and style_of(1) == COLOURS[0]
    assert style_of(len(COLOURS)) == style_of(99) == COLOURS[-1]
