"""What of a saved drafter's folder goes to the Hub: what we wrote there, by name, and nothing else that may lie beside it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub.errors import HTTPError
from transformers.dynamic_module_utils import get_relative_import_files
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from ..runtime.weights import weight_files
from .cards import PICTURE, TRAINING_RECORD

RECIPE_FILE = "custom_generate/generate.py"
PAPERS = ("README.md", TRAINING_RECORD, PICTURE)


def code_files() -> list[Path]:
    """The drafter's module and all that it imports from its own folder: what a saved drafter runs on."""
    modeling = Path(__file__).with_name("modeling_hyperdflash.py")
    return sorted({modeling, *map(Path, get_relative_import_files(modeling))})


def drafter_files(folder: str | os.PathLike) -> list[str]:
    """Names of the files in `folder` that belong to a drafter as we save it, or to an adapter as PEFT does.

    Links are none of them: what they point to may be anything.
    """
    folder = Path(folder)
    names = {
        "config.json", SAFE_WEIGHTS_INDEX_NAME, *weight_files(folder), "adapter_config.json", "adapter_model.safetensors",
        *(path.name for path in code_files()), RECIPE_FILE, *PAPERS,
    }  # fmt: skip
    return sorted(name for name in names if (folder / name).is_file() and not _is_linked(folder, name))


def _is_linked(folder: Path, name: str) -> bool:
    places = [folder / name, (folder / name).parent]
    return any(place.is_symlink() for place in places if place != folder)


@contextmanager
def reaching_hub(repo_id: str) -> Iterator[None]:
    """Where the network does not let a push through, an `OSError` says so in one line."""
    try:
        yield
    except HTTPError as error:
        if isinstance(error, OSError):  # the Hub's own answer
            raise
        raise OSError(
            f"{repo_id} could not be pushed, the Hub was not reached: {error}. Check the network and push again; nothing was "
            "uploaded."
        ) from error
