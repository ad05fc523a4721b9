"""GGUF files as llama.cpp's converter writes them, by the package `gguf`: a small Llama and its tokenizer."""

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from .families import COMMON
from .tokenizers import ENDS, trained

NORMAL, CONTROL = 1, 3  # kinds of tokens
TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] }}{% if m['role'] == 'assistant' %}</s>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_OF_LAYER = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def chatting_llama(**fields: int) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """A random Llama with a byte-level tokenizer of as many tokens; `</s>` ends its texts. `fields` are of its
    configuration."""
    tokenizer = trained("bytes")
    tokenizer.chat_template = TEMPLATE
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    sizes = {"vocab_size": len(tokenizer), "intermediate_size": 48, "num_hidden_layers": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**COMMON, **sizes, **ends, **fields})).eval(), tokenizer


def write_gguf(
    path: Path,
    target: PreTrainedModel,
    tokenizer=None,
    quantized: str | None = None,
    architecture: str = "llama",
    **special: int,
) -> None:
    """Write a Llama with the rows of q and k in pairs, as llama.cpp's RoPE turns them.

    Args:
        path: The file.
        target: The Llama.
        tokenizer: A byte-level one, as of [`trained`]; none if left out.
        quantized: The type of all matrices whose rows have whole blocks, `"Q8_0"` for example; float32 if left out.
        architecture: What the file calls itself.
        **special: More fields about special tokens, by their names without `tokenizer.ggml.`.
    """
    gguf = pytest.importorskip("gguf")
    config, writer = target.config, gguf.GGUFWriter(str(path), architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    if tokenizer is not None:
        _write_tokenizer(writer, tokenizer)
    for name, token in special.items():
        add = writer.add_bool if isinstance(token, bool) else writer.add_uint32
        add(f"tokenizer.ggml.{name}", token)
    kind = quantized and gguf.GGMLQuantizationType[quantized]
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    for i in range(config.num_hidden_layers):
        names |= {f"model.layers.{i}.{theirs}": f"blk.{i}.{name}" for theirs, name in _OF_LAYER.items()}
    for theirs, name in names.items():
        tensor = target.get_parameter(f"{theirs}.weight").detach()
        if name.endswith(("attn_q", "attn_k")):
            halves = tensor.unflatten(0, (-1, 2, config.head_dim // 2))
            tensor = halves.transpose(1, 2).flatten(0, 2)
        values = tensor.contiguous().numpy()
        if kind and values.ndim == 2 and values.shape[1] % gguf.GGML_QUANT_SIZES[kind][0] == 0:
            writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(f"{name}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_tokenizer(writer, tokenizer) -> None:
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([CONTROL if token in ENDS else NORMAL for token in tokens])
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_chat_template(tokenizer.chat_template)
