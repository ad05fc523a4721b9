"""DeepSeek-V4's own drafters, MTP and DSpark, for one entry or slot at a time, in float64, from a checkpoint's `mtp.*`
tensors and nothing else.

What is written out here of DSpark was read in descriptions of the `inference/model.py` of DeepSeek-V4-Flash-DSpark
(lines 744 to 932); vLLM's `models/deepseek_v4/nvidia/dspark.py` and the list of tensors in DeepSeek-V4-Flash-0731
agree with it.
"""

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


class NaiveMTP(NaiveBlock):
    """The block of the releases of April."""

    def __init__(self, tensors, config, embed, head):
        super().__init__(tensors, "mtp.0.", config)
        self.embed, self.head = embed.double(), head.double()

    def said(self, residual, positions, ids, drafts):
        """Logits of each of `drafts`, `[drafts, vocab_size]`, and no confidences; as [`NaiveDSpark.said`]."""
        keys, logits = [], []
        for state, token, position in zip(residual.double(), ids[1:], positions):
            out = self.entry(state, token, int(position), keys)
        for step, token in enumerate(drafts):
            logits.append(self.read(out))
            out = self.entry(out, token, int(positions[-1]) + step, keys)
        return torch.stack(logits), None

    def entry(self, state, token, position, keys):
        e = self.w["e_proj.weight"] @ self.norm(self.embed[token], "enorm.weight")
        x = torch.stack([e + self.w["h_proj.weight"] @ self.norm(path, "hnorm.weight") for path in state])
        read, put = self.mix(x, "hc_attn")
        read = self.norm(read, "attn_norm.weight")
        keys.append(self.key(read, position))
        x = put(self.attention(read, position, keys[-self.config.sliding_window :]))
        read, put = self.mix(x, "hc_ffn")
        return put(self.experts(self.norm(read, "ffn_norm.weight")))

    def read(self, x):
        return self.head @ self.norm(self.collapse(x), "norm.weight")


class NaiveDSpark:
    """The blocks of the releases of July, whose configuration has `dspark_*` fields. `embed` and `head` are the
    target's weights, `[vocab_size, hidden_size]`."""

    def __init__(self, tensors, config, embed, head):
        blocks = 1 + max(int(name.split(".")[1]) for name in tensors)
        self.blocks = [NaiveBlock(tensors, f"mtp.{i}.", config) for i in range(blocks)]
        self.first, self.last = self.blocks[0], self.blocks[-1]
        self.config, self.embed, self.head = config, embed.double(), head.double()

    def feature(self, residual):
        """Of one token's residual, `[layers * hc_mult, hidden_size]`: each layer's mean over its streams."""
        layers = residual.double().split(self.config.hc_mult)
        main = torch.cat([sum(layer) / self.config.hc_mult for layer in layers])
        return self.first.norm(self.first.w["main_proj.weight"] @ main, "main_norm.weight")

    def states(self, residual, positions, anchor):
        """What a block's slots end in, `[block_size, hidden_size]`, before the last norm.

        Args:
            residual: `[seq, layers * hc_mult, hidden_size]` of the tokens before the anchor.
            positions: Theirs and the anchor's, `seq + 1` of them.
            anchor: The token.
        """
        config, size = self.config, self.config.dspark_block_size
        seen = list(zip(residual, positions[:-1]))[-config.sliding_window :]
        context = [(self.feature(state), int(position)) for state, position in seen]
        tokens = [anchor] + [config.dspark_noise_token_id] * (size - 1)
        at = [int(positions[-1]) + k for k in range(size)]
        slots = [torch.stack([self.embed[token]] * config.hc_mult) for token in tokens]
        for block in self.blocks:
            read, put = zip(*(block.mix(x, "hc_attn") for x in slots))
            read = [block.norm(x, "attn_norm.weight") for x in read]
            keys = [block.key(x, p) for x, p in [*context, *zip(read, at)]]
            slots = [put[k](block.attention(read[k], at[k], keys)) for k in range(size)]
            read, put = zip(*(block.mix(x, "hc_ffn") for x in slots))
            slots = [put[k](block.experts(block.norm(read[k], "ffn_norm.weight"))) for k in range(size)]
        return torch.stack([self.last.collapse(x) for x in slots])

    def scores(self, state, token):
        """Logits and the confidence's logit of a slot whose token before is `token`."""
        embedded = self.last.w["markov_head.markov_w1.weight"][token]
        bias = self.last.w["markov_head.markov_w2.weight"] @ embedded
        confidence = self.last.w["confidence_head.proj.weight"] @ torch.cat([state, embedded])
        return self.head @ self.last.norm(state, "norm.weight") + bias, confidence[0]

    def said(self, residual, positions, ids, drafts):
        """Logits of each of `drafts`, `[drafts, vocab_size]`, and its confidence, `[drafts]`.

        Args:
            residual: `[seq, streams read, hidden_size]`, of the tokens before the anchor.
            positions, ids: Theirs and the anchor's.
            drafts: The tokens that are drafted.
        """
        logits, confidences = [], []
        before = [int(ids[-1]), *drafts]
        for state, token in zip(self.states(residual, positions, before[0])[: len(drafts)], before):
            scores, confidence = self.scores(state, token)
            scores[self.config.dspark_noise_token_id] = -torch.inf  # ours: what masks is never drafted
            logits.append(scores)
            confidences.append(torch.sigmoid(confidence))
        return torch.stack(logits), torch.stack(confidences)
