"""Small modules of a bound target as one kernel each: hyper-connections, and DeepSeek-V4's norms.

A hyper-connection is some 140 operations on a few numbers for each token, most of them Sinkhorn iterations. An
accelerator waits for Python to launch each. So here one Triton kernel does the work of all of them, and one that of a
norm. On a CPU `torch.compile` compiles the hyper-connections' own forward instead, for a target that asks for it.

Compilers round otherwise than PyTorch's operations do, so the target's logits move a little. They move alike in plain
and in assisted text, because the switch belongs to the target.
"""

from __future__ import annotations

import functools
import os
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import nn

from .compiled import copy_function
from .hooks import PerThread
from .target import Kernel, Outputs

_FORWARDS = ("_old_forward", "forward")  # of an instance; the first where accelerate's hooks wrap it


class HyperConnection(Protocol):
    """A hyper-connection with Sinkhorn iterations: DeepSeek-V4's, GLM-5 Next's."""

    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    fn: nn.Parameter
    base: nn.Parameter
    scale: nn.Parameter
    input_norm: Any


class FusedForward:
    """The `forward` of a module whose work a kernel can do, in the instance itself."""

    def __init__(self, fusion: Fusion, module: nn.Module, kernel: Kernel) -> None:
        self.fusion, self.module, self.kernel = fusion, module, kernel

    def __call__(self, *args: torch.Tensor, **kwargs: object) -> Outputs:
        if torch.compiler.is_compiling() or len(args) != 1 or not self.fusion.covers(self.kernel, args[0]):
            return type(self.module).forward(self.module, *args, **kwargs)
        return self.fusion.run(self.kernel, self.module, args[0])


class Fusion:
    """Runs modules of a bound target as one kernel each, from [`bind`] to [`remove`]: on an accelerator that has
    Triton, and on a CPU that asks for it. Wherever gradients are computed or the target is compiled as a whole, each
    module runs its own forward.

    A module whose forward somebody else has replaced is left alone, and all are where no kernel could run: to ask at
    each call would take 2 % of a forward of DeepSeek-V4 on a CPU.
    """

    def __init__(self, modules: dict[nn.Module, Kernel]) -> None:
        self._kernels, self.modules = modules, set[nn.Module]()  # those whose forward is replaced
        self.on_cpu = False  # whether hyper-connections are compiled on a CPU
        self.is_off = False  # whether no module is fused
        self.paused: PerThread[bool] = PerThread()  # the threads in which none is
        self._checked: set[tuple[Kernel, str]] = set()
        self._compiled: dict[type, Callable[..., tuple[torch.Tensor, ...]]] = {}
        # Of those that are compiled, by what torch.compile tells them apart.
        self._graphs: set[tuple[type, torch.dtype, bool, bool]] = set()
        if torch.accelerator.is_available() or _is_interpreted():
            self._replace_forwards(modules)

    def _replace_forwards(self, modules: Iterable[nn.Module]) -> None:
        for module in modules:
            name = next((name for name in _FORWARDS if name in vars(module)), "forward")
            if vars(module).get(name, module.forward) == types.MethodType(type(module).forward, module):
                vars(module)[name] = FusedForward(self, module, self._kernels[module])
                self.modules.add(module)

    def __getstate__(self) -> dict[str, object]:
        # What is compiled cannot be copied, and other threads do not run a copy.
        return {**vars(self), "_compiled": {}, "_graphs": set(), "paused": PerThread()}

    def remove(self) -> None:
        """Give each module its own forward back."""
        for module in self.modules:
            for name in _FORWARDS:
                if isinstance(vars(module).get(name), FusedForward):
                    del vars(module)[name]
                    if name == "_old_forward":
                        module._old_forward = types.MethodType(type(module).forward, module)  # type: ignore[assignment]
        self.modules.clear()

    def switch(self, on: bool, dtype: torch.dtype) -> None:
        """Fuse everywhere, on a CPU, too, or nowhere. A CPU compiles here, for streams of a dtype. Raise a
        `ValueError` if there is nothing to fuse, or if torch.compile does not work on this CPU."""
        connections: list[Any] = [module for module, kernel in self._kernels.items() if kernel is hyper_connection]
        if on and not connections:
            raise ValueError(
                "`fuse` is True, but the target has no hyper-connections with Sinkhorn iterations, as DeepSeek-V4 and "
                "GLM-5 Next have: leave `fuse` out."
            )
        self.is_off, self.on_cpu = not on, on
        if not on or (module := connections[0]).fn.device.type != "cpu" or _runs_triton("cpu"):
            return
        self._replace_forwards(connections)
        sizes = 1, 2, module.hc_mult, module.fn.shape[1] // module.hc_mult
        try:
            for mode in (torch.no_grad, torch.inference_mode):  # of plain text and of rounds
                with mode():
                    self.compiled(module, torch.zeros(sizes, dtype=dtype))
        except Exception as error:
            self.on_cpu = False
            raise ValueError(
                f"`fuse` is True on a CPU, but torch.compile failed there ({_line_of(error)}): install a C++ "
                "compiler, a newer torch than 2.8, or leave `fuse` out."
            ) from error

    @contextmanager
    def pausing(self, is_paused: bool) -> Iterator[None]:
        """Let each module of this thread's forwards run its own operations inside, if `is_paused`."""
        end = self.paused.add(True) if is_paused else None
        try:
            yield
        finally:
            if end is not None:
                end()

    def covers(self, kernel: Kernel, inputs: torch.Tensor) -> bool:
        """Return whether a kernel does the work of a call with these inputs."""
        device = inputs.device.type
        if device == "cpu" and not (self.on_cpu and kernel is hyper_connection) and not _is_interpreted():
            return False
        if torch.is_grad_enabled() or self.is_off or type(inputs) is not torch.Tensor:
            return False
        if get_ident() in self.paused or torch.is_autocast_enabled(device) or not inputs.numel():
            return False
        return device == "cpu" or (_runs_triton(device) and inputs.dtype.itemsize < 8)

    def run(self, kernel: Kernel, module: nn.Module, inputs: torch.Tensor) -> Outputs:
        """Return what the module's forward would, from the kernel, which the first call compares with it."""
        if not _runs_triton(inputs.device.type):
            return self.compiled(cast(HyperConnection, module), inputs)
        if (kernel, device := str(inputs.device)) in self._checked:
            return kernel(module, inputs)
        outputs = expected = type(module).forward(module, inputs)
        try:
            outputs = kernel(module, inputs)
            for output, own in zip(outputs, expected) if isinstance(expected, tuple) else [(outputs, expected)]:
                tolerance = 1e-3 if own.dtype == torch.float32 else 0.05  # a few steps of bfloat16
                torch.testing.assert_close(output, own, rtol=tolerance, atol=tolerance * float(own.abs().max()))
        except Exception as error:
            outputs, self.is_off = expected, True
            warnings.warn(
                f"The target runs operation by operation, as if it were not bound: on {device} a kernel that would "
                f"do the work of {type(module).__name__} failed ({_line_of(error)}).",
                stacklevel=2,
            )
        self._checked.add((kernel, device))
        return outputs

    def compiled(self, module: HyperConnection, streams: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run a hyper-connection's own forward, compiled once for every number of tokens."""
        kind: Any = type(module)
        if kind not in self._compiled:
            self._compiled[kind] = torch.compile(copy_function(kind.forward), fullgraph=True, dynamic=False)
        batch, seq = streams.shape[:2]
        tokens = streams if batch == 1 else streams.flatten(0, 1).unsqueeze(0)
        graph = kind, streams.dtype, streams.is_inference(), module.fn.requires_grad
        if graph not in self._graphs:
            tokens = tokens.view_as(tokens)  # the caller's stays unmarked
            torch._dynamo.decorators.mark_unbacked(tokens, 1)
        outputs = self._compiled[kind](module, tokens)
        self._graphs.add(graph)
        return outputs if batch == 1 else tuple(output.view(batch, seq, *output.shape[2:]) for output in outputs)


@functools.cache
def _is_interpreted() -> bool:
    """Return whether Triton runs its kernels in Python, on a CPU, as it decides when it is first imported."""
    return os.environ.get("TRITON_INTERPRET") == "1" and _kernels() is not None


def _runs_triton(device: str) -> bool:
    return _is_interpreted() if device == "cpu" else device in ("cuda", "xpu") and _kernels() is not None


def _line_of(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


# Kernels


def hyper_connection(module: HyperConnection, streams: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Do a hyper-connection's forward in one kernel after its projection.

    Args:
        streams: `[batch, seq, hc_mult, hidden_size]`.

    Returns:
        What its forward returns: how much of the block's output each stream takes `[batch, seq, hc_mult]`, how the
        streams are mixed `[batch, seq, hc_mult, hc_mult]`, and the block's input `[batch, seq, hidden_size]`.
    """
    batch, seq, paths, width = streams.shape
    streams = streams.contiguous()
    mixes = F.linear(streams.flatten(2).float(), module.fn.float())
    post, comb = mixes.new_empty(batch, seq, paths), mixes.new_empty(batch, seq, paths, paths)
    collapsed = streams.new_empty(batch, seq, width)
    with torch.accelerator.device_index(streams.device.index):
        _kernels().hyper_connection[(batch * seq,)](
            streams, mixes, module.base, module.scale, post, comb, collapsed,
            module.input_norm.eps, module.hc_eps,
            PATHS=paths, WIDTH=width, ITERATIONS=module.hc_sinkhorn_iters, BLOCK=_block(width),
        )  # fmt: skip
    return post, comb, collapsed


def rms_norm(module: nn.Module, states: torch.Tensor) -> torch.Tensor:
    """Do a DeepSeek-V4 norm's forward of states `[..., width]` in one kernel; one without a weight rounds as it does
    there."""
    weight = getattr(module, "weight", None)
    states, normed = states.contiguous(), torch.empty_like(states, memory_format=torch.contiguous_format)
    width = states.shape[-1]
    with torch.accelerator.device_index(states.device.index):
        _kernels().rms_norm[(states.numel() // width,)](
            states, states if weight is None else weight, normed,
            module.eps if weight is None else module.variance_epsilon,
            WIDTH=width, BLOCK=_block(width), HAS_WEIGHT=weight is not None,
        )  # fmt: skip
    return normed


def _block(width: int) -> int:
    return min(1024, 1 << (width - 1).bit_length())


@functools.cache
def _kernels() -> Any:
    """Return the Triton kernels; `None` where there is no Triton."""
    try:
        import triton
        import triton.language as tl
    except ImportError:
        return None

    @triton.jit
    def connection(  # type: ignore[no-untyped-def]
        streams, mixes, base, scale, post, comb, collapsed, norm_eps, eps,
        PATHS: tl.constexpr, WIDTH: tl.constexpr, ITERATIONS: tl.constexpr, BLOCK: tl.constexpr,
    ) -> None:  # fmt: skip
        """One program a token. The projection's `mixes` `[tokens, (2 + PATHS) * PATHS]` are not normed yet."""
        token = tl.program_id(0).to(tl.int64)
        streams += token * PATHS * WIDTH
        mixes += token * (2 + PATHS) * PATHS
        squares = tl.zeros([BLOCK], tl.float32)
        for start in range(0, PATHS * WIDTH, BLOCK):
            at = start + tl.arange(0, BLOCK)
            part = tl.load(streams + at, mask=at < PATHS * WIDTH, other=0.0).to(tl.float32)
            squares += part * part
        norm = 1 / tl.sqrt(tl.sum(squares) / (PATHS * WIDTH) + norm_eps)

        path = tl.arange(0, PATHS)
        logits = tl.load(mixes + path) * norm * tl.load(scale).to(tl.float32)
        pre = 1 / (1 + tl.exp(-(logits + tl.load(base + path).to(tl.float32)))) + eps
        logits = tl.load(mixes + PATHS + path) * norm * tl.load(scale + 1).to(tl.float32)
        gates = 2 / (1 + tl.exp(-(logits + tl.load(base + PATHS + path).to(tl.float32))))
        tl.store(post + token * PATHS + path, gates)

        entry = path[:, None] * PATHS + path[None, :]
        logits = tl.load(mixes + 2 * PATHS + entry) * norm * tl.load(scale + 2).to(tl.float32)
        logits += tl.load(base + 2 * PATHS + entry).to(tl.float32)
        matrix = tl.exp(logits - tl.max(logits, 1)[:, None])
        matrix = matrix / tl.sum(matrix, 1)[:, None] + eps
        matrix = matrix / (tl.sum(matrix, 0)[None, :] + eps)
        for _ in range(ITERATIONS - 1):
            matrix = matrix / (tl.sum(matrix, 1)[:, None] + eps)
            matrix = matrix / (tl.sum(matrix, 0)[None, :] + eps)
        tl.store(comb + token * PATHS * PATHS + entry, matrix)

        for start in range(0, WIDTH, BLOCK):
            at = start + tl.arange(0, BLOCK)
            inside = at < WIDTH
            part = tl.load(streams + path[:, None] * WIDTH + at[None, :], mask=inside[None, :], other=0.0)
            mixed = tl.sum(pre[:, None] * part.to(tl.float32), 0)
            tl.store(collapsed + token * WIDTH + at, mixed.to(collapsed.dtype.element_ty), mask=inside)

    @triton.jit
    def norm(  # type: ignore[no-untyped-def]
        states, weight, normed, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, HAS_WEIGHT: tl.constexpr
    ) -> None:
        """One program a row of `states` `[rows, WIDTH]`."""
        row = tl.program_id(0).to(tl.int64) * WIDTH
        squares = tl.zeros([BLOCK], tl.float32)
        for start in range(0, WIDTH, BLOCK):
            at = start + tl.arange(0, BLOCK)
            part = tl.load(states + row + at, mask=at < WIDTH, other=0.0).to(tl.float32)
            squares += part * part
        factor = 1 / tl.sqrt(tl.sum(squares) / WIDTH + eps)
        if not HAS_WEIGHT:
            factor = factor.to(normed.dtype.element_ty).to(tl.float32)
        for start in range(0, WIDTH, BLOCK):
            at = start + tl.arange(0, BLOCK)
            part = tl.load(states + row + at, mask=at < WIDTH, other=0.0).to(tl.float32) * factor
            if HAS_WEIGHT:
                part = tl.load(weight + at, mask=at < WIDTH, other=0.0).to(tl.float32) * part
            tl.store(normed + row + at, part.to(normed.dtype.element_ty), mask=at < WIDTH)

    return types.SimpleNamespace(hyper_connection=connection, rms_norm=norm)
