"""MTP heads of families whose tensors transformers drops, an entry at a time and in float64, from the tensors that
their publishers release and nothing else.

Read for what is written out here: NVIDIA's NeMo Automodel (`nemotron_v3/mtp.py`, `qwen3_5/model.py`), Baidu's
FastDeploy (`ernie4_5_mtp.py`), Meituan's head in SGLang (`longcat_flash_nextn.py`), and vLLM's `*_mtp.py` beside each
and of EXAONE, GLM, Hunyuan and Ling. All heads read the target's state after its final norm, and hand on what they
norm for the LM head; GLM's do so in transformers and SGLang, while vLLM's hand on what is before that norm. ERNIE's
has no norm for that and takes the target's, as in FastDeploy; vLLM leaves it out.
"""

from __future__ import annotations

import math

import torch


class NaiveHead:
    """A head whose decoder layer has attention and an MLP, each behind a norm.

    Args:
        tensors: By the publisher's names.
        config: The target's text configuration.
        target: For its embedding, its LM head and its final norm.
    """

    layer = "mtp.layers.0."  # before the names of the decoder layer's tensors
    fusion = {
        "embedding": "mtp.pre_fc_norm_embedding.weight",
        "hidden": "mtp.pre_fc_norm_hidden.weight",
        "projection": "mtp.fc.weight",
        "out": "mtp.norm.weight",
    }
    centre = 0.0  # what is added to a norm's weight
    window = 2**20  # entries that one sees, itself included

    def __init__(self, tensors, config, target):
        self.w = {name: tensor.double() for name, tensor in tensors.items()}
        self.config = config
        self.embed = target.get_input_embeddings().weight.detach().double()
        self.head = target.get_output_embeddings().weight.detach().double()
        trunk = target.get_decoder()
        self.final = (trunk.norm_f if hasattr(trunk, "norm_f") else trunk.norm).weight.detach().double()
        eps = [getattr(config, name, None) for name in ("rms_norm_eps", "layer_norm_epsilon")]
        self.eps = next(each for each in eps if each is not None)
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads

    def norm(self, x, weight, eps=None):
        weight = self.w[weight] if isinstance(weight, str) else weight
        return x / torch.sqrt((x * x).mean() + (self.eps if eps is None else eps)) * (weight + self.centre)

    def linear(self, x, name):
        bias = self.w.get(f"{name}.bias")
        return self.w[f"{name}.weight"] @ x + (0.0 if bias is None else bias)

    def logits(self, states, ids, path):
        """The logits after each token of a path that follows a text, `[1 + tokens, vocabulary]`.

        Args:
            states: The target's, after its final norm, of the text without its last token, `[seq, hidden_size]`.
            ids: The text.
            path: The tokens.
        """
        self.seen, made = [], []
        for position, (state, token) in enumerate(zip(states.double(), ids[1:])):
            state = self.entry(state, token, position)
        for step, token in enumerate(path):
            made.append(self.head @ state)
            state = self.entry(state, token, len(states) + step)
        return torch.stack([*made, self.head @ state])

    def entry(self, state, token, position):
        """What an entry hands on: to the LM head, and in place of the target's state to the next entry."""
        embedding = self.norm(self.embed[token], self.fusion["embedding"])
        fused = self.w[self.fusion["projection"]] @ torch.cat([embedding, self.norm(state, self.fusion["hidden"])])
        return self.norm(self.block(fused, position), self.out)

    @property
    def out(self):
        return self.fusion["out"]

    def block(self, x, position):
        x = x + self.attention(self.norm(x, self.layer + "input_layernorm.weight"), position)
        return x + self.mlp(self.norm(x, self.layer + "post_attention_layernorm.weight"))

    # Attention over the entries so far, a head at a time

    @property
    def attn(self):
        return self.layer + "self_attn."

    def rotated(self, x, position):
        """Of a head: its first channels turn, the first half of them with the second."""
        rope = self.config.rope_parameters
        dim = int(len(x) * rope.get("partial_rotary_factor", 1.0))
        turned, half = x.clone(), dim // 2
        for i in range(half):
            angle = position * rope["rope_theta"] ** (-2 * i / dim)
            a, b = x[i], x[half + i]
            turned[i], turned[half + i] = (
                a * math.cos(angle) - b * math.sin(angle),
                a * math.sin(angle) + b * math.cos(angle),
            )
        return turned

    def head_norm(self, x, name):
        return x

    def gates(self, queries):
        """Queries, and what each head's output is multiplied with."""
        return queries, None

    def attention(self, x, position):
        config, dim = self.config, self.head_dim
        queries, gates = self.gates(self.linear(x, self.attn + "q_proj").view(config.num_attention_heads, -1))
        keys = self.linear(x, self.attn + "k_proj").view(-1, dim)
        values = self.linear(x, self.attn + "v_proj").view(-1, dim)
        keys = torch.stack([self.rotated(self.head_norm(key, "k_norm"), position) for key in keys])
        self.seen.append((keys, values))
        heads = []
        for i, query in enumerate(queries):
            query = self.rotated(self.head_norm(query, "q_norm"), position)
            group = i * config.num_key_value_heads // config.num_attention_heads
            seen = self.seen[-self.window :]
            weights = torch.softmax(torch.stack([query @ keys[group] / math.sqrt(dim) for keys, _ in seen]), dim=0)
            heads.append(sum(weight * values[group] for weight, (_, values) in zip(weights, seen)))
        out = torch.cat(heads)
        return self.linear(out if gates is None else out * torch.sigmoid(gates.flatten()), self.attn + "o_proj")

    # The MLP

    @property
    def ffn(self):
        return self.layer + "mlp."

    def swiglu(self, x, place):
        gate = self.linear(x, place + "gate_proj")
        return self.linear(gate * torch.sigmoid(gate) * self.linear(x, place + "up_proj"), place + "down_proj")

    def mlp(self, x):
        return self.swiglu(x, self.ffn)


class NaiveQwen(NaiveHead):
    """Qwen3-Next's and Qwen3.5's: attention with normed heads and a gate, over all entries whatever the target's own
    layers are."""

    centre = 1.0

    def head_norm(self, x, name):
        return self.norm(x, f"{self.attn}{name}.weight")

    def gates(self, queries):
        return queries.chunk(2, dim=-1)


class NaiveQwenMoe(NaiveQwen):
    """With experts, of which some are chosen, and one for all behind a gate."""

    def mlp(self, x):
        scores = torch.softmax(self.w[self.ffn + "gate.weight"] @ x, dim=0)
        best = scores.topk(self.config.num_experts_per_tok)
        shares = best.values / best.values.sum()
        out = sum(share * self.swiglu(x, f"{self.ffn}experts.{i}.") for share, i in zip(shares, best.indices.tolist()))
        return out + torch.sigmoid(self.w[self.ffn + "shared_expert_gate.weight"] @ x) * self.swiglu(
            x, self.ffn + "shared_expert."
        )


class NaiveErnie(NaiveHead):
    """ERNIE 4.5's: a layer with one MLP, which the target's final norm is behind."""

    layer = "model.mtp_block.0."
    fusion = {
        "embedding": "model.mtp_emb_norm.0.weight",
        "hidden": "model.mtp_hidden_norm.0.weight",
        "projection": "model.mtp_linear_proj.0.weight",
    }

    @property
    def out(self):
        return self.final

    def rotated(self, x, position):
        """Consecutive channels turn together."""
        return rotated_pairs(x, position, self.config.rope_parameters["rope_theta"])


def rotated_pairs(x, position, theta):
    turned = x.clone()
    for i in range(0, len(x), 2):
        angle = position * theta ** (-i / len(x))
        turned[i] = x[i] * math.cos(angle) - x[i + 1] * math.sin(angle)
        turned[i + 1] = x[i] * math.sin(angle) + x[i + 1] * math.cos(angle)
    return turned


class NaiveLatent(NaiveHead):
    """With a multi-head latent attention."""

    last_projection = "o_proj"

    def scaled(self, latent):
        return latent

    def attention(self, x, position):
        c, place = self.config, self.attn
        theta, dim = c.rope_parameters["rope_theta"], c.qk_nope_head_dim + c.qk_rope_head_dim
        latent = self.norm(self.linear(x, place + "q_a_proj"), place + "q_a_layernorm.weight", eps=1e-6)
        queries = self.scaled(self.linear(latent, place + "q_b_proj")).view(c.num_attention_heads, dim)
        latent, key = self.linear(x, place + "kv_a_proj_with_mqa").split([c.kv_lora_rank, c.qk_rope_head_dim])
        latent = self.scaled(self.norm(latent, place + "kv_a_layernorm.weight", eps=1e-6))
        known = self.linear(latent, place + "kv_b_proj").view(c.num_attention_heads, -1)
        self.seen.append((known, rotated_pairs(key, position, theta)))
        gates, heads = self.gates_of_heads(x), []
        for i, query in enumerate(queries):
            plain, turned = query.split([c.qk_nope_head_dim, c.qk_rope_head_dim])
            turned = rotated_pairs(turned, position, theta)
            scores = [plain @ known[i, : c.qk_nope_head_dim] + turned @ key for known, key in self.seen]
            weights = torch.softmax(torch.stack(scores) / math.sqrt(dim), dim=0)
            read = sum(w * known[i, c.qk_nope_head_dim :] for w, (known, _) in zip(weights, self.seen))
            heads.append(gates[i] * read)
        return self.linear(torch.cat(heads), place + self.last_projection)

    def gates_of_heads(self, x):
        return torch.ones(self.config.num_attention_heads)


class NaiveLongcat(NaiveLatent):
    """LongCat-Flash's: one multi-head latent attention, whose latents are scaled, and one MLP."""

    layer = "model.mtp.layers.0."
    fusion = {
        "embedding": "model.mtp.layers.0.enorm.m.weight",
        "hidden": "model.mtp.layers.0.hnorm.m.weight",
        "projection": "model.mtp.layers.0.eh_proj.weight",
        "out": "model.mtp.norm.weight",
    }

    @property
    def ffn(self):
        return self.layer + "transformer_layer.mlp."

    def scaled(self, latent):
        assert self.config.q_lora_rank == self.config.kv_lora_rank
        return latent * math.sqrt(self.config.hidden_size / self.config.kv_lora_rank)


class NaiveBehind(NaiveHead):
    """With DeepSeek-V3's names: a layer behind the target's last one."""

    before, last = "model.", "shared_head.norm"

    def __init__(self, tensors, config, target):
        self.layer = f"{self.before}layers.{config.num_hidden_layers}."
        names = {"embedding": "enorm", "hidden": "hnorm", "projection": "eh_proj", "out": self.last}
        self.fusion = {part: f"{self.layer}{name}.weight" for part, name in names.items()}
        super().__init__(tensors, config, target)


class NaiveChosenExperts(NaiveHead):
    """With experts that are chosen by a biased score, from the best groups of them, and one for all."""

    gate, bias, shared = "gate.weight", "gate.e_score_correction_bias", "shared_experts."

    @property
    def scale(self):
        return self.config.routed_scaling_factor

    def mlp(self, x):
        c, groups = self.config, getattr(self.config, "n_group", 1)
        scores = torch.sigmoid(self.w[self.ffn + self.gate] @ x)
        grouped = (scores + self.w[self.ffn + self.bias]).view(groups, -1)
        best = grouped.topk(2).values.sum(dim=-1).topk(getattr(c, "topk_group", 1)).indices
        allowed = torch.full_like(grouped, -math.inf)
        allowed[best] = grouped[best]
        chosen = allowed.flatten().topk(c.num_experts_per_tok).indices
        shares = scores[chosen] / scores[chosen].sum() * self.scale
        out = sum(s * self.swiglu(x, f"{self.ffn}experts.{i}.") for s, i in zip(shares, chosen.tolist()))
        return out + self.swiglu(x, self.ffn + self.shared)


class NaiveGlmLite(NaiveChosenExperts, NaiveLatent, NaiveBehind):
    """GLM-4.7-Flash's."""


class NaiveKimi(NaiveGlmLite):
    """Kimi-K2.5's: DeepSeek-V3's behind another prefix."""

    before = "language_model.model."


class NaiveLing(NaiveChosenExperts, NaiveLatent, NaiveBehind):
    """Ling 3's: what each head of its attention reads has a gate."""

    last, last_projection, bias = "final_layernorm", "dense", "gate.expert_bias"

    @property
    def attn(self):
        return self.layer + "attention."

    def gates_of_heads(self, x):
        return torch.sigmoid(self.linear(x, self.attn + "g_proj"))


class NaiveHunyuan(NaiveChosenExperts, NaiveBehind):
    """Hunyuan V3's: attention with normed heads."""

    last = "final_layernorm"
    gate, bias, shared = "router.gate.weight", "expert_bias", "shared_mlp."

    @property
    def scale(self):
        return self.config.router_scaling_factor

    def head_norm(self, x, name):
        return self.norm(x, f"{self.attn}{name}.weight")


class NaiveGlmOcr(NaiveBehind):
    """GLM-OCR's: norms before and behind attention and MLP, rotary positions of consecutive channels."""

    before = "model.language_model."

    def rotated(self, x, position):
        return rotated_pairs(x, position, self.config.rope_parameters["rope_theta"])

    def block(self, x, position):
        read = self.attention(self.norm(x, self.layer + "input_layernorm.weight"), position)
        x = x + self.norm(read, self.layer + "post_self_attn_layernorm.weight")
        made = self.mlp(self.norm(x, self.layer + "post_attention_layernorm.weight"))
        return x + self.norm(made, self.layer + "post_mlp_layernorm.weight")

    def mlp(self, x):
        gate, up = self.linear(x, self.ffn + "gate_up_proj").chunk(2)
        return self.linear(gate * torch.sigmoid(gate) * up, self.ffn + "down_proj")


class NaiveExaoneMoe(NaiveHead):
    """K-EXAONE's: attention with normed heads, the window of the target's first layer and no experts."""

    def __init__(self, tensors, config, target):
        super().__init__(tensors, config, target)
        kind = (getattr(config, "mtp_layer_types", None) or config.layer_types)[0]
        self.window = config.sliding_window if kind == "sliding_attention" else self.window

    def head_norm(self, x, name):
        return self.norm(x, f"{self.attn}{name}.weight")


class NaiveExaone4(NaiveExaoneMoe):
    """EXAONE 4.5's: norms behind attention and MLP alone."""

    def block(self, x, position):
        x = x + self.norm(self.attention(x, position), self.layer + "post_attention_layernorm.weight")
        return x + self.norm(self.mlp(x), self.layer + "post_feedforward_layernorm.weight")


class NaiveNemotronH(NaiveHead):
    """Nemotron-H's: an attention layer without positions, then a layer of experts, each behind one norm."""

    fusion = {
        "embedding": "mtp.layers.0.enorm.weight",
        "hidden": "mtp.layers.0.hnorm.weight",
        "projection": "mtp.layers.0.eh_proj.weight",
        "out": "mtp.layers.1.final_layernorm.weight",
    }
    attn = "mtp.layers.0.mixer."

    def rotated(self, x, position):
        return x

    def block(self, x, position):
        x = x + self.attention(self.norm(x, "mtp.layers.0.norm.weight"), position)
        return x + self.mlp(self.norm(x, "mtp.layers.1.norm.weight"))

    def squared(self, x, place):
        return self.linear(torch.relu(self.linear(x, place + "up_proj")) ** 2, place + "down_proj")

    def mlp(self, x):
        c, place = self.config, "mtp.layers.1.mixer."
        scores = torch.sigmoid(self.w[place + "gate.weight"] @ x)
        chosen = (scores + self.w[place + "gate.e_score_correction_bias"]).topk(c.num_experts_per_tok).indices
        shares = scores[chosen] / scores[chosen].sum() * c.routed_scaling_factor
        inner = x if c.moe_latent_size is None else self.linear(x, place + "fc1_latent_proj")
        out = sum(s * self.squared(inner, f"{place}experts.{i}.") for s, i in zip(shares, chosen.tolist()))
        out = out if c.moe_latent_size is None else self.linear(out, place + "fc2_latent_proj")
        return out + self.squared(x, place + "shared_experts.")
