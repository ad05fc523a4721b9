"""The layout of vllm-project/speculators for DFlash, DFlash 2 and DSpark. Its layer id i means the input of layer i,
so each id is one more than ours."""

from __future__ import annotations

from pathlib import Path

from ...drafters.blocks.configuration_hyperdflash import HyperDFlashConfig
from .lines import (
    DFLASH2,
    DRAFT_VOCABULARY,
    DSPARK,
    ROPE,
    SOFT_CAP,
    STREAMS,
    WINDOWS,
    is_dflash2,
    layers_read,
    read_windows,
    shape,
    vllm,
)
from .table import Entry, Fields, Given, Layout, always, inside, same, section
from .zlab import BLOCK_SIZE, rename

LAYERS, _ALGORITHM = "transformer_layer_config", "speculators_model_type"
_ARCHITECTURES = {"dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel", "dspark": "DSparkDraftModel"}
_HEADS = {"dflash2": DFLASH2, "dspark": DSPARK}
# What a missing field means, by algorithm.
_DEFAULTS: dict[str, Fields] = {
    "dflash": {"sample_from_anchor": False, "sliding_window_non_causal": False},
    "dflash2": {
        "sample_from_anchor": False, "sliding_window_non_causal": True, "conv_kernel_size": 2, "conv_group_size": 16,
        "selector_rank": 256, "selector_top_k": 16,
    },
    "dspark": {
        "sample_from_anchor": True, "sliding_window_non_causal": False, "markov_rank": 256,
        "markov_head_type": "vanilla", "enable_confidence_head": True, "confidence_head_with_markov": True,
    },
}  # fmt: skip


def _algorithm(config: HyperDFlashConfig) -> str:
    has_dsparks = DSPARK.write(config)["markov_rank"] or config.confidence_head
    return "dflash2" if is_dflash2(config) else "dspark" if has_dsparks else "dflash"


def _read_algorithm(given: Given) -> Fields:
    if (algorithm := str(given(_ALGORITHM))) not in _DEFAULTS:
        raise ValueError(f"{given.name} is a {algorithm!r} speculator, expected one of {', '.join(_DEFAULTS)}.")
    return {}


def _read_target(given: Given) -> Fields:
    verifier = section(given.top, "speculators_config", given.name).get("verifier") or {}
    return {"target_name_or_path": verifier.get("name_or_path") or ""}


def _write_method(config: HyperDFlashConfig) -> Fields:
    method = {
        "proposal_type": "greedy", "speculative_tokens": config.max_draft_tokens, "accept_tolerance": 0.0,
        "verifier_accept_k": 1,
    }  # fmt: skip
    return {
        "speculators_config": {
            "algorithm": _algorithm(config),
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"name_or_path": config.target_name_or_path or None, "architectures": []},
        }
    }


def _read_causal(given: Given) -> Fields:
    return {"causal_layers": "sliding" if read_windows(given) and not given("sliding_window_non_causal") else "none"}


def _read_heads(given: Given) -> Fields:
    heads = _HEADS[given(_ALGORITHM)].read(given) if given(_ALGORITHM) in _HEADS else {}
    if heads.get("sequential_head") == "recurrent" and not given("sample_from_anchor"):
        raise ValueError(
            f"{given.name} has an 'rnn' head and `sample_from_anchor` is false: its state begins at the anchor's "
            "slot, which drafts nothing, and that is not supported."
        )
    return heads


def served(config: HyperDFlashConfig, folder: Path) -> str:
    """Return the option with which vLLM serves the drafter, or why no engine does."""
    if is_dflash2(config):
        return "vLLM reads DFlash 2 in z-lab's layout."
    if config.sequential_head in ("gated_markov", "recurrent"):
        return f"No engine is known to serve a {config.sequential_head!r} head: vLLM knows 'markov' alone."
    command = vllm(config, folder, _algorithm(config))
    if config.sliding_window is None:
        return command
    window = f"vLLM counts the window of {config.sliding_window} from each slot, not the anchor: drafts may differ."
    return f"{command}\n{window}"


def _rename(name: str) -> str | None:
    # The target's, of its loss.
    return None if name in ("hc_head_fn", "hc_head_base", "hc_head_scale") else rename(name)


TARGET = Entry(("speculators_config",), _read_target, _write_method)
LAYOUT = Layout(
    fits=lambda fields: fields.get(_ALGORITHM, "eagle3") not in ("eagle3", "peagle"),
    config=HyperDFlashConfig,
    table=(
        always("architectures", lambda config: [_ARCHITECTURES[_algorithm(config)]]),
        Entry((_ALGORITHM,), _read_algorithm, lambda config: {_ALGORITHM: _algorithm(config)}),
        TARGET,
        *inside(LAYERS, shape(), ROPE),
        DRAFT_VOCABULARY._replace(  # DFlash 2 knows the whole one alone
            write=lambda config: {
                "draft_vocab_size": (0 if is_dflash2(config) else config.draft_vocab_size) or config.vocab_size
            }
        ),
        layers_read("aux_hidden_state_layer_ids", 1),
        BLOCK_SIZE,
        same("mask_token_id", "mask_token_id", is_needed=True),
        same("sample_from_anchor", "sample_from_anchor", missing=False),
        # vLLM makes every layer causal where this is false.
        Entry(
            ("sliding_window_non_causal",),
            _read_causal,
            lambda config: {"sliding_window_non_causal": config.causal_layers != "sliding"},
        ),
        SOFT_CAP,
        Entry(
            (*DFLASH2.names, *DSPARK.names),
            _read_heads,
            lambda config: _HEADS.get(_algorithm(config), Entry(())).write(config),
        ),
        STREAMS._replace(names=("target_hidden_size",)),
        WINDOWS,
        Entry(("final_logit_softcapping", "hc_mult"), is_of_layers=True),  # or there
    ),
    layers_in=LAYERS,
    defaults=lambda fields: _DEFAULTS.get(str(fields[_ALGORITHM]), {}),
    rename=_rename,
    served=served,
)
