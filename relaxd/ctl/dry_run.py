"""`relaxctl run --dry-run`: the plan of a recipe, and what of it was checked. Starts nothing."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from relax_common.recipe import Derived, Recipe, load_recipe
from relaxd.plan.checks import check_recipe
from relaxd.plan.plan import make_plan
from relaxd.plan.show import as_json, show

NOT_CHECKED = "the model's folder has no weights: neither they nor data, prompts and engine were looked at"


def dry_run(path: Path, overrides: Sequence[str], *, as_json_text: bool) -> int:
    """Of a folder that holds only config.json there is a plan; with weights everything a run needs is checked."""
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
