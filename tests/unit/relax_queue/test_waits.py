"""What a wait was for reaches people once, not wrapped in the words of each wait around it."""

import asyncio
import threading
from typing import Any, cast

import pytest

from relax_common.errors import DeadlineExceeded, from_status, to_status
from relax_queue.broker.waits import Waits
from relax_queue.client import QueueClient, StreamingLoader, Wanted


class Queue:
    """The first call for a plan ends with what is missing; the second one stays open."""

    def __init__(self) -> None:
        self.calls = 0
        self.asked_again, self.let_go = threading.Event(), threading.Event()

    def get_plan(self, *args: Any) -> None:
        self.calls += 1
        if self.calls > 1:
            self.asked_again.set()
            self.let_go.wait(30)
        raise DeadlineExceeded("GetPlan of actor waited 1.7 s for groups", details={"missing": "groups"})


def test_I5_a_loader_names_what_the_queue_waits_for_and_not_the_wait() -> None:
    queue = Queue()
    loader = StreamingLoader(cast(QueueClient, queue), Wanted("actor", 0, own=(), shared=()), lambda: 1)
    loader.open(0, 0)
    assert queue.asked_again.wait(30)
    with pytest.raises(DeadlineExceeded) as late:
        loader.next(0.01)
    loader.close()
    queue.let_go.set()
    assert late.value.message == "waited 0.0 s for groups"
    assert late.value.missing == "groups"


def test_I5_what_a_call_missed_survives_the_way_to_its_caller() -> None:
    async def wait() -> None:
        await Waits("r").until("GetPlan", "actor", lambda: None, lambda: "groups of step 0", 0.0)

    with pytest.raises(DeadlineExceeded) as late:
        asyncio.run(wait())
    received = from_status(to_status(late.value))
    assert isinstance(received, DeadlineExceeded)
    assert received.message.endswith(" s for groups of step 0")
    assert received.missing == "groups of step 0"


def test_an_error_that_names_nothing_is_its_own_message() -> None:
    assert DeadlineExceeded("drain did not end").missing == "drain did not end"
