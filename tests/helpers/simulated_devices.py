"""Two GPUs that are not there: what torch's `FakeTensorMode` says of devices, with the values that the CPU computes.

Tensors "on" `cuda:0` and `cuda:1` are fake ones, so that an operation whose arguments lie on different devices raises
as on a GPU. Beside each stands the real tensor on the CPU, so that what depends on data (`.item()`, boolean indices, a
loop over accepted drafts) goes on as well, and the result can be compared with the CPU's.

Not simulated: kernels, streams, memory, and code that asks `torch.cuda` what it can do (grouped matrix products of
experts: use `set_experts_implementation("batched_mm")`).
"""

from __future__ import annotations

import ctypes
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._pytree import tree_leaves, tree_map

CPU = torch.device("cpu")
# A build with CUDA asks for the driver itself, at places that no mode sees.
CAN_SIMULATE = sys.platform == "linux" and not torch.backends.cuda.is_built()
_WAITING = {"_local_scalar_dense", "equal", "masked_select", "nonzero"}
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}


class SimulatedDevices(FakeTensorMode):
    """Inside this context `.to("cuda:0")` and `.to("cuda:1")` work.

    Attributes:
        waits: How often the host had to wait for a device, by the place in the code that made it: values that are read
            (`.item()`, `bool()`, `.tolist()`), copies to the CPU, indices and shapes that depend on values, and
            `torch.multinomial`, which reads twice whether its input is a distribution.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.waits: Counter[str] = Counter()
        self._within = False

    def __enter__(self) -> SimulatedDevices:
        if not CAN_SIMULATE:
            pytest.skip(f"torch {torch.__version__} cannot simulate a GPU: only a CPU build on Linux can")
        # A build without CUDA has nothing to switch devices with, and asks for it before any mode does: torch's "meta"
        # switches nothing.
        path = Path(torch.__file__).parent / "lib" / "libc10.so"
        guards = (ctypes.c_void_p * 20).in_dll(ctypes.CDLL(str(path)), "_ZN3c104impl26device_guard_impl_registryE")
        self._guards, self._own = guards, guards[1]
        guards[1] = guards[14]
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._guards[1] = self._own

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._within:
            return super().__torch_dispatch__(func, types, args, kwargs)
        leaves = tree_leaves((args, kwargs))
        away = [leaf.device for leaf in leaves if isinstance(leaf, FakeTensor)]
        if not away and not any(
            isinstance(leaf, torch.device) and leaf.type not in ("cpu", "meta") for leaf in leaves
        ):
            return func(*args, **kwargs)
        if away and (count := _waits(func, args, kwargs)):
            self.waits[_caller()] += count
        self._within = True
        try:
            out = super().__torch_dispatch__(func, types, args, kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            out = None
        finally:
            self._within = False
        real_args, real_kwargs = tree_map(_real, (args, kwargs))
        real = func(*real_args, **real_kwargs)
        if out is None:
            return tree_map(lambda value: self._placed(value, away[0]), real)
        for fake, value in zip(tree_leaves(out), tree_leaves(real)):
            if isinstance(fake, FakeTensor):
                assert (fake.shape, fake.dtype) == (value.shape, value.dtype), func
                fake.on_cpu = value
        return tree_map(lambda value: _real(value) if getattr(value, "device", None) == CPU else value, out)

    def _placed(self, value: Any, device: torch.device) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        fake = FakeTensor(self, value.to("meta"), device)
        fake.on_cpu = value
        return fake


def _real(value: Any) -> Any:
    if isinstance(value, torch.device):
        return CPU
    return value.on_cpu if isinstance(value, FakeTensor) else value


def _waits(func: Any, args: Any, kwargs: Any) -> int:
    name = func.overloadpacket.__name__
    if name in _INDEXING:
        indices = [index for index in args[1] if index is not None]
        for index in indices:  # which torch's fake tensors do not check
            if index.device not in (CPU, args[0].device):
                raise RuntimeError(f"indices on {index.device} for a tensor on {args[0].device}")
        return sum(index.dtype == torch.bool for index in indices)
    to_cpu = (name == "_to_copy" and kwargs.get("device") == CPU) or (name == "copy_" and args[0].device == CPU)
    return 2 if name == "multinomial" else int(to_cpu or name in _WAITING)


def _caller() -> str:
    frame = sys._getframe(2)
    while "/torch/" in frame.f_code.co_filename or frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"
