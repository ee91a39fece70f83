import pytest
from tests.data_plane import test_transfer_queue as t
from tests.data_plane.test_transfer_queue import plane, partition
@pytest.mark.parametrize("check",[False,True,False])
def test_x(plane,partition,queue_config,monkeypatch,check):
    from rollout_reassembler.data_plane.transfer_queue import rows
    if not check: monkeypatch.setattr(rows,"_owners",lambda p,k:[b"x"]*len(k))
    t.test_a_reader_among_clears_and_puts_never_gets_another_row(plane,partition,queue_config)
