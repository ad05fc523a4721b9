"""Pushes a drafter with its card. Only files that we write are uploaded, whatever else the folder has."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from huggingface_hub import CommitInfo, HfApi
from huggingface_hub.errors import HTTPError
from transformers import PreTrainedConfig
from transformers.dynamic_module_utils import get_relative_import_files
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from ..drafters.adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS, finish_adapter
from ..drafters.saved import NOTE, RECIPE_FILE, SavedDrafter
from ..drafters.weights import weight_files
from .cards import PICTURE, TRAINING_RECORD, adapter_card, drafter_card
from .found import find

_FROM_ITS_FOLDER = ("README.md", TRAINING_RECORD, PICTURE)


def push_drafter(
    drafter: SavedDrafter,
    repo_id: str,
    *,
    commit_message: str | None = None,
    commit_description: str | None = None,
    private: bool | None = None,
    token: bool | str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    max_shard_size: int | str = "50GB",
    tags: list[str] | None = None,
) -> CommitInfo:
    """Upload drafter, code and model card in one commit, or the adapter that is set, alone with its card.

    The card is the `README.md` of the folder that the drafter was loaded from; else the one that the repository has
    already; else a new one from what is known (`hf-hyperdflash card` makes one with a benchmark's figures). Repository
    and branch are made if needed, and `create_pr` proposes the commit instead.
    """
    is_adapter = bool(drafter.active_adapters())
    with TemporaryDirectory() as folder, reaching_hub(repo_id):
        api = HfApi(token=token)
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        if revision is not None and not revision.startswith("refs/"):
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        has_card = partial(api.file_exists, repo_id, "README.md", revision=revision)
        _gather(drafter, Path(folder), repo_id, has_card, max_shard_size=max_shard_size, tags=tags)
        return api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            allow_patterns=drafter_files(folder),
            commit_message=commit_message or f"Upload {'LoRA adapter of a' * is_adapter or 'HyperDFlash'} drafter",
            commit_description=commit_description,
            revision=revision,
            create_pr=create_pr,
        )


def planned_push(
    drafter: SavedDrafter,
    repo_id: str,
    *,
    private: bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
) -> str:
    """Describe what [`push_drafter`] would upload and where, with a line per file. No request is sent to the Hub."""
    with TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        card = _gather(drafter, folder, repo_id, has_card=lambda: False)
        sizes = {name: (folder / name).stat().st_size for name in drafter_files(folder)}
    return "\n".join([
        f"Nothing was uploaded. To {repo_id}{', private if it is new' if private else ''}, revision "
        f"{revision or 'main'}, {'as a pull request' if create_pr else 'in one commit'}, would go",
        *(f"{size:>15,}  {name}{f' ({card})' * (name == 'README.md')}" for name, size in sizes.items()),
        f"{sum(sizes.values()):>15,}  bytes",
    ])  # fmt: skip


def _gather(
    drafter: SavedDrafter, folder: Path, repo_id: str, has_card: Callable[[], bool], *,
    max_shard_size: int | str = "50GB", tags: list[str] | None = None,
) -> str:  # fmt: skip
    """Write the files to push into `folder`, and return the origin of the card. `has_card`, whether the repository has
    one, is called only if the drafter's own folder has none."""
    drafter.save_pretrained(folder, max_shard_size=max_shard_size)
    new = "a new one; where the repository has a card, that stays"
    if drafter.active_adapters():
        base = drafter.name_or_path or ""
        finish_adapter(folder, drafter.dtype, Path(base).name if Path(base).exists() else base)  # no folder of ours
        if has_card():
            return "the repository's"
        adapter_card(folder, repo_id=repo_id, tags=tags).save(folder / "README.md")
        return new
    source = Path(drafter.name_or_path or "")
    if drafter.name_or_path and source.is_dir():
        found = find(PreTrainedConfig.get_config_dict(source)[0], source)
        is_foreign = found is not None and found.layout is not None  # then its card is about another program's file
        for name in set() if is_foreign else set(_FROM_ITS_FOLDER) & set(drafter_files(source)):
            shutil.copyfile(source / name, folder / name)
    card = folder / "README.md"
    if card.is_file() and NOTE.encode() not in card.read_bytes():
        return "the folder's own"
    card.unlink(missing_ok=True)  # there is none beside a drafter without code
    if has_card():
        return "the repository's"
    drafter_card(folder, repo_id=repo_id, tags=tags).save(folder / "README.md")
    return new


def drafter_files(folder: str | os.PathLike) -> list[str]:
    """Return the names of the files in `folder` that we save for a drafter, or PEFT for an adapter.

    Links are left out, because they may point to anything.
    """
    folder = Path(folder)
    # The modules in its configuration, and all modules that they import.
    config = folder / "config.json"
    entries = json.loads(config.read_text(encoding="utf-8")).get("auto_map") or {} if config.is_file() else {}
    modules = {folder / f"{entry.rpartition('--')[2].partition('.')[0]}.py" for entry in entries.values()}
    modules = {module for module in modules if module.is_file()}
    modules |= {Path(path) for module in modules for path in get_relative_import_files(module)}
    code = {module.name for module in modules if module.parent == folder}
    names = {
        "config.json", "generation_config.json", SAFE_WEIGHTS_INDEX_NAME, *weight_files(folder), *code, RECIPE_FILE,
        ADAPTER_CONFIG, ADAPTER_WEIGHTS, *_FROM_ITS_FOLDER,
    }  # fmt: skip
    places = {name: {folder / name, (folder / name).parent} - {folder} for name in names}
    linked = {name for name, paths in places.items() if any(path.is_symlink() for path in paths)}
    return sorted(name for name in names - linked if (folder / name).is_file())


@contextmanager
def reaching_hub(repo_id: str) -> Iterator[None]:
    """Turn errors of the network into an `OSError` of one line."""
    try:
        yield
    except HTTPError as error:
        if isinstance(error, OSError):  # the Hub's own answer
            raise
        raise OSError(
            f"{repo_id} could not be pushed, the Hub was not reached: {error}. Check the network and push again; "
            "nothing was uploaded."
        ) from error
