"""The platform that `sglang_on_cpu.py` names to SGLang, which imports it before anything else of its own."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuSRTPlatform
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities


class TorchPlatform(CpuSRTPlatform):
    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        return algorithm == "DFLASH"

    def supports_speculative_draft_attention_backend(self, algorithm: str, backend: str) -> bool:
        return backend == "torch_native"

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_default_speculative_draft_attention_backend(self, algorithm: str) -> str:
        return "torch_native"

    def get_speculative_cache_locs_fn(self) -> Any:
        return cache_places


def cache_places(
    *, req_pool_indices: Any, req_to_token: Any, start_offset: Any, draft_token_num: int, **_: Any
) -> torch.Tensor:
    """Where the tokens of every request's block are in the cache, one block after the other."""
    places = start_offset.unsqueeze(1) + torch.arange(draft_token_num)
    return req_to_token[req_pool_indices.unsqueeze(1), places].flatten().long()
