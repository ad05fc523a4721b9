"""Sequential heads and the confidence from their papers' formulas: one draft position and one token
of the vocabulary at a time, in float64, on a head's saved tensors alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

Weights = dict[str, np.ndarray]
# What a head makes of a state and of the token before, with its embedding: the state that the LM head reads, and what
# is added to the logits, [vocab or draft vocab].
Step = Callable[[np.ndarray, int, np.ndarray], tuple[np.ndarray, np.ndarray]]
EPSILON = 0.01  # large enough to be seen
FAR = 1e4


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def normed(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean() + EPSILON)


def each(rows: np.ndarray, x: np.ndarray) -> np.ndarray:
    return np.array([(row * x).sum() for row in rows])


def markov(weights: Weights) -> Step:
    """DSpark: logits_k = U_k + W1[x_{k-1}] W2."""

    def step(h: np.ndarray, token: int, embedded: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return h, each(weights["markov_w2.weight"], weights["markov_w1.weight"][token])

    return step


def gated_markov(weights: Weights) -> Step:
    """DSpark: sigma(W [h; e]) * e in the place of e = W1[x_{k-1}]."""

    def step(h: np.ndarray, token: int, embedded: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        e = weights["markov_w1.weight"][token]
        gate = sigmoid(each(weights["gate_proj.weight"], np.concatenate([h, e])) + weights["gate_proj.bias"])
        return h, each(weights["markov_w2.weight"], gate * e)

    return step


def recurrent(weights: Weights) -> Step:
    """DSpark: gate, candidate and output of [s_{k-1}; W1[x_{k-1}]; h_k]; s_{-1} = 0."""
    s = np.zeros(weights["markov_w1.weight"].shape[1])

    def step(h: np.ndarray, token: int, embedded: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        nonlocal s
        z = np.concatenate([s, weights["markov_w1.weight"][token], h])
        joint = each(weights["joint_proj.weight"], z) + weights["joint_proj.bias"]
        gate, candidate, output = (joint[i * len(s) : (i + 1) * len(s)] for i in range(3))
        s = sigmoid(gate) * s + (1 - sigmoid(gate)) * np.tanh(candidate)
        return h, each(weights["markov_w2.weight"], np.tanh(output))

    return step


def gru(weights: Weights) -> Step:
    """Domino: s_k = GRU(e(x_{k-1}), s_{k-1}) as PyTorch defines it, the table times silu(W [h_k; s_k]); the first
    draft stays the block's own."""
    s, count = np.zeros(weights["state_proj.weight"].shape[1]), 0

    def step(h: np.ndarray, token: int, embedded: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        nonlocal s, count
        xr, xz, xn = np.split(each(weights["input_proj.weight"], embedded), 3)
        sr, sz, sn = np.split(each(weights["state_proj.weight"], s), 3)
        r, z = sigmoid(xr + sr), sigmoid(xz + sz)
        s, count = (1 - z) * np.tanh(xn + r * sn) + z * s, count + 1
        v = each(weights["hidden_proj.weight"], np.concatenate([h, s]))
        return h, each(weights["out_proj.weight"], v * sigmoid(v)) * (count > 1)

    return step


def selector(weights: Weights) -> Step:
    """DFlash 2: score(b) = U_k(b) + <A[x_{k-1}] * (P h_k), B[b]>."""

    def step(h: np.ndarray, token: int, embedded: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        projected = each(weights["hidden_projection.weight"], h)
        return h, each(weights["successor_codebook"], weights["predecessor_codebook"][token] * projected)

    return step


def state(weights: Weights) -> Step:
    """Ours: z_k = h_k + D (silu(g) * u), [g, u] = U [norm(h_k); norm(e(x_{k-1})); norm(z_{k-1})], z_{-1} = 0."""
    z = np.zeros(weights["down_proj.weight"].shape[0])

    def step(h: np.ndarray, token: int, embedded: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        nonlocal z
        up = each(weights["up_proj.weight"], np.concatenate([normed(h), normed(embedded), normed(z)]))
        g, u = up[: len(up) // 2], up[len(up) // 2 :]
        z = h + each(weights["down_proj.weight"], g * sigmoid(g) * u)
        return z, np.zeros(1)

    return step


ORACLES: dict[str, Callable[[Weights], Step]] = {
    "markov": markov,
    "gated_markov": gated_markov,
    "recurrent": recurrent,
    "gru": gru,
    "selector": selector,
    "state": state,
}


def logits(
    step: Step,
    hidden: np.ndarray,
    previous: list[int],
    embedded: np.ndarray,
    lm_head: Callable[[np.ndarray], np.ndarray],
    candidates: int,
) -> Iterator[np.ndarray]:
    """Of one block's drafts, `[vocab or draft vocab]` each. Where they are among the block's own best `candidates`
    tokens, the others stand far below: they are drawn only where a request leaves none of those."""
    for h, token, e in zip(hidden, previous, embedded):
        blind = lm_head(h)
        z, bias = step(h, token, e)
        scores = lm_head(z) + bias
        best = sorted(range(len(blind)), key=lambda b: -blind[b])[: candidates or len(blind)]
        yield np.array([scores[b] if b in best else blind[b] - FAR for b in range(len(blind))])


def remembered(kind: str, weights: Weights, token: int, embedded: np.ndarray) -> np.ndarray:
    """What a confidence reads of the token before."""
    if kind in ("gru", "state"):
        return normed(embedded)
    return weights["predecessor_codebook" if kind == "selector" else "markov_w1.weight"][token]


def confidence(weights: Weights, h: np.ndarray, remembered: np.ndarray | None, temperature: float = 1.0) -> float:
    """DSpark: c_k = sigma(w^T [h_k; W1[x_{k-1}]]), the logit divided by the position's temperature."""
    read = h if remembered is None else np.concatenate([h, remembered])
    logit = sum(a * b for a, b in zip(weights["proj.weight"][0], read)) + weights["proj.bias"][0]
    return float(sigmoid(logit / temperature))
