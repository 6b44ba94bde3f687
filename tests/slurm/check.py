"""A two-rank run of deploy/slurm/relax.sbatch on a real slurmctld and slurmd of this host.

    make slurm-check        needs root and the Debian packages slurmctld, slurmd, slurm-client, munge

Everything lives in a temporary folder: its own munged and key, the cluster's configuration, ports that were free.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from relax_common.process.host import keepable_port
from relax_common.recipe import load_recipe, to_toml
from relaxd.run.files import read_lines
from relaxd.run.ledger import audit

REPOSITORY = Path(__file__).parents[2]
STEPS = 4
JOB_SECONDS = 400.0
CALM_SECONDS = 60.0
TOOLS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue")


def configuration(folder: Path, host: str) -> str:
    return f"""ClusterName=relaxcheck
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={keepable_port()}
SlurmdPort={keepable_port()}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs=16 State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


class Cluster:
    """munged, slurmctld and slurmd, ended with the block."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self.host = socket.gethostname()
        self.env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "OMP_NUM_THREADS": "1"}
        (folder / "slurm.conf").write_text(configuration(folder, self.host))
        (folder / "state").mkdir()
        (folder / "spool").mkdir()
        key = folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        self._start(
            stack,
            "munged",
            *("--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket"),
            *(f"--pid-file={folder}/munge.pid", f"--log-file={folder}/munge.log", f"--seed-file={folder}/munge.seed"),
        )
        self._await("munged", (folder / "munge.socket").exists)
        self._start(stack, "slurmctld", "-D", "-f", str(folder / "slurm.conf"))
        self._start(stack, "slurmd", "-D", "-f", str(folder / "slurm.conf"), "-N", self.host)
        self._await("the node", lambda: "idle" in self.ask("sinfo", "-h", "-o", "%T"))

    def _start(self, stack: ExitStack, *command: str) -> None:
        log = stack.enter_context((self.folder / f"{command[0]}.out").open("wb"))
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.env)
        stack.callback(process.wait, 30)
        stack.callback(process.terminate)

    def _await(self, what: str, done: Callable[[], bool]) -> None:
        end = time.monotonic() + CALM_SECONDS
        while not done():
            if time.monotonic() > end:
                logs = "".join(path.read_text(errors="replace")[-2000:] for path in self.folder.glob("*.out"))
                raise SystemExit(f"waited {CALM_SECONDS:.0f} s for {what}: {logs}")
            time.sleep(0.2)

    def ask(self, *command: str) -> str:
        return subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=60).stdout


def submit(cluster: Cluster, folder: Path) -> tuple[str, Path]:
    made = folder / "quickstart" / "made"
    make = [sys.executable, str(REPOSITORY / "recipes/quickstart/make_model.py"), str(made)]
    subprocess.run(make, check=True, capture_output=True, timeout=300, env=cluster.env)
    shutil.copy(REPOSITORY / "recipes/quickstart.toml", folder / "quickstart.toml")
    overrides = [f"total_steps={STEPS}", "samples_per_prompt=8", "actor.tensor_parallel_size=2"]
    recipe = folder / "recipe.toml"
    recipe.write_text(to_toml(load_recipe(folder / "quickstart.toml", overrides)))
    run_dir = folder / "runs" / "slurm-check"
    settings = {
        "RECIPE": recipe,
        "RUN_DIR": run_dir,
        "ACTOR_RANKS": 2,
        "CPUS_PER_TASK": 1,
        "RELAX_BIN": Path(sys.executable).parent,
        "RELAX_TOKEN_FILE": folder / "token",
        "FIRST_PORT": keepable_port(),
    }
    exported = ",".join(["ALL", *(f"{name}={value}" for name, value in settings.items())])
    script = str(REPOSITORY / "deploy/slurm/relax.sbatch")
    told = cluster.ask("sbatch", "--parsable", f"--export={exported}", f"--output={folder}/job.out", script)
    return told.strip(), run_dir


def main() -> int:
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing or os.geteuid() != 0:
        print(
            f"slurm-check: needs root and {', '.join(missing) or 'nothing else'}; nothing was checked", file=sys.stderr
        )
        return 2
    folder = Path(tempfile.mkdtemp(prefix="relax-slurm-"))
    with ExitStack() as stack:
        cluster = Cluster(folder, stack)
        job, run_dir = submit(cluster, folder)
        if not job:
            raise SystemExit("sbatch took no job: " + (folder / "slurmctld.log").read_text()[-2000:])
        stack.callback(cluster.ask, "scancel", "--full", job)
        end = time.monotonic() + JOB_SECONDS
        while job in cluster.ask("squeue", "-h", "-o", "%i"):
            if time.monotonic() > end:
                raise SystemExit(
                    f"job {job} has not ended: " + (folder / "job.out").read_text(errors="replace")[-4000:]
                )
            time.sleep(0.5)
        state = dict(word.split("=", 1) for word in cluster.ask("scontrol", "show", "job", job).split() if "=" in word)
        output = (folder / "job.out").read_text(errors="replace")
        faults = judge(run_dir, state, output)
    for fault in faults:
        print(f"fault: {fault}")
    print(f"job {job} {state['JobState']}, {STEPS} steps on two ranks: {'no fault' if not faults else 'see above'}")
    if not faults:
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if faults else 0


def judge(run_dir: Path, state: dict[str, str], output: str) -> list[str]:
    faults = []
    if state.get("JobState") != "COMPLETED":
        faults.append(f"the job is {state.get('JobState')}: {output[-4000:]}")
    with sqlite3.connect(f"{run_dir}.state/relaxd/relaxd.sqlite") as store:
        told = store.execute("SELECT detail FROM events WHERE kind = 'daemon_registered'").fetchall()
    details = [json.loads(text) for (text,) in told]
    ranks = sorted((each["rank"], each["term"]) for each in details if each["instance"].endswith(".actor"))
    if ranks != [(0, 1), (1, 1)]:
        faults.append(f"the actor's ranks (rank, term) registered as {ranks}, not as rank 0 and 1 of one term")
    result = audit(read_lines(run_dir / "events.jsonl"), ended=True)
    faults += result.faults
    if result.commits != STEPS + 1:
        faults.append(f"{result.commits} commits, not {STEPS + 1}")
    if not (run_dir / "export" / "model.safetensors").is_file():
        faults.append("no export")
    return faults


if __name__ == "__main__":
    sys.exit(main())
