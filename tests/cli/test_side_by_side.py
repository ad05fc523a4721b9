"""One answer twice, side by side: what stands where, in whose colours, and the table."""

import io

import pytest
import torch
from rich.console import Console

from hf_hyperdflash.cli.app import app
from hf_hyperdflash.cli.display.side_by_side import SideBySide
from hf_hyperdflash.cli.display.who_wrote import legend, position_style
from hf_hyperdflash.cli.generate import _note
from hf_hyperdflash.decoding.stats import keep_trees

from ..conftest import MODELS, half_right, prompt, tiny_target
from ..helpers.tokenizers import characters

PAIR = ["--target", MODELS / "tiny-deepseek-v4", "--drafter", MODELS / "tiny-deepseek-v4-hyperdflash"]


@pytest.mark.parametrize("width", [120, 40])
def test_each_token_has_the_colour_of_who_wrote_it(width):
    target, tokenizer, ids = tiny_target(), characters(), prompt(9)
    drafter = half_right(target, ids, max_new_tokens=30)
    drafter.bind(target)
    console = Console(file=io.StringIO(), force_terminal=True, width=width, height=60, color_system="256")
    with keep_trees(), SideBySide(tokenizer, drafter, console) as shown:
        target.generate(ids, do_sample=False, max_new_tokens=30, streamer=shown.side("alone", False))
        new = target.generate(
            ids, do_sample=False, max_new_tokens=30, assistant_model=drafter, streamer=shown.side("helped", True)
        )[0, 9:].tolist()
    alone, helped = shown.sides
    written = drafter.last_stats.written
    assert alone.tokens == helped.tokens == new and len(written) == 30
    assert alone.text.plain == helped.text.plain == tokenizer.decode(new, skip_special_tokens=True)
    assert not alone.text.spans and {span.style for span in helped.text.spans} == {
        position_style(by, "256") for by in written
    }
    rows = console.file.getvalue().split("\x1b[2K")[-1].splitlines()  # of the last drawing
    beside = [row for row in rows if "alone" in row and "helped" in row]
    assert bool(beside) == (width == 120)
    table = Console(file=io.StringIO(), width=120)
    table.print(shown.table("a note"))
    said = table.file.getvalue()
    share = sum(by > 0 for by in written) / 30
    assert f"{drafter.last_stats.tau:.2f}" in said and f"{100 * share:.0f} %" in said and "a note" in said
    assert legend(written, "256").plain == "  ".join(["target", *(f"draft {at + 1}" for at in range(max(written)))])


def test_the_command_writes_both_answers_and_a_table(capsys):
    arguments = ["generate", *map(str, PAIR), "--compare", "--max-new-tokens", "24", "--tree-budget", "8"]
    app([*arguments, "What is 3 plus 4?"], standalone_mode=False)
    said = capsys.readouterr().out
    first, second = said.split("Target alone")[1].split("With drafter")[:2]
    assert len(first.split()) > 8 and first.split()[3:8] == second.split()[3:8]  # after number of tokens and speed
    assert "Both texts are the same." in said and "tokens/round" in said


@pytest.mark.parametrize(
    ("alone", "assisted", "is_drawn", "said"),
    [
        ([1, 2], [1, 2], False, "the same"),
        ([1, 2], [1, 2], True, "drawn at random"),
        ([1, 2, 3], [1, 4, 3], False, "part at token 2: in bfloat16"),
        ([1, 2], [1, 2, 3], False, "part at token 3"),
    ],
)
def test_what_two_texts_have_in_common(alone, assisted, is_drawn, said):
    assert said in _note(alone, assisted, is_drawn, torch.bfloat16)
