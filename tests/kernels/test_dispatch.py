import numpy as np
import pytest
import reference

from colibri_cli import InvalidInput, _core


@pytest.mark.parametrize("n_slots", [0, 1, 2, 7, 8, 9, 100])
@pytest.mark.parametrize("n_experts", [1, 2, 8, 17])
def test_slots_are_grouped_by_expert_and_stay_in_order(n_slots, n_experts):
    ids = reference.integers(n_slots, -1, n_experts, n_slots)
    offsets, order = _core.dispatch(ids, n_experts)
    assert (offsets.tolist(), order.tolist()) == reference.dispatch(ids.tolist(), n_experts)


def test_skipped_slots_alone_leave_every_expert_empty():
    offsets, order = _core.dispatch(np.full(5, -1, np.int32), 3)
    assert offsets.tolist() == [0, 0, 0, 0]
    assert order.tolist() == []


@pytest.mark.parametrize("bad", [-2, 3, 2**31 - 1, -(2**31)])
def test_an_id_out_of_range_is_refused(bad):
    with pytest.raises(InvalidInput, match=r"ids\[1\]"):
        _core.dispatch(np.array([0, bad], np.int32), 3)
