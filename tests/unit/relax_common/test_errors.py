"""Errors on the wire, and the refusal of a peer that speaks another protocol."""

from __future__ import annotations

import pytest

from relax.common.v1 import common_pb2
from relax_common.errors import PlanLost, Precondition, RelaxError, StaleTerm, to_status
from relax_common.rpc.registration import check_protocol, make_identity


def test_an_error_carries_reason_and_details_in_its_status() -> None:
    status = to_status(PlanLost("step 3 is lost", details={"step": "3"}))
    assert (status.code, status.message) == (9, "step 3 is lost")
    assert b"PLAN_LOST" in status.details[0].value
    assert StaleTerm("x").reason == "STALE_TERM"
    assert RelaxError("x").reason == "INTERNAL"


def test_a_peer_of_another_protocol_is_refused_by_name() -> None:
    peer = make_identity(common_pb2.ROLE_QUEUE, "queue")
    check_protocol(peer)
    peer.protocol_version += 1
    with pytest.raises(Precondition, match="install the same release on both"):
        check_protocol(peer)
