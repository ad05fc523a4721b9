"""Published drafters: the table of those that are known here, and what the Hub names for a target.

Importing this file costs nothing, and the table needs no network.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from huggingface_hub import HfApi, ModelInfo


@dataclass(frozen=True)
class PublishedDrafter:
    """A drafter on the Hub. What is not known of it is empty."""

    name: str
    target: str
    kind: str  # its method, and whose layout it is in
    size: str = ""  # its number of parameters, in words
    date: str = ""  # when it was last changed
    why_not_read: str = ""  # by `load_drafter`
    why_unfit: str = ""  # for this target, by both configurations

    def __str__(self) -> str:
        about = f"{self.name}: {', '.join(filter(None, (self.kind, self.size, self.date)))}"
        if self.why_not_read:
            return f"{about}\n    not read: {self.why_not_read}"
        if self.why_unfit:
            return f"{about}\n    does not fit: {self.why_unfit}"
        return f'{about}\n    drafter = load_drafter("{self.name}", target=target)'


_V4, _GLM = "deepseek-ai/DeepSeek-V4-Flash", "zai-org/GLM-5.3-Flash"
_TABLE = {  # drafters and their targets, by method and layout
    "DFlash, z-lab": {
        "z-lab/Qwen3-4B-DFlash-b16": "Qwen/Qwen3-4B",
        "z-lab/Qwen3-8B-DFlash-b16": "Qwen/Qwen3-8B",
        "z-lab/Qwen3-Coder-30B-A3B-DFlash": "Qwen/Qwen3-Coder-30B-A3B-Instruct",
        "z-lab/Qwen3.5-4B-DFlash": "Qwen/Qwen3.5-4B",
        "z-lab/Qwen3.5-9B-DFlash": "Qwen/Qwen3.5-9B",
        "z-lab/gpt-oss-20b-DFlash": "openai/gpt-oss-20b",
    },
    "DFlash 2, z-lab": {
        "z-lab/Qwen3.8-27B-DFlash2": "Qwen/Qwen3.8-27B",
        "modal-labs/GLM-5.3-Flash-DFlash": _GLM,
        "incoai/GLM-5.3-Flash-DFlash2": _GLM,
    },
    "JetSpec, z-lab": {
        "JetSpec/jetspec-qwen3-8b": "Qwen/Qwen3-8B",
        "JetSpec/jetspec-qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B",
        "JetSpec/jetspec-gpt-oss-20b": "openai/gpt-oss-20b",
    },
    "Domino, z-lab": {
        "Huang2020/Qwen3-4B-Domino-b16": "Qwen/Qwen3-4B",
        "Huang2020/Qwen3-8B-Domino-b16": "Qwen/Qwen3-8B",
    },
    "DSpark, DeepSpec": {
        "deepseek-ai/dspark_qwen3_4b_block7": "Qwen/Qwen3-4B",
        "deepseek-ai/dspark_qwen3_8b_block7": "Qwen/Qwen3-8B",
    },
    "DSpark, speculators": {"RedHatAI/GLM-5.3-Flash-speculator.dspark-preview": _GLM},
    "EAGLE-3, speculators": {
        "RedHatAI/Qwen3-8B-speculator.eagle3": "Qwen/Qwen3-8B",
        "RedHatAI/Qwen3-32B-speculator.eagle3": "Qwen/Qwen3-32B",
        "RedHatAI/gpt-oss-20b-speculator.eagle3": "openai/gpt-oss-20b",
    },
    "EAGLE-3, SafeAILab": {
        "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B": "meta-llama/Llama-3.1-8B-Instruct",
        "yuhuili/EAGLE3-Vicuna1.3-13B": "lmsys/vicuna-13b-v1.3",
    },
    "EAGLE-3, DeepSpec": {
        "deepseek-ai/eagle3_qwen3_4b_ttt7": "Qwen/Qwen3-4B",
        "deepseek-ai/eagle3_qwen3_8b_ttt7": "Qwen/Qwen3-8B",
    },
    "EAGLE-3, NVIDIA": {
        "nvidia/Llama-3.3-70B-Instruct-Eagle3": "meta-llama/Llama-3.3-70B-Instruct",
        "nvidia/Qwen3-235B-A22B-Eagle3": "Qwen/Qwen3-235B-A22B",
    },
    "P-EAGLE, Amazon": {
        "amazon/GPT-OSS-20B-P-EAGLE": "openai/gpt-oss-20b",
        "amazon/gpt-oss-120b-p-eagle": "openai/gpt-oss-120b",
    },
    "DFlash, transformers": {"meta-models/Muse-Glimmer-30B-assistant": "meta-models/Muse-Glimmer-30B"},
    "Medusa heads, its authors": {"FasterDecoding/medusa-vicuna-7b-v1.3": "lmsys/vicuna-7b-v1.3"},
    "SpecBlock, its authors": {
        "weijiezz/SpecBlock-Qwen3-8B": "Qwen/Qwen3-8B",
        "weijiezz/SpecBlock-Llama-3.1-8B-Instruct": "meta-llama/Llama-3.1-8B-Instruct",
    },
    "DFlash over all streams, speculators": {"RedHatAI/DeepSeek-V4-Flash-speculator.dflash": _V4},
    "EAGLE-3 and EAGLE-3.1, SafeAILab": {
        "AQ-MedAI/DeepSeek-V4-Flash-0731-eagle3": f"{_V4}-0731",
        "SyzygyResearch/DeepSeek-V4-Flash-EAGLE3.1": _V4,
    },
    "DSpark, the target's own": {f"{_V4}-0731": f"{_V4}-0731"},
    "MTP, the target's own": {_V4: _V4},
    "Gemma 4 assistant, Google": {
        f"google/gemma-4-{size}-it-assistant": f"google/gemma-4-{size}-it" for size in ("E2B", "E4B", "26B-A4B", "31B")
    },
    "Gemma 4 Unified assistant, Google": {"google/gemma-4-12B-it-assistant": "google/gemma-4-12B-it"},
}
PUBLISHED = tuple(
    PublishedDrafter(name, target, kind) for kind, pairs in _TABLE.items() for name, target in pairs.items()
)
_PUBLISHERS = sorted({drafter.name.partition("/")[0] for drafter in PUBLISHED})
# By accepted tokens a second: as measured here where it is, else as published. Within a method the newest is first.
_FASTEST_FIRST = (
    "JetSpec", "DSpark", "DFlash 2", "HyperDFlash", "Domino", "DFlash", "SpecBlock", "P-EAGLE", "EAGLE-3", "assistant",
    "MTP", "Medusa",
)  # fmt: skip
# In names of drafters.
_METHODS = (
    "assistant", "dflash", "domino", "dspark", "eagle", "hass", "jetspec", "medusa", "specblock", "speculator",
)  # fmt: skip
_MOST = 100  # that one question is answered with
_FACTS: Any = ["safetensors", "lastModified", "tags"]
_GGUF = re.compile(r"([.-](i?q\d\w*|b?f16|f32))?\.gguf$", re.IGNORECASE)  # the end of a file's name


def known_drafters(target: str) -> list[PublishedDrafter]:
    """Return the drafters of a target that are in the table, by the last part of its folder, Hub id or GGUF file."""
    return [drafter for drafter in PUBLISHED if _plain(drafter.target) == _plain(target)]


def own_drafter(target: str) -> PublishedDrafter | None:
    """Return the drafter in a target's own checkpoint, of which the configuration is read; `None` if it has none."""
    from .found import check_drafter

    try:
        found = check_drafter(target)
    except (ValueError, OSError):
        return None
    return PublishedDrafter(target, target, f"{found.kind.name}, the target's own") if found.is_targets_own else None


def choose(drafters: Iterable[PublishedDrafter]) -> PublishedDrafter | None:
    """Return the one to try first: of those that are read and fit the one whose method drafts fastest, the newest."""

    def rank(drafter: PublishedDrafter) -> int:
        named = (i for i, method in enumerate(_FASTEST_FIRST) if method.lower() in drafter.kind.lower())
        return next(named, len(_FASTEST_FIRST))

    usable = [drafter for drafter in drafters if not (drafter.why_not_read or drafter.why_unfit)]
    return min(sorted(usable, key=lambda each: each.date, reverse=True), key=rank, default=None)


def hub_drafters(target: str, api: HfApi) -> list[PublishedDrafter]:
    """Return the drafters of a target that are on the Hub, those of the table among them: what has the target as its
    `base_model`, and what the table's publishers call by its name. Of each only the config.json is downloaded."""
    known = {drafter.name: drafter for drafter in known_drafters(target)}
    questions: list[dict[str, Any]] = [{"author": one, "search": _name(target)} for one in _PUBLISHERS]
    if re.fullmatch(r"[\w.-]+/[\w.-]+", target):
        questions += [{"filter": f"base_model:{target}", "search": method} for method in _METHODS]

    def answer(question: dict[str, Any]) -> list[ModelInfo]:
        return list(api.list_models(**question, expand=_FACTS, limit=_MOST))

    with ThreadPoolExecutor() as pool:
        answers = list(pool.map(answer, questions))
        found: dict[str, ModelInfo | None] = {
            info.id: info for infos in answers for info in infos if _is_for(info, target)
        }
        missing = [name for name in known if name not in found]
        found |= zip(missing, pool.map(lambda name: _info(api, name), missing))
        return list(pool.map(lambda name: _described(name, found[name], target, known), found))


def _is_for(info: ModelInfo, target: str) -> bool:
    """Return whether an answer is a drafter of the target, by its name and the targets that its tags name, if any."""
    bases = {tag.rpartition(":")[2] for tag in info.tags or () if tag.startswith("base_model:")}
    is_drafter = any(method in info.id.lower() for method in _METHODS)
    is_quantized = "gguf" in info.id.lower() or any(tag.startswith("base_model:quantized") for tag in info.tags or ())
    return is_drafter and not is_quantized and (not bases or _plain(target) in map(_plain, bases))


def _info(api: HfApi, name: str) -> ModelInfo | None:
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return api.model_info(name, expand=_FACTS)
    except HfHubHTTPError:  # it is gone, or not for everybody
        return None


def _described(name: str, info: ModelInfo | None, target: str, known: dict[str, PublishedDrafter]) -> PublishedDrafter:
    from .found import check_drafter
    from .kinds import title
    from .loading import check_made_for

    kind, why, unfit = "", "", ""
    if info is None:
        why = "the Hub does not show it: it is gone, or not for everybody"
    else:
        try:
            found = check_drafter(name)
            kind = found.kind.name if found.config is None else title(found.config)
        except (ValueError, OSError) as error:
            why = " ".join(str(error).split())
        else:
            with suppress(OSError):  # of a target of which nothing but the name is known
                try:
                    check_made_for(target, found)
                except ValueError as error:
                    unfit = " ".join(str(error).split())
    kind = known[name].kind if name in known else kind
    count = info.safetensors.total if info and info.safetensors else 0
    date = f"{info.last_modified:%Y-%m-%d}" if info and info.last_modified else ""
    return PublishedDrafter(name, target, kind, _size(count), date, why, unfit)


def _size(count: int) -> str:
    shown = f"{count / 1e9:.1f} B" if count >= 1e9 else f"{count / 1e6:.1f} M" if count >= 1e6 else f"{count:,}"
    return f"{shown} parameters" if count else ""


def _name(target: str) -> str:
    """Return the last part of a target's name, without what says how a GGUF file is quantized."""
    return _GGUF.sub("", PurePath(target).name)


def _plain(target: str) -> str:
    return _name(target).lower().removeprefix("meta-")


def as_text(drafters: Iterable[PublishedDrafter]) -> str:
    """Return drafters by target, with the line of Python that loads each."""
    by_target: dict[str, list[PublishedDrafter]] = {}
    for drafter in drafters:
        by_target.setdefault(drafter.target, []).append(drafter)
    parts = [f"{target}\n" + "\n".join(f"  {line}" for each in some for line in str(each).split("\n"))
             for target, some in by_target.items()]  # fmt: skip
    return "\n\n".join(parts)
