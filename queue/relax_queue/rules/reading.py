"""Answers to readers: plans, rows, leases that may be granted. Nothing here changes a run by itself."""

from collections.abc import Collection
from dataclasses import dataclass

from relax_common.errors import PlanLost, RowsFreed, UnknownConsumer, UnknownRow
from relax_queue.rows import row_keys
from relax_queue.rows.row_keys import KeySpan, RowKeys
from relax_queue.rows.spec import Consumer
from relax_queue.rules import events as ev
from relax_queue.rules.planning import late_groups, run_over
from relax_queue.rules.state import RunState, StepPlan


@dataclass(frozen=True, slots=True)
class PlanAnswer:
    """A chunk, the closing, or neither where the run has no such step."""

    plan: StepPlan | None
    chunk: ev.ChunkPlanned | None = None
    close: ev.StepClosed | None = None


def consumer(state: RunState, name: str) -> Consumer:
    for c in state.spec.consumers:
        if c.name == name:
            return c
    known = ", ".join(c.name for c in state.spec.consumers)
    raise UnknownConsumer(f"consumer {name} is not in the schema of run {state.run}; it has {known}")


def reader_of(state: RunState, fields: Collection[str]) -> str:
    """The first consumer that reads all these fields."""
    return next((c.name for c in state.spec.consumers if set(fields) <= set(c.fields)), "unknown")


def find_plan(state: RunState, lineage: int, step: int, chunk: int, generation: int) -> PlanAnswer | None:
    """The answer of GetPlan, None if it must wait. Raises PLAN_LOST, ROWS_FREED."""
    if lineage < state.lineage:
        raise PlanLost(f"lineage {lineage} has ended, {state.lineage} continues: load its head")
    if lineage > state.lineage or step > state.head:
        return PlanAnswer(None) if run_over(state, step) else None
    if step < state.head:
        plan = state.kept.get(step)
        if plan is None or not plan.whole:
            raise RowsFreed(f"rows and plan of step {step} are gone (F is {state.frontier}): load a newer state")
    else:
        plan = state.plan
    current = plan.generation if plan else state.generation
    if generation not in (0, current):
        raise PlanLost(
            f"generation {generation} of the plan of step {step} is lost, generation {current} has "
            f"replaced it: start the step again",
            details={"generation": str(current)},
        )
    if plan is None or (chunk >= len(plan.chunks) and plan.close is None):
        return PlanAnswer(None) if plan is None and run_over(state, step) else None
    if chunk < len(plan.chunks):
        return PlanAnswer(plan, chunk=plan.chunks[chunk])
    return PlanAnswer(plan, close=plan.close)


def plan_missing(state: RunState, lineage: int, step: int) -> str:
    """What GetPlan waits for, for people."""
    if lineage > state.lineage:
        return f"the dcs record that begins lineage {lineage}; lineage {state.lineage} is applied"
    if step > state.head:
        return f"version {step}: the actor commits it at dcs, whose log is applied up to version {state.head}"
    spec, plan = state.spec, state.plan
    taken = len(plan.groups()) if plan else 0
    ready = [g for g in state.open_groups() if g.status == "ready"]
    late = late_groups(state)
    text = f"groups of step {step}: {taken} planned and {len(ready)} ready of {spec.prompts_per_step}"
    if late and len(ready) + taken >= spec.prompts_per_step:
        return text + f"; group {late[0].id} at server {late[0].server} would be late and stale_policy is wait"
    running = len(state.open_groups()) - len(ready)
    if not running and not state.waiting:
        return text + "; none is offered: relaxd must offer groups"
    servers = ", ".join(sorted(state.confirmed)) or "none"
    return text + f"; {running} at rollout servers (confirmed: {servers}), {len(state.waiting)} pending"


def rows_of_plan(state: RunState, lineage: int, step: int, generation: int, rows: RowKeys) -> None:
    """Do all rows belong to this plan, and is it still the one that counts? Raises PLAN_LOST, ROWS_FREED, NOT_FOUND."""
    if step in state.kept:
        plan: StepPlan | None = state.kept[step]
    else:
        plan = state.plan if state.plan and state.plan.step == step else None
    if plan is None or not plan.whole:
        if step < state.head:
            raise RowsFreed(f"rows of step {step} are gone (F is {state.frontier})")
        raise PlanLost(f"the plan of step {step} is lost: start the step again")
    if (plan.lineage, plan.generation) != (lineage, generation):
        raise PlanLost(
            f"generation {generation} of the plan of step {step} is lost, generation {plan.generation} has replaced it",
        )
    planned = set(plan.groups())
    wanted: dict[str, list[KeySpan]] = {}
    for group, spans in rows.by_group():
        wanted.setdefault(group, []).extend(spans)
    for group, spans in wanted.items():
        own = state.groups[group].rows.keys if group in planned else row_keys.EMPTY
        row = own.first_missing(spans)
        if row is not None:
            raise UnknownRow(f"row {group}/{row[0]}/{row[1]} is not in the plan of step {step}")
