"""`transformers serve`, drafting: the same server, endpoints and text, fewer forwards of the target a token.

    python examples/serve_with_drafter.py --target examples/models/tiny-deepseek-v4 \
        --drafter examples/models/tiny-deepseek-v4-hyperdflash
    transformers chat examples/models/tiny-deepseek-v4 http://localhost:8000 max_new_tokens=96

The server is transformers' own class, which loads the target; then the drafter becomes that target's default, and a
few conversations keep their caches: a request names none, so it goes on with the one whose text its prompt begins
with. Requests that come before are answered without either. Needs `transformers[serving]`. Nothing for
`--continuous-batching`, which calls no `generate`.
"""

from __future__ import annotations

import argparse
import threading
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_hyperdflash import Conversation, load_drafter

try:
    from transformers.cli.serve import Serve
except ImportError as error:
    raise SystemExit(f"Error: {error}.") from None


_TEXT = {
    "input_ids",
    "attention_mask",
    "generation_config",
    "streamer",
    "tokenizer",
}  # arguments of a request for text


class Conversations:
    """Answers calls of `target.generate` with conversations that keep their caches.

    A prompt goes on with the free conversation of which it keeps the most, if that is more than half of its text.
    Else it begins a new one; of too many the one goes that was used longest ago.

    Args:
        target: The target, whose `generate` the server calls.
        number: How many conversations are kept at most, beside those that are being answered.
    """

    def __init__(self, target: PreTrainedModel, number: int) -> None:
        self.target, self.number, self.alone = target, number, target.generate
        self.free: list[Conversation] = []  # the one that was used last at the end
        self._lock = threading.Lock()
        vars(target)["generate"] = self.generate

    def generate(self, **options: Any) -> Any:
        """Do what `target.generate` does."""
        ids, config = options.get("input_ids"), options.get("generation_config")
        given = {name for name, value in options.items() if value is not None}
        other_way = max(getattr(config, "num_beams", 0) or 0, getattr(config, "num_return_sequences", 0) or 0) > 1
        other_cache = getattr(config, "cache_implementation", None) or getattr(config, "use_cache", None) is False
        if not (isinstance(ids, torch.Tensor) and len(ids) == 1 and given <= _TEXT) or other_way or other_cache:
            return self.alone(**options)
        conversation = self._take(ids)
        try:
            out = conversation.generate(**options)
            print(f"{conversation.cached_tokens} of {ids.shape[1]} prompt tokens were in a cache", flush=True)
            return out
        finally:
            with self._lock:
                self.free = [*self.free, conversation][-self.number :]

    def _take(self, ids: torch.Tensor) -> Conversation:
        with self._lock:
            nearest = max(self.free, key=lambda each: each.shared_tokens(ids), default=None)
            if nearest is None or 2 * nearest.shared_tokens(ids) <= nearest.length:
                return Conversation(self.target)
            self.free.remove(nearest)
            return nearest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="path or Hub id")
    parser.add_argument("--drafter", required=True, help="path or Hub id")
    parser.add_argument("--host", default="localhost")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto", help="of the target")
    parser.add_argument("--conversations", type=int, default=4, help="that keep their caches, at most; 0 for none")
    arguments = parser.parse_args()
    if arguments.conversations < 0:
        parser.error(f"--conversations is {arguments.conversations}, expected a whole number of at least 0")
    server = Serve(
        arguments.target, host=arguments.host, port=arguments.port, device=arguments.device, dtype=arguments.dtype,
        non_blocking=True,
    )  # fmt: skip
    try:
        manager = server._model_manager  # which knows its models by names of its own
        target, _ = manager.load_model_and_processor(manager.process_model_name(arguments.target))
        load_drafter(arguments.drafter, target=target).bind(target, as_default=True)
        if arguments.conversations:
            Conversations(target, arguments.conversations)
    except Exception as error:
        server.kill_server()
        raise SystemExit(f"{error}") from None
    print(
        f"{arguments.target} drafts with {arguments.drafter} on http://{arguments.host}:{arguments.port}", flush=True
    )


if __name__ == "__main__":
    main()
