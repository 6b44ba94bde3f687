"""The units of deploy/systemd under a booted systemd: five daemons, a run of a few steps, a queue that is killed.

    make systemd-check        needs root and systemd-nspawn (Debian package systemd-container)

The container's root is an overlay of this machine's own: nothing is installed, and nothing of it stays. Its network is
a loopback of its own, so that the ports of deploy/systemd/relax.env are free. The interpreter and the packages of this
environment are mounted below /opt, because units with ProtectHome= cannot see home directories.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from relaxd.run.files import read_lines
from relaxd.run.ledger import audit

REPOSITORY = Path(__file__).parents[2]
STEPS = 4
BOOT_SECONDS = 600.0
RUN = "check"
UNITS = ("relaxd", "relax-queue", "relax-dcs", f"relax-trainer@{RUN}.actor", f"relax-rollout@{RUN}.rollout-0")
SCRIPT = f"""#!/bin/bash
# What docs/operations.md tells an operator to do; each line of the output is judged afterwards.
exec > /told 2>&1
trap 'journalctl --no-pager --output=cat --lines=60 --unit="relax*"' EXIT
set -x
export RELAX_TOKEN_FILE=/var/lib/relax/token PATH=/opt/relax/.venv/bin:$PATH LD_LIBRARY_PATH=/opt/python/lib
ctl() {{ runuser -u relax -- env RELAX_TOKEN_FILE=$RELAX_TOKEN_FILE relaxctl --controller 127.0.0.1:7000 "$@"; }}
systemd-sysusers && systemctl daemon-reload && systemctl enable --now relaxd relax-queue relax-dcs || exit 1
ctl create /opt/relax/recipe/quickstart.toml --run-dir /var/lib/relax/runs/{RUN} \\
    --set total_steps={STEPS} --set samples_per_prompt=8 || exit 1
systemctl start {UNITS[3]} {UNITS[4]}
systemctl kill --kill-who=main --signal=KILL relax-queue
timeout 300 runuser -u relax -- env RELAX_TOKEN_FILE=$RELAX_TOKEN_FILE \\
    relaxctl --controller 127.0.0.1:7000 watch {RUN} || exit 1
for unit in {UNITS[3]} {UNITS[4]}; do
    for second in $(seq 60); do systemctl is-active --quiet $unit || break; sleep 1; done
done
ctl daemons
for unit in {" ".join(UNITS)}; do
    echo "unit $unit" $(systemctl show $unit --property=ActiveState,Result,ExecMainStatus,NRestarts)
done
stat --format='owner %U:%G %a %n' /var/lib/relax/runs/{RUN} /var/lib/relax/token
"""
SERVICE = """[Unit]
After=multi-user.target
[Service]
Type=oneshot
ExecStart=/opt/relax/check
ExecStopPost=/bin/systemctl poweroff --no-block
"""


@contextmanager
def mounted(*words: str) -> Iterator[None]:
    """The last word is where."""
    subprocess.run(["mount", *words], check=True, timeout=30)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", words[-1]], check=True, timeout=30)


@contextmanager
def root_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="relax-systemd-"))
    with mounted("-t", "tmpfs", "-o", "size=2g", "tmpfs", str(folder)):
        for name in ("upper", "work", "root"):
            (folder / name).mkdir(mode=0o755)
        layers = f"lowerdir=/,upperdir={folder}/upper,workdir={folder}/work"
        with mounted("-t", "overlay", "-o", layers, "overlay", str(folder / "root")):
            yield folder / "root"
    folder.rmdir()


def binds(root: Path) -> list[str]:
    """Mounts the interpreter at /opt/python and every folder of packages below /opt/relax; makes an environment."""
    mounts = [f"--bind-ro={sys.base_prefix}:/opt/python"]
    environment = root / "opt/relax/.venv"
    packages = environment / f"lib/python3.{sys.version_info.minor}/site-packages"
    packages.mkdir(parents=True)
    (environment / "bin").mkdir()
    (environment / "bin/python").symlink_to(f"/opt/python/bin/python3.{sys.version_info.minor}")
    (environment / "pyvenv.cfg").write_text("home = /opt/python/bin\ninclude-system-site-packages = false\n")
    sources = [str(REPOSITORY), *(path for path in sys.path if os.path.isdir(path))]
    lines = []
    for number, path in enumerate(dict.fromkeys(sources)):
        if not Path(path).is_relative_to(sys.base_prefix) and path != str(Path(__file__).parent):
            mounts.append(f"--bind-ro={path}:/opt/relax/path-{number}")
            lines.append(f"/opt/relax/path-{number}\n")
    (packages / "relax.pth").write_text("".join(lines))
    scripts = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["scripts"]
    for name, target in scripts.items():
        module, _, function = target.partition(":")
        program = environment / "bin" / name
        program.write_text(f"#!/opt/relax/.venv/bin/python\nimport sys\nfrom {module} import {function}\n")
        with program.open("a") as file:
            file.write(f"sys.exit({function}())\n")
        program.chmod(0o755)
    return mounts


def install(root: Path) -> None:
    """The files of deploy/systemd as docs/operations.md places them, the recipe, and the script that is run."""
    units, deploy = root / "etc/systemd/system", REPOSITORY / "deploy/systemd"
    for unit in deploy.glob("*.service"):
        shutil.copy(unit, units)
    for folder in ("etc/relax", "etc/sysusers.d"):
        (root / folder).mkdir(exist_ok=True)
    settings = (deploy / "relax.env").read_text()
    # An interpreter that was built elsewhere looks for its own library there.
    (root / "etc/relax/relax.env").write_text(f"{settings}LD_LIBRARY_PATH=/opt/python/lib\n")
    shutil.copy(deploy / "relax.sysusers.conf", root / "etc/sysusers.d/relax.conf")
    recipe = root / "opt/relax/recipe"
    make = [sys.executable, str(REPOSITORY / "recipes/quickstart/make_model.py"), str(recipe / "quickstart/made")]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(make, check=True, capture_output=True, timeout=300, env=env)
    shutil.copy(REPOSITORY / "recipes/quickstart.toml", recipe)
    (root / "opt/relax/check").write_text(SCRIPT)
    (root / "opt/relax/check").chmod(0o755)
    (units / "relax-check.service").write_text(SERVICE)
    for link, target in (
        (units / "multi-user.target.wants/relax-check.service", "/etc/systemd/system/relax-check.service"),
        (units / "default.target", "/lib/systemd/system/multi-user.target"),
    ):
        link.parent.mkdir(exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(target)
    (root / "etc/machine-id").unlink(missing_ok=True)
    (root / "etc/machine-id").write_text(f"{uuid.uuid4().hex}\n")


def judge(root: Path) -> list[str]:
    told = (root / "told").read_text(errors="replace") if (root / "told").exists() else "nothing was run"
    units = {line.split()[1]: dict(word.split("=") for word in line.split()[2:]) for line in told.splitlines()
             if line.startswith("unit ")}  # fmt: skip
    faults = []
    for unit in UNITS:
        state = units.get(unit, {})
        wanted = "active" if unit in UNITS[:3] else "inactive"
        restarts = "1" if unit == "relax-queue" else "0"
        if (state.get("ActiveState"), state.get("Result"), state.get("NRestarts")) != (wanted, "success", restarts):
            faults.append(f"{unit}: {state}, not {wanted} after {restarts} restarts")
    for path, mode in ((f"/var/lib/relax/runs/{RUN}", "750"), ("/var/lib/relax/token", "600")):
        if f"owner relax:relax {mode} {path}" not in told:
            faults.append(f"{path} is not the user's own with mode {mode}")
    run_dir = root / "var/lib/relax/runs" / RUN
    if not (run_dir / "events.jsonl").exists():
        return [*faults, "no run was created", told[-6000:]]
    result = audit(read_lines(run_dir / "events.jsonl"), ended=True)
    faults += result.faults
    if result.commits != STEPS + 1:
        faults.append(f"{result.commits} commits, not {STEPS + 1}")
    if not (run_dir / "export/model.safetensors").is_file():
        faults.append("no export")
    return [*faults, told[-6000:]] if faults else []


def main() -> int:
    if shutil.which("systemd-nspawn") is None or os.geteuid() != 0:
        print("systemd-check: needs root and systemd-nspawn; nothing was checked", file=sys.stderr)
        return 2
    with root_folder() as root:
        mounts = binds(root)
        install(root)
        name = f"relaxcheck{os.getpid()}"
        command = [
            *("systemd-nspawn", "--quiet", "--boot", f"--directory={root}", f"--machine={name}", "--private-network"),
            # This machine may not run systemd itself, so nobody is there to register the container.
            *("--register=no", "--keep-unit", "--link-journal=no", "--console=pipe", *mounts),
        ]
        booted = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=BOOT_SECONDS
        )
        faults = judge(root)
    for fault in faults:
        print(f"fault: {fault}")
    if faults:
        print(f"the console ends with: {booted.stdout[-1500:]}{booted.stderr[-1500:]}")
    print(f"{len(UNITS)} units, {STEPS} steps, a killed queue: {'no fault' if not faults else 'see above'}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
