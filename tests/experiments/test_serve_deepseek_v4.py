"""What of `experiments/serve_deepseek_v4.py` needs no server."""

import socket
import sys

import pytest

from ..helpers.scripts import ROOT


@pytest.fixture
def serve_v4(monkeypatch):
    """`experiments/serve_deepseek_v4.py` as a module: what of it needs no server."""
    monkeypatch.syspath_prepend(ROOT / "experiments")
    monkeypatch.setenv("HYPERDFLASH_DEEPSEEK_V4_PATHS", "1")  # as it sets it itself
    import serve_deepseek_v4

    return serve_deepseek_v4


@pytest.mark.parametrize(
    ("text", "other", "is_one"),
    [
        ([5, 6, 7], [5, 6, 7], True),
        ([5, 6, 7], [5, 8, 9], True),  # what comes after the tie is another text
        ([5, 6, 7], [9, 6, 7], False),
        ([5, 6, 7], [5, 6, 8], False),
        ([5, 6, 7], [5, 8], True),
        ([5, 6, 7], [5], True),
        ([5, 6, 7], [5, 6, 7, 8], False),  # no tie is known there
        ([5, 6, 7], [], False),
    ],
)
def test_texts_of_servers_may_part_where_two_tokens_tie(serve_v4, text, other, is_one):
    assert serve_v4.parted_at_a_tie(text, other, [3.0, 0.1, 1.5]) == is_one


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        ("--data", "nowhere", "There is no folder .*nowhere with suites"),
        ("--data", "empty", "No suite 'gsm8k' in .*empty"),
        ("--target", "nowhere", "`--target` is nowhere, whose tokenizer cannot be loaded"),
        ("--drafter", "nowhere", "`--drafter` is .*nowhere, expected the folder of a saved drafter"),
        ("--drafter", "fc", "The `reducer` of .*fc is 'fc', expected a gate"),
        ("--port", "TAKEN", r"`--port` is \d+, which cannot be had \(.*in use\): give a free one"),
        ("--output", "file", "file"),
        ("--limit", "0", "`limit` is 0, expected at least 1"),
        ("--limit", "1", "There is no .*vllm: install vLLM"),  # all is well but that
    ],
)
def test_what_cannot_be_served_is_told_before_a_server_starts(
    serve_v4, tmp_path, dense_pair, monkeypatch, option, value, told
):
    for name in ("data", "empty", "fc"):
        (tmp_path / name).mkdir()
    for name in serve_v4.SUITES:
        (tmp_path / "data" / f"{name}.jsonl").write_text('{"turns": ["one"]}\n')
    (tmp_path / "fc" / "config.json").write_text('{"reducer": "fc"}')
    (tmp_path / "file").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(tmp_path / ("vllm" if option == "--output" else "python")))
    if option == "--output":
        (tmp_path / "vllm").write_text("")
    with socket.socket() as taken, socket.socket() as free:
        for one in (taken, free):
            one.bind(("127.0.0.1", 0))
        taken.listen()
        given = {"--target": dense_pair[0], "--data": "data", "--output": "out",
                 "--drafter": dense_pair[1], "--expected-tau": 2,
                 "--port": free.getsockname()[1]}  # fmt: skip
        given[option] = taken.getsockname()[1] if value == "TAKEN" else value
        free.close()
        monkeypatch.setattr(sys, "argv", ["script", *(str(word) for pair in given.items() for word in pair)])
        with pytest.raises(SystemExit, match=f"^Error: .*{told}") as caught:
            serve_v4.main()
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()
