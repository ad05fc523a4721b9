"""What tests of fused modules share."""

import torch

from hf_hyperdflash.targets.fused import FusedForward

GREEDY = dict(do_sample=False, max_new_tokens=20)


def rugged(target):
    """With hyper-connections far from their initial values, which differ little from stream to stream."""
    for module in target.modules():
        if hasattr(module, "hc_sinkhorn_iters"):
            torch.nn.init.normal_(module.fn, std=0.3)
            torch.nn.init.normal_(module.base)
            torch.nn.init.normal_(module.scale)
    return target


@torch.no_grad()
def logits_of(target, ids):
    return target(ids).logits


def replaced(model):
    return [type(module).__name__ for module in model.modules() if isinstance(module.forward, FusedForward)]
