"""`transformers serve`, drafting: the same server, endpoints and text, fewer forwards of the target a token.

    python examples/serve_with_drafter.py --target examples/models/tiny-deepseek-v4 \\
        --drafter examples/models/tiny-deepseek-v4-hyperdflash
    transformers chat examples/models/tiny-deepseek-v4 http://localhost:8000 max_new_tokens=96

The server is transformers' own class. Once it has loaded the target, the drafter becomes that target's default. What
agents need is added:

- A few conversations keep their caches: a request names none, so it goes on with the one whose text its prompt begins
  with.
- Copies of what earlier requests read and wrote are drafted, too: of a million tokens, which take some 350 MB.
- An answer has the format that `response_format` of a chat, or `text.format` of a response, asks for: JSON of any kind
  or by a schema. A target that reasons needs `--reasoning-end "</think>"` for that.

Needs `transformers[serving]`, and xgrammar for formats. transformers ignores `tool_choice`, `n` and `logprobs`.
Nothing for `--continuous-batching`, which calls no `generate`.
"""

from __future__ import annotations

import argparse
import re
import threading
from functools import cached_property
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_hyperdflash import AfterReasoning, Conversation, Drafter, GrammarProcessor, Lookup, load_drafter

try:
    from transformers.cli.serve import Serve
except ImportError as error:
    raise SystemExit(f"Error: {error}.") from None


# The arguments of a request for text.
_TEXT = {"input_ids", "attention_mask", "generation_config", "streamer", "tokenizer"}
_GRAMMAR = "answer_grammar"  # attribute of a request's generation configuration


class Conversations:
    """Answers calls of `target.generate` with conversations that keep their caches.

    A prompt goes on with the free conversation of which it keeps the most, if that is more than half of its text.
    Else it begins a new one; of too many the one goes that was used longest ago.

    Args:
        target: The target, whose `generate` the server calls.
        drafter: Its drafter, which also copies from all that it has served.
        number: How many conversations are kept at most, beside those that are being answered; 0 for none.
        reasoning_end: The text that ends the target's reasoning; `None` if it does not reason.
        reasoning_budget: The most tokens of reasoning; `None` for any number.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        drafter: Drafter,
        number: int,
        reasoning_end: str | None = None,
        reasoning_budget: int | None = None,
    ) -> None:
        self.target, self.drafter, self.number, self.alone = target, drafter, number, target.generate
        self.reasoning_end, self.reasoning_budget = reasoning_end, reasoning_budget
        self.lookup = Lookup()
        self.free: list[Conversation] = []  # the one that was used last at the end
        self._lock = threading.Lock()
        vars(target)["generate"] = self.generate

    def generate(self, **options: Any) -> Any:
        """Do what `target.generate` does, and keep the grammar that the generation configuration may have."""
        ids, config = options.get("input_ids"), options.get("generation_config")
        given = {name for name, value in options.items() if value is not None}
        is_text = isinstance(ids, torch.Tensor) and len(ids) == 1 and given <= _TEXT
        if is_text and (grammar := self._grammar(ids, config, options.get("tokenizer"))) is not None:
            options["logits_processor"] = [GrammarProcessor(grammar)]
        other_way = max(getattr(config, "num_beams", 0) or 0, getattr(config, "num_return_sequences", 0) or 0) > 1
        other_cache = getattr(config, "cache_implementation", None) or getattr(config, "use_cache", None) is False
        if not is_text or not self.number or other_way or other_cache:
            return self.alone(**options)
        conversation = self._take(ids)
        try:
            out = conversation.generate(**options, lookup=self.lookup)
            cached = f"{conversation.cached_tokens} of {ids.shape[1]} prompt tokens were in a cache"
            print(f"{cached}; {self.drafter.last_stats}", flush=True)
            return out
        finally:
            with self._lock:
                self.free = [*self.free, conversation][-self.number :]

    def _take(self, ids: torch.Tensor) -> Conversation:
        with self._lock:
            nearest = max(self.free, key=lambda each: each.shared_tokens(ids), default=None)
            if nearest is None or 2 * nearest.shared_tokens(ids) <= nearest.length:
                return Conversation(self.target, self.drafter)
            self.free.remove(nearest)
            return nearest

    def _grammar(self, ids: torch.Tensor, config: Any, tokenizer: Any) -> Any:
        """Return the grammar of an answer, behind its reasoning; `None` for any text."""
        grammar = None if config is None else vars(config).pop(_GRAMMAR, None)  # transformers would copy it
        if self.reasoning_end is None or (grammar is None and self.reasoning_budget is None):
            return grammar
        if tokenizer.decode(ids[0]).rstrip().endswith(self.reasoning_end):  # by a template, for no reasoning
            return grammar
        return AfterReasoning(grammar, self.reasoning_end, tokenizer, self.reasoning_budget)


class Formats:
    """Reads which format a request wants its answer in, and compiles that to a grammar.

    Args:
        tokenizer: The target's.
        vocab_size: The target's.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
        self.tokenizer, self.vocab_size = tokenizer, vocab_size

    @cached_property
    def compiler(self) -> Any:
        """xgrammar's, for this vocabulary; made for the first request that wants a format."""
        import xgrammar

        known = xgrammar.TokenizerInfo.from_huggingface(self.tokenizer, vocab_size=self.vocab_size)
        return xgrammar.GrammarCompiler(known)

    def read_for(self, handler: Any) -> None:
        """Let a handler of transformers' server, which ignores formats, add their grammars to its configurations."""
        build = handler._build_generation_config

        def build_with_grammar(body: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            config = build(body, *args, **kwargs)
            setattr(config, _GRAMMAR, self.grammar_of(body))
            return config

        handler._build_generation_config = build_with_grammar
        handler._unused_fields = handler._unused_fields - {"response_format", "text"}

    def grammar_of(self, body: dict[str, Any]) -> Any:
        """Return the grammar of a request's answer; `None` for any text.

        Raises:
            HTTPException: If the format is none that can be kept; the client gets the status 400 and the reason.
        """
        try:
            wanted = body.get("response_format") or (body.get("text") or {}).get("format") or {"type": "text"}
            if not isinstance(wanted, dict):
                raise ValueError(f"it is {wanted!r}, expected an object with a `type`")
            kind = wanted["type"]
            if kind == "text":
                return None
            if kind not in ("json_object", "json_schema"):
                raise ValueError(f"its type is {kind!r}, expected 'text', 'json_object' or 'json_schema'")
            # On one line: there is less to write, and more of it is known without the drafter.
            if kind == "json_object":
                return self.compiler.compile_json_schema({"type": "object"}, any_whitespace=False, strict_mode=False)
            schema = wanted.get("json_schema", wanted)["schema"]
            return self.compiler.compile_json_schema(schema, any_whitespace=False)
        except (AttributeError, ImportError, KeyError, TypeError, ValueError, RuntimeError) as error:
            from fastapi import HTTPException

            reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
            reason = re.sub(r"^\[\S+ \S+: ", "", reason)  # without time and place: "[12:30:59] a/b.cc:9: "
            reason = reason.strip().rstrip(".")
            raise HTTPException(400, f"The format of the answer cannot be kept: {reason}.") from None


class DraftingServer(Serve):
    """transformers' server, whose target has a drafter before it answers.

    Args:
        arguments: Of the command line.

    Raises:
        ValueError: If target and drafter cannot be loaded, or do not fit.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        super().__init__(
            arguments.target, host=arguments.host, port=arguments.port, device=arguments.device,
            dtype=arguments.dtype, non_blocking=True,
        )  # fmt: skip

    def start_server(self) -> None:
        """Bind the drafter, and serve until Ctrl-C. `Serve` calls it at last, for a thread of its own."""
        arguments = self.arguments
        (loaded,) = self._model_manager.loaded_models.values()
        target, tokenizer = loaded.model, getattr(loaded.processor, "tokenizer", loaded.processor)
        drafter = load_drafter(arguments.drafter, target=target)
        drafter.bind(target, as_default=True)
        drafter.num_draft_tokens = arguments.num_draft_tokens
        reasoning = arguments.reasoning_end, arguments.reasoning_budget
        Conversations(target, drafter, arguments.conversations, *reasoning)
        formats = Formats(tokenizer, target.config.get_text_config().vocab_size)
        for handler in (self._chat_handler, self._response_handler):
            formats.read_for(handler)
        address = f"http://{arguments.host}:{arguments.port}"
        print(f"{arguments.target} drafts with {arguments.drafter} on {address}", flush=True)
        self.server.run()


def number_or_auto(text: str) -> int | str:
    return text if text == "auto" else int(text)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="path or Hub id")
    parser.add_argument("--drafter", required=True, help="path or Hub id")
    parser.add_argument("--host", default="localhost")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto", help="of the target")
    parser.add_argument(
        "--num-draft-tokens", type=number_or_auto, default="auto",
        metavar="NUMBER|auto", help="drafts a round; auto, the default, for as many as pay",
    )  # fmt: skip
    parser.add_argument("--conversations", type=int, default=4, help="that keep their caches, at most; 0 for none")
    parser.add_argument("--reasoning-end", metavar="TEXT", help="which ends the target's reasoning: </think>")
    parser.add_argument("--reasoning-budget", type=int, metavar="TOKENS", help="of reasoning, at most")
    arguments = parser.parse_args()
    for name in ("conversations", "reasoning_budget"):
        value = getattr(arguments, name)
        if value is not None and value < 0:
            parser.error(f"--{name.replace('_', '-')} is {value}, expected a whole number of at least 0")
    if arguments.reasoning_budget is not None and not arguments.reasoning_end:
        parser.error("--reasoning-budget needs --reasoning-end, the text that ends the reasoning")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    try:
        DraftingServer(arguments)
    except (ImportError, OSError, ValueError) as error:
        raise SystemExit(f"Error: {' '.join(str(error).split())}") from None
    except KeyboardInterrupt:
        pass  # uvicorn has ended, and says it again


if __name__ == "__main__":
    main()
