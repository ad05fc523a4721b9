"""Saves and loads a drafter with weights, and writes the code that it needs beside them.

Transformers' remote code supports no subfolders. So the code is written flat, `trees/growth.py` as `trees_growth.py`,
with its imports rewritten.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from ..targets.registry import FAMILIES
from ..version import __version__
from .base import Drafter
from .configuration import WithCode
from .custom_generate import RECIPE
from .weights import load_complete

RECIPE_FILE = "custom_generate/generate.py"
NOTE = "<!-- hf_hyperdflash: no card yet -->"  # in a README that is about the code alone
_OF_SHARED_FORWARDS = (
    "targets/caches/ragged", "targets/caches/slot_forward", "targets/caches/static", "drafters/parts/fixed_context",
)  # fmt: skip
# What `save_pretrained(push_to_hub=True)` may be given besides.
_PUSHING = ("repo_id", "commit_message", "commit_description", "private", "token", "revision", "create_pr", "tags")
_ROOT = Path(__file__).parents[__package__.endswith(".drafters")]  # of the package, or the flat folder of a saved one


class SavedDrafter(WithCode, Drafter, PreTrainedModel):
    """A drafter with weights: saved with code, and loaded whole."""

    config: Any
    target_model_type = ""  # of a kind whose configuration does not say it

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        # Transformers reads it from an assistant before it calls `generate`.
        self.generation_config = GenerationConfig()

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load the drafter as any model, but only a complete one in safetensors
        ([`~drafters.weights.load_complete`]).

        Raises:
            ValueError: If it is no drafter of this kind, or its tensors are not those of its configuration.
            OSError: If it cannot be found or its weights are damaged.
        """
        return load_complete(super().from_pretrained, pretrained_model_name_or_path, *args, **kwargs)

    @property
    def _is_launch_bound(self) -> bool:
        """Whether a pass takes as long over some more drafts, which nobody asked for: not on a CPU."""
        return self.device.type != "cpu"

    def get_input_embeddings(self) -> None:  # type: ignore[override]
        """Return nothing: the embeddings are the target's. Accelerate asks for them, to shard them apart."""

    @classmethod
    def _own_class(cls) -> type:
        """Return the class that loads what this one saves: FSDP2 makes a subclass, which is in no file."""
        for kind in cls.__mro__:
            module = sys.modules.get(kind.__module__)
            if getattr(module, kind.__name__, None) is kind and getattr(module, "__file__", None):
                break
        if not issubclass(kind, SavedDrafter) or kind is SavedDrafter:
            raise ValueError(
                f"A {cls.__name__} is from {cls.__module__}: what a saved drafter runs on is copied from the file of "
                "its class. Put the class into a file of its own."
            )
        return kind

    def carried_code(self) -> dict[str, str]:
        """Return the code that the drafter needs, by the names of flat files: its own module and everything that this
        imports, but for what its target cannot need. Of the families of targets it has the target's relatives and
        those with one stream.

        Raises:
            ValueError: If the class is in no file, or its file imports from above its folder.
        """
        return flat_code(Path(str(sys.modules[self._own_class().__module__].__file__)), self._unneeded())

    def _unneeded(self) -> set[Path]:
        """Return the files that the drafter's target cannot need, by its configuration: of families to which it cannot
        belong, and of caches that it cannot have."""
        kind = getattr(self.config, "target_model_type", self.target_model_type)
        if not kind:
            return set()
        is_deepseek, is_masked = kind.startswith("deepseek_v4"), any(kind in each.masked_types for each in FAMILIES)
        unneeded = [] if is_deepseek else ["targets/deepseek_v4"]
        if getattr(self.config, "target_hc_mult", 0) == 1 and not getattr(self.config, "any_streams", False):
            unneeded.append("targets/hyper_connections")
        if is_masked or is_deepseek:
            unneeded.append("targets/caches/linear")
        if not is_masked:  # no batches that share forwards, and no static caches
            unneeded += _OF_SHARED_FORWARDS
        return {_ROOT / f"{name}.py" for name in unneeded}

    def save_pretrained(  # type: ignore[override]
        self,
        save_directory: str | os.PathLike,
        is_main_process: bool = True,
        push_to_hub: bool = False,
        with_code: bool = True,
        **kwargs: Any,
    ) -> None:
        """Save the drafter as any model. The folder also gets the code with which plain transformers drafts without
        this package, and, if it has no README.md, one that explains the code.

        Args:
            save_directory: The folder, made if needed.
            is_main_process: Whether this process writes.
            push_to_hub: Whether to [`push_to_hub`] too.
            with_code: Whether to write the code; `load_drafter` needs none.
            **kwargs: As of any model, and of [`push_to_hub`].

        Raises:
            OSError: If `save_directory` is a file, or the disk is full.
        """
        folder = Path(save_directory)
        if folder.is_file():  # where transformers logs an error and saves nothing
            raise OSError(f"{save_directory} is a file, expected a folder for the drafter: choose another name.")
        push_options = {name: kwargs.pop(name) for name in _PUSHING if name in kwargs}
        code = self.carried_code() if with_code else {}
        self.config.hyperdflash_version = __version__
        self.config._auto_class = None  # as of `WithCode`, which a drafter of somebody else's may not have
        vars(self.config).pop("auto_map", None)
        if with_code:
            own = self._own_class()
            places = {"AutoConfig": own.config_class, "AutoModel": own}  # type: ignore[attr-defined]
            self.config.auto_map = {auto: f"{_flat_module(kind)}.{kind.__name__}" for auto, kind in places.items()}
        try:
            super().save_pretrained(folder, is_main_process=is_main_process, token=push_options.get("token"), **kwargs)
        except SafetensorError as error:  # for any error of the system
            raise OSError(
                f"The drafter cannot be written to {folder} ({error}): make room there, or choose another folder."
            ) from error
        if is_main_process and with_code:
            (folder / RECIPE_FILE).parent.mkdir(exist_ok=True)
            (folder / RECIPE_FILE).write_text(RECIPE.read_text(encoding="utf-8"), encoding="utf-8")
            for name, text in code.items():
                (folder / name).write_text(text, encoding="utf-8")
            if not (readme := folder / "README.md").exists():
                text = f"---\nlibrary_name: transformers\n---\n\n{NOTE}\n\n{about_code(__version__)}"
                readme.write_text(text, encoding="utf-8")
        if is_main_process and push_to_hub:
            self.push_to_hub(push_options.pop("repo_id", folder.name), **push_options)

    def push_to_hub(self, repo_id: str, **options: Any) -> Any:  # type: ignore[override]
        """Upload drafter, code and model card in one commit. The target's embedding and head are no part of it.

        Args:
            repo_id: The repository, `"org/name"`, made if needed.
            **options: Of [`~hub.publish.push_drafter`]: `commit_message`, `private`, `token`, `revision`, `create_pr`,
                `tags`, ...

        A drafter's own code, without the package, knows no cards: it is pushed on as any model is.

        Raises:
            OSError: If the Hub cannot be reached.
        """
        if find_spec("hf_hyperdflash") is None:
            return super().push_to_hub(repo_id, **options)  # type: ignore[arg-type]
        return import_module("hf_hyperdflash.hub.publish").push_drafter(self, repo_id, **options)


def about_code(version: str) -> str:
    """Return what users should know before they trust the code beside a drafter, as Markdown."""
    return f"""## The code here

hf_hyperdflash {version} wrote it: the part of the package that drafts, in flat files. Transformers runs it only
with `trust_remote_code=True`. `pip install hf-hyperdflash` runs the same weights with newer code, and nothing from
here: `hf_hyperdflash.load_drafter(...)`.

`drafter.bind(target)` changes that one target: its class becomes a subclass whose `generate` can draft and whose cache
can give tokens back, and its layers get hooks that do nothing in other calls. `drafter.unbind(target)` undoes both.
`custom_generate` does the same for one call. The code loads no weights but this repository's, and no other code.
"""


def flat_code(module: Path, left_out: set[Path] = frozenset()) -> dict[str, str]:  # type: ignore[assignment]
    """Return a module and all that it imports from its package or folder, with names and imports for one flat folder.

    Args:
        module: The file, of this package, or of a folder of its own.
        left_out: Files that are not written. What is imported from them becomes an empty tuple.

    Returns:
        The texts by file name.

    Raises:
        ValueError: If an import leads out of the folder, or names no module.
    """
    root = _ROOT if module.is_relative_to(_ROOT) else module.parent
    texts: dict[Path, str] = {}
    to_do = [module]
    while to_do:
        path = to_do.pop()
        if path not in texts:
            texts[path], imported = _flattened(path, root, left_out)
            to_do += imported
    return {f"{_flat_name(path, root)}.py": text for path, text in sorted(texts.items())}


def _flattened(path: Path, root: Path, left_out: set[Path]) -> tuple[str, list[Path]]:
    """Return the text of a file for a flat folder, and the files that it imports."""
    lines, imported = path.read_text(encoding="utf-8").splitlines(keepends=True), []
    for node in ast.walk(ast.parse("".join(lines))):
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        place = path.parents[node.level - 1].joinpath(*(node.module or "").split(".")).with_suffix(".py")
        if not node.module or not place.is_relative_to(root):
            raise ValueError(
                f"{path}, line {node.lineno}: expected `from .module import name` within {root}, as what a saved "
                "drafter runs on is written into one flat folder."
            )
        if place in left_out:
            names = " = ".join(name.asname or name.name for name in node.names)
            lines[node.lineno - 1] = f"{names} = ()  # type: ignore  # of other targets than this drafter's\n"
            lines[node.lineno : node.end_lineno] = [""] * (node.end_lineno - node.lineno)  # type: ignore[operator]
            continue
        imported.append(place)
        lines[node.lineno - 1] = re.sub(
            r"from\s+\.[\w.]*", f"from .{_flat_name(place, root)}", lines[node.lineno - 1], count=1
        )
    return "".join(lines), imported


def _flat_name(path: Path, root: Path) -> str:
    return "_".join(path.relative_to(root).with_suffix("").parts)


def _flat_module(kind: type) -> str:
    """Return the name of the flat file of a class."""
    path = Path(str(sys.modules[kind.__module__].__file__))
    return _flat_name(path, _ROOT if path.is_relative_to(_ROOT) else path.parent)
