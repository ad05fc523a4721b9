import pytest

from hf_hyperdflash import HyperDFlashConfig


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"reducer": "mean"}, "mean"),
        ({"block_size": 1}, "block_size"),
        ({"mask_token_id": 129280}, "outside the vocabulary"),
        ({"mask_token_id": -1}, "outside the vocabulary"),
        ({"num_attention_heads": 6, "num_key_value_heads": 4}, "multiple"),
        ({"head_dim": 7}, "even"),
        ({"hidden_size": 0}, "at least 1"),
        ({"sliding_window": 0}, "sliding_window"),
        ({"hidden_size": 64, "target_hidden_size": 128}, "equal widths"),
        ({"hidden_size": 64, "target_hidden_size": 128, "reducer": "hybrid"}, "equal widths"),
        ({"target_layer_ids": []}, "target_layer_ids"),
        ({"target_layer_ids": [2, 1]}, "ascending"),
        ({"target_layer_ids": [-1, 2]}, "ascending"),
        ({"target_layer_ids": [1, 1]}, "each once"),
        ({"target_layer_ids": [-2, -1]}, "layer numbers from 0"),
    ],
)
def test_bad_fields_name_the_value_and_the_fix(fields, message):
    with pytest.raises(ValueError, match=message):
        HyperDFlashConfig(**fields)


def test_round_trip(tmp_path):
    config = HyperDFlashConfig(hidden_size=64, target_hidden_size=128, reducer="fc", sliding_window=32, block_size=5)
    config.save_pretrained(tmp_path)
    again = HyperDFlashConfig.from_pretrained(tmp_path)
    assert again.to_dict() == config.to_dict()
    assert again.max_draft_tokens == 4
    assert again.target_layer_ids == [-1] and again.num_paths == 4  # the paper's source


def test_vllms_key_is_not_used():
    # vLLM multiplies its draft buffer by a *draft* config's top-level `hc_mult` when the target is V4.
    assert "hc_mult" not in HyperDFlashConfig().to_dict()
