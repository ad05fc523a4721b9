"""The Space in a real browser without a screen: what a visitor does, and what the page then shows.

python tools/check_space.py              # `.ci/space` makes an environment with gradio and Playwright, and runs it
PICTURE=docs/pictures/space.png python tools/check_space.py      # and draws the picture of the pages
"""

from __future__ import annotations

import itertools
import os
import random
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import gradio
import torch
import yaml
from playwright.sync_api import sync_playwright
from transformers import AutoTokenizer

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from hf_hyperdflash import load_drafter, load_target  # noqa: E402
from hf_hyperdflash.decoding.stats import VerifiedTree, keep_trees  # noqa: E402
from hf_hyperdflash.training.data.encoding import encode_prompts  # noqa: E402
from hf_hyperdflash.trees.tree import DraftTree  # noqa: E402
from tests.helpers.dense_pair import save_dense_pair  # noqa: E402
from tests.helpers.pieces import pieces_of  # noqa: E402

BROWSER = os.environ.get("BROWSER") or shutil.which("chromium") or shutil.which("google-chrome")
MODELS = ROOT / "examples" / "models"
SPACE = ROOT / "examples" / "space"
VIEWS = runpy.run_path(str(SPACE / "views.py"))
position_colour, token_text, tree_text = (VIEWS[name] for name in ("position_colour", "token_text", "tree_text"))
PROMPT = "Tom has 12 marbles and gives 5 to his sister. How many are left?"
SVG = "{http://www.w3.org/2000/svg}"
NOWHERE = "http://127.0.0.1:9"  # what the page's server asks of others would end there
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
]  # fmt: skip


def environment(**more: str) -> dict[str, str]:
    given = {name: value for name, value in os.environ.items() if name not in ("TARGET", "DRAFTER")}
    proxies = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), NOWHERE)
    offline = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "NO_PROXY": "127.0.0.1,localhost"}
    return {**given, **proxies, **offline, "GRADIO_ANALYTICS_ENABLED": "False", "PYTHONPATH": str(ROOT), **more}


@contextmanager
def served(app: Path, *arguments: object, **variables: str) -> Iterator[str]:
    """The app's address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    command = [sys.executable, app, *map(str, arguments)]
    variables = environment(GRADIO_SERVER_PORT=str(port), GRADIO_SERVER_NAME="127.0.0.1", **variables)
    process = subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        for _ in range(240):
            try:
                urllib.request.build_opener(urllib.request.ProxyHandler({})).open(address, timeout=5).close()
                break
            except OSError:
                assert process.poll() is None, process.communicate()[0]
                time.sleep(0.5)
        yield address
    finally:
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=60)[0]
    assert "Traceback" not in said.split("Keyboard interruption")[0], said


@contextmanager
def opened(browser: Any, address: str, **options: Any) -> Iterator[Any]:
    """A visitor, who asks nobody but the app for anything."""
    page, asked = browser.new_page(viewport={"width": 1280, "height": 900}, **options), []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(address)
    button(page, "Write").wait_for()
    yield page
    page.close()
    assert [url for url in asked if not url.startswith((address, "data:", "blob:"))] == [] and asked


class Expected:
    """What the library itself writes, plain and assisted."""

    def __init__(self, name: str, prompt: str, new_tokens: int, **options: Any) -> None:
        path = str(MODELS / name)
        target, self.tokenizer = load_target(path, dtype=torch.float32), AutoTokenizer.from_pretrained(path)
        drafter = load_drafter(f"{path}-hyperdflash", target=target)
        ids = encode_prompts(self.tokenizer, [{"messages": [{"role": "user", "content": prompt}]}])[0]
        common = {"do_sample": False, "max_new_tokens": new_tokens}
        self.text = self.tokenizer.decode(target.generate(ids, **common)[0, ids.shape[1] :], skip_special_tokens=True)
        drafter.bind(target)
        with keep_trees():
            new = target.generate(ids, assistant_model=drafter, **common, **options)[0, ids.shape[1] :]
        self.stats = drafter.last_stats
        self.pieces = pieces_of(self.tokenizer, new, self.stats.written, self.stats.by_head)


def button(page: Any, name: str) -> Any:
    return page.get_by_role("button", name=name, exact=True)


def choose(page: Any, label: str, value: str) -> None:
    field = page.get_by_label(label)
    field.click()
    field.fill(value)
    field.press("Enter")


def write(page: Any, ends_with: str = "rounds · the same text") -> None:
    button(page, "Write").click()
    page.get_by_text(ends_with).wait_for(timeout=120_000)


def texts(page: Any) -> tuple[str, str]:
    left, right = page.locator(".plain"), page.locator("[data-token]")
    return left.text_content(), "".join(right.all_text_contents())


def check_texts(page: Any) -> None:
    """Both are the library's, in the colours of who wrote them, and a click on a token draws its round."""
    expected = Expected("tiny-deepseek-v4", PROMPT, 128, tree_budget=16)
    page.get_by_label("Prompt").fill(PROMPT)
    choose(page, "Tree budget", "16")
    page.evaluate("""() => {
      window.seen = [];
      const look = () => window.seen.push([
        document.querySelector('.plain')?.textContent ?? '',
        [...document.querySelectorAll('[data-token]')].map(piece => piece.textContent).join(''),
      ]);
      new MutationObserver(look).observe(document.body, {subtree: true, childList: true, characterData: true});
    }""")
    write(page)
    assert texts(page) == (expected.text, expected.text) and len(expected.text) > 100
    # Streamed, and one after the other.
    seen = page.evaluate("window.seen")
    assert len({left for left, _ in seen}) > 3 and all(
        expected.text.startswith(part) for both in seen for part in both
    )
    assert {left for left, right in seen if right} == {expected.text}
    # Who wrote what.
    shown = page.locator("[data-token]").evaluate_all(
        "all => all.map(one => [one.textContent, one.dataset.token, getComputedStyle(one).backgroundColor, one.title])"
    )
    assert [(text, int(token)) for text, token, *_ in shown] == [
        (piece.text, piece.token) for piece in expected.pieces
    ]
    assert [colour for *_, colour, _ in shown] == [rgb(position_colour(piece.position)) for piece in expected.pieces]
    assert len({colour for *_, colour, _ in shown}) > 5
    # The numbers: of two sides, and how they compare.
    page_text = page.locator("body").inner_text()
    left, right = re.findall(r"([\d.]+) tokens/s", page_text)
    (speedup,) = re.findall(r"([\d.]+)×", page_text)
    assert abs(float(speedup) - float(right) / float(left)) < 0.02 * float(speedup)
    tau, rounds = re.search(r"\(tau\) ([\d.]+) · (\d+) rounds", page_text).groups()
    assert (tau, int(rounds)) == (f"{expected.stats.tau:.2f}", expected.stats.rounds)

    # A click on a token, the last one of the round with the most rejected drafts.
    picked = max(expected.stats.trees, key=lambda kept: len(kept.drafts) - len(kept.accepted))
    page.locator(f"[data-token='{picked.tokens[-1]}']").click()
    number = expected.stats.trees.index(picked) + 1
    page.get_by_text(f"Round {number} of {rounds}: {tree_text(picked)}").wait_for()
    drawn = page.locator(".tree svg g").evaluate_all(
        "all => all.map(one => [one.classList[0], one.lastChild.textContent])"
    )
    tokens = [picked.anchor, *picked.drafts.tokens.tolist(), picked.own]
    assert [text for _, text in drawn] == [token_text(expected.tokenizer, token) for token in tokens]
    kinds = [kind for kind, _ in drawn]
    assert kinds[0] == "anchor" and kinds[-1] == "own"
    assert [node for node, kind in enumerate(kinds[1:-1]) if kind == "accepted"] == picked.accepted
    page.locator(f"[data-token='{picked.tokens[0]}']").click()  # the same round's
    assert page.locator(".picked").count() == 1
    page.get_by_text(f"Round {number} of {rounds}: ").wait_for()
    if os.environ.get("PICTURE"):
        page.mouse.move(0, 0)
        page.screenshot(path=os.environ["PICTURE"], full_page=True)
    page.locator("[data-token='0']").click()
    page.get_by_text("No round wrote this token").wait_for()
    assert page.locator(".tree svg").count() == 0


def rgb(colour: str) -> str:
    return f"rgb({', '.join(str(int(colour[k : k + 2], 16)) for k in (1, 3, 5))})"


def check_another_pair(browser: Any, pair: tuple[Path, Path]) -> None:
    asked = "Write a Python function that adds two numbers."
    expected = Expected(str(pair[0]), asked, 64, num_assistant_tokens=2)
    named = ["--target", pair[0], "--drafter", pair[1]]
    with served(SPACE / "app.py", *named) as address, opened(browser, address) as page:
        page.get_by_role("button", name=asked).click()
        choose(page, "Drafts a round", "2")
        page.get_by_role("spinbutton", name="New tokens").fill("64")
        write(page)
        assert texts(page) == (expected.text, expected.text)
        assert f"(tau) {expected.stats.tau:.2f}" in page.locator("body").inner_text()
        page.locator(f"[data-token='{expected.pieces[1].token}']").click()
        page.get_by_text("2 drafts one after the other").wait_for()


def check_sampling(page: Any) -> None:
    page.get_by_role("spinbutton", name="Temperature").fill("1")
    write(page, "rounds · drawn at random")
    left, right = texts(page)
    assert left and right and left != right


WRONG = [
    ("Prompt", " ", "The prompt is empty, expected what to ask."),
    ("Prompt", "word " * 2000, "the target was made for 2048 together."),
    ("Drafts a round", "99", "cannot draft 99 tokens a round"),
    ("Drafts a round", "many", "cannot draft 'many' tokens a round"),
    ("Tree budget", "0", "'0', expected the most nodes of a tree, 1 to 512, or auto."),
]


def check_mistake(page: Any, label: str, value: str, said: str) -> None:
    """What a visitor gets wrong is one line."""
    page.get_by_label(label).fill(value) if label == "Prompt" else choose(page, label, value)
    button(page, "Write").click()
    toast = page.get_by_test_id("toast-text")
    toast.wait_for()
    line = toast.inner_text().strip()
    assert said in line and "\n" not in line, line
    assert "Traceback" not in page.locator("body").inner_text() and page.locator("[data-token]").count() == 0


def check_stopping(page: Any) -> None:
    """Who stops can go on."""
    page.get_by_role("spinbutton", name="New tokens").fill("512")
    page.get_by_label("Prompt").fill("Write a long Python program.")
    button(page, "Write").click()
    page.wait_for_function("document.querySelector('.plain')?.textContent.length > 20")
    button(page, "Stop").click()
    page.wait_for_timeout(500)
    stopped = texts(page)
    page.wait_for_timeout(1500)
    assert texts(page) == stopped and stopped[1] == ""
    page.get_by_label("Prompt").fill(PROMPT)
    write(page)
    assert len(texts(page)[0]) > 100


def check_dark(page: Any) -> None:
    """In the dark everything is light but what is coloured."""
    write(page)
    page.locator("[data-token='3']").click()
    page.locator(".tree svg").wait_for()

    def lightness(selector: str, property: str) -> float:
        colour = page.locator(selector).first.evaluate(f"one => getComputedStyle(one).{property}")
        return sum(map(float, re.findall(r"[\d.]+", colour)[:3])) / 765

    assert lightness("body", "backgroundColor") < 0.2
    assert lightness(".plain", "color") > 0.8 and lightness(".tree .anchor text", "fill") > 0.8
    assert lightness("[data-token]", "color") < 0.2 and lightness("[data-token]", "backgroundColor") > 0.6


def check_space_of_ones_own(browser: Any, folder: Path, pair: tuple[Path, Path]) -> None:
    """As its README puts it together: the package's folder and the models beside the app; and with other models."""
    command = r"^hf upload USER/NAME (\S+) (\S+) --repo-type space"
    lines = re.findall(command, (SPACE / "README.md").read_text(), re.MULTILINE)
    assert len(lines) == 3
    for source, place in lines:
        shutil.copytree(ROOT / source, folder / place, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.pyc"))
    with served(folder / "app.py", PYTHONPATH="") as address, opened(browser, address) as page:
        write(page)
    shutil.rmtree(folder / "models")
    names = {"TARGET": str(pair[0]), "DRAFTER": str(pair[1])}
    with served(folder / "app.py", PYTHONPATH="", **names) as address, opened(browser, address) as page:
        assert page.get_by_label("Target and its drafter").count() == 0
        write(page)


def check_models_that_cannot_be_shown() -> None:
    for arguments, said in (
        (["--target", "nowhere/nothing", "--drafter", "also/nothing"], "nowhere/nothing"),
        (["--target", MODELS / "tiny-deepseek-v4"], "expected both names, or neither."),
        (["--target", MODELS / "tiny-deepseek-v4", "--drafter", MODELS / "smollm2-135m-hyperdflash"], "vocab_size"),
    ):
        command = [sys.executable, SPACE / "app.py", *arguments]
        ran = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
        last = ran.stderr.strip().splitlines()[-1]
        assert ran.returncode == 1 and "Traceback" not in ran.stderr and last.startswith("Error: ") and said in last


def check_slow_visitor() -> None:
    """Who looks seldom sees the end: the text is over before it looks again."""
    app, name = runpy.run_path(str(SPACE / "app.py")), str(MODELS / "tiny-deepseek-v4")
    pair = app["pair_of"](name, f"{name}-hyperdflash")
    side, seen = app["Side"](pair, pair.drafter), []
    for _ in side.write(app["ids_of"](pair, PROMPT), {"max_new_tokens": 64, "do_sample": False}):
        seen.append(side.is_over)
        time.sleep(3)
    assert seen[-1] and side.text == Expected(name, PROMPT, 64).text


class Words:
    """A tokenizer of which token n is a word of its own."""

    def decode(self, ids: list[int]) -> str:
        return f"w{ids[0]}"


def check_drawings() -> None:
    """Of random trees every node is right of its parent, what the text got is the first row, and no two overlap."""
    draw = random.Random(0)
    for _ in range(100):
        parents = [draw.randrange(-1, k) for k in range(draw.randrange(12))]
        tree = DraftTree(torch.arange(100, 100 + len(parents)), tuple(parents))
        kept = VerifiedTree(7, tree, tree.path(draw.randrange(-1, len(parents))), draw.choice([None, 9]), 5)
        boxes = []
        for _, box, text in ElementTree.fromstring(VIEWS["tree_html"](kept, Words())).iter(f"{SVG}g"):
            x, y, width = (float(box.get(name)) for name in ("x", "y", "width"))
            boxes.append((y, x, x + width, text.text, box.get("fill")))
        anchor, *nodes = boxes
        assert [text for *_, text, _ in boxes] == [
            "w7",
            *(f"w{100 + k}" for k in range(len(tree))),
            *["w9"] * (kept.own is not None),
        ]
        for node, (_, left, *_, colour) in enumerate(nodes[: len(tree)]):
            assert left > (anchor if parents[node] < 0 else nodes[parents[node]])[2]
            depth = tree.depths[node]
            assert colour == (position_colour(depth) if node in kept.accepted else "none")
        assert {nodes[node][0] for node in kept.accepted} <= {anchor[0]}
        assert all(a[0] < b[0] or a[2] < b[1] for a, b in itertools.pairwise(sorted(boxes)))


def check_header() -> None:
    """It is that of what runs here."""
    header = yaml.safe_load((SPACE / "README.md").read_text().split("---")[1])
    assert header["sdk"] == "gradio" and header["sdk_version"] == gradio.__version__
    assert (SPACE / header["app_file"]).is_file() and len(header["short_description"]) <= 60
    assert {header["colorFrom"], header["colorTo"]} <= {*"red yellow green blue indigo purple pink gray".split()}


def main() -> None:
    check_header()
    check_drawings()
    check_slow_visitor()
    check_models_that_cannot_be_shown()
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as started:
        pair = save_dense_pair(Path(folder))
        browser = started.chromium.launch(executable_path=BROWSER, args=FLAGS)
        with served(SPACE / "app.py") as address:
            for check in (check_texts, check_sampling, check_stopping):
                with opened(browser, address) as page:
                    check(page)
            for mistake in WRONG:
                with opened(browser, address) as page:
                    check_mistake(page, *mistake)
            with opened(browser, address, color_scheme="dark") as page:
                check_dark(page)
        check_another_pair(browser, pair)
        check_space_of_ones_own(browser, Path(folder, "space"), pair)
        browser.close()


if __name__ == "__main__":
    main()
