"""Which matrices a tensor consists of."""

from __future__ import annotations

import pytest
import torch

from fsdp2.optim.matrices.rules import MatrixRule

RULES = {
    "whole": (MatrixRule.whole(), (6, 4), [(6, 4)]),
    "rows": (MatrixRule.rows(4, 1, 1), (6, 4), [(4, 4), (1, 4), (1, 4)]),
    "columns": (MatrixRule.columns(3, 1), (6, 4), [(6, 3), (6, 1)]),
    "heads": (MatrixRule.heads(3), (6, 4), [(2, 4)] * 3),
    "batch": (MatrixRule.batch(), (2, 6, 4), [(6, 4)] * 2),
    "batch of rows": (MatrixRule.batch(MatrixRule.rows(2, 4)), (2, 6, 4), [(2, 4), (4, 4)] * 2),
    "batch of two dims": (MatrixRule.batch(), (2, 3, 6, 4), [(6, 4)] * 6),
    "flattened": (MatrixRule.flattened(), (5, 2, 3, 3), [(5, 18)]),
    "not whole": (MatrixRule.whole(), (2, 6, 4), None),
    "not these rows": (MatrixRule.rows(4, 1), (6, 4), None),
    "no rows": (MatrixRule("rows", (6, 0)), (6, 4), None),
    "not these columns": (MatrixRule.columns(3), (6, 4), None),
    "not these heads": (MatrixRule.heads(4), (6, 4), None),
    "not a batch": (MatrixRule.batch(), (6, 4), None),
    "not a batch of these rows": (MatrixRule.batch(MatrixRule.rows(4)), (2, 6, 4), None),
    "not flattened": (MatrixRule.flattened(), (6,), None),
}


@pytest.mark.parametrize("case", RULES)
def test_a_rule_divides_a_tensor_into_matrices_or_says_what_it_expects(case: str) -> None:
    rule, shape, expected = RULES[case]
    if expected is None:
        with pytest.raises(ValueError, match=r"has shape \(.*\), but MatrixRule\.\w+ expects "):
            rule.boxes(shape)
        return
    boxes = rule.boxes(shape)
    assert [(each.rows, each.columns) for each in boxes] == expected
    covered = torch.zeros(shape, dtype=torch.int64)
    for each in boxes:
        covered[tuple(slice(*interval) for interval in each.box)] += 1
    assert torch.equal(covered, torch.ones_like(covered))
    assert len({each.label for each in boxes}) == len(boxes)
