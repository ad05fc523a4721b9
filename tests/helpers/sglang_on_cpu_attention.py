"""The attention of SGLang on a CPU, for tests: its own in torch, with blocks after a context."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc


@register_attention_backend("torch_native")
class BlockAttention(TorchNativeAttnBackend):
    """SGLang's torch attention, which has no blocks after a context, with them."""

    def forward_extend(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True
    ) -> torch.Tensor:
        if not forward_batch.forward_mode.is_target_verify():
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)
        where = KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc)
        self.token_to_kv_pool.set_kv_buffer(layer, where, k, v)
        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        block = len(q) // forward_batch.batch_size
        is_causal = layer.attn_type != AttentionType.ENCODER_ONLY
        window = layer.sliding_window_size
        outputs = []
        for row, own in enumerate(q.view(forward_batch.batch_size, block, layer.tp_q_head_num, -1)):
            context = int(forward_batch.seq_lens[row])
            places = self.req_to_token_pool.req_to_token[forward_batch.req_pool_indices[row], : context + block]
            ahead = torch.arange(context + block) - torch.arange(context, context + block).unsqueeze(1)
            seen = ahead <= 0 if is_causal else torch.ones_like(ahead, dtype=torch.bool)
            if window is not None and window > -1:  # a side, the token itself left out
                seen = seen & (ahead.abs() <= window)
            attended = torch.nn.functional.scaled_dot_product_attention(
                own.transpose(0, 1), keys[places].transpose(0, 1), values[places].transpose(0, 1),
                attn_mask=seen, scale=layer.scaling, enable_gqa=True,
            )  # fmt: skip
            outputs.append(attended.transpose(0, 1).flatten(1))
        return torch.cat(outputs)
