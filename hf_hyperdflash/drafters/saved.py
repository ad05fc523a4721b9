"""Saves and loads a drafter with weights, and writes the code beside them that plain transformers drafts with."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import get_relative_import_files

from ..upper import upper
from ..version import __version__
from .adapters import WithAdapters
from .base import Drafter
from .configuration import WithCode
from .letter import carried_code
from .weights import load_complete

RECIPE_FILE = "custom_generate/generate.py"
NOTE = "<!-- hf_hyperdflash: no card yet -->"  # in a README that is about the code alone
# What `save_pretrained(push_to_hub=True)` may be given besides.
_PUSHING = ("repo_id", "commit_message", "commit_description", "private", "token", "revision", "create_pr", "tags")
_PACKAGE = Path(__file__).parents[1]
_RECIPE = _PACKAGE / "portable" / "generate.py"


class SavedDrafter(WithCode, WithAdapters, Drafter, PreTrainedModel):
    """A drafter with weights: saved with code, and loaded whole."""

    config: Any
    target_model_type = ""  # of a kind whose configuration does not say it
    carries_code = True  # whether it is saved with code; a kind in its publisher's layout is not

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        # Transformers reads it from an assistant before it calls `generate`.
        self.generation_config = GenerationConfig()

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load the drafter as any model, but only a complete one in safetensors
        ([`~drafters.weights.load_complete`])."""
        return load_complete(super().from_pretrained, pretrained_model_name_or_path, *args, **kwargs)

    @property
    def _on_accelerator(self) -> bool:
        """Whether a pass takes as long over some more drafts, which nobody asked for: not on a CPU."""
        return self.device.type != "cpu"

    def get_input_embeddings(self) -> None:  # type: ignore[override]
        """Return nothing: the embeddings are the target's. Accelerate asks for them, to shard them apart."""

    @classmethod
    def _own_class(cls) -> type:
        """Return the class that loads what this one saves: FSDP2 makes a subclass, which is in no file."""
        for kind in cls.__mro__:
            module = sys.modules.get(kind.__module__)
            is_in_file = getattr(module, kind.__name__, None) is kind and getattr(module, "__file__", None)
            if is_in_file and issubclass(kind, SavedDrafter):  # FSDP2's own class comes before the drafter's
                break
        if kind in (SavedDrafter, object):
            raise ValueError(
                f"A {cls.__name__} is from {cls.__module__}: what a saved drafter runs on is copied from the file of "
                "its class. Put the class into a file of its own."
            )
        return kind

    def carried_code(self) -> dict[str, str]:
        """Return the code that goes with the drafter, by file names: of a kind of this package what drafts without it
        ([`~drafters.letter`]). A class of somebody else's brings its own file and those beside it that this imports,
        which use the installed package."""
        own: Any = self._own_class()
        path = Path(str(sys.modules[own.__module__].__file__))
        if not path.is_relative_to(_PACKAGE):
            try:
                files = [path, *map(Path, get_relative_import_files(path))]
                return {file.name: file.read_text(encoding="utf-8") for file in files}
            except FileNotFoundError as error:
                raise ValueError(
                    f"{path} imports from {Path(error.filename).name}, expected imports from files beside it, which "
                    "are saved with it: put that there, or into a package."
                ) from error
        chosen = {
            "CONFIDENCE_HEADS": str(getattr(self.config, "confidence_head", True)),
            "HEADS": getattr(self.config, "sequential_head", ""),
            "REDUCERS": getattr(self.config, "reducer", ""),
            "PREPARATIONS": getattr(self.config, "target_model_type", self.target_model_type),
        }
        return carried_code(own.config_class, own, chosen)

    def save_pretrained(  # type: ignore[override]
        self,
        save_directory: str | os.PathLike,
        is_main_process: bool = True,
        push_to_hub: bool = False,
        with_code: bool = True,
        **kwargs: Any,
    ) -> None:
        """Save the drafter as any model. The folder also gets the code with which plain transformers drafts without
        this package, and, if it has no README.md, one that explains the code. Where an adapter is set it is saved
        alone, in PEFT's layout; after [`disable_adapters`] the drafter without its adapters.

        Args:
            save_directory: The folder, made if needed.
            is_main_process: Whether this process writes.
            push_to_hub: Whether to [`push_to_hub`] too.
            with_code: Whether to write the code, of a kind that has some; `load_drafter` needs none.
            **kwargs: As of any model, and of [`push_to_hub`].

        Raises:
            OSError: If `save_directory` is a file, or the disk is full.
        """
        folder = Path(save_directory)
        if folder.is_file():  # where transformers logs an error and saves nothing
            raise OSError(f"{save_directory} is a file, expected a folder for the drafter: choose another name.")
        push_options = {name: kwargs.pop(name) for name in _PUSHING if name in kwargs}
        adapter = self._set_adapter
        with_code = with_code and self.carries_code and adapter is None
        code = self.carried_code() if with_code else {}
        self.config.hyperdflash_version = __version__
        self.config._auto_class = None  # as of `WithCode`, which a drafter of somebody else's may not have
        vars(self.config).pop("auto_map", None)
        if with_code:
            own: Any = self._own_class()
            module = next(iter(code)).removesuffix(".py")
            classes = {"AutoConfig": own.config_class, "AutoModel": own}
            self.config.auto_map = {auto: f"{module}.{kind.__name__}" for auto, kind in classes.items()}
        if self.adapters:
            kwargs.setdefault("state_dict", self._own_tensors())
        try:
            if adapter is None:
                super().save_pretrained(
                    folder, is_main_process=is_main_process, token=push_options.get("token"), **kwargs
                )
            elif is_main_process:
                self._save_adapter(folder, adapter)
        except SafetensorError as error:  # for any error of the system
            raise OSError(
                f"The drafter cannot be written to {folder} ({error}): make room there, or choose another folder."
            ) from error
        if is_main_process and with_code:
            (folder / RECIPE_FILE).parent.mkdir(exist_ok=True)
            (folder / RECIPE_FILE).write_text(_RECIPE.read_text(encoding="utf-8"), encoding="utf-8")
            for name, text in code.items():
                (folder / name).write_text(text, encoding="utf-8")
            if not (readme := folder / "README.md").exists():
                text = f"---\nlibrary_name: transformers\n---\n\n{NOTE}\n\n{about_code(__version__)}"
                readme.write_text(text, encoding="utf-8")
        if is_main_process and push_to_hub:
            self.push_to_hub(push_options.pop("repo_id", folder.name), **push_options)

    def push_to_hub(self, repo_id: str, **options: Any) -> Any:  # type: ignore[override]
        """Upload drafter, code and model card in one commit, or the adapter that is set with its card. The target's
        embedding and head are no part of it.

        Args:
            repo_id: The repository, `"org/name"`, made if needed.
            **options: Of [`~hub.publish.push_drafter`]: `commit_message`, `private`, `token`, `revision`, `create_pr`,
                `tags`, ...

        Raises:
            OSError: If the Hub cannot be reached.
        """
        return upper("push_drafter")(self, repo_id, **options)


def about_code(version: str) -> str:
    """Return what users should know before they trust the code beside a drafter, as Markdown."""
    return f"""## The code here

hf_hyperdflash {version} wrote it. Transformers runs it only with `trust_remote_code=True`. Where the package is
installed (`pip install hf-hyperdflash`), `modeling_*.py` takes the package's drafter, and nothing else here runs.
Where it is not, `portable_*.py` drafts: one file that reads from top to bottom, and needs torch and transformers. It
writes one text at a time and drafts chains; draft trees, batches, `"auto"`, static caches and learning need the
package.

`drafter.bind(target)` changes that one target: it gets a `generate` that can draft, and its layers get hooks that do
nothing in other calls. `drafter.unbind(target)` undoes both. `custom_generate` does the same for one call. The code
loads no weights but this repository's, and no other code.
"""
