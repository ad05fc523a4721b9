"""`hf-hyperdflash benchmark`, `sweep` and `doctor`: measure a drafter."""

from __future__ import annotations

import copy
import functools
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from . import options
from .session import Session, announce, check_writable, use_cache_if_offline, with_session

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..benchmark.runner import BenchmarkSettings
    from ..drafters.base import Drafter

# Tokens that are drafted one after the other, nodes of a tree, and whether the drafter learns meanwhile.
Shape = tuple[int | str, int | str | None, bool]
Compared = tuple[str, "Drafter", Sequence[Shape]]  # a drafter's name, the drafter, and its shapes


@with_session
def doctor(
    session: Session,
    drafter: options.Drafter,
    max_new_tokens: Annotated[
        int | None, Option(min=3, help="Most new tokens per prompt; 64, or down to 32 on a slow machine, if unset.")
    ] = None,
    context: Annotated[
        int | None, Option(min=1, help="Tokens of your texts, for what rounds cost; 512 if unset, 128 if quick.")
    ] = None,
    batch_size: Annotated[int, Option(min=1, help="Texts that you generate at a time, for what rounds cost.")] = 1,
    mode: Annotated[str, Option(help="non-think or think-high: whether you ask the target to think.")] = "non-think",
    compiled: Annotated[
        bool | None, Option("--compile/--no-compile", help="Time compiled rounds, too; on an accelerator if unset.")
    ] = None,
    output: Annotated[
        Path | None, Option(file_okay=False, help="Folder for the page, its pictures and a record for an issue.")
    ] = None,
    quick: Annotated[
        bool, Option("--quick", help="One minute: 4 prompts, nothing changed, no settings timed.")
    ] = False,
    endpoint: Annotated[
        str | None,
        Option(help="Compare with what a server of the pair accepts at this address, which nobody else uses now."),
    ] = None,
    served_model: Annotated[
        str | None, Option(help="With --endpoint: what the server calls the target, if it serves several.")
    ] = None,
) -> None:
    """Say how many times as fast a drafter makes a target, what limits it and what to set; with --endpoint, what a
    server does otherwise. Exit status 1 if the pair is wrong."""
    if mode not in ("non-think", "think-high"):
        raise ValueError(f"`--mode` is {mode!r}, expected non-think or think-high.")
    for option, is_given in (("--context", context), ("--batch-size", batch_size > 1), ("--compile", compiled)):
        if endpoint and is_given:
            raise ValueError(
                f"`{option}` is for what rounds cost here, and `--endpoint` asks a server: leave one out."
            )
    if served_model and not endpoint:
        raise ValueError(f"`--served-model` is {served_model!r}, but no server is asked: add `--endpoint`.")
    if output is not None:
        from ..benchmark.figures import import_matplotlib

        check_writable(output)
        import_matplotlib()  # for the page
    began = time.monotonic()
    announce("target", session.target)
    use_cache_if_offline(session.target, drafter)
    session.check([(drafter, None)])
    model, tokenizer, loaded = session.load([drafter])
    from ..benchmark.doctor.examine import PROMPTS, examine

    if endpoint is not None:
        from ..benchmark.served.examine_server import examine_server

        served = examine_server(
            model, loaded[drafter], tokenizer, endpoint, model=served_model,
            prompts=PROMPTS[: 4 if quick else 12], max_new_tokens=max_new_tokens or 64, thinking=mode == "think-high",
            report=functools.partial(print, file=sys.stderr),
        )  # fmt: skip
        print(served)
        if output is not None:
            output.mkdir(parents=True, exist_ok=True)
            (output / "served.json").write_text(served.record(), encoding="utf-8")
        if served.cause:
            raise typer.Exit(1)
        return
    diagnosis = examine(
        model,
        loaded[drafter],
        tokenizer,
        prompts=PROMPTS[:4] if quick else PROMPTS,
        max_new_tokens=max_new_tokens,
        context=context,
        texts=batch_size,
        thinking=mode == "think-high",
        compiled=compiled,
        seconds=60 if quick else None,
        began=began,
        disable_tqdm=None,
        report=functools.partial(print, file=sys.stderr),
    )
    print(diagnosis)
    if output is not None:
        from ..benchmark.doctor.page import write_page

        write_page(diagnosis, model, loaded[drafter], output)
        print(f"{output / 'doctor.md'} has every measurement, and record.json what an issue needs.", file=sys.stderr)
    if diagnosis.is_wrong:
        raise typer.Exit(1)


@with_session
def benchmark(
    session: Session,
    output: options.Output,
    drafter: options.Drafters = None,
    mtp: Annotated[
        list[int] | None,
        Option(min=1, help="Compare with the target's own drafter (MTP or DSpark), this many drafts; repeatable."),
    ] = None,
    prompt_lookup: Annotated[
        list[int] | None, Option(min=1, help="Compare with prompt lookup, this many drafts; repeatable.")
    ] = None,
    endpoint: Annotated[
        str | None,
        Option(help="Ask a server of OpenAI's protocol at this address; --target is what it calls the target."),
    ] = None,
    concurrency: Annotated[
        list[int] | None, Option(min=1, help="With --endpoint: prompts asked at a time, 1 if unset; repeatable.")
    ] = None,
    suite: options.Suites = None,
    data: options.Data = None,
    mode: options.Modes = None,
    temperature: options.Temperatures = None,
    limit: options.Limit = None,
    max_new_tokens: options.NewTokensOfRounds = 2048,
    seed: options.Seed = 0,
) -> None:
    """Compare drafters with the target alone and with each other, prompt by prompt (the paper's Tables 2 and 3)."""
    if endpoint is not None:
        ours = {"--drafter": drafter, "--mtp": mtp, "--prompt-lookup": prompt_lookup, "--mode": mode}
        _measure_server(
            endpoint, session.target, output, ours, suite, data, temperature, concurrency, limit, max_new_tokens, seed
        )
        return
    if concurrency:
        raise ValueError(f"`--concurrency` is {concurrency}, but only servers are asked so: add `--endpoint`.")
    named = _parse_drafters(drafter, mtp or prompt_lookup)
    use_cache_if_offline(session.target, *(path for *_, path in named), data or "suites")
    settings = _make_settings(session.target, output, suite, data, mode, temperature, limit, max_new_tokens, seed)
    requested = [(path, count) for _, count, *_, path in named] + [(session.target, None)] * bool(mtp)
    model, tokenizer, loaded = _load_all(settings, session, requested)
    from ..drafters.without_weights.prompt_lookup import PromptLookupDrafter
    from ..hub.kinds import title

    compared: list[Compared] = []
    if mtp:
        target_drafter = loaded[session.target]
        compared.append(
            (
                title(target_drafter.config),
                target_drafter,
                _chain_shapes([target_drafter.check_num_draft_tokens(count) for count in mtp]),
            )
        )
    compared.append(("Prompt lookup", PromptLookupDrafter(model), _chain_shapes(prompt_lookup or ())))
    for name, assistant, count, nodes, learns in _bind_all(model, named, loaded):
        compared.append((name, assistant, [(count or assistant.num_draft_tokens, nodes, learns)]))
    _run(model, tokenizer, compared, settings, output)


@with_session
def sweep(
    session: Session,
    output: options.Output,
    drafter: options.Drafters = None,
    num_draft_tokens: Annotated[
        list[int] | None,
        Option(min=1, help="Drafted tokens per round; repeatable, all a drafter can (6 for MTP) if unset."),
    ] = None,
    suite: options.Suites = None,
    data: options.Data = None,
    mode: options.Modes = None,
    temperature: options.Temperatures = None,
    limit: options.Limit = None,
    max_new_tokens: options.NewTokensOfRounds = 2048,
    seed: options.Seed = 0,
) -> None:
    """Find the number of drafted tokens per round that is fastest on each suite. The target's own drafter (MTP or
    DSpark) is found where the target is: `--drafter TARGET`."""
    named = _parse_drafters(drafter)
    use_cache_if_offline(session.target, *(path for *_, path in named), data or "suites")
    settings = _make_settings(session.target, output, suite, data, mode, temperature, limit, max_new_tokens, seed)
    for name, _, _, learns, path in named:
        if learns:
            raise ValueError(
                f"`--drafter` has {name or path} (adaptive), but what learns cannot be swept: leave it out."
            )
    requested = [(path, max(num_draft_tokens or (), default=count)) for _, count, *_, path in named]
    model, tokenizer, loaded = _load_all(settings, session, requested)
    compared: list[Compared] = []
    for name, assistant, _, nodes, _ in _bind_all(model, named, loaded):
        counts = num_draft_tokens or range(1, 1 + (assistant.max_draft_tokens or 6))
        compared.append((name, assistant, [(assistant.check_num_draft_tokens(k), nodes, False) for k in counts]))
    results = _run(model, tokenizer, compared, settings, output)
    from ..benchmark.report import print_fastest

    print_fastest(results)


Named = tuple[str | None, int | str | None, int | str | None, bool, str]
_NUMBERS = r"([^()]*?)\s*(?:\((auto|[0-9]+)(?:, (auto|[0-9]+) nodes)?(, adaptive)?\))?"


def _parse_drafters(drafters: list[str] | None, others: Any = None) -> list[Named]:
    """Parse each `NAME (COUNT, NODES nodes, adaptive)=PATH` into name, count, nodes, adaptive and path."""
    if not drafters and not others:
        raise ValueError("No method is given: expected --drafter, or another one that --help lists, to compare with.")
    named = []
    for option in drafters or ():
        head, _, path = option.rpartition("=")
        matched = re.fullmatch(_NUMBERS, head)
        if not path or matched is None or ("=" in option and not matched[1]) or "0" in matched.groups():
            raise ValueError(
                f'`--drafter` is {option!r}, expected PATH, NAME=PATH, "NAME (4)=PATH", "NAME (auto)=PATH", '
                '"NAME (4, 16 nodes)=PATH" or "NAME (4, adaptive)=PATH" with at least 1 draft and 1 node.'
            )
        count, nodes = (int(parts) if parts and parts != "auto" else parts for parts in matched.groups()[1:3])
        if matched[4] and path == options.PROMPT_LOOKUP:
            raise ValueError(f"`--drafter` is {option!r}, but prompt lookup has no weights that could learn.")
        if isinstance(nodes, int) and nodes > options.MOST_NODES:
            raise ValueError(f"`--drafter` is {option!r}, expected at most {options.MOST_NODES} nodes, or auto.")
        named.append((matched[1] or None, count, nodes, bool(matched[4]), path))
    return named


def _make_settings(
    target: str,
    output: Path,
    suite: list[str] | None,
    data: Path | None,
    mode: list[str] | None,
    temperature: list[float] | None,
    *rest: Any,
) -> BenchmarkSettings:
    """Announce the run, and return its settings."""
    check_writable(output)
    announce("target", target)
    from ..benchmark.figures import import_matplotlib
    from ..benchmark.runner import BenchmarkSettings

    import_matplotlib()  # for the report
    folder = None if data is None else str(data)
    return BenchmarkSettings(_suites(suite, data), folder, mode or ["non-think"], temperature or [0.0], *rest)


def _load_all(
    settings: BenchmarkSettings, session: Session, requested: list[tuple[str, int | str | None]]
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, dict[str, Drafter]]:
    """Load target, tokenizer and drafters. Errors in their folders are raised before suites are read, and maybe
    downloaded; errors in suites are raised before models are loaded."""
    session.check(requested)
    settings.prompts()
    return session.load([path for path, _ in requested])


def _suites(suite: list[str] | None, data: Path | None) -> list[str]:
    from ..benchmark.suites import SUITES, suites_in

    return suite or (list(SUITES) if data is None else suites_in(data))


def _measure_server(
    endpoint: str, target: str, output: Path, ours: dict[str, Any], suite: list[str] | None, data: Path | None,
    temperature: list[float] | None, concurrency: list[int] | None, limit: int | None, max_new_tokens: int, seed: int,
) -> None:  # fmt: skip
    """Measure a server with the suites. It uses its own drafter."""
    for option, value in ours.items():
        if value:
            raise ValueError(f"`{option}` is {value}, but a server at `--endpoint` has its own: leave one out.")
    check_writable(output)
    from ..benchmark.served.endpoint import EndpointSettings, run_endpoint

    folder = None if data is None else str(data)
    settings = EndpointSettings(
        endpoint, target, _suites(suite, data), folder, temperature or [0.0], concurrency or [1], limit,
        max_new_tokens, seed,
    )  # fmt: skip
    run_endpoint(settings, output)
    print((output / "endpoint.md").read_text(encoding="utf-8"))


def _chain_shapes(counts: Sequence[int | str]) -> list[Shape]:
    return [(count, None, False) for count in counts]


def _bind_all(
    model: PreTrainedModel, named: list[Named], loaded: dict[str, Drafter]
) -> Iterator[tuple[str, Drafter, int | str | None, int | str | None, bool]]:
    from ..hub.kinds import title

    for name, count, nodes, learns, path in named:
        drafter = copy.deepcopy(loaded[path]) if learns else loaded[path]
        drafter.bind(model)
        usual = "Prompt lookup" if path == options.PROMPT_LOOKUP else title(drafter.config)
        yield name or usual, drafter, count and drafter.check_num_draft_tokens(count), nodes, learns


def _method_name(name: str, count: int | str, nodes: int | str | None, learns: bool) -> str:
    parts = [str(count), f"{nodes} nodes" if nodes else "", "adaptive" if learns else ""]
    return f"{name} ({', '.join(filter(None, parts))})"


def _run(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    compared: list[Compared],
    settings: BenchmarkSettings,
    output: Path,
) -> Path:
    from ..benchmark.report import print_results, write_report
    from ..benchmark.runner import Method, run_benchmark

    methods = [
        Method(_method_name(name, *shape), drafter, *shape) for name, drafter, shapes in compared for shape in shapes
    ]
    results = run_benchmark(model, tokenizer, methods, settings, output / "results.jsonl")
    write_report(results, output)
    print_results(results)
    print(f"{output / 'report.md'}, summary.csv and three pictures are written.")
    return results
