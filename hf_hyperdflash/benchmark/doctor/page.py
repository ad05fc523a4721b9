"""Writes an examination down: a page in Markdown with pictures, and a record for an issue, without any text."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

from ...drafters.base import Drafter
from ...training.features.fingerprint import config_fields
from ..figures import import_matplotlib
from ..runner import environment
from .diagnosis import Diagnosis, tables
from .fit import quantization

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WITH_NAMES = ("command", "target", "date")  # of an environment, which a record leaves out


def write_page(found: Diagnosis, target: PreTrainedModel, drafter: Drafter, folder: Path) -> None:
    """Write `doctor.md`, `record.json` and the pictures of what was measured into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures = []
    for name, measured in (("costs", found.costs), ("acceptance", found.acceptance)):
        if not measured:
            continue
        figure = import_matplotlib()[0]((5.2, 3.4), dpi=150, layout="constrained")
        axes = figure.add_subplot()
        if name == "costs":
            _draw_costs(found, axes)
        else:
            axes.plot(range(1, len(found.acceptance) + 1), found.acceptance, "o-")
            axes.set(xlabel="Draft position", ylabel="Accepted, share of rounds", ylim=(-0.03, 1.03))
        axes.grid(alpha=0.25)
        figure.savefig(folder / f"{name}.png")
        pictures.append(name)
    facts = record(found, target, drafter)
    (folder / "record.json").write_text(json.dumps(facts, indent=1, default=str) + "\n", encoding="utf-8")
    (folder / "doctor.md").write_text(markdown(found, pictures), encoding="utf-8")


def markdown(found: Diagnosis, pictures: list[str]) -> str:
    """Return the page: the verdict, then every measurement."""
    lines = ["# Verdict", "", *(f"- {line}" for line in found.verdict()), ""]
    for name in pictures:
        lines += [f"![{name}]({name}.png)", ""]
    for title, (head, rows) in tables(found).items():
        lines += [f"## {title}", "", f"| {' | '.join(head)} |", f"|---{'|---:' * (len(head) - 1)}|"]
        lines += [*(f"| {' | '.join(row)} |" for row in rows), ""]
    lines += ["## What was examined", "", *(f"- {name}: {value}" for name, value in found.facts.items())]
    lines += [f"- {text}" for text in found.remarks]
    return "\n".join([*lines, ""])


def record(found: Diagnosis, target: PreTrainedModel, drafter: Drafter) -> dict[str, Any]:
    """Return what an issue needs: machine, versions, both models' settings, and what was measured. No prompt, no text,
    no path and no name of a model is in it."""
    parameters = sum(weight.numel() for weight in target.parameters())
    dtypes = sorted({str(weight.dtype) for weight in target.parameters()})
    has_weights = hasattr(drafter, "get_memory_footprint")
    return {
        "environment": {name: fact for name, fact in environment(target).items() if name not in _WITH_NAMES},
        "target": {
            "model_type": target.config.model_type, "parameters": parameters, "dtypes": dtypes,
            "quantization": quantization(target), "device": target.device.type,
            "attention": target.config._attn_implementation,
        },
        "drafter": {
            "kind": type(drafter).__name__, "dtype": str(getattr(drafter, "dtype", None)),
            "config": config_fields(drafter.config) if has_weights else {},
        },
        "verdict": {
            "tau": found.tau, "speedup": found.speedup, "limit": found.limit, "problems": found.problems,
            "remarks": found.remarks,
        },
        "acceptance": found.acceptance, "drafts": found.drafts, "differing": found.differing, "kinds": found.kinds,
        "costs": found.costs and asdict(found.costs), "expected": found.expected,
        "changes": [change._asdict() for change in found.changes],
        "timed": {str(t): [each._asdict() for each in timed] for t, timed in found.timed.items()},
    }  # fmt: skip


def _draw_costs(found: Diagnosis, axes: Axes) -> None:
    costs = found.costs
    if costs is None:
        return
    for name, each, style in (("eager", costs, "o-"), ("compiled", costs.compiled, "s--")):
        if each is not None:
            forwards = [seconds / each.plain for seconds in each.rounds.values()]
            axes.plot(list(each.rounds), forwards, style, label=f"cost of verifying, {name}")
    if found.acceptance:
        widths = range(1, len(found.acceptance) + 2)
        written = [1 + sum(found.acceptance[: width - 1]) for width in widths]
        axes.plot(widths, written, "^-", label="tokens that a round writes")
        needed = [costs.break_even(width - 1) for width in widths[1:]]
        axes.plot(widths[1:], needed, ":", label="cost of verifying and drafting")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.set(
        xlabel=f"Tokens that a round verifies (context: {costs.context:,} tokens, batch: {costs.texts})",
        ylabel="Tokens, or forwards over one token",
    )
    axes.legend(frameon=False)
