"""Checks before anything starts: plan, checkpoint, data, prompts, host. Each error is one line; needs no torch."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from relax_common.errors import InvalidInput
from relax_common.model_support import check_shapes
from relax_common.recipe import Derived, Recipe
from relax_common.storage.model_folder import check_tied, weight_shapes
from relaxd.data import Prompts, read_prompts
from relaxd.data.labels import UNREADABLE, readable_rows
from relaxd.data.lengths import fit_lengths
from relaxd.data.prompts import source_name
from relaxd.plan.model import model_sizes, read_model_config, tensor_shapes
from relaxd.plan.plan import make_plan

_FIND_SGLANG = "import importlib.util, sys; sys.exit(importlib.util.find_spec('sglang') is None)"
_FIND_SECONDS = 30.0


def check_recipe(recipe: Recipe) -> tuple[Derived, Prompts]:
    """Check everything that would make a run fail later. Raises InvalidInput."""
    derived = make_plan(recipe).derived
    check_weights(recipe.model.path)
    for role, path in (
        ("reference", recipe.reference.path),
        ("critic", recipe.critic.path),
        ("teacher", recipe.teacher.path),
    ):
        if role in recipe.algorithm.roles and path:
            check_weights(Path(path), f"{role}.path")
    check_engine(recipe)
    rows = read_prompts(recipe.data)
    readable = readable_rows(recipe, rows)
    if not readable:
        raise InvalidInput(f"{source_name(recipe.data)}: the reward can read none of its {len(rows)} labels")
    prompts = fit_lengths(recipe, readable)
    if len(readable) < len(rows):
        prompts = replace(prompts, dropped={UNREADABLE: len(rows) - len(readable), **prompts.dropped})
    if recipe.data.passes:
        groups = len(prompts.rows) * recipe.data.passes
        if groups < recipe.prompts_per_step:
            raise InvalidInput(
                f"{source_name(recipe.data)}: {len(prompts.rows)} rows x {recipe.data.passes} passes do not fill one "
                f"step of {recipe.prompts_per_step} prompts; lower prompts_per_step or raise data.passes"
            )
    return derived, prompts


def check_weights(folder: Path, key: str = "model.path") -> None:
    """Check that the folder holds exactly the tensors of its config.json. Reads headers, and a tied model's output
    layer."""
    sizes = model_sizes(read_model_config(folder, key))
    check_shapes(weight_shapes(folder), tensor_shapes(sizes), folder, tied=sizes.tied)
    if sizes.tied:
        check_tied(folder)


def check_launch(recipe: Recipe, gpus_here: int) -> None:
    """Check that this host can start all processes."""
    place = recipe.placement
    if place.hosts > 1:
        raise InvalidInput(
            f"placement.hosts = {place.hosts}: `relaxctl run` starts everything on one host; start the daemons that "
            "`relaxctl run --dry-run` lists yourself and use `relaxctl create`"
        )
    if place.gpus_per_host > gpus_here:
        raise InvalidInput(
            f"placement.gpus_per_host = {place.gpus_per_host}, but nvidia-smi lists {gpus_here} on this host"
        )


def count_gpus() -> int:
    """GPUs of this host, as listed by the driver's own tool."""
    try:
        listed = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=_FIND_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


def check_engine(recipe: Recipe) -> None:
    """Check that the interpreter of a managed SGLang has it installed; a URL is checked by the rollout server that uses
    it."""
    if recipe.rollout.engine != "sglang" or recipe.rollout.engine_urls:
        return
    python = recipe.rollout.engine_python or sys.executable
    remedy = "`make sglang` installs it into .venv-sglang; name that one's bin/python, or use engine = 'torch'"
    try:
        found = subprocess.run([python, "-c", _FIND_SGLANG], capture_output=True, timeout=_FIND_SECONDS, check=False)
    except OSError as error:
        raise InvalidInput(f"rollout.engine_python = {python}: {error.strerror}; {remedy}") from error
    except subprocess.TimeoutExpired as error:
        raise InvalidInput(f"rollout.engine_python = {python}: no answer within {_FIND_SECONDS:.0f} s") from error
    if found.returncode != 0:
        raise InvalidInput(f"rollout.engine = 'sglang', but {python} has no sglang: {remedy}")
