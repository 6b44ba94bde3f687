"""Daemons that something else starts, as systemd and Slurm do; relaxd only talks to them."""

from __future__ import annotations

import json
import re
import time
import urllib.request
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from relax.controller.v1 import controller_pb2, controller_pb2_grpc
from relax_common.recipe import load_recipe, to_toml
from relax_common.rpc.channels import sync_channel
from relaxd.run.files import read_lines
from relaxd.run.ledger import audit

STEPS = 4
REPOSITORY = Path(__file__).resolve().parents[3]


def missing_metrics(stub: controller_pb2_grpc.ControllerServiceStub, relaxd: Any) -> set[str]:
    """Names in the dashboard's expressions that no running daemon serves, although each of them has done some work."""
    expressions = (REPOSITORY / "deploy/grafana/relax.json").read_text()
    wanted = set(re.findall(r"relax_[a-z_]+", expressions)) - {"relax_"}
    own = json.loads(next(line for line in relaxd.log.splitlines() if '"event": "serving"' in line))["metrics"]
    end = time.monotonic() + 120
    while True:
        daemons = stub.ListDaemons(controller_pb2.ListDaemonsRequest(), timeout=10).daemons
        served = "".join(_scrape(address) for address in {own, *(daemon.metrics_address for daemon in daemons)})
        missing = wanted - set(re.findall(r"^relax_[a-z_]+", served, re.MULTILINE))
        if not missing or time.monotonic() > end:
            return missing
        time.sleep(0.2)


def _scrape(address: str) -> str:
    try:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
            return str(answer.read().decode())
    except OSError:
        return ""


def test_a_run_of_daemons_that_relaxd_has_not_started(
    tmp_path: Path, start_daemon: Callable, quickstart_material: Path
) -> None:
    relaxd = start_daemon("relaxd", "--launcher", "none", "--ttl-seconds", "4", "--runs-dir", str(tmp_path))
    for module in ("dcs", "relax_queue"):
        start_daemon(module, "--controller", relaxd.address)
    recipe = load_recipe(quickstart_material / "quickstart.toml", [f"total_steps={STEPS}", "samples_per_prompt=8"])
    stub = controller_pb2_grpc.ControllerServiceStub(sync_channel(relaxd.address))
    run_dir = tmp_path / "run"
    request = controller_pb2.CreateRunRequest(
        request_id=uuid.uuid4().hex, recipe_toml=to_toml(recipe), run_dir=str(run_dir)
    )
    run = stub.CreateRun(request, timeout=30).run.run
    common = ("--controller", relaxd.address)
    actor = start_daemon("trainer_server", *common, "--instance", f"{run}.actor")
    rollout = start_daemon("rollout_server", *common, "--instance", f"{run}.rollout-0")

    assert missing_metrics(stub, relaxd) == set()
    daemons = stub.ListDaemons(controller_pb2.ListDaemonsRequest(), timeout=10).daemons
    assert daemons[0].address == relaxd.address, "relaxd itself comes first"
    assert {each.address for each in daemons[1:]} >= {actor.address, rollout.address}

    end = time.monotonic() + 150
    while (found := stub.GetRun(controller_pb2.GetRunRequest(run=run), timeout=10).run).state not in (
        controller_pb2.RUN_STATE_ENDED,
        controller_pb2.RUN_STATE_FAILED,
    ):
        assert time.monotonic() < end, actor.log + rollout.log + relaxd.log
        time.sleep(0.2)
    assert found.state == controller_pb2.RUN_STATE_ENDED, found.error
    assert found.head.number == STEPS
    assert actor.process.wait(20) == 0
    assert rollout.process.wait(20) == 0, "it was told to end in the answer to a heartbeat"
    events = list(read_lines(run_dir / "events.jsonl"))
    result = audit(events, ended=True, max_staleness=recipe.max_staleness)
    assert not result.faults
    assert result.commits == STEPS + 1
