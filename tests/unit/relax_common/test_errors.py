"""Errors on the wire, and the refusal of a peer that speaks another protocol."""

from __future__ import annotations

import base64
import urllib.parse

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


@pytest.mark.parametrize("letter", ["x", "%", "ü", "\n", "😀"])
def test_a_long_message_keeps_its_ends_and_fits_the_trailers_of_a_call(letter: str) -> None:
    """gRPC replaces an error with larger trailers by RESOURCE_EXHAUSTED, so the caller gets another error."""
    sent = to_status(PlanLost(f"begin {letter * 100_000} end")).message
    assert sent.startswith(f"begin {letter}")
    assert sent.endswith(f"{letter} end")
    assert "bytes are left out" in sent
    assert len(urllib.parse.quote(sent, safe="")) + len(base64.b64encode(sent.encode())) < 8000
    whole = "a recipe with many faults, one line each; " * 60
    assert to_status(PlanLost(whole)).message == whole


def test_a_peer_of_another_protocol_is_refused_by_name() -> None:
    peer = make_identity(common_pb2.ROLE_QUEUE, "queue")
    check_protocol(peer)
    peer.protocol_version += 1
    with pytest.raises(Precondition, match="install the same release on both"):
        check_protocol(peer)
