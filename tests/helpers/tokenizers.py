"""Tiny real tokenizers, built in code."""

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def characters() -> PreTrainedTokenizerFast:
    """A tokenizer of 60 characters, which chats by spelling."""
    letters = [*"abcdefghijklmnopqrstuvwxyzAELTW0123456789 .,?$'"]
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<mask>", "<unk>", *letters])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, chat_template=template, mask_token="<mask>", unk_token="<unk>", pad_token="<pad>"
    )
