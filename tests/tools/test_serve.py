"""transformers' own server and chat with a drafter. `.ci/tools` makes an environment with `transformers[serving]`."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager

import pytest
from transformers.utils.import_utils import is_serve_available

from ..conftest import MODELS
from .page import command

if not is_serve_available():
    pytest.skip(
        "transformers[serving] is not installed: .ci/tools makes an environment that has it", allow_module_level=True
    )
openai = pytest.importorskip("openai")

NAME = str(MODELS / "tiny-deepseek-v4")
QUESTIONS = ["Tom has 12 marbles and gives 5 to his sister. How many are left?", "Write a function that adds."]
DRAFTED = command("python examples/serve_with_drafter.py")[1:]  # the last port that is given counts
PLAIN = ["-c", "from transformers.cli.transformers import main; main()", "serve", NAME]


@contextmanager
def serving(arguments, path):
    """A server's address on loopback, once it answers, and its log."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url, log = f"http://127.0.0.1:{port}", path.open("w+")
    options = ["--host", "127.0.0.1", "--port", str(port), "--device", "cpu", "--dtype", "float32"]
    process = subprocess.Popen([sys.executable, *arguments, *options], stdout=log, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 120
        while not answers(url) or (arguments is DRAFTED and " drafts with " not in path.read_text()):
            assert process.poll() is None and time.monotonic() < deadline, path.read_text()
            time.sleep(0.2)
        yield url
    finally:
        process.kill()
        process.wait()
        log.close()


def answers(url):
    try:
        return urllib.request.urlopen(f"{url}/health").status == 200
    except OSError:
        return False


def asked_of(url, question, **options):
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    message = {"role": "user", "content": question}
    return client.chat.completions.create(model=NAME, messages=[message], max_tokens=40, **options)


def texts_of(url):
    """Each answer whole and streamed, with its number of tokens."""
    found = []
    for question in QUESTIONS:
        whole = asked_of(url, question, temperature=0)
        chunks = list(asked_of(url, question, temperature=0, stream=True))
        pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
        assert "".join(pieces) == whole.choices[0].message.content
        found.append((whole.choices[0].message.content, whole.usage.completion_tokens, chunks[-1].usage))
    return found


def test_the_server_answers_the_same(tmp_path):
    with serving(PLAIN, tmp_path / "plain.log") as url:
        expected = texts_of(url)
    with serving(DRAFTED, tmp_path / "drafted.log") as url:
        assert texts_of(url) == expected
        assert asked_of(url, QUESTIONS[0], temperature=1).choices[0].message.content
        environment = {**os.environ, "HF_HUB_OFFLINE": "0"}  # with 1 its client asks nobody, not even this machine
        assert expected[1][1] == 40  # at the limit `chat` asks whether to go on: n
        program, *asked = command("transformers chat", **{"http://localhost:8000": url})
        assert program == "transformers" and asked[0] == "chat"
        chat = subprocess.run(
            [sys.executable, *PLAIN[:2], *asked, "max_new_tokens=40", "do_sample=False"],
            input=f"{QUESTIONS[1]}\nn\n!exit\n", env=environment, cwd=tmp_path, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        assert chat.returncode == 0, chat.stderr[-2000:]
        assert f"{expected[1][1]} tokens in " in chat.stdout
    assert all(count > 10 for _, count, _ in expected)


def test_a_drafter_that_does_not_fit_ends_the_server(dense_pair):
    other = str(dense_pair[1])
    ran = subprocess.run(
        [sys.executable, *DRAFTED, "--drafter", other, "--port", "0", "--device", "cpu"], capture_output=True,
        text=True, check=False, timeout=120,
    )  # fmt: skip
    assert ran.returncode == 1 and "hidden_size" in ran.stderr.splitlines()[-1] and "Traceback" not in ran.stderr


def test_the_pages_snippet_drafts():
    """Seen from inside: the drafter is asked, in the server's thread."""
    page = (MODELS.parent.parent / "docs" / "serving.md").read_text()
    (snippet,) = [code for code in page.split("```python\n") if code.startswith("from transformers.cli.serve")]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    names = {"name": NAME, "drafter_name": f"{NAME}-hyperdflash", "port": port}
    exec(snippet.partition("```")[0], names)
    try:
        heard, remember = [], names["drafter"].remember
        names["drafter"].remember = lambda stats: (heard.append(stats), remember(stats))
        url = f"http://localhost:{port}"
        while not answers(url):
            time.sleep(0.2)
        text = asked_of(url, QUESTIONS[0], temperature=0).choices[0].message.content
        assert heard and heard[-1].rounds and heard[-1].tau > 1 and text
    finally:
        names["server"].kill_server()
