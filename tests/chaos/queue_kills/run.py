"""Stops a queue daemon under load at many points and checks what its clients saw.

    python tests/chaos/queue_kills/run.py --points 1000 --seed 1        a campaign a run, 20 points each
    python tests/chaos/queue_kills/run.py --campaign 17                 one campaign again

A campaign is a function of its seed: the run's settings, what each client does, how each incarnation ends. The timing
of the machine is not, so a campaign that failed may have to be repeated. A kill loses nothing that the operating system
holds: what a power cut loses (an fsync that is missing) is not tried here.
"""

from __future__ import annotations

import argparse
import itertools
import random
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent import futures
from pathlib import Path

from broker import Broker, Stop, Zygote
from clients import SAMPLES, Campaign, actor, reader, relaxd, rollout, watcher
from history import History, check

from benchmarks.bus.dcs_log import DcsLog
from relax.queue.v1 import queue_pb2 as pb
from relax_common.process.host import keepable_port
from relax_common.process.telemetry import configure_logging
from relax_queue.client import ROW_FIELDS

POINTS_PER_CAMPAIGN = 20
END_SECONDS = 300.0
LAST_EVENT_SECONDS = LAST_CALL_SECONDS = 60.0
FAULTS_SHOWN = 20
SCOPES = {"row": pb.SCOPE_ROW, "sample": pb.SCOPE_SAMPLE, "group": pb.SCOPE_GROUP}


def draw_spec(rng: random.Random) -> pb.RunSpec:
    per_step = rng.randint(1, 4)
    closing = rng.random() < 0.25
    return pb.RunSpec(
        fields=[
            pb.Field(name=f.name, dtype=f.dtype, shape=f.shape, scope=SCOPES[f.scope], writer=f.writer)
            for f in ROW_FIELDS
        ],
        consumers=[
            pb.Consumer(name="actor", fields=["tokens", "log_probs"], needs_version=pb.NEEDS_VERSION_STEP),
            pb.Consumer(name="reader", fields=["tokens", "log_probs"], needs_version=pb.NEEDS_VERSION_ANY),
        ],
        prompts_per_step=per_step,
        samples_per_prompt=SAMPLES,
        max_staleness=rng.randint(0, 2),
        snapshot_every=1,
        tokens_per_row_max=16,
        tokens_per_microbatch=rng.choice([16, 40]),
        groups_per_chunk=rng.randint(1, per_step),
        data_parallel_size=rng.randint(1, 2),
        packer=rng.choice(list(pb.Packer.values())[1:]),
        stale_policy=rng.choice(list(pb.StalePolicy.values())[1:]),
        min_valid_samples=1,
        max_refills_per_step=rng.randint(0, 2),
        memory_budget_bytes=1 << 30,
        lease_ttl_seconds=rng.choice([0.8, 2.0]),
        durability=rng.choice([pb.DURABILITY_METADATA, pb.DURABILITY_FULL]),
        seed=7,
        deterministic=rng.random() < 0.3,
        closing=pb.CLOSING_MIN_N if closing else pb.CLOSING_ALL,
        closing_min_prompts=1 if closing else 0,
        closing_deadline_seconds=0.3 if closing else 0.0,
        lease_attempts_max=rng.choice([0, 3]),
    )


def campaign(zygote: Zygote, folder: Path, seed: int, points: int) -> tuple[list[str], Counter[str], dict[str, int]]:
    """(faults, what happened, figures) of one run with `points` ends of its queue."""
    rng = random.Random(seed)
    spec = draw_spec(rng)
    broker, dcs = Broker(zygote, folder, keepable_port()), DcsLog(threads=16)
    stop = Stop.draw(rng)
    broker.start(stop if not stop.point else None)
    masks = spec.stale_policy == pb.STALE_POLICY_MASK
    history = History(spec.durability == pb.DURABILITY_FULL, spec.max_staleness, masks)
    c = Campaign(broker.address, dcs, history, spec, seed)
    client = c.client()
    client.open_run(spec, "digest", dcs.address)
    dcs.commit(0)
    last = threading.Event()
    for work, *args in ((relaxd,), (rollout, "s0"), (rollout, "s1"), (actor,), (reader,), (watcher, last)):
        c.start(work, *args)
    ends: Counter[str] = Counter()
    for _ in range(points):
        if c.done.is_set():
            break
        end = broker.run_until(stop)
        ends[end] += 1
        if end == "died":
            history.add("faults", f"the queue ended by itself: {broker.log_tail()}")
            break
        stop = Stop.draw(rng)
        broker.start(stop)
    if not broker.wait(0):
        broker.kill()
    broker.start()
    c.over.set()
    if not c.done.wait(END_SECONDS):
        waits = [w.what for w in client.status().waits]
        history.add("faults", f"the run did not end; waits: {waits}")
        c.done.set()
    counts = client.end()
    last.wait(LAST_EVENT_SECONDS)
    c.join(LAST_CALL_SECONDS)
    broker.kill()
    broker.start()
    again = client.status().counts
    if again != counts:
        history.add("faults", f"counts after a restart of the ended run: {again}, before: {counts}")
    broker.kill()
    dcs.stop()
    client.close()
    history.counts = {name: getattr(counts, name) for name in ("trained", "returned", "offered")}
    history.counts["dropped"] = dict(counts.dropped)
    figures = {"steps": len(history.commits), "trained": counts.trained, "puts": len(history.puts)}
    return check(history), ends, figures


class Tally:
    """Sums over campaigns; `one` may be called by several threads."""

    def __init__(self, zygote: Zygote) -> None:
        self._zygote = zygote
        self._lock = threading.Lock()
        self._began = time.monotonic()
        self.ends: Counter[str] = Counter()
        self.figures: Counter[str] = Counter()
        self.failed: dict[int, list[str]] = {}

    @property
    def points(self) -> int:
        return sum(self.ends.values())

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def one(self, seed: int, points: int) -> None:
        folder = Path(tempfile.mkdtemp(prefix=f"queue-kills-{seed}-"))
        faults, ends, figures = campaign(self._zygote, folder, seed, points)
        with self._lock:
            self.ends.update(ends)
            self.figures.update(figures)
            verdict = "FAULTS" if faults else "ok"
            print(
                f"campaign {seed}: {sum(ends.values())} points, {figures['steps']} steps, {figures['trained']} groups "
                f"trained, {verdict} [{self.points} points, {self.seconds:.0f} s]",
                flush=True,
            )
            if faults:
                self.failed[seed] = [*faults[:FAULTS_SHOWN], f"state kept in {folder}; again with --campaign {seed}"]
            else:
                shutil.rmtree(folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1, help="of the first campaign")
    parser.add_argument("--campaign", type=int, help="only this one")
    parser.add_argument("--jobs", type=int, default=3, help="campaigns at a time")
    parser.add_argument("--seconds", type=float, default=24 * 3600.0, help="begin no campaign after so long")
    args = parser.parse_args()
    configure_logging("error", "queue-kills", "")
    zygote = Zygote()
    tally = Tally(zygote)
    if args.campaign:
        tally.one(args.campaign, POINTS_PER_CAMPAIGN)
    seeds = itertools.count(args.seed)

    def work() -> None:
        while not args.campaign and tally.points < args.points and tally.seconds < args.seconds:
            tally.one(next(seeds), min(POINTS_PER_CAMPAIGN, args.points))

    with futures.ThreadPoolExecutor(args.jobs) as pool:
        for job in [pool.submit(work) for _ in range(args.jobs)]:
            job.result()
    zygote.close()
    for end, n in sorted(tally.ends.items()):
        print(f"{n:6} {end}")
    # Last, because whoever looks at a failed run sees its end first.
    for seed, faults in tally.failed.items():
        print(f"faults of campaign {seed}:", *faults, sep="\n  ")
    failed = ", ".join(map(str, tally.failed)) or "none"
    print(f"{tally.points} points in {tally.seconds:.0f} s: {dict(tally.figures)}; campaigns with faults: {failed}")
    return 1 if tally.failed else 0


if __name__ == "__main__":
    sys.exit(main())
