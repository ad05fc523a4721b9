"""Tokens in the colours of who wrote them."""

import io
import re
from types import SimpleNamespace

import pytest
import torch
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text
from transformers import AutoTokenizer

from hf_hyperdflash import load_drafter, load_target
from hf_hyperdflash.cli.display.text import BY_HEAD, Piece
from hf_hyperdflash.cli.display.who_wrote import (
    COLOURS,
    TARGET,
    LiveLine,
    WhoWrote,
    column_after,
    position_style,
)
from hf_hyperdflash.decoding.stats import keep_trees

from ..conftest import MODELS
from ..helpers.pieces import pieces_of


def code_of(position, colours, more=""):
    """What a terminal of so many colours is sent before the tokens of a draft position."""
    console = Console(file=io.StringIO(), force_terminal=True, color_system=colours)
    console.print(Text("|", position_style(position, colours) + more))
    return console.file.getvalue().partition("|")[0]


@pytest.mark.parametrize("colours", ["truecolor", "256", "standard"])
def test_no_two_writers_have_one_colour(colours):
    """Far positions share the last one."""
    codes = [code_of(position, colours) for position in range(10)]
    assert len(set(codes)) == 9 and codes[8] == codes[9] == code_of(99, colours)
    assert position_style(0) == TARGET and position_style(1) == COLOURS[0]


@pytest.mark.parametrize("colours", ["256", "standard"])
def test_what_is_printed_is_the_text_in_colours(colours):
    target = load_target(str(MODELS / "tiny-deepseek-v4"), dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(MODELS / "tiny-deepseek-v4")
    drafter = load_drafter(MODELS / "tiny-deepseek-v4-hyperdflash", target=target)
    drafter.bind(target)
    chat = [{"role": "user", "content": "Write a Python function that prints 'héllo 世界' twice.\n"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    shown, plain = io.StringIO(), io.StringIO()
    options = {"assistant_model": drafter, "max_new_tokens": 60, "do_sample": False}
    for file, terminal in ((shown, True), (plain, False)):  # whose width breaks no line
        console = Console(file=file, force_terminal=terminal, width=40, color_system=colours if terminal else None)
        with keep_trees():
            text = target.generate(**inputs, streamer=WhoWrote(tokenizer, drafter, console), **options)
    answer = tokenizer.decode(text[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert plain.getvalue() == answer + "\n"
    most = max(drafter.last_stats.written)
    names = ["target", *(f"draft {position}" for position in range(1, most + 1)), BY_HEAD]
    pieces, _, legend = shown.getvalue().rpartition("\n\n")
    assert re.sub(r"\x1b\[[\d;]*m", "", legend).strip() == "  ".join(names)
    stats, new = drafter.last_stats, text[0, inputs["input_ids"].shape[1] :]
    told = pieces_of(tokenizer, new, stats.written, stats.by_head)
    assert {piece.by_head for piece in told} == {False, True}
    expected = [code_of(piece.position, colours, " underline" * piece.by_head) for piece in told]
    assert re.findall(r"\x1b\[(?!0m|2m)[\d;]+m", pieces) == expected  # but for resets, and the line beneath


class Bytes:
    """A tokenizer of bytes, of which 0 is special."""

    def decode(self, ids, **kwargs):
        return bytes(token for token in ids if token).decode(errors="replace")


def test_pieces_are_of_whole_characters_and_say_which_token():
    ids, written = [*"a世".encode(), 0, *b"\nb"], [0, 1, 2, 3, 0, 1, 2]
    by_head = [False, False, True, True, False, False, True]
    pieces = pieces_of(Bytes(), ids, written, by_head)
    assert pieces == [Piece("a", 0, 0), Piece("世", 3, 3, True), Piece("\n", 1, 5), Piece("b", 2, 6, True)]
    assert pieces_of(Bytes(), ids, written) == [piece._replace(by_head=False) for piece in pieces]
    assert pieces_of(Bytes(), [0], [0]) == []
    cut = pieces_of(Bytes(), [97, *"世".encode()[:2]], [0, 1, 2], [False, False, True])
    assert cut == [Piece("a", 0, 0), Piece("\N{REPLACEMENT CHARACTER}", 2, 2, True)]


class Drafter:
    """A text that goes on for ever: one draft accepted a round."""

    class last_stats:
        written, by_head, rounds, tokens, tau = [0, 1], [False, False], 1, 3, 2.0


def stream(text, console, tokens=None):
    """Of one byte each."""
    with WhoWrote(Bytes(), Drafter, console) as streamer:
        streamer.put(torch.tensor([[1, 2, 3]]))
        for byte in text.encode() if tokens is None else tokens:
            streamer.put(torch.tensor([byte]))
            yield
        streamer.end()


@pytest.mark.parametrize("text", ["a世\nb", "\tif x:\n\t\ty\n\n"])
def test_what_is_piped_is_the_text_and_nothing_else(text):
    """Characters of several tokens once, tabs as they are, half a character at the end, and no line beneath."""
    for tokens, shown in (
        (text.encode(), text),
        ([*text.encode(), *"世".encode()[:2]], f"{text}\N{REPLACEMENT CHARACTER}"),
    ):
        file = io.StringIO()
        list(stream(None, Console(file=file, highlight=False), tokens))
        assert file.getvalue() == f"{shown}\n"


class Terminal:
    """What a terminal of such a size shows of what is written to it. As in xterm, a row that is full forgets so when
    the cursor moves; as in all but pyte, a wide character has both cells in one row."""

    def __init__(self, width, height):
        pyte = pytest.importorskip("pyte", reason="the extra `test` is not installed")

        class Screen(pyte.HistoryScreen):
            def draw(self, data):
                for character in data:
                    if cell_len(character) > self.columns - self.cursor.x == 1:
                        self.carriage_return()
                        self.linefeed()
                    super().draw(character)

            def index(self):
                self.cursor.x = min(self.cursor.x, self.columns - 1)
                super().index()

        self.screen = Screen(width, height, history=10_000, ratio=1)
        self.told = pyte.Stream(self.screen)

    def write(self, text):
        self.told.feed(text.replace("\n", "\r\n"))  # as a terminal's driver has it

    def flush(self):
        pass

    def rows(self):
        """All that was ever shown, what has scrolled away included."""
        above = ["".join(row[x].data for x in range(self.screen.columns)) for row in self.screen.history.top]
        rows = [row.rstrip() for row in [*above, *self.screen.display]]
        return rows[: max((k + 1 for k, row in enumerate(rows) if row), default=0)]


def rows_of(text, width):
    """How a terminal breaks a text: a wide character takes two cells, both in one row."""
    rows = []
    for line in text.split("\n"):
        row, cells = "", 0
        for character in line:
            cells += cell_len(character)
            if cells > width:
                rows.append(row)
                row, cells = "", cell_len(character)
            row += character
        rows.append(row)
    return [row.rstrip() for row in rows]


LONG = "The answer of 12 + 12 is 24, " * 9 + "\n\n" + "é世界" * 30 + "\nend."


@pytest.mark.parametrize(
    ("text", "column", "after"),
    [("\tx", 0, 9), ("ab\tx", 0, 9), ("\t", 9, 11), ("世", 11, 2), ("世", 10, 12), ("abcd", 8, 12), ("abcde", 8, 1)],
)
def test_where_a_terminal_of_12_columns_has_its_cursor(text, column, after):
    assert column_after(text, column, 12) == after


@pytest.mark.parametrize(("width", "height"), [(80, 24), (29, 5), (12, 3), (7, 2), (2, 4)])
def test_a_line_beneath_destroys_no_text(width, height):
    """Rows that are exactly full, wide characters that do not fit, a screen that scrolls."""
    terminal = Terminal(width, height)
    console = Console(file=terminal, force_terminal=True, width=width, color_system="256", legacy_windows=False)
    terminal.write("$\n")
    told = []
    for length, _ in enumerate(stream(LONG, console), start=1):
        text, rows = LONG.encode()[:length].decode(errors="ignore"), terminal.rows()
        if column_after(text.rpartition("\n")[2], 0, width) < width:
            told.append(rows.pop())
        assert "\n".join(rows).rstrip() == "\n".join(rows_of(f"$\n{text}", width)).rstrip()
    assert len(told) > len(LONG) / 3 and all(cell_len(row) < width for row in told)
    assert all(f"{row} ".startswith("2 tokens, "[: width - 1]) for row in told)
    assert width < 40 or {row[-10:] for row in told} == {", tau 2.00"}
    assert terminal.rows() == rows_of(f"$\n{LONG}\n\ntarget  draft 1", width)


def test_a_window_that_loses_its_last_row_loses_no_text():
    """And the line beneath with it: then the text ends on the last."""
    terminal = Terminal(20, 3)
    line = LiveLine(Console(file=terminal, force_terminal=True, width=20))
    line.write("a\nb", "", "told")
    assert terminal.rows() == ["a", "b", "told"]
    terminal.screen.lines = 2
    line.write("c", "", "told")
    assert terminal.rows() == ["a", "bc", "told"]


def test_the_speed_beneath_is_of_whole_rounds(monkeypatch):
    """The prompt's token, then a round of three after a second and one of two after another half."""
    stats = SimpleNamespace(written=[], by_head=[], rounds=0, tokens=0, tau=0.0)
    now, told = 7.0, []
    monkeypatch.setattr("hf_hyperdflash.cli.display.who_wrote.time.perf_counter", lambda: now)
    monkeypatch.setattr(LiveLine, "write", lambda self, text, style, beneath: told.append(beneath))
    with WhoWrote(Bytes(), SimpleNamespace(last_stats=stats), Console(file=io.StringIO())) as streamer:
        streamer.put(torch.tensor([[1]]))
        for seconds, tokens in ((0.0, 1), (1.0, 3), (0.5, 2), (0.5, 2)):
            now += seconds
            for token in range(tokens):
                now += 0.001 * (token > 0)
                stats.written, stats.by_head = [*stats.written, token], [*stats.by_head, False]
                streamer.put(torch.tensor([65]))
            stats.rounds, stats.tokens, stats.tau = stats.rounds + (tokens > 1), stats.tokens + tokens, 2.5
    assert told[:4] == ["1 tokens", "2 tokens", "3 tokens", "4 tokens"]
    assert [line.split(", ")[1] for line in told[4:]] == [f"{rate:.1f} tokens/s" for rate in (3, 3, 5 / 1.5, 5 / 1.5)]


@pytest.mark.parametrize("variable", ["NO_COLOR", "TERM"])
def test_terminals_that_want_less_get_less(monkeypatch, variable):
    monkeypatch.setenv(variable, "dumb")
    file = io.StringIO()
    list(stream("a\nb", Console(file=file, force_terminal=True, width=60, color_system="auto")))
    if variable == "TERM":
        assert file.getvalue() == "a\nb\n"  # no colour, none to explain
    else:
        assert "tau 2.00" in file.getvalue() and not re.search(r"\x1b\[[\d;]*3\d", file.getvalue())


def test_the_line_goes_where_a_text_is_stopped():
    terminal = Terminal(60, 10)
    with (
        pytest.raises(KeyboardInterrupt),
        WhoWrote(Bytes(), Drafter, Console(file=terminal, force_terminal=True, width=60)) as streamer,
    ):
        streamer.put(torch.tensor([[1]]))
        streamer.put(torch.tensor([65]))
        assert any("tau 2.00" in row for row in terminal.rows())
        raise KeyboardInterrupt
    assert [row for row in terminal.rows() if row] == ["A"]
