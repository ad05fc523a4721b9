"""DeepSeek-V4's DSpark drafter, slot by slot in float64, from a checkpoint's `mtp.*` tensors and nothing else.

What is written out here was read in descriptions of the `inference/model.py` of DeepSeek-V4-Flash-DSpark (lines 744 to
932); vLLM's `models/deepseek_v4/nvidia/dspark.py` and the list of tensors in DeepSeek-V4-Flash-0731 agree with it.
"""

from __future__ import annotations

import torch

from .oracle_deepseek_v4 import NaiveBlock


class NaiveDSpark:
    """Args:
    tensors: The checkpoint's `mtp.*`.
    config: The checkpoint's, with its `dspark_*` fields.
    embed, head: The target's weights, `[vocab_size, hidden_size]`.
    """

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

    def draft(self, residual, positions, anchor, count, choose=torch.argmax):
        """Tokens, logits `[count, vocab_size]` and confidences (before the sigmoid) `[count]`, left to right."""
        tokens, logits, confidences, token = [], [], [], anchor
        for state in self.states(residual, positions, anchor)[:count]:
            scores, confidence = self.scores(state, token)
            scores[self.config.dspark_noise_token_id] = -torch.inf  # ours: what masks is never drafted
            token = int(choose(scores))
            tokens.append(token)
            logits.append(scores)
            confidences.append(confidence)
        return tokens, torch.stack(logits), torch.stack(confidences)
