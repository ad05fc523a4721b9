"""The recipe of a saved drafter, `custom_generate`, where threads share a target."""

import threading

import torch
from transformers.generation.streamers import BaseStreamer

from hf_hyperdflash.portable import generate as recipe

from ..conftest import half_right, prompt, tiny_target


class Waits(BaseStreamer):
    """Goes on with the text only when another thread's is over."""

    def __init__(self, begun: threading.Event, over: threading.Event) -> None:
        self.begun, self.over, self.tokens = begun, over, 0

    def put(self, value):
        self.tokens += 1
        if self.tokens == 4:
            self.begun.set()
            assert self.over.wait(60)

    def end(self): ...


def test_a_call_that_ends_leaves_the_target_to_those_that_go_on():
    target, ids = tiny_target(hidden_size=64), prompt(9)
    own, options = type(target), dict(do_sample=False, max_new_tokens=20)
    expected = target.generate(ids, **options)
    drafters = [half_right(target, ids, max_new_tokens=20) for _ in range(2)]
    begun, over, texts = threading.Event(), threading.Event(), []
    for first, second in ((drafters[0], drafters[0]), drafters):  # one drafter, and two
        begun.clear()
        over.clear()

        def longer(drafter=first):
            streamer = Waits(begun, over)
            texts.append(recipe.generate(target, assistant_model=drafter, inputs=ids, streamer=streamer, **options))

        thread = threading.Thread(target=longer)
        thread.start()
        assert begun.wait(60)
        assert torch.equal(recipe.generate(target, assistant_model=second, inputs=ids, **options), expected)
        over.set()
        thread.join()
        assert len(texts) and torch.equal(texts.pop(), expected)
        assert type(target) is own
    drafters[0].bind(target)
    bound = type(target)
    recipe.generate(target, assistant_model=drafters[0], inputs=ids, **options)
    assert type(target) is bound  # by somebody else, who wants it to stay so
