"""What is in deploy/ is accepted by the tools that read it and by the daemons that it starts."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
UNITS = sorted((ROOT / "deploy" / "systemd").glob("*.service"))
MODULES = {
    "relaxd": "relaxd",
    "relax-queue": "relax_queue",
    "relax-dcs": "dcs",
    "relax-trainer": "trainer_server",
    "relax-rollout": "rollout_server",
}


def test_systemd_finds_nothing_to_say_about_the_units() -> None:
    done = subprocess.run(
        ["systemd-analyze", "verify", "--recursive-errors=one", *UNITS], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_there_is_a_unit_for_every_daemon() -> None:
    assert {_command(unit)[0] for unit in UNITS} == set(MODULES)


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_a_daemon_takes_the_flags_and_the_environment_of_its_unit(unit: Path) -> None:
    program, *flags = _command(unit)
    command = [sys.executable, "-m", MODULES[program], *flags, "--print-config"]
    env = {**os.environ, **_environment(), **_own_environment(unit)}
    printed = subprocess.run(command, check=True, timeout=60, cwd=ROOT, env=env, capture_output=True, text=True).stdout
    section = program.removeprefix("relax-").upper()
    for name, value in {**_environment(), **_own_environment(unit)}.items():
        if name.startswith(f"RELAX_{section}__"):
            key = name.partition("__")[2].lower()
            assert f"{key} = {value!r}  # {name}" in printed


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_all_units_run_as_one_user_and_are_watched(unit: Path) -> None:
    lines = unit.read_text().splitlines()
    folder = _command(unit)[2].replace("/var/lib/relax/", "").replace("RUN.NAME", "%i")
    for line in (
        "User=relax",
        f"StateDirectory=relax relax/runs relax/{folder}",
        f"RuntimeDirectory=relax/{folder}",
        "EnvironmentFile=/etc/relax/relax.env",
        "RestartPreventExitStatus=2 4",
        "ProtectSystem=strict",
    ):
        assert line in lines
    assert any(re.fullmatch(r"WatchdogSec=\d+", line) for line in lines)
    assert not any(line.startswith("DynamicUser") for line in lines)


def _command(unit: Path) -> list[str]:
    line = next(line for line in unit.read_text().splitlines() if line.startswith("ExecStart="))
    inner = shlex.split(line.removeprefix("ExecStart="))[-1]
    filled = inner.replace("${RELAX_CONTROLLER_ADDRESS}", "127.0.0.1:7000").replace("%S", "/var/lib")
    filled = filled.replace("%t", "/run").replace("%i", "RUN.NAME")
    return shlex.split(filled.removeprefix("exec ").replace("$RELAX_BIN/", ""))


def _environment() -> dict[str, str]:
    lines = (ROOT / "deploy/systemd/relax.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def _own_environment(unit: Path) -> dict[str, str]:
    lines = [line.removeprefix("Environment=") for line in unit.read_text().splitlines() if line[:12] == "Environment="]
    return dict(line.replace("%i", "RUN.NAME").split("=", 1) for line in lines)


def test_the_slurm_script_is_valid_bash() -> None:
    subprocess.run(["bash", "-n", str(ROOT / "deploy/slurm/relax.sbatch")], check=True, timeout=20)


def test_the_slurm_script_gives_daemons_the_devices_of_the_plan(tmp_path: Path) -> None:
    recipe = ROOT / "recipes/qwen3_30b_a3b_16gpu.toml"
    command = [sys.executable, "-m", "relaxd.ctl.main", "run", str(recipe), "--dry-run", "--json"]
    plan = subprocess.run(command, check=True, capture_output=True, timeout=60, cwd=ROOT)
    (tmp_path / "plan.json").write_bytes(plan.stdout)
    script = (ROOT / "deploy/slurm/relax.sbatch").read_text()
    function = re.search(r"^devices\(\) \{$.*?^\}$", script, re.MULTILINE | re.DOTALL)
    assert function is not None
    lines = [
        f"BIN={Path(sys.executable).parent} STATE={tmp_path}",
        function.group(),
        "devices actor; devices rollout-2",
    ]
    found = subprocess.run(["bash", "-euc", "\n".join(lines)], check=True, capture_output=True, text=True, timeout=20)
    assert found.stdout.split() == [*map(str, range(8)), "4,5"]


def test_prometheus_scrapes_the_addresses_that_the_units_open() -> None:
    config = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    scraped = {
        target for job in config["scrape_configs"] for each in job["static_configs"] for target in each["targets"]
    }
    opened = {value for name, value in _environment().items() if name.endswith("__METRICS_LISTEN")}
    assert scraped == opened


def test_the_dashboard_has_a_panel_a_place() -> None:
    panels = json.loads((ROOT / "deploy/grafana/relax.json").read_text())["panels"]
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
    assert len(places) == len(set(places))
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    assert all(re.search(r"relax_[a-z_]+", expression) for expression in expressions)


def test_every_panel_follows_the_chosen_run_and_data_source() -> None:
    dashboard = json.loads((ROOT / "deploy/grafana/relax.json").read_text())
    assert [variable["name"] for variable in dashboard["templating"]["list"]] == ["datasource", "run"]
    chosen = {"type": "prometheus", "uid": "${datasource}"}
    assert dashboard["templating"]["list"][1]["datasource"] == chosen
    for panel in dashboard["panels"]:
        assert panel["datasource"] == chosen, panel["title"]
        for target in panel["targets"]:
            assert 'run=~"$run"' in target["expr"], (panel["title"], target["expr"])
