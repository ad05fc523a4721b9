"""Tiny tokenizers, built in code."""

import re

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast


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


WORDS = ["Hello there, I am fine.", "What is the sum of one and two?", "It is three. Hello", "user: q\nassistant: a\n"]
ENDS = ["<s>", "</s>", "<|user|>", "<|assistant|>"]
BYTES = [f"<0x{value:02X}>" for value in range(256)]


def trained(kind: str) -> PreTrainedTokenizerFast:
    """A tokenizer of a kind that is in use, trained on a few words.

    `first` and `always` are SentencePiece's Metaspace and where it puts its space: before the text, or after every
    special token, too. `legacy` does the latter by its normalizer. `bytes` is byte-level BPE, `trimmed` the same with
    offsets that leave spaces out, and `stripping` one whose end tokens take the white space after them.
    """
    if kind in ("bytes", "trimmed", "stripping"):
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.post_processor = processors.ByteLevel(trim_offsets=kind == "trimmed")
        backend.decoder = decoders.ByteLevel()
        tokens, alphabet = ENDS, pre_tokenizers.ByteLevel.alphabet()
    else:
        backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
        scheme = kind if kind in ("first", "always") else "always"
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
        backend.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        tokens, alphabet = ["<unk>", *BYTES], []
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=tokens, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(WORDS * 5, trainer)
    if kind == "legacy":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        backend.pre_tokenizer = None
    ends = [AddedToken(end, rstrip=kind == "stripping", special=True) for end in ENDS]
    backend.add_special_tokens(ends)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=ends[0], eos_token=ends[1])


class SlowPieces(PreTrainedTokenizer):
    """A tokenizer without offsets that spells, with a space before every piece between special tokens."""

    def __init__(self, **options) -> None:
        letters = [*"▁abcdefghijklmnopqrstuvwxyzHIW .,?\n:"]
        self.vocabulary = {token: i for i, token in enumerate([*ENDS, "<unk>", *letters])}
        super().__init__(bos_token="<s>", eos_token="</s>", unk_token="<unk>", **options)
        self.add_special_tokens({"additional_special_tokens": ENDS[2:]})

    @property
    def vocab_size(self) -> int:
        return len(self.vocabulary)

    def get_vocab(self) -> dict[str, int]:
        return {**self.vocabulary, **self.added_tokens_encoder}

    def _tokenize(self, text, **options):
        return [*("▁" + text)]

    def _convert_token_to_id(self, token):
        return self.vocabulary.get(token, self.vocabulary["<unk>"])

    def _convert_id_to_token(self, index):
        return {i: token for token, i in self.vocabulary.items()}[index]


class JoiningPieces(SlowPieces):
    """One that writes a space before a word as one token with it, wherever a prompt ends."""

    def _tokenize(self, text, **options):
        return re.findall(r" ?[^ ]+| ", text)
