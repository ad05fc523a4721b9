"""`target.generate(..., custom_generate="org/drafter", trust_remote_code=True)`, without this package installed.

Every saved drafter has a copy of this file as `custom_generate/generate.py`, where transformers looks for it. So it
imports nothing of the package: the drafter's own code comes from its repository.
"""

from __future__ import annotations

import inspect
import threading
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from transformers import AutoModel

RECIPE = Path(__file__)
_LOADING = ("revision", "token", "cache_dir", "force_download", "local_files_only")

# Of each target that calls have bound, how many of them draft with each drafter now: threads may call at once.
_calls: WeakKeyDictionary[Any, dict[Any, int]] = WeakKeyDictionary()
_BINDING = threading.Lock()
_loaded: WeakKeyDictionary[Any, dict[tuple[Any, ...], Any]] = WeakKeyDictionary()


def generate(model: Any, assistant_model: Any = None, **kwargs: Any) -> Any:
    """Generate with the drafter of this repository. The target is bound for this one call.

    Args:
        model: The target.
        assistant_model: The drafter, if it is loaded already; otherwise loaded once for each target.
        **kwargs: As for `target.generate`; `revision`, `token`, `cache_dir`, `force_download` and `local_files_only`
            as for `from_pretrained`.

    Raises:
        ValueError: If drafter and target do not fit, or it is not known which repository this is.
    """
    loading = {name: kwargs.pop(name) for name in _LOADING if name in kwargs}
    # `generate` tells a recipe all but where it came from, and a local one is run from a copy in transformers' cache.
    caller = inspect.currentframe().f_back.f_locals  # type: ignore[union-attr]
    drafter = assistant_model or _drafter(model, caller.get("custom_generate"), loading)
    with _BINDING:
        calls, own = _calls.setdefault(model, {}), type(model)
        drafter.bind(model)
        is_bound_here = bool(calls) or type(model) is not own
        if is_bound_here:
            calls[drafter] = calls.get(drafter, 0) + 1
    try:
        return model.generate(assistant_model=drafter, **kwargs)
    finally:
        if is_bound_here:
            with _BINDING:
                calls[drafter] -= 1
                if not calls[drafter]:
                    del calls[drafter]
                    drafter.unbind(model)


def _drafter(target: Any, repository: Any, loading: dict[str, Any]) -> Any:
    if not isinstance(repository, str):
        raise ValueError(
            f"`custom_generate` is {repository!r}, expected the drafter's Hub id or folder: "
            '`target.generate(..., custom_generate="org/drafter", trust_remote_code=True)`. Or pass `assistant_model`.'
        )
    drafters = _loaded.setdefault(target, {})
    key = (repository, loading.get("revision"))
    if key not in drafters:
        head = target.get_output_embeddings().weight
        drafter = AutoModel.from_pretrained(repository, trust_remote_code=True, dtype=head.dtype, **loading)
        drafters[key] = drafter.to(head.device).eval()
    return drafters[key]
