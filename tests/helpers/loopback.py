"""Servers on loopback that speak OpenAI's protocol as engines do."""

from __future__ import annotations

import json
import sys
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import SHUT_RDWR


class Server(ThreadingHTTPServer):
    """Answers "<question> 1 2" in three pieces, and tells its models and counters. A question may ask for trouble."""

    more = {}  # that it says of each model

    def __init__(self, models=("tiny", "small"), owner="vllm", port=0):
        super().__init__(("127.0.0.1", port), _Handler)
        self.owner, self.names = owner, models
        self.asked, self.at_once, self.most, self.lock = [], 0, 0, threading.Lock()
        self.gate = threading.Barrier(2)  # requests that wait for each other
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def root(self):
        return f"http://127.0.0.1:{self.server_port}"

    def metrics(self):
        """The page of counters; `None` if there is none."""

    def answer(self, path, body):
        """Status and page of an answer; a page that is `None` is not there, and a status that is `None` cuts the
        connection."""
        question = body["messages"][-1]["content"]
        with self.lock:
            self.asked.append(body)
            self.at_once += 1
            self.most = max(self.most, self.at_once)
        if "together" in question:
            self.gate.wait(10)
        with self.lock:
            self.at_once -= 1
        if "too long" in question:
            return 400, '{"error": {"message": "longer than 1024"}}'
        pieces = [
            {"choices": [{"delta": {"content": piece} if piece else {}}]} for piece in ("", question, " 1", " 2")
        ]
        dead = [{"error": {"message": "engine is dead", "code": 500}}] * ("breaks off" in question)
        return 200, events(*pieces, *dead, *self.last_events(body))

    def last_events(self, body):
        return [{"choices": [], "usage": {"completion_tokens": 3}}]


class Engine(Server):
    """Answers "<question> 1 2" at once, with tokens as vLLM gives them. `troubles` has what goes wrong first, by the
    last question: statuses, `None` for a cut connection. `refuses` names fields that it does not take."""

    def __init__(self, troubles=None, refuses=(), seconds=0.0, models=("tiny",), port=0):
        self.troubles, self.refuses, self.seconds = troubles or {}, refuses, seconds
        super().__init__(models, port=port)

    def answer(self, path, body):
        if refused := [name for name in self.refuses if name in body]:
            return 422, json.dumps({"detail": f"Unexpected fields: {refused}"})
        question = body["messages"][-1]["content"]
        with self.lock:
            self.asked.append(body)
            troubles = self.troubles.get(question, [])
            trouble = troubles.pop(0) if troubles else 200
        time.sleep(self.seconds)
        return trouble, json.dumps(self.reply(body) if trouble == 200 else {"error": "so it is"})

    def reply(self, body):
        prompt = [100 + len(message["content"]) for message in body["messages"]]
        choice = {"message": self.message(body), "finish_reason": "stop", "token_ids": [1, 2, 3]}
        usage = {"prompt_tokens": len(prompt), "completion_tokens": 3}
        return {"choices": [choice], "prompt_token_ids": prompt, "usage": usage}

    def message(self, body):
        return {"role": "assistant", "content": f"{body['messages'][-1]['content']} 1 2", "refusal": None}


class _Handler(BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def tell(self, status, page):
        if status is None:
            self.connection.shutdown(SHUT_RDWR)
            return
        self.send_response(404 if page is None else status)
        self.end_headers()
        self.wfile.write((page or "").encode())

    def do_GET(self):
        models = [
            {"id": name, "object": "model", "owned_by": self.server.owner, **self.server.more}
            for name in self.server.names
        ]
        listed = json.dumps({"object": "list", "data": models})
        self.tell(200, {"/v1/models": listed, "/metrics": self.server.metrics()}.get(self.path))

    def do_POST(self):
        self.tell(*self.server.answer(self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))


def events(*parts):
    """A stream of events, as an answer has them."""
    return "".join(f"data: {json.dumps(part)}\n\n" for part in parts) + "data: [DONE]\n\n"


@contextmanager
def serving(server):
    """Stop a server at the end."""
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


if __name__ == "__main__":  # `python loopback.py PORT SECONDS`, to be killed
    Engine(port=int(sys.argv[1]), seconds=float(sys.argv[2]))
    threading.Event().wait()
