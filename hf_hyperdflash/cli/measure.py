"""`hf-hyperdflash benchmark`, `sweep` and `doctor`: measure a drafter."""

from __future__ import annotations

import copy
import functools
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, cast

import typer
from typer import Option

from . import options
from .session import Session, announce, check_adapter, check_writable, use_cache_if_offline, with_session

if TYPE_CHECKING:
    from ..benchmark.runner import BenchmarkSettings


@with_session
def doctor(
    session: Session,
    drafter: options.Drafter,
    adapter: options.Adapter = None,
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
    if endpoint and adapter:
        raise ValueError(f"`--adapter` is {adapter!r}, and a server at `--endpoint` drafts without: leave one out.")
    if served_model and not endpoint:
        raise ValueError(f"`--served-model` is {served_model!r}, but no server is asked: add `--endpoint`.")
    if output is not None:
        from ..benchmark.figures import import_matplotlib

        check_writable(output)
        import_matplotlib()  # for the page
    began = time.monotonic()
    announce("target", session.target)
    use_cache_if_offline(session.target, drafter, adapter)
    session.check([(drafter, None)])
    check_adapter(adapter, drafter)
    model, tokenizer, loaded = session.load([drafter])
    if adapter is not None:
        cast(Any, loaded[drafter]).merge_adapter(adapter)
    from ..benchmark.doctor.examine import PROMPTS, examine

    if endpoint is not None:
        from ..benchmark.server_comparison import examine_server

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


@dataclass(frozen=True)
class Measured:
    """What `benchmark` and `sweep` measure on."""

    suite: options.Suites = None
    data: options.Data = None
    mode: options.Modes = None
    temperature: options.Temperatures = None
    limit: options.Limit = None
    max_new_tokens: options.NewTokensOfRounds = 2048
    seed: options.Seed = 0

    def settings(self) -> BenchmarkSettings:
        from ..benchmark.runner import BenchmarkSettings
        from ..benchmark.suites import SUITES, suites_in

        suites = self.suite or (list(SUITES) if self.data is None else suites_in(self.data))
        data, modes = None if self.data is None else str(self.data), self.mode or ["non-think"]
        temperatures = self.temperature or [0.0]
        return BenchmarkSettings(suites, data, modes, temperatures, self.limit, self.max_new_tokens, self.seed)


@with_session
def benchmark(
    session: Session,
    measured: Measured,
    output: options.Output,
    drafter: options.Drafters = None,
    adapter: Annotated[
        list[str] | None,
        Option(help="Path or Hub id of a LoRA adapter, with which --drafter drafts, too; repeatable."),
    ] = None,
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
) -> None:
    """Compare drafters with the target alone and with each other, prompt by prompt (the paper's Tables 2 and 3)."""
    if endpoint is not None:
        ours = {"--drafter": drafter, "--adapter": adapter, "--mtp": mtp, "--prompt-lookup": prompt_lookup}
        ours["--mode"] = measured.mode
        for option, value in ours.items():
            if value:
                raise ValueError(f"`{option}` is {value}, but a server at `--endpoint` has its own: leave one out.")
        check_writable(output)
        from ..benchmark.server import Server, run_endpoint

        server = Server(endpoint, session.target, measured.seed)
        run_endpoint(server, measured.settings(), concurrency or [1], output)
        print((output / "endpoint.md").read_text(encoding="utf-8"))
        return
    if concurrency:
        raise ValueError(f"`--concurrency` is {concurrency}, but only servers are asked so: add `--endpoint`.")
    named = [Named(None, count, None, None, False, session.target) for count in mtp or ()]
    named += [Named(None, count, None, None, False, options.PROMPT_LOOKUP) for count in prompt_lookup or ()]
    parsed = [_parsed(option) for option in drafter or ()]
    if adapter and (not parsed or any(each.learns for each in parsed)):
        raise ValueError(f"`--adapter` is {adapter}, expected with it a `--drafter` that is not adaptive.")
    for each in parsed:
        named += [each, *(each._replace(adapter=path) for path in adapter or ())]
    _compare(session, measured, named, output)


@with_session
def sweep(
    session: Session,
    measured: Measured,
    output: options.Output,
    drafter: options.Drafters = None,
    num_draft_tokens: Annotated[
        list[int] | None,
        Option(min=1, help="Drafted tokens per round; repeatable, all a drafter can (6 for MTP) if unset."),
    ] = None,
) -> None:
    """Find the number of drafted tokens per round that is fastest on each suite. The target's own drafter (MTP or
    DSpark) is found where the target is: `--drafter TARGET`."""
    named = [_parsed(option) for option in drafter or ()]
    for each in named:
        if each.learns:
            raise ValueError(
                f"`--drafter` has {each.name or each.path} (adaptive), but what learns cannot be swept: leave it out."
            )
    results = _compare(session, measured, named, output, num_draft_tokens or [])
    from ..benchmark.report import print_fastest

    print_fastest(results)


class Named(NamedTuple):
    """A drafter as `--drafter "NAME (COUNT, NODES nodes, lookup, adaptive)=PATH"` asks for it."""

    name: str | None
    drafts: int | str | None
    nodes: int | str | None
    looks_up: bool | None
    learns: bool
    path: str
    adapter: str | None = None


_NUMBERS = r"([^()]*?)\s*(?:\((auto|[0-9]+)(?:, (auto|[0-9]+) nodes)?(?:, (no lookup|lookup))?(, adaptive)?\))?"


def _parsed(option: str) -> Named:
    head, _, path = option.rpartition("=")
    matched = re.fullmatch(_NUMBERS, head)
    if not path or matched is None or ("=" in option and not matched[1]) or "0" in matched.groups():
        raise ValueError(
            f'`--drafter` is {option!r}, expected PATH, NAME=PATH, "NAME (4)=PATH", "NAME (auto)=PATH", '
            '"NAME (4, 16 nodes)=PATH", "NAME (4, lookup)=PATH" or "NAME (4, adaptive)=PATH" with at least 1 draft '
            "and 1 node."
        )
    count, nodes = (int(parts) if parts and parts != "auto" else parts for parts in matched.groups()[1:3])
    if matched[5] and path == options.PROMPT_LOOKUP:
        raise ValueError(f"`--drafter` is {option!r}, but prompt lookup has no weights that could learn.")
    if isinstance(nodes, int) and nodes > options.MOST_NODES:
        raise ValueError(f"`--drafter` is {option!r}, expected at most {options.MOST_NODES} nodes, or auto.")
    looks_up = None if matched[4] is None else matched[4] == "lookup"
    return Named(matched[1] or None, count, nodes, looks_up, bool(matched[5]), path)


def _compare(
    session: Session, measured: Measured, named: list[Named], output: Path, swept: list[int] | None = None
) -> Path:
    """Run the target alone and with each drafter, write the report, print the tables, and return the file of results.
    A sweep runs each with all of the `swept` numbers of drafts, or with all that it can if that is empty."""
    if not named:
        raise ValueError("No method is given: expected --drafter, or another one that --help lists, to compare with.")
    requested = [(each.path, max(swept or (), default=each.drafts)) for each in named]
    adapters = dict.fromkeys(each.adapter for each in named if each.adapter)
    use_cache_if_offline(session.target, *(path for path, _ in requested), *adapters, measured.data or "suites")
    # What a report cannot be written without is missed first, then errors in folders are raised before suites are
    # read, and maybe downloaded, and errors in suites before models are loaded.
    check_writable(output)
    announce("target", session.target)
    from ..benchmark.figures import import_matplotlib

    import_matplotlib()
    settings = measured.settings()
    session.check(requested)
    for each in named:
        check_adapter(each.adapter, each.path)
    settings.prompts()
    model, tokenizer, loaded = session.load([path for path, _ in requested])
    from ..benchmark.report import print_results, write_report
    from ..benchmark.runner import run_benchmark
    from ..hub.kinds import title
    from ..training.trials import Local

    names = {path: f"adapter{index}" for index, path in enumerate(adapters)}  # any name, as of a folder may be none
    for path, adapter in dict.fromkeys((each.path, each.adapter) for each in named if each.adapter):
        cast(Any, loaded[path]).load_adapter(adapter, names[adapter])
    methods = []
    for each in named:
        drafter = copy.deepcopy(loaded[each.path]) if each.learns else loaded[each.path]
        usual = "Prompt lookup" if each.path == options.PROMPT_LOOKUP else title(drafter.config)
        tried: list[Any] = [each.drafts or drafter.num_draft_tokens]
        if swept is not None:
            tried = swept or list(range(1, 1 + (drafter.max_draft_tokens or 6)))
        for count in tried:
            lookup = {None: "", True: "lookup", False: "no lookup"}[each.looks_up]
            about = [str(count), f"{each.nodes} nodes" if each.nodes else "", lookup, "adaptive" * each.learns]
            about.append(Path(each.adapter or "").name)
            asked = {"num_assistant_tokens": count, "tree_budget": each.nodes, "lookup": each.looks_up}
            if getattr(drafter, "adapters", ()):
                asked["adapter"] = names.get(each.adapter or "")
            name = f"{each.name or usual} ({', '.join(filter(None, about))})"
            methods.append(Local(model, drafter, asked, name, each.learns))
    results = run_benchmark(model, tokenizer, methods, settings, output / "results.jsonl")
    write_report(results, output)
    print_results(results)
    print(f"{output / 'report.md'}, summary.csv and three pictures are written.")
    return results
