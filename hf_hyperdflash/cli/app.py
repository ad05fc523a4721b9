"""The `hf-hyperdflash` command: a thin layer over the package's functions."""

from __future__ import annotations

import math
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

_UsageError: Any = typer.BadParameter.__base__  # which typer has of one version of click or another

if TYPE_CHECKING:
    from ..benchmark.runner import BenchmarkSettings, Method

app = typer.Typer(add_completion=False, help="HyperDFlash: draft with, train and measure.")

_STOPPED = 130  # as a shell has it for Ctrl-C
_AFTERWARDS = {
    "benchmark": " The same command goes on where it stopped.",
    "sweep": " The same command goes on where it stopped.",
    "train": " The same command with --resume_from_checkpoint True goes on from the last checkpoint, if one was saved.",
}


def run() -> None:
    """The command. What the user can mend ends in one line, not in a traceback."""
    for library in ("TRANSFORMERS", "HF_HUB"):  # they report and try again at length before the error that counts
        os.environ.setdefault(f"{library}_VERBOSITY", "error")
    try:
        status = app(prog_name="hf-hyperdflash", standalone_mode=False) or 0
    except (KeyboardInterrupt, typer.Abort):
        status = _STOPPED
    except _UsageError as error:
        help = f"{error.ctx.command_path} --help" if error.ctx else "--help"
        status = _say(f"{error.format_message().rstrip('.')}. See `{help}`.", error.exit_code)
    except OSError as error:
        # Of the system's own errors, which file it is and what is wrong with it.
        status = _say(f"{error.filename}: {error.strerror}." if error.filename and error.strerror else str(error))
    except (ValueError, ImportError) as error:
        status = _say(str(error))
    if status == _STOPPED:
        typer.echo(f"\nStopped.{_AFTERWARDS.get(' '.join(sys.argv[1:2]), '')}", err=True)
    raise SystemExit(status)


def _say(message: str, status: int = 1) -> int:
    typer.echo(f"Error: {' '.join(message.split())}", err=True)
    return status


def _version(asked: bool) -> None:
    if asked:
        from .. import __version__

        typer.echo(f"hf-hyperdflash {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def main(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """HyperDFlash block speculative decoding for DeepSeek-V4."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def _temperature(value: Any) -> Any:
    for temperature in value if isinstance(value, list) else [value]:
        if temperature is not None and not 0 <= temperature < math.inf:
            raise typer.BadParameter(f"{temperature} is no temperature: 0 (greedy) or above.")
    return [] if value is None else value  # typer before 0.20 asks a list's callback for its length


def _dtype(value: str | None) -> str | None:
    if value is not None and value not in _DTYPES:
        raise typer.BadParameter(f"{value!r} is not one of {', '.join(_DTYPES)}.")
    return value


_DTYPES = ("auto", "bfloat16", "float16", "float32", "float64")


Target = Annotated[str, typer.Option(help="Path or Hub id of the target.")]
Drafters = Annotated[
    Optional[list[str]],  # noqa: UP045 - typer evaluates it, on Python 3.10 too
    typer.Option(
        "--drafter",
        help='Path or Hub id of a drafter; NAME=PATH names it in the tables, "NAME (4)=PATH" lets it draft 4. Repeatable.',
    ),
]
Output = Annotated[
    Path,
    typer.Option(file_okay=False, help="Folder of results.jsonl and the report; a killed run continues there."),
]
Suites = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option(
        "--suite",
        help="gsm8k, math500, aime25, humaneval, mbpp, livecodebench, mt-bench; all, or all in --data, if unset.",
    ),
]
Data = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option(help='Folder with <suite>.jsonl files of {"turns": [...]} lines; the Hub if unset.'),
]
Modes = Annotated[Optional[list[str]], typer.Option("--mode", help="non-think or think-high; repeatable.")]  # noqa: UP045
Temperatures = Annotated[
    Optional[list[float]],  # noqa: UP045
    typer.Option("--temperature", callback=_temperature, help="0 is greedy; repeatable."),
]
Limit = Annotated[Optional[int], typer.Option(min=1, help="Prompts of each suite; all if unset.")]  # noqa: UP045
NewTokens = Annotated[int, typer.Option(min=1, help="Most new tokens per turn.")]
NewTokensOfRounds = Annotated[int, typer.Option(min=3, help="Most new tokens per turn; less than 3 has no round.")]
Seed = Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Of sampling.")]
Dtype = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        callback=_dtype, help="float32, bfloat16, ..; float32 on a CPU, the checkpoint's elsewhere, if unset."
    ),
]
DeviceMap = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(help="auto, balanced, .. spread the target; or one device, for example cpu or cuda:1."),
]
Threads = Annotated[Optional[int], typer.Option(min=1, max=1024, help="CPU threads.")]  # noqa: UP045
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run the code that the target brings along.")
]


@app.command()
def generate(
    target: Target,
    drafter: Annotated[str, typer.Option(help="Path or Hub id of the drafter.")],
    prompt: Annotated[str, typer.Argument(help="What to ask, as one chat turn.")],
    max_new_tokens: NewTokens = 256,
    temperature: Annotated[float, typer.Option(callback=_temperature, help="0 is greedy.")] = 0.0,
    num_draft_tokens: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, help="Drafted tokens per round; all that the drafter can if unset."),
    ] = None,
    seed: Seed = 0,
    dtype: Dtype = None,
    device_map: DeviceMap = None,
    threads: Threads = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Answer a prompt with a drafter's help, as it is written, and say how well the drafter did."""
    if not prompt.strip():
        raise ValueError("The prompt is empty, expected what to ask.")
    _announce(target)
    _check_sources(target, [drafter])

    import torch
    from transformers import TextStreamer

    from ..training.data import encode_prompts

    model, tokenizer = _load_target(target, dtype, device_map, threads, trust_remote_code)
    assistant = _load_drafter(model, drafter)
    assistant.bind(model)
    if num_draft_tokens is not None:
        assistant.num_draft_tokens = assistant.check_num_draft_tokens(num_draft_tokens)
    torch.manual_seed(seed)
    ids = encode_prompts(tokenizer, [{"messages": [{"role": "user", "content": prompt}]}])[0].to(model.device)
    sampling: dict[str, Any] = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    model.generate(
        ids,
        assistant_model=assistant,
        max_new_tokens=max_new_tokens,
        streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
        **sampling,
    )
    stats = assistant.last_stats
    rates = ", ".join(f"{100 * rate:.0f}" for rate in stats.acceptance)
    typer.echo(
        f"\n{stats.tokens} tokens in {stats.rounds} verification round{'s' * (stats.rounds != 1)}: tau {stats.tau:.2f}, "
        f"{stats.tokens / max(stats.loop_seconds, 1e-9):.1f} tokens/s. Drafts accepted at each position, %: {rates}.",
        err=True,
    )


@app.command(add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def train(context: typer.Context) -> None:
    """Train a drafter for a target. All flags of transformers' TrainingArguments and more: `train --help` lists them."""
    if {"-h", "--help"} & set(context.args):
        from ..training.flags import help_text

        typer.echo(help_text(context.command_path))
        return
    typer.echo("Loading PyTorch and transformers ...", err=True)
    from ..training.script import main as run_training

    run_training(context.args, context.command_path)


@app.command()
def card(
    folder: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="Folder of a saved drafter.")],
    results: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(exists=True, file_okay=False, help="Folder that `benchmark` wrote, for the figures."),
    ] = None,
    method: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Which of the benchmark's methods this drafter is, if it compares several."),
    ] = None,
    repo_id: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Where users will load it from."),
    ] = None,
    target: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Where users load the target from, if not from where the drafter's configuration says."),
    ] = None,
    license: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="A Hub licence name, for example apache-2.0."),
    ] = None,
    notes: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(exists=True, dir_okay=False, help="A Markdown file about the training."),
    ] = None,
    limits: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(exists=True, dir_okay=False, help="A Markdown file about where the drafter does not do well."),
    ] = None,
    card_dtype: Annotated[
        str, typer.Option("--dtype", callback=_dtype, help="Of the target in the usage snippet.")
    ] = "auto",
    figure: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Where the acceptance figure is; the benchmark's is copied beside the card if unset."),
    ] = None,
    output: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(dir_okay=False, help="The card; README.md in the drafter's folder if unset."),
    ] = None,
) -> None:
    """Write a drafter's model card from its configuration, training record and benchmark. What is not known is left out."""
    import shutil

    from .. import loading
    from ..benchmark.report import measured
    from ..hub.cards import drafter_card

    loading.check_drafter(str(folder), is_ours=True, needs_weights=False)
    output, picture = output or folder / "README.md", "acceptance.png"
    _check_writable(output.parent)
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
        dtype=card_dtype,
        measured=figures,
        figure=picture if is_copied else figure,
        notes=_text_of(notes),
        limits=_text_of(limits),
    )
    if results is not None and is_copied:
        shutil.copyfile(results / picture, output.parent / picture)
    written.save(output)
    typer.echo(f"{output} is written.")


def _text_of(path: Path | None) -> str | None:
    try:
        return None if path is None else path.read_text().strip()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8: {error}.") from error


@app.command()
def doctor(
    target: Target,
    drafter: Annotated[str, typer.Option(help="Path or Hub id of the drafter.")],
    max_new_tokens: NewTokensOfRounds = 64,
    dtype: Dtype = None,
    device_map: DeviceMap = None,
    threads: Threads = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Say whether a drafter fits a target, what it takes and gives, and what is wrong. Exit status 1 if anything is."""
    _announce(target)
    _check_sources(target, [drafter])
    from ..benchmark.doctor import PROMPTS, examine
    from ..runtime.binding import unbind

    model, tokenizer = _load_target(target, dtype, device_map, threads, trust_remote_code)
    assistant = _load_drafter(model, drafter)
    if not hasattr(assistant.config, "reducer"):
        raise ValueError(f"{drafter} is a {type(assistant).__name__}, expected a HyperDFlash or DFlash drafter.")
    unbind(model)
    typer.echo(f"Generating from {len(PROMPTS)} prompts ...", err=True)
    diagnosis = examine(model, assistant, tokenizer, max_new_tokens=max_new_tokens, disable_tqdm=False)
    typer.echo(str(diagnosis))
    if diagnosis.problems:
        raise typer.Exit(1)


@app.command()
def export(
    drafter: Annotated[str, typer.Argument(help="Path or Hub id of a drafter.")],
    folder: Annotated[Path, typer.Argument(file_okay=False, help="Where the checkpoint goes.")],
    format: Annotated[str, typer.Option(help="z-lab (vLLM and SGLang) or speculators (vLLM).")] = "z-lab",
) -> None:
    """Write a drafter in another program's layout, if that has words for it, and say how to serve it."""
    _check_writable(folder)
    typer.echo(f"Loading the drafter {drafter} ...", err=True)
    from .. import loading

    loading.check_drafter(drafter, is_ours=True)
    from ..hub.formats import export_dflash
    from ..runtime.modeling_hyperdflash import HyperDFlashDrafter

    typer.echo(export_dflash(HyperDFlashDrafter.from_pretrained(drafter, dtype="auto"), folder, format))


@app.command()
def push(
    folder: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="Folder of a saved drafter.")],
    repo_id: Annotated[str, typer.Argument(help="org/name on the Hub; made if needed.")],
    private: Annotated[bool, typer.Option(help="Whether a new repository is private.")] = False,
    revision: Annotated[Optional[str], typer.Option(help="The branch, made if needed.")] = None,  # noqa: UP045
    create_pr: Annotated[bool, typer.Option(help="Propose the commit instead.")] = False,
    commit_message: Annotated[Optional[str], typer.Option(help="What is committed.")] = None,  # noqa: UP045
    token: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Of the Hub; the stored one if unset.", envvar="HF_TOKEN", show_envvar=True),
    ] = None,
) -> None:
    """Upload a saved drafter with its code and its card, in one commit."""
    typer.echo(f"Loading the drafter {folder} ...", err=True)
    from .. import loading

    loading.check_repo_id(repo_id)
    loading.check_drafter(str(folder), is_ours=True)
    from ..runtime.modeling_hyperdflash import HyperDFlashDrafter

    drafter = HyperDFlashDrafter.from_pretrained(folder, dtype="auto")
    done = drafter.push_to_hub(
        repo_id,
        commit_message=commit_message,
        private=private or None,
        token=token,
        revision=revision,
        create_pr=create_pr,
    )
    typer.echo(done.commit_url)


@app.command()
def benchmark(
    target: Target,
    output: Output,
    drafter: Drafters = None,
    mtp: Annotated[
        Optional[list[int]],  # noqa: UP045
        typer.Option(min=1, help="Compare with the target's own MTP head, this many drafts; repeatable."),
    ] = None,
    prompt_lookup: Annotated[
        Optional[list[int]],  # noqa: UP045
        typer.Option(min=1, help="Compare with prompt lookup, this many drafts; repeatable."),
    ] = None,
    suite: Suites = None,
    data: Data = None,
    mode: Modes = None,
    temperature: Temperatures = None,
    limit: Limit = None,
    max_new_tokens: NewTokensOfRounds = 2048,
    seed: Seed = 0,
    dtype: Dtype = None,
    device_map: DeviceMap = None,
    threads: Threads = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Compare drafters with the target alone and with each other, prompt by prompt (the paper's Tables 2 and 3)."""
    _check_methods(drafter, mtp, prompt_lookup)
    named = [_named(given) for given in drafter or []]
    _check_writable(output)
    _announce(target)
    settings = _settings(suite, data, mode, temperature, limit, max_new_tokens, seed)
    _check_sources(target, [path for _, _, path in named])
    model, tokenizer = _load_target(target, dtype, device_map, threads, trust_remote_code)
    methods = [*_mtp(model, target, mtp or []), *_prompt_lookup(model, prompt_lookup or [])]
    methods += [_method(*part) for part in _load_drafters(model, named)]
    _run(model, tokenizer, methods, settings, output)


@app.command()
def sweep(
    target: Target,
    output: Output,
    drafter: Drafters = None,
    mtp: Annotated[bool, typer.Option(help="Sweep the target's own MTP head too.")] = False,
    tokens: Annotated[
        Optional[list[int]],  # noqa: UP045
        typer.Option(min=1, help="Numbers of drafted tokens to try; all a drafter can (6 for MTP) if unset."),
    ] = None,
    suite: Suites = None,
    data: Data = None,
    mode: Modes = None,
    temperature: Temperatures = None,
    limit: Limit = None,
    max_new_tokens: NewTokensOfRounds = 2048,
    seed: Seed = 0,
    dtype: Dtype = None,
    device_map: DeviceMap = None,
    threads: Threads = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Find the number of drafted tokens per round that is fastest on each suite."""
    _check_methods(drafter, mtp)
    named = [_named(given) for given in drafter or []]
    _check_writable(output)
    _announce(target)
    settings = _settings(suite, data, mode, temperature, limit, max_new_tokens, seed)
    _check_sources(target, [path for _, _, path in named])
    model, tokenizer = _load_target(target, dtype, device_map, threads, trust_remote_code)
    methods = _mtp(model, target, tokens or list(range(1, 7))) if mtp else []
    for name, part, _ in _load_drafters(model, named):
        counts = tokens or range(1, getattr(part.config, "max_draft_tokens", 6) + 1)
        methods += [_method(name, part, part.check_num_draft_tokens(count)) for count in counts]
    results = _run(model, tokenizer, methods, settings, output)
    from ..benchmark.report import print_fastest

    print_fastest(results)


def _check_methods(*asked: Any) -> None:
    if not any(asked):
        raise ValueError("No method is given: expected --drafter, or another one that --help lists, to compare with.")


def _announce(target: str) -> None:
    """Say what is going to be loaded: from here on it takes a while."""
    typer.echo(f"Loading the target {target} ...", err=True)


def _check_sources(target: str, drafters: list[str]) -> None:
    """Raise a `ValueError` or an `OSError` if these are no target and drafters, before any of them is loaded."""
    from .. import loading

    loading.check_target(target)
    for drafter in drafters:
        loading.check_drafter(drafter)


def _check_writable(folder: Path) -> None:
    """Raise an `OSError` if `folder` cannot be written to, or made."""
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not there.is_dir():
        raise OSError(f"{folder} cannot be made, because {there} is a file. Choose another folder.")
    if not os.access(there, os.W_OK | os.X_OK):
        raise OSError(f"{there} cannot be written to. Choose another folder, or change its permissions.")


def _check_device(device_map: str) -> None:
    import torch

    if device_map in ("auto", "balanced", "balanced_low_0", "sequential"):
        return
    try:
        device = torch.device(device_map)
    except RuntimeError as error:
        raise ValueError(
            f"`--device-map` is {device_map!r}, expected auto, balanced, balanced_low_0, sequential or a device such as cpu "
            "or cuda:0."
        ) from error
    here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    count = torch.accelerator.device_count() if here else 0
    if device.type != "cpu" and (here is None or device.type != here.type or (device.index or 0) >= count):
        raise ValueError(
            f"`--device-map` is {device_map!r}, but this torch sees {f'{count} devices of type {here}' if here else 'only a cpu'}."
            " Leave it out, or install torch for your accelerator."
        )


def _load_target(
    target: str, dtype: str | None, device_map: str | None, threads: int | None, trust_remote_code: bool
) -> tuple[Any, Any]:
    import torch

    from ..loading import load_target, load_tokenizer, readable
    from ..runtime.binding import bind

    if threads:
        torch.set_num_threads(threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    _check_device(device_map or device)
    with readable(target):
        tokenizer = load_tokenizer(target, trust_remote_code)
        model = load_target(
            target,
            dtype=dtype or ("float32" if device == "cpu" else "auto"),
            device_map=device_map or device,
            trust_remote_code=trust_remote_code,
        )
    return bind(model), tokenizer


def _named(given: str) -> tuple[str | None, int | None, str]:
    """Of `NAME (COUNT)=PATH` its name and count, where there are any, and its path."""
    head, _, path = given.rpartition("=")
    matched = re.fullmatch(r"([^()]*?)\s*(?:\(([0-9]+)\))?", head)
    if not path or matched is None or ("=" in given and not matched[1]) or matched[2] == "0":
        raise ValueError(
            f'`--drafter` is {given!r}, expected PATH, NAME=PATH or "NAME (4)=PATH" with at least 1 draft.'
        )
    return matched[1] or None, int(matched[2]) if matched[2] else None, path


def _load_drafters(model: Any, named: list[tuple[str | None, int | None, str]]) -> list[tuple[str, Any, int | None]]:
    """Names, drafters and how many tokens each is to draft, if the name says so."""
    loaded: dict[str, Any] = {}
    drafters = []
    for name, count, path in named:
        if path not in loaded:
            loaded[path] = _load_drafter(model, path)
            loaded[path].bind(model)
        checked = None if count is None else loaded[path].check_num_draft_tokens(count)
        drafters.append((name or _title(loaded[path].config), loaded[path], checked))
    return drafters


def _load_drafter(model: Any, path: str) -> Any:
    """Ours, an MTP block, or a DFlash drafter of others, as its configuration says."""
    from transformers import PreTrainedConfig

    from ..hub.formats import load_dflash
    from ..loading import readable
    from ..runtime.modeling_hyperdflash import HyperDFlashDrafter
    from ..runtime.modeling_mtp import DeepseekV4MTPDrafter
    from ..runtime.weights import is_other_format

    fields, _ = PreTrainedConfig.get_config_dict(path)
    weight = model.get_output_embeddings().weight
    device: Any = "cpu" if weight.is_meta else weight.device  # where the target's LM head is
    kind: Any = DeepseekV4MTPDrafter if fields.get("model_type") == "deepseek_v4" else HyperDFlashDrafter
    with readable(path):
        if is_other_format(fields):
            return load_dflash(path, target=model, dtype=model.dtype).to(device)
        return kind.from_pretrained(path, dtype=model.dtype, device_map={"": device}).eval()


def _title(config: Any) -> str:
    """What a drafter is called where the user gives it no name."""
    if not hasattr(config, "reducer"):
        return "MTP"
    if config.reducer == "hybrid":
        return "HyperDFlash hybrid"
    if config.reducer != "hc_gate":
        return "Vanilla DFlash"
    layers = config.target_layer_ids
    return "HyperDFlash" if layers == [-1] else f"HyperDFlash on {', '.join(map(str, layers))}"


def _method(name: str, drafter: Any, count: int | None = None) -> Method:
    from ..benchmark.runner import Method

    count = drafter.num_draft_tokens if count is None else count
    return Method(f"{name} ({count})", drafter, count)


def _mtp(model: Any, target: str, counts: list[int]) -> list[Method]:
    from ..runtime.modeling_mtp import DeepseekV4MTPDrafter

    drafter = DeepseekV4MTPDrafter.from_target(model) if counts else None
    return [_method("MTP", drafter, count) for count in counts]


def _prompt_lookup(model: Any, counts: list[int]) -> list[Method]:
    from ..runtime.prompt_lookup import PromptLookupDrafter

    return [_method("Prompt lookup", PromptLookupDrafter(model, count)) for count in counts]


def _settings(
    suite: list[str] | None, data: Path | None, mode: list[str] | None, temperature: list[float] | None, *rest: Any
) -> BenchmarkSettings:
    from ..benchmark.runner import BenchmarkSettings
    from ..benchmark.suites import SUITES, suites_in

    suites = suite or (list(SUITES) if data is None else suites_in(data))
    settings = BenchmarkSettings(
        suites, None if data is None else str(data), mode or ["non-think"], temperature or [0.0], *rest
    )
    settings.prompts()  # what is wrong with them shows before models are loaded
    return settings


def _run(model: Any, tokenizer: Any, methods: list[Method], settings: BenchmarkSettings, output: Path) -> Path:
    from ..benchmark.report import print_results, write_report
    from ..benchmark.runner import run_benchmark

    results = run_benchmark(model, tokenizer, methods, settings, output / "results.jsonl")
    write_report(results, output)
    print_results(results)
    typer.echo(f"{output / 'report.md'}, summary.csv, acceptance.png and speedup_tau.png are written.")
    return results
