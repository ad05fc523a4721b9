"""`target.generate(..., custom_generate="org/drafter", trust_remote_code=True)`: draft with a repository's drafter. It
has a copy of this file as `custom_generate/generate.py`."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, cast
from weakref import WeakKeyDictionary

from transformers import AutoModel, PreTrainedModel

_LOADING = ("revision", "token", "cache_dir", "force_download", "local_files_only")
_BINDING = threading.Lock()
# Of each target that calls have bound, how many of them draft with each drafter now: threads may call at once.
_calls: WeakKeyDictionary[PreTrainedModel, dict[Any, int]] = WeakKeyDictionary()
_loaded: WeakKeyDictionary[PreTrainedModel, dict[tuple[str, str | None], PreTrainedModel]] = WeakKeyDictionary()


def generate(
    model: PreTrainedModel, assistant_model: PreTrainedModel | str | Path | None = None, **kwargs: Any
) -> Any:
    """Generate with the drafter beside this file or a loaded one; the target is bound for this one call. Arguments are
    those of `target.generate` and of `from_pretrained` (`_LOADING`)."""
    loading = {name: kwargs.pop(name) for name in _LOADING if name in kwargs}
    drafter: Any = assistant_model
    if drafter is None or isinstance(drafter, (str, Path)):
        drafter = _drafter(model, str(drafter or ""), loading)
    with _BINDING:
        calls = _calls.setdefault(model, {})
        is_bound_here = drafter.bind(model) or drafter in calls  # and not by whoever passed it
        if is_bound_here:
            calls[drafter] = calls.get(drafter, 0) + 1
    try:
        return cast(Any, model).generate(assistant_model=drafter, **kwargs)
    finally:
        with _BINDING:
            if is_bound_here:
                calls[drafter] -= 1
                if not calls[drafter]:
                    del calls[drafter]
                    drafter.unbind(model)


def _drafter(target: PreTrainedModel, repository: str, loading: dict[str, Any]) -> PreTrainedModel:
    """Return the drafter beside this file, loaded once for each target."""
    # transformers calls this file `transformers_modules.ORG.NAME.COMMIT.custom_generate.generate`.
    _, *names, commit = __name__.removesuffix(".custom_generate.generate").split(".")
    if len(commit) == 40 and not repository:
        parts = (part.replace("_dot_", ".").replace("_hyphen_", "-") for part in names)
        repository = "/".join(part[1:] if part[:1] == "_" and part[1:2].isdigit() else part for part in parts)
        loading["revision"] = commit
    elif not repository or not Path(repository).is_dir():  # nobody has allowed the code of another repository here
        raise ValueError(
            f"`assistant_model` is {repository or None!r}, expected a folder on this machine or a drafter: beside "
            '`custom_generate="my-drafter"` pass `assistant_model="my-drafter"`, or `AutoModel.from_pretrained(...)`.'
        )
    drafters, key = _loaded.setdefault(target, {}), (repository, loading.get("revision"))
    if key not in drafters:
        head = cast(Any, target.get_output_embeddings()).weight
        drafter = AutoModel.from_pretrained(repository, trust_remote_code=True, dtype=head.dtype, **loading)
        drafters[key] = (drafter if head.is_meta else drafter.to(head.device)).eval()  # meta: offloaded
    return drafters[key]
