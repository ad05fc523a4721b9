"""The conditioning feature of whole documents, read from the target now."""

import torch

from hf_hyperdflash.training.features.capture import compute_residual

from ..helpers.training import packed_rows, run_alone


def test_packed_rows_are_read_document_by_document(target):
    rows = packed_rows([(9, 12), (1, 3, 17), (21,)])
    residual = compute_residual(
        target, *(torch.tensor([row[c] for row in rows]) for c in ("input_ids", "position_ids"))
    )
    for states, row in zip(residual, rows):
        torch.testing.assert_close(states, run_alone(target, row), atol=1e-5, rtol=1e-4)
    run_together = compute_residual(target, torch.tensor([rows[0]["input_ids"]]), torch.arange(21).unsqueeze(0))
    assert (run_together[0, 9:] - residual[0, 9:]).abs().max() > 0.01


def test_padding_on_the_right_changes_nothing(target):
    rows = packed_rows([(9,), (5, 12), (17,)])
    for chosen in (rows, [rows[0], rows[2]]):  # packed and not
        ids = torch.tensor([row["input_ids"] + [0] * (17 - len(row["input_ids"])) for row in chosen])
        positions = torch.tensor([(row["position_ids"] + list(range(9, 17)))[:17] for row in chosen])
        for states, row in zip(compute_residual(target, ids, positions), chosen):
            unpadded = run_alone(target, row)
            torch.testing.assert_close(states[: len(unpadded)], unpadded, atol=1e-5, rtol=1e-4)
