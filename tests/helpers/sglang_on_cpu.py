"""SGLang on a CPU: a platform of its plugin group `sglang.srt.platforms`, for tests.

SGLang 0.5.23 drafts blocks on GPUs alone, and its own CPU platform wants a build of `sgl_kernel` that no registry has.
It lets others add platforms, which say what they run: this one says DFlash, and brings the attention of a block's
tokens in torch, which stands for the GPU kernels (their masks are computed here as `flashattention_backend.py` has
them). All else is SGLang's own: its scheduler, workers, models, caches, loaders and its loop of drafts and checks.

SGLang's processes find this through [`environment`], and end the one that started them when they fail: engines run in
a process of their own, `python -m tests.helpers.sglang_on_cpu FOLDER`.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.request import urlopen

DRAFTS = "HYPERDFLASH_TEST_DRAFTS"
ROOT = Path(__file__).parents[2]
SETTINGS = dict(
    device="cpu", dtype="float32", attention_backend="torch_native", sampling_backend="pytorch",
    grammar_backend="none", disable_cuda_graph=True, mem_fraction_static=0.1, max_total_tokens=4096,
    max_running_requests=4, context_length=256, skip_tokenizer_init=True, log_level="error",
    speculative_algorithm="DFLASH", disable_overlap_schedule=True,  # it drafts once more at the end
)  # fmt: skip


def environment(folder: Path) -> dict[str, str]:
    """For processes that run SGLang, with what Python and SGLang read at their start written into `folder`."""
    told = folder / "sglang_on_cpu-0.dist-info"
    told.mkdir(parents=True)
    (told / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang-on-cpu\nVersion: 0\n")
    module = "tests.helpers.sglang_on_cpu"
    (told / "entry_points.txt").write_text(
        f"[sglang.srt.platforms]\ncpu = {module}:activate\n[sglang.srt.plugins]\ncpu = {module}:prepare\n"
    )
    paths = [str(folder), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    # SGLang copies a cache once with a Triton kernel as it makes it, which Triton's interpreter does on a CPU.
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "TRITON_INTERPRET": "1",
        DRAFTS: str(folder / "drafts"),
    }


def served(
    folder: Path, target: Path, drafter: Path, prompts: list[list[int]], count: int, **engine: Any
) -> tuple[list[list[int]], list[list[list[int]]]]:
    """The texts after prompts, one after the other, or as a batch with `batch=True`, and what was drafted, round by
    round, for each.

    Raises:
        RuntimeError: If the engine ends before them, with what it printed.
    """
    asked = {"model_path": str(target), "speculative_draft_model_path": str(drafter), **engine}
    there = environment(folder)
    (folder / "asked.json").write_text(json.dumps({"engine": asked, "prompts": prompts, "count": count}))
    command = [sys.executable, "-m", "tests.helpers.sglang_on_cpu", str(folder)]
    ran = subprocess.run(command, cwd=ROOT, env=there, capture_output=True, text=True, start_new_session=True)
    if not (folder / "written.json").exists():
        raise RuntimeError(ran.stdout + ran.stderr)
    return tuple(json.loads((folder / "written.json").read_text()))


@contextmanager
def listening(folder: Path, target: Path, drafter: Path, name: str) -> Iterator[str]:
    """SGLang's own server, with `/metrics`, as long as the block runs: where it answers.

    Raises:
        RuntimeError: If it ends before it answers, with what it printed.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = {**SETTINGS, "model_path": target, "speculative_draft_model_path": drafter, "served_model_name": name}
    settings |= {"context_length": 512, "host": "127.0.0.1", "port": port, "enable_metrics": True}
    command = [sys.executable, "-m", "sglang.launch_server"]
    for option, value in settings.items():
        flag = f"--{option.replace('_', '-')}"
        if option != "skip_tokenizer_init":  # its prompts are text
            command += [flag] if value is True else [flag, str(value)]
    there, log = environment(folder), folder / "log"
    with log.open("wb") as file:
        server = subprocess.Popen(command, cwd=ROOT, env=there, stdout=file, stderr=file, start_new_session=True)
    try:
        while not _answers(f"http://127.0.0.1:{port}/health"):
            if server.poll() is not None:
                raise RuntimeError(log.read_text())
            time.sleep(1)
        yield f"http://127.0.0.1:{port}"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def _answers(address: str) -> bool:
    with suppress(OSError), urlopen(address):
        return True
    return False


def main(folder: Path) -> None:
    import sglang

    asked = json.loads((folder / "asked.json").read_text())
    settings = asked["engine"]
    is_batch = settings.pop("batch", False)
    engine = sglang.Engine(**{**SETTINGS, **settings})
    sampling = {"temperature": 0, "max_new_tokens": asked["count"], "ignore_eos": True}
    prompts = asked["prompts"]
    texts, drafts = [], []
    for part in [prompts] if is_batch else [[ids] for ids in prompts]:
        answers = engine.generate(input_ids=part, sampling_params=sampling)
        texts += [answer["output_ids"] for answer in answers]
        drafts.append([json.loads(row)[1:] for row in (folder / "drafts").read_text().splitlines()])
        (folder / "drafts").write_text("")
    (folder / "written.json").write_text(json.dumps([texts, drafts]))
    engine.shutdown()


def activate() -> str:
    return "tests.helpers.sglang_on_cpu_platform:TorchPlatform"


def prepare() -> None:
    """Let SGLang's workers take the platform's attention, and write the blocks that they check into the file that
    `DRAFTS` names, one a line."""
    import torch
    from sglang.srt.arg_groups.choices import add_draft_attention_backend_choices
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from .sglang_on_cpu_attention import BlockAttention  # noqa: F401  registers itself

    def write(*_: Any, candidates: Any, **__: Any) -> None:
        with open(os.environ[DRAFTS], "a") as file:
            file.writelines(json.dumps(row) + "\n" for row in candidates.tolist())

    add_draft_attention_backend_choices(["torch_native"])
    torch.Tensor.record_stream = lambda *_: None  # type: ignore[method-assign, assignment]  # a CPU has no streams
    target = "sglang.srt.speculative.dflash_worker_v2.DFlashWorkerV2._accept_block"
    HookRegistry.register(target, write, HookType.BEFORE)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
