"""`target.generate(..., custom_generate="org/drafter", trust_remote_code=True)`, without this package installed.

Every saved drafter has a copy of this file as `custom_generate/generate.py`, where transformers looks for it. So it
imports nothing of the package: the drafter's own code comes from its repository, at the commit of this file.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from transformers import AutoModel, PreTrainedModel
from transformers.utils import ModelOutput

RECIPE = Path(__file__)
_LOADING = ("revision", "token", "cache_dir", "force_download", "local_files_only")

# Of each target that calls have bound, how many of them draft with each drafter now: threads may call at once.
_calls: WeakKeyDictionary[PreTrainedModel, dict[Any, int]] = WeakKeyDictionary()
_BINDING = threading.Lock()
_loaded: WeakKeyDictionary[PreTrainedModel, dict[tuple[str, str | None], PreTrainedModel]] = WeakKeyDictionary()


def generate(
    model: PreTrainedModel, assistant_model: PreTrainedModel | str | Path | None = None, **kwargs: Any
) -> torch.Tensor | ModelOutput:
    """Generate with the drafter of this repository. The target is bound for this one call.

    Args:
        model: The target.
        assistant_model: The drafter, or the folder that it is in; left out for the repository on the Hub that this
            file came from. What is loaded is loaded once for each target.
        **kwargs: As for `target.generate`; `revision`, `token`, `cache_dir`, `force_download` and `local_files_only`
            as for `from_pretrained`.

    Raises:
        ValueError: If drafter and target do not fit, or this file is from no repository on the Hub and no drafter is
            passed.
    """
    loading = {name: kwargs.pop(name) for name in _LOADING if name in kwargs}
    drafter: Any = assistant_model
    if drafter is None or isinstance(drafter, (str, Path)):
        drafter = _drafter(model, drafter, loading)
    with _BINDING:
        calls, own = _calls.setdefault(model, {}), type(model)
        drafter.bind(model)
        is_bound_here = bool(calls) or type(model) is not own
        if is_bound_here:
            calls[drafter] = calls.get(drafter, 0) + 1
    try:
        return cast(Any, model).generate(assistant_model=drafter, **kwargs)
    finally:
        if is_bound_here:
            with _BINDING:
                calls[drafter] -= 1
                if not calls[drafter]:
                    del calls[drafter]
                    drafter.unbind(model)


def _drafter(target: PreTrainedModel, folder: str | Path | None, loading: dict[str, Any]) -> PreTrainedModel:
    repository = str(folder or "")
    if not repository:
        repository, loading["revision"] = _own_repository(__name__)
    drafters = _loaded.setdefault(target, {})
    key = (repository, loading.get("revision"))
    if key not in drafters:
        head = cast(torch.Tensor, target.get_output_embeddings().weight)
        drafter = AutoModel.from_pretrained(repository, trust_remote_code=True, dtype=head.dtype, **loading)
        drafters[key] = drafter.to(head.device).eval()
    return drafters[key]


def _own_repository(module: str) -> tuple[str, str]:
    """Return the Hub id and the commit of this file, which transformers names
    `transformers_modules.ORG.NAME.COMMIT.custom_generate.generate`."""
    *_, owner, name, commit = module.removesuffix(".custom_generate.generate").split(".")[-4:]
    if len(commit) != 40 or not owner:
        raise ValueError(
            "It is not known which drafter to use: of a folder on this machine pass the folder once more, "
            '`target.generate(..., custom_generate="my-drafter", assistant_model="my-drafter", '
            "trust_remote_code=True)`, or the drafter itself."
        )
    parts = (part.replace("_dot_", ".").replace("_hyphen_", "-") for part in (owner, name))
    return "/".join(part[1:] if part[:1] == "_" and part[1:2].isdigit() else part for part in parts), commit
