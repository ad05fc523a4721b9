"""A DeepSeek-V4 as remote code would ship it, small: DeepSeek's module layout, bare `hc_head_*` parameters on the top
module, streams `[batch, seq, hc_mult, hidden_size]`, and a cache that is none of transformers' own.

Attention is plain causal attention with one key-value head, as V4's without compression; what is tested with it is the
layout, not the architecture.
"""

import torch
from torch import nn
from torch.nn import functional as F
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast


class RemoteV4Config(PreTrainedConfig):
    model_type = "remote_v4"

    def __init__(
        self,
        vocab_size=64,
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        head_dim=16,
        intermediate_size=96,
        hc_mult=4,
        hc_eps=1e-6,
        rms_norm_eps=1e-6,
        max_position_embeddings=1024,
        **kwargs,
    ):
        self.vocab_size, self.hidden_size, self.num_hidden_layers = vocab_size, hidden_size, num_hidden_layers
        self.num_attention_heads, self.head_dim, self.intermediate_size = (
            num_attention_heads,
            head_dim,
            intermediate_size,
        )
        self.hc_mult, self.hc_eps, self.rms_norm_eps = hc_mult, hc_eps, rms_norm_eps
        self.max_position_embeddings = max_position_embeddings
        super().__init__(**kwargs)


class RemoteV4Cache:
    """Keys of every layer, `[batch, seq, head_dim]`, and what transformers and a drafter ask of a cache."""

    is_compileable = False
    is_croppable = True
    is_linear = (False,)  # of any layer, which transformers asks from 5.24 on before it goes on with a cache

    def __init__(self):
        self.keys = {}

    def update(self, layer, keys):
        self.keys[layer] = torch.cat([self.keys[layer], keys], dim=1) if layer in self.keys else keys
        return self.keys[layer]

    def get_seq_length(self, layer_idx=0):
        return self.keys[layer_idx].shape[1] if layer_idx in self.keys else 0

    def activate_past_recording(self):
        pass

    def crop(self, tokens_to_remove):
        if tokens_to_remove:
            self.keys = {layer: keys[:, :tokens_to_remove] for layer, keys in self.keys.items()}


class RMSNorm(nn.Module):
    def __init__(self, dim, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x):
        y = x.float()
        return (self.weight * y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, index, config):
        super().__init__()
        self.index, self.heads, self.dim = index, config.num_attention_heads, config.head_dim
        self.wq = nn.Linear(config.hidden_size, self.heads * self.dim, bias=False)
        self.wkv = nn.Linear(config.hidden_size, self.dim, bias=False)
        self.wo = nn.Linear(self.heads * self.dim, config.hidden_size, bias=False)

    def forward(self, x, positions, cache):
        turn = positions[..., None] / 100 ** (torch.arange(0, self.dim, 2, device=x.device) / self.dim)
        queries = self._rotated(self.wq(x).unflatten(-1, (self.heads, self.dim)), turn[:, :, None])
        keys = self._rotated(self.wkv(x), turn)
        keys = keys if cache is None else cache.update(self.index, keys)
        past = keys.shape[1] - x.shape[1]
        seen = torch.ones(x.shape[1], keys.shape[1], dtype=torch.bool, device=x.device).tril(past)
        out = F.scaled_dot_product_attention(queries.transpose(1, 2), keys[:, None], keys[:, None], attn_mask=seen)
        return self.wo(out.transpose(1, 2).flatten(2))

    def _rotated(self, x, turn):
        even, odd = x[..., ::2], x[..., 1::2]
        turned = even * turn.cos() - odd * turn.sin(), even * turn.sin() + odd * turn.cos()
        return torch.stack(turned, dim=-1).flatten(-2)


class Block(nn.Module):
    def __init__(self, index, config):
        super().__init__()
        width, paths = config.hidden_size, config.hc_mult
        self.paths, self.eps = paths, config.rms_norm_eps
        self.attn = Attention(index, config)
        self.ffn = nn.Sequential(
            nn.Linear(width, config.intermediate_size), nn.SiLU(), nn.Linear(config.intermediate_size, width)
        )
        self.attn_norm, self.ffn_norm = RMSNorm(width, self.eps), RMSNorm(width, self.eps)
        for part in ("attn", "ffn"):
            setattr(self, f"hc_{part}_fn", nn.Parameter(torch.empty((2 + paths) * paths, paths * width)))
            setattr(self, f"hc_{part}_base", nn.Parameter(torch.empty((2 + paths) * paths)))
            setattr(self, f"hc_{part}_scale", nn.Parameter(torch.empty(3)))

    def _mixes(self, h, part):
        flat = h.flatten(2).float()
        mixes = F.linear(flat, getattr(self, f"hc_{part}_fn")) * torch.rsqrt(flat.square().mean(-1, True) + self.eps)
        scale, base = getattr(self, f"hc_{part}_scale"), getattr(self, f"hc_{part}_base")
        m = self.paths
        pre, post, comb = (
            x * scale[i] + b for i, (x, b) in enumerate(zip(mixes.split([m, m, m * m], -1), base.split([m, m, m * m])))
        )
        return pre.sigmoid(), 2 * post.sigmoid(), comb.unflatten(-1, (m, m)).softmax(-1)

    def _around(self, h, part, inner):
        pre, post, comb = self._mixes(h, part)
        out = inner((pre.unsqueeze(-1) * h).sum(2))
        return post.unsqueeze(-1) * out.unsqueeze(2) + comb @ h

    def forward(self, h, positions, cache):
        h = self._around(h, "attn", lambda x: self.attn(self.attn_norm(x), positions, cache))
        return self._around(h, "ffn", lambda x: self.ffn(self.ffn_norm(x)))


class RemoteV4ForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = RemoteV4Config
    base_model_prefix = ""
    _no_split_modules = ["Block"]

    def __init__(self, config):
        super().__init__(config)
        paths, width = config.hc_mult, config.hidden_size
        self.embed = nn.Embedding(config.vocab_size, width)
        self.layers = nn.ModuleList([Block(i, config) for i in range(config.num_hidden_layers)])
        self.norm = RMSNorm(width, config.rms_norm_eps)
        self.head = nn.Linear(width, config.vocab_size, bias=False)
        self.hc_head_fn = nn.Parameter(torch.empty(paths, paths * width))
        self.hc_head_base = nn.Parameter(torch.empty(paths))
        self.hc_head_scale = nn.Parameter(torch.empty(1))
        self.post_init()

    def _init_weights(self, module):
        super()._init_weights(module)
        for name, value in module.named_parameters(recurse=False):
            if name.startswith("hc_"):
                nn.init.normal_(value, mean=1.0 if name.endswith("scale") else 0.0, std=0.1)

    def get_input_embeddings(self):
        return self.embed

    def get_output_embeddings(self):
        return self.head

    def prepare_inputs_for_generation(self, input_ids, past_key_values=None, attention_mask=None, **kwargs):
        # The cache that `generate` prepares is not this model's: it is left out, and a new one made on first use.
        cache = past_key_values if isinstance(past_key_values, RemoteV4Cache) else RemoteV4Cache()
        new = input_ids[:, cache.get_seq_length() :]
        positions = torch.arange(cache.get_seq_length(), input_ids.shape[1], device=input_ids.device)[None]
        return {"input_ids": new, "position_ids": positions, "past_key_values": cache, "use_cache": True}

    def forward(self, input_ids, position_ids=None, past_key_values=None, use_cache=False, logits_to_keep=0, **kwargs):
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        h = self.embed(input_ids).unsqueeze(2).repeat(1, 1, self.config.hc_mult, 1)
        for layer in self.layers:
            h = layer(h, position_ids, past_key_values)
        hidden = self.norm(self.hc_head(h, self.hc_head_fn, self.hc_head_scale, self.hc_head_base))
        return CausalLMOutputWithPast(logits=self.head(hidden[:, -logits_to_keep:]), past_key_values=past_key_values)

    def hc_head(self, x, fn, scale, base):
        flat = x.flatten(2).float()
        mixes = F.linear(flat, fn) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + self.config.rms_norm_eps)
        pre = torch.sigmoid(mixes * scale + base) + self.config.hc_eps
        return (pre.unsqueeze(-1) * x).sum(dim=2).to(x.dtype)
