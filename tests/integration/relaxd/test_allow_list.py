"""A recipe from the network can only run programs and import code that the operator has named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from relax.controller.v1 import controller_pb2, controller_pb2_grpc
from relax_common.errors import InvalidInput, RelaxError, from_rpc
from relax_common.recipe import load_recipe, parse_recipe, to_toml
from relax_common.rpc.channels import sync_channel
from relaxd.plan.code_names import CodeNames, check_allowed, code_names

StartDaemon = Callable[..., Any]


def _program(folder: Path) -> Path:
    """Leaves a mark when it runs."""
    path = folder / "program"
    path.write_text(f"#!/bin/sh\ntouch {folder}/ran\n")
    path.chmod(0o755)
    return path


def _ask(address: str, recipe_toml: str) -> RelaxError | None:
    request = controller_pb2.CreateRunRequest(recipe_toml=recipe_toml, validate_only=True)
    with sync_channel(address) as channel:
        try:
            controller_pb2_grpc.ControllerServiceStub(channel).CreateRun(request, timeout=30)
        except grpc.RpcError as error:
            return from_rpc(error)
    return None


def test_an_interpreter_runs_only_where_the_operator_names_it(
    start_daemon: StartDaemon, quickstart_material: Path, tmp_path: Path
) -> None:
    program = _program(tmp_path)
    overrides = ["rollout.engine=sglang", f"rollout.engine_python={program}"]
    recipe = to_toml(load_recipe(quickstart_material / "quickstart.toml", overrides))
    closed = start_daemon("relaxd", name="closed")
    refused = _ask(closed.address, recipe)
    assert isinstance(refused, InvalidInput)
    assert "rollout.engine_python" in refused.message
    assert "allow_programs" in refused.message
    assert not (tmp_path / "ran").exists()
    opened = start_daemon("relaxd", "--allow-programs", str(program), name="opened")
    assert _ask(opened.address, recipe) is None
    assert (tmp_path / "ran").exists()


def test_a_generator_is_imported_only_where_the_operator_names_it(
    start_daemon: StartDaemon, quickstart_material: Path, tmp_path: Path
) -> None:
    (tmp_path / "rows_of_mine.py").write_text(
        "import pathlib\n"
        "pathlib.Path(__file__).with_name('imported').touch()\n"
        "def make(size, seed):\n    return [{'prompt': '1+1=', 'label': '2'}] * size\n"
    )
    base = load_recipe(quickstart_material / "quickstart.toml")
    data = base.data.model_copy(update={"path": (), "generator": "rows_of_mine:make"})
    recipe = to_toml(base.model_copy(update={"data": data}))
    env = {"PYTHONPATH": str(tmp_path)}
    refused = _ask(start_daemon("relaxd", name="closed", **env).address, recipe)
    assert isinstance(refused, InvalidInput)
    assert "data.generator" in refused.message
    assert not (tmp_path / "imported").exists()
    opened = start_daemon("relaxd", "--allow-imports", "other:f,rows_of_mine:make", name="opened", **env)
    assert _ask(opened.address, recipe) is None
    assert (tmp_path / "imported").exists()


def test_the_names_of_a_recipe_leave_out_what_comes_with_relax(quickstart_material: Path) -> None:
    text = (quickstart_material / "quickstart.toml").read_text()
    assert code_names(parse_recipe(text)) == CodeNames()
    own = parse_recipe(text, overrides=["reward.name=exact", 'reward.parts."mine:f"=1.0', "reward.parts.math=0.5"])
    assert code_names(own).imports == {"reward.parts.mine:f": "mine:f"}
    with pytest.raises(InvalidInput, match="allow_imports"):
        check_allowed(own, [], ["mine:g"])
    check_allowed(own, [], ["mine:f"])
