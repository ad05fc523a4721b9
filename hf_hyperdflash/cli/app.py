"""The `hf-hyperdflash` command: a thin layer over the package's functions."""

from __future__ import annotations

import codecs
import io
import os
import sys
from typing import Annotated, Any

import typer
from typer import Option

from ..version import __version__
from .answers import answers
from .calibrate import calibrate
from .drafters import drafters
from .features import features
from .generate import generate
from .measure import benchmark, doctor, sweep
from .share import card, export, push
from .train import train

_UsageError: Any = typer.BadParameter.__base__  # click's class, of the version that typer uses

app = typer.Typer(
    add_completion=False,
    help="Generate text with a drafter's help; train, measure and share drafters.",
    context_settings={"help_option_names": ["-h", "--help"]},
)

_STOPPED = 130  # a shell's exit status for Ctrl-C
_AFTERWARDS = {
    "answers": " The same command goes on where it stopped.",
    "benchmark": " The same command goes on where it stopped.",
    "features": " The same command goes on where it stopped.",
    "sweep": " The same command goes on where it stopped.",
    "train": " The same command with --resume_from_checkpoint True goes on from the last checkpoint, if one was "
    "saved.",
}


# What texts and tables of ours have, where the encoding of a stream does not. Other characters are escaped.
_IN_ASCII = {"×": "x", "τ": "tau", "–": "-", "…": "...", "‘": "'", "’": "'", "“": '"', "”": '"'}

_EXTRAS = {"datasets": "train", "peft": "train", "evaluate": "train"}  # the extra that installs a missing module


def _in_ascii(error: UnicodeError) -> tuple[str, int]:
    """Write what an encoding cannot in ASCII: an error, which is the alternative, comes when the work is done."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    unknown = error.object[error.start : error.end]
    return "".join(_IN_ASCII.get(c) or c.encode("ascii", "backslashreplace").decode() for c in unknown), error.end


def run() -> None:
    """Run the command. Errors that the user can fix end in one line, without a traceback."""
    codecs.register_error("in ascii", _in_ascii)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # which Python's own are; lines of a pipe come as they are printed
            is_lenient = stream.errors not in ("strict", "surrogateescape")
            stream.reconfigure(errors=stream.errors if is_lenient else "in ascii", line_buffering=True)
    for library in ("TRANSFORMERS", "HF_HUB"):  # they would log many retries before the actual error
        os.environ.setdefault(f"{library}_VERBOSITY", "error")
    if not sys.stderr.isatty():  # in a file a bar is noise
        for library in ("HF_HUB", "HF_DATASETS"):  # and transformers, which does as the first
            os.environ.setdefault(f"{library}_DISABLE_PROGRESS_BARS", "1")
    try:
        status = app(prog_name="hf-hyperdflash", standalone_mode=False) or 0
    except (KeyboardInterrupt, typer.Abort):
        status = _STOPPED
    except _UsageError as error:
        help = f"{error.ctx.command_path} --help" if error.ctx else "--help"
        status = _say(f"{_usage_message(error)} See `{help}`.", error.exit_code)
    except OSError as error:
        # An error of the system has the file and the reason.
        status = _say(f"{error.filename}: {error.strerror}." if error.filename and error.strerror else str(error))
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get(error.name or "")
        status = _say(f'{error}: pip install "hf-hyperdflash[{extra}]".' if extra else str(error))
    except (ValueError, ImportError) as error:
        status = _say(str(error))
    if status == _STOPPED:
        print(f"\nStopped.{_AFTERWARDS.get(' '.join(sys.argv[1:2]), '')}", file=sys.stderr)
    raise SystemExit(status)


def _usage_message(error: Any) -> str:
    """Return what is wrong with the command line, with the value, which typer omits, and the help of a missing one."""
    message = error.format_message().rstrip(".")
    if errors := getattr(error.__cause__, "errors", None):
        message = message.replace("Input should", f"{errors()[0]['input']!r} should")
    about = (getattr(error.param, "help", None) or "") if message.startswith("Missing ") else ""
    if about:
        message += f" ({about.rstrip('.')})"
    return message if message.endswith("?") else f"{message}."


def _say(message: str, status: int = 1) -> int:
    # Each of several processes prints its own error: the launcher ends all others when one fails.
    rank = os.environ.get("RANK", "0")
    where = f" in process {rank}" if rank != "0" else ""
    print(f"Error{where}: {' '.join(message.split())}", file=sys.stderr)
    return status


@app.callback(invoke_without_command=True)
def main(
    context: typer.Context, version: Annotated[bool, Option("--version", help="Print the version and exit.")] = False
) -> None:
    """HyperDFlash block speculative decoding for DeepSeek-V4."""
    if version:
        print(f"hf-hyperdflash {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


_ANY = {"add_help_option": False, "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True}}
# In the order in which they are listed.
for command in (generate, drafters, answers, features, train, calibrate, card, doctor, export, push, benchmark, sweep):
    more: dict[str, Any] = _ANY if command in (features, train) else {}
    app.command(help=" ".join(str(command.__doc__).split()), **more)(command)


if __name__ == "__main__":  # for `accelerate launch -m hf_hyperdflash.cli.app train`
    run()
