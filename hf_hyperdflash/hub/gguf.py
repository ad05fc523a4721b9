"""Targets in GGUF files, llama.cpp's format: the file that a name means, what it says of itself, what is loaded, and
what is kept of it as a folder. To read the file takes many seconds, to load the folder one.

transformers reads weights, configuration and tokenizer. This file checks before it does, and corrects afterwards what
the file itself says otherwise: 5.17, for example, takes the beginning of a text for its end.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import logging
import os
import shutil
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import transformers
from filelock import FileLock, Timeout
from huggingface_hub import constants
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

from ..version import __version__

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
SWITCH = "HF_HYPERDFLASH_GGUF_CACHE"  # an environment variable: 0 keeps nothing
_OF_CLASS = ("padding_side", "model_input_names")  # which a tokenizer has from its class
_HEADER = 2**24  # bytes: more than headers have with their vocabularies

Part = TypeVar("Part")


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


def cached(
    path: Path,
    part: str,
    read: Callable[[], Part],
    load: Callable[[Path], Part],
    is_kept: bool = True,
) -> Part:
    """Return a part of a GGUF file, which `save_pretrained` saves: loaded from its folder, or else read from the file
    and kept as a folder, unless there is not twice the free space that it takes."""
    if os.environ.get(SWITCH, "").upper() in ("0", "OFF", "NO", "FALSE"):
        return read()
    # The folder for this file as it is now, and for the versions of transformers and this package.
    facts = path.stat()
    with path.open("rb") as file:
        header = hashlib.sha256(file.read(_HEADER)).hexdigest()
    names = str(path.resolve()), (facts.st_size, facts.st_mtime_ns, header, transformers.__version__, __version__)
    place, version = (hashlib.sha256(repr(each).encode()).hexdigest()[:16] for each in names)
    folder = Path(constants.HF_HOME, "hf_hyperdflash", "gguf", f"{path.stem}-{place}", version, part)
    is_there = os.path.isdir(folder)
    if is_there:
        try:
            return load(folder)
        except Exception as error:  # a damaged file can end in any; what the caller asked wrongly, `read` raises again
            said = (str(error) or type(error).__name__).splitlines()[0]
            logger.warning("%s cannot be loaded (%.100s): %s is read again.", folder, said, path)
    found = read()
    if is_kept:
        try:
            _keep(folder, found, is_damaged=is_there)
        except Exception as error:  # of the system, of safetensors, of a file system without locks
            _tell_not_kept(folder.parents[1], getattr(error, "strerror", None) or str(error))
    return found


def _keep(folder: Path, part: Any, is_damaged: bool) -> None:
    """Save a part where nobody sees it, then give it its name, and remove what there is of other versions. Another
    process that does the same for this file goes first."""
    version, place = folder.parent, folder.parents[1]
    size = part.get_memory_footprint() if isinstance(part, PreTrainedModel) else 0
    version.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(version).free < 2 * size:
        raise OSError(f"that takes {size / 1e6:,.0f} MB, and twice as many must be free")
    try:
        lock = FileLock(place / "lock").acquire(timeout=0)
    except Timeout:
        return
    with lock:
        if os.path.isdir(folder) and not is_damaged:
            return
        unfinished = place / "unfinished"
        for old in place.iterdir():
            if old.is_dir() and old != version:
                shutil.rmtree(old, ignore_errors=True)
        try:
            if isinstance(part, PreTrainedTokenizerBase):  # in the folder it has another class, with other defaults
                part.init_kwargs |= {own: getattr(part, own) for own in _OF_CLASS}
            # A shard takes as much of the memory, too.
            part.save_pretrained(unfinished, **({"max_shard_size": "5GB"} if size else {}))
            for file in unfinished.iterdir():
                with file.open("rb+") as written:
                    os.fsync(written)  # or its name may reach the disk without its bytes
            shutil.rmtree(folder, ignore_errors=True)
            unfinished.rename(folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    if size:
        logger.warning(
            "What was read is kept for the next time: %s MB in %s. %s=0 switches that off.",
            f"{size / 1e6:,.0f}",
            folder,
            SWITCH,
        )


@functools.cache
def _tell_not_kept(place: Path, why: str) -> None:
    """Say once why nothing is kept."""
    logger.warning("What is read of a GGUF file is not kept in %s (%s): the next time takes as long.", place, why)
