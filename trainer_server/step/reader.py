"""All ranks read a step together: rank 0 waits for the queue, then the others read the same chunk from its log (I7)."""

import json
from collections.abc import Callable

from relax_common.errors import DeadlineExceeded
from relax_queue.client import Loaded, QueueClient, StreamingLoader, Wanted
from trainer_server.rank_group import RankGroup
from trainer_server.status import RoleStatus

_TICK_SECONDS = 2.0
_CALL_SECONDS = 60.0


class RoleStopped(Exception):
    """The role was asked to end."""


class StepReader:
    """A loader that gives all ranks the same chunks. `open` and `next` are called on all ranks together."""

    def __init__(self, queue: QueueClient, wanted: Wanted, group: RankGroup, status: RoleStatus) -> None:
        self._loader = StreamingLoader(queue, wanted, lambda: status.term)
        self._group = group
        self._status = status

    def open(self, lineage: int, step: int) -> None:
        self._loader.open(lineage, step)

    def next(self, lineage: int, step: int, on_tick: Callable[[], None] = lambda: None) -> Loaded:
        """Waits as long as it takes, calling `on_tick` periodically. Raises RoleStopped, and Precondition PLAN_LOST."""
        while (loaded := self._poll(lineage, step)) is None:
            on_tick()
        return loaded

    def check_stop(self) -> None:
        """Raises RoleStopped on all ranks if the role was asked to end."""
        if self._group.share(lambda: b"1" if self._status.stop.is_set() else b"0") == b"1":
            raise RoleStopped

    def _poll(self, lineage: int, step: int) -> Loaded | None:
        held: list[Loaded] = []
        said = json.loads(self._group.share(lambda: self._wait_once(held)))
        if said.get("stop"):
            raise RoleStopped
        if "generation" not in said:
            return None
        generation = int(said["generation"])
        return self._group.agree(lambda: held[0] if held else self._same(lineage, step, generation))

    def _same(self, lineage: int, step: int, generation: int) -> Loaded:
        """Fetch the chunk that rank 0 has. If this rank fetched a plan that was lost since, it fetches again."""
        loaded = self._loader.next(_CALL_SECONDS)
        if loaded.plan.generation != generation:
            self._loader.open(lineage, step, generation)
            loaded = self._loader.next(_CALL_SECONDS)
        return loaded

    def _wait_once(self, held: list[Loaded]) -> bytes:
        if self._status.stop.is_set():
            return b'{"stop": true}'
        try:
            loaded = self._loader.next(_TICK_SECONDS)
        except DeadlineExceeded as error:
            self._status.enter("wait", error.missing)
            return b"{}"
        held.append(loaded)
        return json.dumps({"generation": loaded.plan.generation}).encode()
