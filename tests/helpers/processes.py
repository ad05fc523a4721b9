"""Python processes of their own, without the seconds that importing torch takes each of them.

A process that has imported torch and nothing else waits for what to run and forks. Whatever reads the environment when
it is imported (`huggingface_hub`, transformers, this package) the fork imports for itself, in the environment it is
given. What a test says of imports, or of another interpreter, needs `subprocess`.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

FORKS = """
import gc, json, os, runpy, sys, types
import torch, torch._dynamo, torch.distributed.fsdp, torch.distributed.tensor, torch.export

def asked():
    "What a fork is to run; the process that forks stays in here."
    gc.freeze()
    for line in sys.stdin:
        wanted = json.loads(line)
        pid = os.fork()
        if not pid:
            return wanted
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
    os._exit(0)

wanted = asked()
for place, path in enumerate((os.devnull, wanted["out"], wanted["err"])):
    os.dup2(os.open(path, os.O_WRONLY if place else os.O_RDONLY), place)
inherited = list(map(os.path.abspath, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
os.environ.clear()
os.environ.update(wanted["env"])
os.chdir(wanted["cwd"])
given = os.environ.get("PYTHONPATH")
sys.path[:] = [path for path in sys.path[1:] if path not in inherited]
sys.path[:0] = map(os.path.abspath, given.split(os.pathsep)) if given else []
first, *rest = wanted["arguments"]
if first == "-c":
    code, *sys.argv[1:] = rest
    sys.argv[0] = first
    sys.path.insert(0, "")
    sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(code, "<string>", "exec"), vars(sys.modules["__main__"]))
elif first == "-m":
    module, *sys.argv[1:] = rest
    sys.path.insert(0, os.getcwd())
    runpy.run_module(module, run_name="__main__", alter_sys=True)
else:
    sys.argv[:] = wanted["arguments"]
    sys.path.insert(0, os.path.dirname(os.path.abspath(first)))
    runpy.run_path(first, run_name="__main__")
"""


# What Triton's bindings (with a torch 2.15 for CUDA) write at the exit of a fork, below all that was said.
NANOBIND = re.compile(r"nanobind: leaked .*?refleaks\.html\n?", re.DOTALL)


@cache
def _forking() -> subprocess.Popen[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}  # two test workers share two cores
    command, place = [sys.executable, "-c", FORKS], tempfile.gettempdir()
    forking = subprocess.Popen(command, cwd=place, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
    atexit.register(forking.stdin.close)
    return forking


def python(
    *arguments: object, cwd: str | Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """What `python *arguments` does and says: a script's path, `-c` and code or `-m` and a module, and what they are
    given."""
    with tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as err:
        wanted = {
            "arguments": list(map(str, arguments)), "cwd": str(cwd or os.getcwd()), "env": dict(env or os.environ),
            "out": out.name, "err": err.name,
        }  # fmt: skip
        forking = _forking()
        forking.stdin.write(json.dumps(wanted) + "\n")
        forking.stdin.flush()
        code = int(forking.stdout.readline())
        said = NANOBIND.sub("", err.read())
        return subprocess.CompletedProcess(wanted["arguments"], code, out.read(), said)
