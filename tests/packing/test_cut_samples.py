from __future__ import annotations

import numpy as np
import pytest

from streampack import IGNORE_INDEX, Sample
from streampack.packing.cut_samples import with_eos
from tests.harness.samples import make_sample


@pytest.mark.parametrize("eos", [2, 2**31 - 1, 2**31, 2**53 + 1, 2**63 - 1])
def test_eos_may_be_any_int64(eos: int) -> None:
    ended = with_eos(Sample(ids := np.array([1, 2, 3], np.int32), ids), eos)
    assert ended.tokens.tolist() == ended.labels.tolist() == [1, 2, eos]


@pytest.mark.parametrize(
    ("labels", "expected"), [([1, 2, 3], [1, 2, 9]), ([1, 2, IGNORE_INDEX], [1, 2, IGNORE_INDEX])]
)
def test_eos_replaces_the_last_token_and_its_label_where_trained(
    labels: list[int], expected: list[int]
) -> None:
    before = make_sample([1, 2, 3], labels)
    after = with_eos(before, 9)
    assert (after.tokens.tolist(), after.labels.tolist()) == ([1, 2, 9], expected)
    assert (before.tokens.tolist(), before.labels.tolist()) == ([1, 2, 3], labels), "the row keeps its own"


def test_parts_of_a_wholly_trained_sample_share_one_array() -> None:
    """Functions take a shared array for a sign that every token is trained."""
    assert (part := make_sample([1, 2, 3]).cut(1, 3)).labels is part.tokens
    assert make_sample([1, 2, 3], [-100, 2, 3]).cut(1, 3).labels.tolist() == [2, 3]
