"""Targets in GGUF files, llama.cpp's format: the file that a name means, what it says of itself, and what is loaded.

transformers reads weights, configuration and tokenizer. This file checks before it does, and corrects afterwards what
the file itself says otherwise: 5.17, for example, takes the beginning of a text for its end.
"""

from __future__ import annotations

import copy
import functools
import json
import logging
import struct
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import transformers
from tokenizers import Tokenizer
from transformers import (
    TOKENIZER_MAPPING,
    AutoConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.integrations.gguf import GGUF_CONFIG_ARCHS, GgufHeader, read_gguf_metadata
from transformers.utils import cached_file, is_gguf_available

from .gguf_cache import cached

logger = logging.getLogger(__name__)

Options = dict[str, Any]  # of `from_pretrained`
Fields = dict[str, Any]  # what a file says of itself
SUFFIX = ".gguf"
_TOKENS = "tokenizer.ggml.tokens"
# What the file calls a special token, by transformers' name of it.
_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_MORE_ENDS = ("eot", "eom")  # of a chat's turn and of a message, which llama.cpp stops at, too
_ADDED = ("add_bos_token", "add_eos_token")  # whether every text gets one
_NAMING = threading.Lock()


def name_in_gguf(name: str, options: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the folder or repository of a checkpoint and the options of loading it: of a name that ends in `.gguf`
    (`folder/model.gguf`, `org/name/model.gguf`) the file becomes the option `gguf_file`."""
    if not isinstance(name, (str, Path)) or Path(name).suffix.lower() != SUFFIX or Path(name).is_dir():
        return name, options
    if options.get("gguf_file") is not None:
        raise ValueError(
            f"The target is the file {name}, and `gguf_file` is {options['gguf_file']!r}: leave one of them out."
        )
    path = Path(name)
    parts = path.parts
    is_on_hub = len(parts) > 2 and not path.is_absolute() and not path.parent.is_dir()
    source, file = (parts[:2], parts[2:]) if is_on_hub else (path.parent.parts, parts[-1:])
    return str(Path(*source)), {**options, "gguf_file": "/".join(file)}


def check_gguf(name: str, file: str) -> None:
    """Raise an error if the file cannot be read as a target. Nothing is downloaded from the Hub for it."""
    if not is_gguf_available():
        raise ValueError(
            f"{file} is a GGUF file, and the package that reads it is missing or older than 0.10: "
            'pip install "hf-hyperdflash[gguf]".'
        )
    path = Path(name, file)
    if not Path(name).is_dir():
        return
    if not path.is_file():
        raise OSError(f"The folder {name} has no {file}, expected the target in GGUF. Check the name.")
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES  # which loads six tokenizers

    architecture = str(_fields(path)["general.architecture"])
    listed = {*GGUF_SUPPORTED_ARCHITECTURES, *GGUF_CONFIG_ARCHS} - {"general", "tokenizer"}  # no architectures
    known = {_plain(kind): kind for kind in listed}
    if _plain(architecture) not in known:
        raise ValueError(
            f"{path} holds a model of architecture {architecture!r}, which transformers {transformers.__version__} "
            f"does not read from GGUF: expected one of {', '.join(sorted(known.values()))}. Take the model in "
            "safetensors, or update transformers."
        )
    with suppress(ValueError):  # of types of blocks that only the package `gguf` knows
        header = GgufHeader.from_file(str(path))
        whole = header.data_start + max((tensor.offset + tensor.nbytes for tensor in header.tensors), default=0)
        if path.stat().st_size < whole:
            raise OSError(
                f"{path} cannot be read as a GGUF file (it ends after {path.stat().st_size:,} of {whole:,} bytes): "
                "it is damaged. Copy or download it again."
            )


def _plain(architecture: str) -> str:
    """Return an architecture's name as llama.cpp and transformers both write it."""
    return architecture.replace("-", "").replace("_", "")


def _fields(path: Path) -> Fields:
    """Return what the file says of itself, the text of its tokens included."""
    try:
        return read_gguf_metadata(str(path), (_TOKENS,))[0]
    except (ValueError, IndexError, struct.error, UnicodeDecodeError) as error:
        raise OSError(
            f"{path} cannot be read as a GGUF file ({error}): it is damaged, or none. Copy or download it again."
        ) from error


def read_gguf_config(name: str, options: Options) -> PreTrainedConfig:
    """Return a target's configuration by its file, which is read once: transformers goes through every token of the
    vocabulary for it, which takes seconds."""
    path = gguf_path(name, options)
    return copy.deepcopy(_config_of(path, path.stat().st_mtime_ns))


@functools.lru_cache(maxsize=2)
def _config_of(path: Path, _: int) -> PreTrainedConfig:
    read = functools.partial(AutoConfig.from_pretrained, path.parent, gguf_file=path.name)
    return cached(path, "config", read, load=AutoConfig.from_pretrained)


@contextmanager
def names_made_once() -> Iterator[None]:
    """Let the package `gguf` make a model's table of tensor names once. transformers asks for it at each module, 397
    times for a Llama of 30 layers, which took a third of the time of loading it."""
    import gguf

    with _NAMING:
        made = gguf.get_tensor_name_map
        gguf.get_tensor_name_map = functools.cache(made)
        try:
            yield
        finally:
            gguf.get_tensor_name_map = made


def settle_target(target: PreTrainedModel, name: str, options: Options) -> None:
    """Make a target that was loaded from GGUF what it would be from safetensors: it can be saved. Its texts begin and
    end with the tokens that the file says."""
    quantizer = getattr(target, "hf_quantizer", None)
    if quantizer is not None:
        quantizer.remove_quantization_config(target)
    for own, tokens in _special_tokens(_fields(gguf_path(name, options))).items():
        for owner in (target.config, target.generation_config):
            setattr(owner, f"{own}_token_id", tokens[0] if len(tokens) == 1 else tokens)


def read_gguf_tokenizer(name: str, where: Options, options: Options) -> PreTrainedTokenizerBase:
    """Return a tokenizer by its file, or by the folder that it was kept in when it was read before. `where` has those
    of `options` that say where the file is."""
    others = {option: value for option, value in options.items() if option not in where}

    def read() -> PreTrainedTokenizerBase:
        # As `AutoTokenizer`, which goes through the file once more for the configuration.
        kind: Any = TOKENIZER_MAPPING.get(type(read_gguf_config(name, where)), None) or PreTrainedTokenizerFast
        tokenizer: PreTrainedTokenizerBase = kind.from_pretrained(name, **options)
        settle_tokenizer(tokenizer, name, where)
        return tokenizer

    def load(folder: Path) -> PreTrainedTokenizerBase:  # its own class might make tokens anew, by other rules
        tokenizer: PreTrainedTokenizerBase = PreTrainedTokenizerFast.from_pretrained(folder, **others)
        return tokenizer

    return cached(gguf_path(name, where), "tokenizer", read, load, is_kept=not others)


def settle_tokenizer(tokenizer: PreTrainedTokenizerBase, name: str, options: Options) -> None:
    """Give a tokenizer from GGUF the tokens and special tokens of its file, and warn of each special one that was
    another."""
    fields = _fields(gguf_path(name, options))
    if len(tokenizer) > len(fields[_TOKENS]):  # 5.24 gives some GPT-2's <|endoftext|>, which has no embedding
        backend: Any = tokenizer
        state = json.loads(backend.backend_tokenizer.to_str())
        state["added_tokens"] = [token for token in state["added_tokens"] if token["id"] < len(fields[_TOKENS])]
        backend._tokenizer = Tokenizer.from_str(json.dumps(state))
        for own, text in tokenizer.special_tokens_map.items():
            if isinstance(text, str) and text not in tokenizer.get_vocab():  # Gemma's class names a <mask>, for one
                setattr(tokenizer, own, None)
    for own, (token, *_) in _special_tokens(fields).items():
        text, read = fields[_TOKENS][token], getattr(tokenizer, f"{own}_token")
        if read != text:
            setattr(tokenizer, f"{own}_token", text)
        if read not in (None, text):
            logger.warning(
                "transformers %s takes %r for the `%s_token` of %s, and the file says %r, which it has now.",
                transformers.__version__,
                read,
                own,
                options["gguf_file"],
                text,
            )
    for flag in _ADDED:
        said = fields.get(f"tokenizer.ggml.{flag}")
        if said is not None and getattr(tokenizer, flag, said) != said:
            setattr(tokenizer, flag, said)


def _special_tokens(fields: Fields) -> dict[str, list[int]]:
    """Return the special tokens that a file names, by transformers' names of them. Texts may end with several: the
    file's own end comes first, then those of turns and messages."""
    key = "tokenizer.ggml.{}_token_id".format
    found = {own: [fields[key(theirs)]] for own, theirs in _SPECIAL.items() if key(theirs) in fields}
    ends = found.pop("eos", [])
    ends += [fields[key(more)] for more in _MORE_ENDS if key(more) in fields and fields[key(more)] not in ends]
    return {**found, "eos": ends} if ends else found


def gguf_path(name: str, options: Options) -> Path:
    """Return where the file is, downloaded where it has to be."""
    file, rest = options["gguf_file"], {option: value for option, value in options.items() if option != "gguf_file"}
    return Path(str(cached_file(name, file, **rest)))
