"""Writes and reads the state of a run, which replaces the log before it.

The first frame is one line of JSON; each frame after it holds a block of finished groups, of which a run may have
millions.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import msgspec

from relax_common.errors import DataLoss
from relax_common.terms import Terms
from relax_common.versions import PackedVersion, PolicyVersion
from relax_queue.rows.facts import RowFacts, SampleFacts
from relax_queue.rows.spec import RunSpec
from relax_queue.rules.events import Prompt
from relax_queue.rules.finished import Columns, Finished
from relax_queue.rules.group import Group, Part, Status
from relax_queue.rules.state import Answer, Confirmation, Phase, RunState, StepPlan


@dataclass(frozen=True, slots=True)
class GroupImage:
    """A group without its indexes. Values are shared with the living group: they are never changed in place."""

    id: str
    order: int
    prompt: Prompt
    status: Status
    attempts: int
    leases_lost: int
    server: str
    term: int
    confirmed: PackedVersion
    deadline: int
    oldest_trained: int
    reserved: bool
    parts: tuple[Part, ...]
    rows: RowFacts
    samples: SampleFacts
    step: int
    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class PlanImage:
    """A copy of a plan; its chunks and closing are immutable values."""

    step: int
    plan: StepPlan


@dataclass(frozen=True, slots=True)
class Written:
    """The first frame: everything of RunState except indexes that follow from the groups, and finished groups."""

    run: str
    recipe_digest: str
    spec: RunSpec
    dcs_address: str
    phase: Phase
    terms: dict[str, int]
    groups: list[GroupImage]
    finished_groups: int
    finished_reasons: list[str]
    blocks: dict[int, int]
    answers: list[tuple[str, str, str]]
    line: list[int]
    lineage: int
    frontier: int
    applied_revision: int
    rollback_revision: int
    confirmed: dict[str, tuple[int, PackedVersion]]
    plan: StepPlan | None
    generation: int
    closing_due: int
    kept: list[PlanImage]
    drops_by_step: dict[int, int]
    dropped_by_reason: dict[str, int]
    next_order: int
    next_block: int
    n_admitted: int
    n_offered: int
    n_leases_lost: int
    last_offered: str


@dataclass(frozen=True, slots=True)
class Image:
    """A copy of a state, still to be written; `values` are the fields of `Written` but the finished groups."""

    values: dict[str, Any]
    finished: Finished


_DIFFERENT = ("terms", "groups", "finished", "answers", "confirmed", "plan", "kept")
_SAME = tuple(f.name for f in fields(Written) if f.name not in (*_DIFFERENT, "finished_groups", "finished_reasons"))
_SAME_IN_GROUP = tuple(f.name for f in fields(GroupImage) if f.name != "parts")


_ENCODER, _DECODER = msgspec.json.Encoder(), msgspec.json.Decoder(Written)
_BLOCK_ENCODER, _BLOCK_DECODER = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(dict[str, bytes])


def take_image(state: RunState) -> Image:
    """A copy that later changes of the state do not affect; cheap enough to be made between two transactions."""
    values: dict[str, Any] = {name: _copy(getattr(state, name)) for name in _SAME}
    values |= {
        "terms": dict(state.terms.newest),
        "groups": [_group_image(group) for group in state.groups.values()],
        "answers": [(key, answer.content, answer.answer) for key, answer in state.answers.items()],
        "confirmed": {server: (c.term, c.version.pack()) for server, c in state.confirmed.items()},
        "plan": None if state.plan is None else _plan_copy(state.plan),
        "kept": [PlanImage(step, _plan_copy(plan)) for step, plan in state.kept.items()],
    }
    return Image(values, state.finished.copy())


def _copy(value: object) -> object:
    return value.copy() if isinstance(value, (dict, list)) else value


def _plan_copy(plan: StepPlan) -> StepPlan:
    return StepPlan(plan.lineage, plan.step, plan.generation, list(plan.chunks), plan.close, plan.whole)


def _group_image(group: Group) -> GroupImage:
    values = {name: getattr(group, name) for name in _SAME_IN_GROUP}
    return GroupImage(parts=tuple(group.parts), **values)


def dump(image: Image) -> Iterator[bytes]:
    """The frames of a snapshot. May run in a thread: the image is not shared."""
    reasons, blocks = image.finished.columns()
    groups = len(image.finished)
    yield _ENCODER.encode(Written(finished_groups=groups, finished_reasons=reasons, **image.values))
    for columns in blocks:
        yield _BLOCK_ENCODER.encode(columns.to_bytes())


def load(frames: Iterable[bytes]) -> RunState:
    """Raises msgspec.DecodeError where the content is no snapshot of this version, DataLoss where some is missing."""
    frames = iter(frames)
    image = _DECODER.decode(next(frames, b""))
    state = RunState(image.run, image.recipe_digest, image.spec, image.dcs_address)
    for name in _SAME:
        setattr(state, name, getattr(image, name))
    state.terms = Terms(image.terms)
    for entry in image.groups:
        _restore(state, entry)
    columns = (Columns.from_bytes(_BLOCK_DECODER.decode(frame)) for frame in frames)
    state.finished = Finished.from_columns(columns, image.finished_reasons)
    if len(state.finished) != image.finished_groups:
        raise DataLoss(f"the snapshot has {len(state.finished)} of {image.finished_groups} finished groups")
    state.answers = {key: Answer(content_digest, answer) for key, content_digest, answer in image.answers}
    state.confirmed = {s: Confirmation(term, PolicyVersion.unpack(v)) for s, (term, v) in image.confirmed.items()}
    state.plan = image.plan
    state.kept = {entry.step: entry.plan for entry in image.kept}
    return state


def _restore(state: RunState, entry: GroupImage) -> None:
    group = Group(**{name: getattr(entry, name) for name in _SAME_IN_GROUP})
    group.parts = list(entry.parts)
    state.groups[group.id] = group
    state.n_reserved += group.reserved
    state.set_status(group, group.status)
