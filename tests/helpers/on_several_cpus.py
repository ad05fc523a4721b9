"""`hf-hyperdflash` on several CPU processes under `accelerate launch`, where accelerate itself shards nothing.

FSDP2's code runs as on GPUs: what accelerate leaves out on CPUs is to say that it is to run, and a gathered tensor is
there waited for, which copying it from a GPU does.
"""

import sys

from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from hf_hyperdflash.cli.app import run

begin, gather = AcceleratorState.__init__, Accelerator.get_state_dict


def begin_with_fsdp(self, *args, **kwargs):
    begin(self, *args, **kwargs)
    plugin = kwargs.get("fsdp_plugin") or vars(self).get("fsdp_plugin")
    if plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
        self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, plugin


def gather_and_wait(self, model, unwrap=True):
    state = gather(self, model, unwrap) or {}  # with ZeRO-3 the first process alone has it
    return {name: value.wait() if isinstance(value, AsyncCollectiveTensor) else value for name, value in state.items()}


AcceleratorState.__init__, Accelerator.get_state_dict = begin_with_fsdp, gather_and_wait
sys.argv[0] = "hf-hyperdflash"
run()
