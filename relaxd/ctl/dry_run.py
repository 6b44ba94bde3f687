"""`relaxctl run --dry-run`: the plan of a recipe for people or as JSON, and what was checked. Starts nothing."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from relax_common.recipe import Derived, Recipe, load_recipe
from relaxd.launch.commands import planned_processes
from relaxd.plan.checks import check_recipe
from relaxd.plan.memory import RankBytes
from relaxd.plan.plan import Plan, make_plan

NOT_CHECKED = "the model's folder has no weights: neither they nor data, prompts and engine were looked at"
_UNITS = ("B", "kB", "MB", "GB", "TB")


def dry_run(path: Path, overrides: Sequence[str], *, as_json_text: bool) -> int:
    """A folder with only config.json is enough for a plan; with weights, everything a run needs is checked."""
    recipe = load_recipe(path, overrides)
    plan = make_plan(recipe)
    has_weights = any(recipe.model.path.glob("*.safetensors"))
    seen = check_recipe(recipe)[1].line() if has_weights else NOT_CHECKED
    if as_json_text:
        json.dump(as_json(recipe, plan) | {"checked": seen}, sys.stdout, indent=2)
        print()
        return 0
    console = Console()
    introduce(recipe, plan.derived, seen, console)
    show(recipe, plan, console)
    return 0


def introduce(recipe: Recipe, derived: Derived, prompts: str, console: Console) -> None:
    console.print(f"[bold]{recipe.name}[/bold]: {recipe.total_steps} steps, {prompts}")
    for line in derived.lines():
        console.print(f"  {line}", style="dim")


def as_json(recipe: Recipe, plan: Plan) -> dict[str, Any]:
    """The plan as JSON; all numbers are bytes, tokens or counts."""
    derived = plan.derived
    return {
        "recipe": recipe.name,
        "processes": [asdict(process) for process in planned_processes(recipe, derived)],
        "model": {"elements": plan.model.elements, "dtype": recipe.model.dtype},
        "rank_bytes": {name: asdict(needs) | {"total": needs.total} for name, needs in _ranks(plan)},
        "engine": asdict(plan.engine) | {"cache_tokens": plan.engine.cache_tokens} if plan.engine else None,
        "version_bytes": plan.dcs.version,
        "rollout_host_bytes": plan.rollout_host_bytes,
        "dcs": asdict(plan.dcs) | {"total": plan.dcs.total, "budget": recipe.dcs.memory_budget_bytes},
        "queue": {
            "step": derived.bytes_per_group * recipe.prompts_per_step,
            "total": derived.queue_bytes_needed,
            "budget": recipe.queue.memory_budget_bytes,
        },
        "samples_per_step": derived.samples_per_step,
        "tokens_per_step_max": plan.tokens_per_step_max,
        "microbatches_per_rank": plan.microbatches,
    }


def show(recipe: Recipe, plan: Plan, console: Console) -> None:
    console.print(_processes_table(recipe, plan))
    console.print(_bytes_table(recipe, plan))


def _ranks(plan: Plan) -> Iterator[tuple[str, RankBytes]]:
    yield "actor", plan.actor
    yield from ((role.name, needs) for role, needs in zip(plan.derived.column_roles, plan.forward, strict=True))


def _processes_table(recipe: Recipe, plan: Plan) -> Table:
    table = Table(
        "daemon", "host", "RANK", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES", title="processes", title_justify="left"
    )
    for each in planned_processes(recipe, plan.derived):
        table.add_row(each.daemon, str(each.host), str(each.rank), str(each.world_size), each.devices or "-")
    return table


def _bytes_table(recipe: Recipe, plan: Plan) -> Table:
    derived, place = plan.derived, recipe.placement
    table = Table("what", "needed", "allowed", "made of", title="sizes", title_justify="left")
    memory = human(place.gpu_memory_bytes) if place.gpus_per_host else "-"
    for name, needs in _ranks(plan):
        parts = f"parameters {human(needs.parameters)}"
        if needs.gradients:
            parts += f", gradients {human(needs.gradients)}, optimizer {human(needs.optimizer)}"
        parts += f", activations {human(needs.activations)} (estimate), reserved {human(needs.reserved)}"
        table.add_row(f"a rank of {name}", human(needs.total), memory, parts)
    if room := plan.engine:
        rows = f"{room.cache_tokens // derived.tokens_per_row_max} of {derived.samples_in_flight_max} rows"
        parts = f"cache for {room.cache_tokens} tokens of {room.cache_per_token} B: {rows} in flight at full length"
        allowed = human(room.weights + room.cache)
        table.add_row("weights of an engine, each device", human(room.weights), allowed, parts)
    elements = f"{plan.model.elements} parameters in {recipe.model.dtype}"
    table.add_row("a published version", human(plan.dcs.version), "-", elements)
    table.add_row("a rollout server, host memory", human(plan.rollout_host_bytes), "-", "a version, three times")
    dcs = plan.dcs
    parts = f"{dcs.versions} versions, {dcs.states} states of {human(dcs.state)}"
    table.add_row("dcs", human(dcs.total), human(recipe.dcs.memory_budget_bytes), parts)
    step = derived.bytes_per_group * recipe.prompts_per_step
    held = derived.queue_bytes_needed // step
    budget = human(recipe.queue.memory_budget_bytes)
    table.add_row("queue", human(derived.queue_bytes_needed), budget, f"{held} steps of {human(step)}")
    table.add_row("a step", f"{plan.tokens_per_step_max} tokens", "-", f"{derived.samples_per_step} samples at most")
    parts = f"a rank, {recipe.actor.tokens_per_microbatch} tokens each"
    table.add_row("micro-batches", str(plan.microbatches), "-", f"{parts}, rows at full length")
    return table


def human(size: int) -> str:
    """Powers of 1000."""
    value, unit = float(size), 0
    while value >= 999.5 and unit + 1 < len(_UNITS):
        value, unit = value / 1000, unit + 1
    return f"{value:.3g} {_UNITS[unit]}"
