"""`hf-hyperdflash card`, `export` and `push`: share a drafter."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Annotated, Any, cast

from typer import Argument, Option

from .options import SavedDrafter, check_dtype
from .session import announce, check_adapter, check_writable, use_cache_if_offline


def card(
    folder: SavedDrafter,
    results: Annotated[
        Path | None,
        Option(exists=True, file_okay=False, help="Folder that `benchmark` wrote, for the figures."),
    ] = None,
    method: Annotated[
        str | None, Option(help="Which of the benchmark's methods this drafter is, if it compares several.")
    ] = None,
    repo_id: Annotated[str | None, Option(help="Where users will load it from.")] = None,
    target: Annotated[
        str | None,
        Option(help="Where users load the target from, if not from where the drafter's configuration says."),
    ] = None,
    license: Annotated[str | None, Option(help="A Hub licence name, for example apache-2.0.")] = None,
    notes: Annotated[
        Path | None, Option(exists=True, dir_okay=False, help="A Markdown file about the training.")
    ] = None,
    limits: Annotated[
        Path | None,
        Option(exists=True, dir_okay=False, help="A Markdown file about where the drafter does not do well."),
    ] = None,
    dtype: Annotated[str, Option(callback=check_dtype, help="Of the target in the usage snippet.")] = "auto",
    figure: Annotated[
        str | None,
        Option(help="Where the acceptance figure is; the benchmark's is copied beside the card if unset."),
    ] = None,
    output: Annotated[
        Path | None, Option(dir_okay=False, help="The card; README.md in the drafter's folder if unset.")
    ] = None,
) -> None:
    """Write a drafter's model card from its configuration, training record and benchmark. What is not known
    is left out."""
    from ..benchmark.report import measured
    from ..hub.cards import drafter_card, is_hub_name
    from ..hub.found import check_drafter
    from ..hub.kinds import KINDS

    found = check_drafter(str(folder), kinds=KINDS, needs_weights=False)
    output, picture = output or folder / "README.md", "acceptance.png"
    check_writable(output.parent)
    if results is not None and not (results / "results.jsonl").is_file():
        raise OSError(
            f"The folder {results} has no results.jsonl, expected one that `hf-hyperdflash benchmark` wrote."
        )
    figures = None if results is None else measured(results / "results.jsonl", method, folder)
    is_copied = results is not None and figure is None and (results / picture).exists()
    written = drafter_card(
        folder,
        repo_id=repo_id,
        target=target,
        license=license,
        dtype=dtype,
        measured=figures,
        figure=picture if is_copied else figure,
        notes=_read_text(notes),
        limits=_read_text(limits),
    )
    output.parent.mkdir(parents=True, exist_ok=True)
    if results is not None and is_copied:
        shutil.copyfile(results / picture, output.parent / picture)
    written.save(output)
    print(f"{output} is written.")
    made_for = getattr(found.config, "target_name_or_path", "") or "TARGET"
    for option, name in {"--repo-id": repo_id or str(folder), "--target": target or made_for}.items():
        if not is_hub_name(name):
            print(
                f"Its snippet loads {name!r}, which is on no Hub: `{option} org/name` says where it is.",
                file=sys.stderr,
            )
    if license is None:
        print(
            "It names no licence, and the Hub will show none: `--license apache-2.0`, or another name, says which.",
            file=sys.stderr,
        )


def _read_text(path: Path | None) -> str | None:
    try:
        return None if path is None else path.read_text(encoding="utf-8-sig").strip()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8 ({error}): save it as UTF-8.") from error


def export(
    drafter: Annotated[str, Argument(help="Path or Hub id of a drafter.")],
    folder: Annotated[Path, Argument(file_okay=False, help="Where the checkpoint goes.")],
    format: Annotated[
        str, Option(help="z-lab (DFlash, DFlash 2), speculators (DFlash, DFlash 2, DSpark) or deepspec (DSpark).")
    ] = "z-lab",
    target: Annotated[
        str | None,
        Option(help="Path or Hub id of its target, of which deepspec holds two tensors."),
    ] = None,
    adapter: Annotated[str | None, Option(help="Path or Hub id of a LoRA adapter to merge into the drafter.")] = None,
) -> None:
    """Write a drafter in another program's layout, if that has words for it, and say how to serve it."""
    check_writable(folder)
    announce("drafter", drafter)
    use_cache_if_offline(drafter, target, adapter)
    from ..hub.formats import check_expressible, check_replaceable, export_dflash
    from ..hub.found import check_drafter
    from ..hub.kinds import KINDS
    from ..hub.loading import check_made_for, check_target, load_drafter, load_target

    check_replaceable(folder)
    found = check_drafter(drafter, kinds=[kind for kind in KINDS if kind.writes])
    check_adapter(adapter, drafter)
    check_expressible(cast(Any, found.config), format, target is not None)
    if target is not None:
        check_target(target)
        check_made_for(target, found)
    loaded = cast(Any, load_drafter(found))
    if adapter is not None:
        loaded.merge_adapter(adapter)
    if target is not None:
        announce("target", target)
    model = None if target is None else load_target(target, dtype="auto")
    print(export_dflash(loaded, folder, format, model))


def push(
    folder: SavedDrafter,
    repo_id: Annotated[str, Argument(help="org/name on the Hub; made if needed.")],
    private: Annotated[bool, Option(help="Whether a new repository is private.")] = False,
    revision: Annotated[str | None, Option(help="The branch, made if needed.")] = None,
    create_pr: Annotated[bool, Option(help="Propose the commit instead.")] = False,
    commit_message: Annotated[str | None, Option(help="What is committed.")] = None,
    token: Annotated[
        str | None, Option(help="Of the Hub; the stored one if unset.", envvar="HF_TOKEN", show_envvar=True)
    ] = None,
    dry_run: Annotated[
        bool, Option("--dry-run", help="Say what would be uploaded and where to; needs no network and no token.")
    ] = False,
    adapter: Annotated[str | None, Option(help="Path of a LoRA adapter of the drafter, to upload that alone.")] = None,
) -> None:
    """Upload a saved drafter with its code and its card, or an adapter of it, in one commit."""
    announce("drafter", folder)
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    from ..hub.found import check_drafter
    from ..hub.kinds import KINDS
    from ..hub.loading import load_drafter
    from ..hub.publish import planned_push

    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise ValueError(f"The repository is {repo_id!r}, expected a name on the Hub: org/name.") from error
    check_adapter(adapter, str(folder))
    drafter = load_drafter(check_drafter(str(folder), kinds=KINDS))
    if adapter is not None:
        drafter.load_adapter(adapter)
    options: dict[str, Any] = {"private": private or None, "revision": revision, "create_pr": create_pr}
    if dry_run:
        print(planned_push(drafter, repo_id, **options))
        return
    done = drafter.push_to_hub(repo_id, commit_message=commit_message, token=token, **options)
    print(done.commit_url)
