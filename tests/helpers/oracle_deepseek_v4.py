"""A DeepSeek-V4 block for one token at a time, in float64 and with DeepSeek's names: for its own drafters' oracles."""

from __future__ import annotations

import math

import torch


class NaiveBlock:
    """The sliding-window block under one prefix of a checkpoint's tensors.

    Args:
        tensors: By DeepSeek's names.
        prefix: `"mtp.0."`, for example.
        config: The checkpoint's.
    """

    def __init__(self, tensors, prefix, config):
        self.w = {name.removeprefix(prefix): t.double() for name, t in tensors.items() if name.startswith(prefix)}
        self.config = config

    def norm(self, x, weight=None):
        x = x / torch.sqrt((x * x).mean() + self.config.rms_norm_eps)
        return x if weight is None else x * self.w[weight]

    def mix(self, x, name):
        """What a layer reads of streams, and what becomes of them and its output."""
        m, eps = len(x), self.config.hc_eps
        mixes, base = self.w[f"{name}_fn"] @ self.norm(x.flatten()), self.w[f"{name}_base"]
        scale = self.w[f"{name}_scale"]
        pre = torch.sigmoid(mixes[:m] * scale[0] + base[:m]) + eps
        post = 2 * torch.sigmoid(mixes[m : 2 * m] * scale[1] + base[m : 2 * m])
        comb = torch.softmax((mixes[2 * m :] * scale[2] + base[2 * m :]).view(m, m), dim=1) + eps
        comb = comb / (comb.sum(0) + eps)
        for _ in range(self.config.hc_sinkhorn_iters - 1):
            comb = comb / (comb.sum(1)[:, None] + eps)
            comb = comb / (comb.sum(0) + eps)

        def put(out):
            return torch.stack([post[k] * out + sum(comb[j, k] * x[j] for j in range(m)) for k in range(m)])

        return sum(pre[j] * x[j] for j in range(m)), put

    def collapse(self, x):
        """Streams to one, as the head's gate does."""
        mixes = self.w["hc_head_fn"] @ self.norm(x.flatten())
        gates = torch.sigmoid(mixes * self.w["hc_head_scale"] + self.w["hc_head_base"]) + self.config.hc_eps
        return sum(g * path for g, path in zip(gates, x))

    def rope(self, x, position):
        """Rotate consecutive pairs of the last channels."""
        dim = int(self.config.head_dim * self.config.partial_rotary_factor)
        x, first = x.clone(), len(x) - dim
        for i in range(0, dim, 2):
            angle = float(position) * self.config.rope_theta ** (-i / dim)
            a, b = x[first + i].clone(), x[first + i + 1].clone()
            x[first + i] = a * math.cos(angle) - b * math.sin(angle)
            x[first + i + 1] = a * math.sin(angle) + b * math.cos(angle)
        return x

    def key(self, x, position):
        """Of a normed input; V4's values are its keys."""
        return self.rope(self.norm(self.w["attn.wkv.weight"] @ x, "attn.kv_norm.weight"), position)

    def attention(self, x, position, keys):
        """Of a normed input over `keys`, its own among them."""
        c, w = self.config, self.w
        queries = w["attn.wq_b.weight"] @ self.norm(w["attn.wq_a.weight"] @ x, "attn.q_norm.weight")
        heads = []
        for query, sink in zip(queries.view(c.num_attention_heads, c.head_dim), w["attn.attn_sink"]):
            query = self.rope(self.norm(query), position)
            logits = [query @ key / math.sqrt(c.head_dim) for key in keys]
            weights = torch.softmax(torch.stack([*logits, sink]), dim=0)
            heads.append(self.rope(sum(p * key for p, key in zip(weights, keys)), -position))
        groups = torch.cat(heads).view(c.o_groups, -1)
        low = [a @ g for a, g in zip(w["attn.wo_a.weight"].view(c.o_groups, c.o_lora_rank, -1), groups)]
        return w["attn.wo_b.weight"] @ torch.cat(low)

    def experts(self, x):
        """Of a normed input."""
        c = self.config
        scores = torch.log1p(torch.exp(self.w["ffn.gate.weight"] @ x)).sqrt()
        chosen = sorted(range(len(scores)), key=lambda i: -(scores + self.w["ffn.gate.bias"])[i])
        chosen = chosen[: c.num_experts_per_tok]
        total = sum(scores[i] for i in chosen)
        routed = sum(scores[i] / total * self.expert(x, f"ffn.experts.{i}") for i in chosen)
        return c.routed_scaling_factor * routed + self.expert(x, "ffn.shared_experts")

    def expert(self, x, name):
        w1, w2, w3 = (self.w[f"{name}.w{i}.weight"] for i in (1, 2, 3))
        limit = self.config.swiglu_limit
        gate, up = (w1 @ x).clamp(max=limit), (w3 @ x).clamp(-limit, limit)
        return w2 @ (gate * torch.sigmoid(gate) * up)
