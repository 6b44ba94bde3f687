"""Puts: rows of a leased group, and how a group is completed. The payload itself is checked in `columns.py`."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from relax_common.errors import AlreadyExists, InvalidInput, Oversize
from relax_queue.rows.facts import RowFacts, SampleFacts
from relax_queue.rules import events as ev
from relax_queue.rules.group import Group
from relax_queue.rules.leases import leased
from relax_queue.rules.staleness import TOO_STALE, mask
from relax_queue.rules.state import RunState
from relax_queue.rules.transaction import Decision, fence, requeue, stored_answer

Outcome = Literal["ok", "no_signal", "failed"]
ACCEPTED, DROPPED, SENT_BACK = "accepted", "dropped", "sent_back"


@dataclass(frozen=True, slots=True)
class PutCommand:
    """Rows of whole samples of one lease; `outcome` completes the group. `digest` covers rows, bytes and outcome."""

    server: str
    term: int
    group: str
    attempt: int
    rows: RowFacts
    samples: SampleFacts
    fields: tuple[str, ...]
    n_bytes: int
    digest: str
    outcome: Outcome | None
    returns: bool = False
    reason: str = ""
    generation_start_unix_seconds: float = 0.0
    generation_end_unix_seconds: float = 0.0

    @property
    def key(self) -> str:
        return put_key(self.group, self.attempt, self.samples, completes=bool(self.outcome), returns=self.returns)


def put_key(group: str, attempt: int, samples: Iterable[int], *, completes: bool, returns: bool) -> str:
    """What a put and its repeat have in common."""
    lease = f"put {group}/{attempt}"
    if returns:
        return f"{lease} return"
    if completes:
        return f"{lease} complete"
    return f"{lease} samples {','.join(map(str, samples))}"


def put(decision: Decision, command: PutCommand) -> tuple[str, int | None]:
    """(disposition, block id if the payload is to be kept). A repeat gets its stored answer before any fencing."""
    state = decision.state
    answer = stored_answer(state, command.key, command.digest)
    if answer is not None:
        return answer, None
    group = _check(decision, command)
    block = _store(decision, group, command)
    if command.returns:
        # "returned" is no lost lease: the server gave the group back by itself.
        requeue(decision, group, "returned", keep=not _stale(state, group))
        disposition = ACCEPTED
    elif command.outcome is None:
        disposition = ACCEPTED
    else:
        disposition = _complete(decision, group, command)
    decision.emit(ev.AnswerStored(command.key, command.digest, disposition))
    return disposition, block if block in state.blocks else None


def _check(decision: Decision, command: PutCommand) -> Group:
    state = decision.state
    fence(decision, command.server, command.term)
    group = leased(state, command.server, command.term, command.group, command.attempt)
    spec = state.spec
    samples = set(command.samples)
    highest = max(samples, default=0)
    if highest >= spec.samples_per_prompt:
        raise InvalidInput(f"sample {highest} of group {group.id}: a group has {spec.samples_per_prompt} samples")
    for part in group.parts:
        if part.attempt == command.attempt and not samples.isdisjoint(part.samples()):
            raise AlreadyExists(f"samples {sorted(samples & set(part.samples()))} of group {group.id} were put before")
    held = sum(state.blocks[p.block] for p in group.parts if not samples.issuperset(p.samples()))
    if held + command.n_bytes > spec.bytes_per_group:
        raise Oversize(
            f"group {group.id} would hold {held + command.n_bytes} bytes, its lease reserved {spec.bytes_per_group}",
        )
    if command.outcome == "ok":
        have = samples | set(group.samples)
        missing = [i for i in range(spec.samples_per_prompt) if i not in have]
        if missing:
            raise InvalidInput(
                f"group {group.id} cannot be complete: samples {missing} were never put; put a failed sample with "
                f"reward_status != 0"
            )
        absent = spec.put_fields.keys() - set(command.fields).union(*(part.fields for part in group.parts))
        if absent:
            raise InvalidInput(f"group {group.id} cannot be complete: fields {sorted(absent)} were never put")
    return group


def _store(decision: Decision, group: Group, command: PutCommand) -> int | None:
    if not command.rows:
        return None
    block = decision.state.next_block
    decision.emit(
        ev.RowsStored(group.id, block, command.n_bytes, command.digest, command.rows, command.samples, command.fields)
    )
    return block


def _stale(state: RunState, group: Group) -> bool:
    """Is a token off the line, or older than the lease's deadline allows?"""
    oldest_allowed = group.deadline - state.spec.max_staleness
    return any(not state.on_line(v) or v.number < oldest_allowed for v in group.versions())


def _complete(decision: Decision, group: Group, command: PutCommand) -> str:
    state = decision.state
    step = state.head
    n_valid = group.samples.n_valid
    if command.outcome == "failed":
        decision.emit(ev.GroupDropped(group.id, command.reason or "failed", step))
        return DROPPED
    stale = _stale(state, group)
    if stale and state.spec.stale_policy == "mask" and all(map(state.on_line, group.versions())):
        mask(decision, group, group.deadline)
        stale = _stale(state, group)
    if stale:
        requeue(decision, group, "stale_tokens")
        return SENT_BACK
    if n_valid < state.spec.min_valid_samples:
        decision.emit(ev.GroupDropped(group.id, "too_few_valid_samples", step))
        return DROPPED
    if group.oldest_trained and not group.has_tokens_to_train():
        decision.emit(ev.GroupDropped(group.id, TOO_STALE, step))
        return DROPPED
    decision.emit(
        ev.GroupCompleted(
            group.id,
            command.attempt,
            command.server,
            len(group.samples),
            n_valid,
            group.oldest_version(),
            group.samples.reward_mean(),
            command.generation_start_unix_seconds,
            command.generation_end_unix_seconds,
        )
    )
    if command.outcome == "no_signal":
        decision.emit(ev.GroupDropped(group.id, "no_signal", step))
        return DROPPED
    return ACCEPTED
