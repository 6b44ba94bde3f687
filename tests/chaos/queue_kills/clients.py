"""The clients of one campaign: rollout servers, an actor and a reader, relaxd, a watcher. Each is a thread with a seed.

Every row says of itself who made it: all its log_probs are the attempt, its tokens follow from group and sample.
"""

from __future__ import annotations

import random
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from history import History

from benchmarks.bus.dcs_log import DcsLog
from relax.queue.v1 import queue_pb2 as pb
from relax_common.errors import DeadlineExceeded, Precondition, RelaxError, StaleTerm, Unavailable
from relax_queue.client import QueueClient, block_to, to_columns

T = TypeVar("T")
SAMPLES = 2
RUN = "run"
WAIT_SECONDS = 1.0


class CampaignOver(Exception):
    """A call was not answered before everything had ended."""


class Campaign:
    """What the threads share. `over`: no more groups are offered; `done`: everything has ended."""

    def __init__(self, address: str, dcs: DcsLog, history: History, spec: pb.RunSpec, seed: int) -> None:
        self.address = address
        self.dcs = dcs
        self.history = history
        self.spec = spec
        self.seed = seed
        self.over = threading.Event()
        self.done = threading.Event()
        self._threads: list[threading.Thread] = []

    def client(self) -> QueueClient:
        return QueueClient(self.address, RUN)

    def patiently(self, call: Callable[[], T]) -> T:
        """Repeat an idempotent call: on a busy machine the queue may be killed again and again before it answers."""
        while True:
            try:
                return call()
            except (DeadlineExceeded, Unavailable) as error:
                if self.done.is_set():
                    raise CampaignOver from error

    def start(self, work: Callable[..., None], *args: Any) -> None:
        def guarded() -> None:
            try:
                work(self, *args)
            except CampaignOver:
                pass
            except Exception as error:  # noqa: BLE001 - whatever it is, it is a fault of the campaign
                calls = " > ".join(f"{f.name}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__))
                self.history.add("faults", f"{work.__name__}{args}: {type(error).__name__}: {error} ({calls})")
                self.done.set()

        thread = threading.Thread(target=guarded, daemon=True)
        thread.start()
        self._threads.append(thread)

    def join(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.1, end - time.monotonic()))
            if thread.is_alive():
                self.history.add("faults", "a client still waits at the end of the campaign")


def relaxd(c: Campaign) -> None:
    """Keeps the line filled, then seals."""
    client, n = c.client(), 0
    while not c.done.is_set():
        if c.over.is_set():
            c.patiently(client.seal)
            break
        if c.patiently(client.status).counts.pending < 6:
            groups = [pb.PromptGroup(group=f"g{i:05d}", position=i, prompt_json="1") for i in range(n, n + 6)]
            c.patiently(lambda groups=groups: client.offer_groups(groups, term=1))
            for group in groups:
                c.history.add("offered", group.group)
            n += 6
        time.sleep(0.02)
    client.close()


def tokens_of(group: str, sample: int) -> np.ndarray:
    begin = int(group[1:]) * SAMPLES + sample
    return np.arange(begin, begin + 4 + begin % 5)


def columns_of(group: str, samples: list[int], attempt: int, version: int) -> Any:
    tokens = [tokens_of(group, s) for s in samples]
    masks = [[0] + [1] * (len(t) - 1) for t in tokens]
    return to_columns(
        {
            "tokens": tokens,
            "loss_mask": masks,
            "log_probs": [np.full(len(t), attempt, np.float32) for t in tokens],
            "versions": [np.where(mask, version, -1) for mask in masks],
            "temperature": [1.0] * len(samples),
            "reward": [float(s) for s in samples],
            "reward_status": [0] * len(samples),
        }
    )


def rollout(c: Campaign, name: str) -> None:
    """Leases, puts whole or in parts, gives back, forgets; now and then it is a newer incarnation of itself."""
    rng, client, term, serving = random.Random(f"{c.seed} {name}"), c.client(), 0, -1
    while not c.done.is_set():
        if term == 0 or rng.random() < 0.02:
            term, serving = term + 1, -1
            c.patiently(lambda term=term: client.register_term(name, term))
        if serving != c.dcs.head and (serving < 0 or rng.random() < 0.7):
            serving = c.dcs.head
            c.dcs.confirm(name, term, serving)
        try:
            leases = list(client.lease_groups(name, term, rng.randint(1, 3), WAIT_SECONDS))
        except (Unavailable, DeadlineExceeded):
            continue
        except Precondition as error:
            if error.reason == "RUN_ENDED":
                break
            raise
        for lease in leases:
            c.history.add("leases", (lease.group.group, lease.attempt, name, lease.deadline_version))
            if rng.random() < 0.05:
                continue  # forgotten: it runs out
            generate(c, client, rng, name, term, serving, lease)
    client.close()


def generate(
    c: Campaign, client: QueueClient, rng: random.Random, name: str, term: int, serving: int, lease: Any
) -> None:
    group, attempt = lease.group.group, lease.attempt
    kept = {row.sample for row in lease.kept.rows}
    missing = [s for s in range(SAMPLES) if s not in kept]
    version = serving

    def header(samples: list[int], **more: Any) -> pb.PutHeader:
        rows = block_to([(group, s, 0) for s in samples])
        return pb.PutHeader(
            run=RUN, server=name, term=term, lease=pb.LeaseKey(group=group, attempt=attempt), rows=rows, **more
        )

    def send(samples: list[int], outcome: str, call: Callable[[], str | None]) -> bool:
        entry = {
            "group": group, "attempt": attempt, "samples": samples, "version": version, "outcome": outcome,
        }  # fmt: skip
        c.history.add("puts", entry)
        try:
            entry["answer"] = c.patiently(call) or "accepted"
        except Precondition as error:
            if error.reason not in ("LEASE_GONE", "STALE_TERM"):
                raise
            entry["answer"] = error.reason
        return entry["answer"] == "accepted"

    if rng.random() < 0.3:
        time.sleep(rng.uniform(0, 0.05))
    if len(missing) == SAMPLES and rng.random() < 0.3:
        first, missing = missing[:1], missing[1:]
        if not send(first, "part", lambda: client.put(header(first), columns_of(group, first, attempt, version))):
            return
    columns = columns_of(group, missing, attempt, version) if missing else {}
    roll = rng.random()
    if roll < 0.06:
        send(missing, "return", lambda: client.return_group(header(missing), columns))
        return
    outcome = "no_signal" if roll < 0.12 else "failed" if roll < 0.16 else "ok"
    completes = getattr(pb, f"GROUP_OUTCOME_{outcome.upper()}")
    done = header(missing, completes_group=completes)
    first_answer: list[str] = []
    send(missing, outcome, lambda: first_answer.append(client.put(done, columns)) or first_answer[0])
    if first_answer and rng.random() < 0.1 and c.patiently(lambda: client.put(done, columns)) != first_answer[0]:
        c.history.add("faults", f"put {group}/{attempt}: a repeat was answered in another way")


def read_chunks(c: Campaign, client: QueueClient, who: str, term: int, step: int, pause: Callable[[], None]) -> Any:
    """All chunks of a step and its closing, whatever becomes of the plan meanwhile; None once the run is over."""
    generation, chunk = 0, 0
    attempts: dict[tuple[str, int], int] = {}
    while not c.done.is_set():
        try:
            answer = client.get_plan(who, term, 0, step, chunk, generation, WAIT_SECONDS)
            if answer.run_over:
                return None
            content = repr((answer.chunk, answer.close))
            c.history.add("plans", (who, step, answer.plan.generation, chunk, content))
            generation = answer.plan.generation
            if answer.close is not None:
                return answer.close, attempts
            rows = [row for rank in answer.chunk.ranks for batch in rank for row in batch.rows]
            attempts |= read_rows(c, client, answer.plan, rows, step)
            chunk += 1
            pause()
        except DeadlineExceeded:
            continue
        except Precondition as error:
            if error.reason == "PLAN_LOST":
                generation, chunk, attempts = 0, 0, {}
            else:
                raise
    return None


def read_rows(c: Campaign, client: QueueClient, plan: Any, rows: Any, step: int) -> dict[tuple[str, int], int]:
    columns = client.read_rows(plan, rows, ["tokens", "log_probs"])
    attempts: dict[tuple[str, int], int] = {}
    for i, (group, sample, _) in enumerate(rows):
        stamps = set(columns["log_probs"].unit(i).tolist())
        if len(stamps) != 1 or not np.array_equal(columns["tokens"].unit(i), tokens_of(group, sample)):
            c.history.add("faults", f"row {group}/{sample} of step {step} has the content of another")
        attempts[group, sample] = int(stamps.pop())
    c.history.add("reads", {"step": step, "attempts": attempts})
    return attempts


def actor(c: Campaign) -> None:
    """Trains by plan and commits at dcs; restarts under a new term now and then; replays what is kept."""
    rng, client, term = random.Random(f"{c.seed} actor"), c.client(), 1
    c.patiently(lambda: client.register_term("actor", 1))
    while not c.done.is_set():
        step = c.dcs.head
        if rng.random() < 0.1:
            term += 1
            c.patiently(lambda term=term: client.register_term("actor", term))
            try:
                client.get_plan("actor", term - 1, 0, step, 0, 0, 0.3)
                c.history.add("faults", f"the actor of term {term - 1} was answered after term {term} had registered")
            except (StaleTerm, Unavailable, DeadlineExceeded):
                pass
        found = read_chunks(c, client, "actor", term, step, lambda: time.sleep(rng.uniform(0, 0.03)))
        if found is None:
            break
        close, attempts = found
        by_group = {group: attempt for (group, _), attempt in attempts.items()}
        if set(by_group) != set(close.groups):
            c.history.add("faults", f"step {step} closes with {close.groups}, its chunks have {sorted(by_group)}")
        c.history.add("commits", {"step": step, "groups": close.groups, "attempts": by_group})
        c.dcs.commit(step + 1, close.groups, close.plan_digest)
        if rng.random() < 0.2:
            replay(c, client, term, step)
        if rng.random() < 0.8:
            c.dcs.snapshot(step + 1)
    c.done.set()
    client.close()


def replay(c: Campaign, client: QueueClient, term: int, step: int) -> None:
    try:
        read_chunks(c, client, "actor", term, step, lambda: None)
    except Precondition as error:
        # Its payload may be lost with durability `metadata`; its rows are still kept, as F has not moved.
        if error.reason != "ROWS_FREED" or c.history.full:
            raise


def reader(c: Campaign) -> None:
    """A second consumer of the same plans, behind or beside the actor."""
    rng, client, step = random.Random(f"{c.seed} reader"), c.client(), 0
    while not c.done.is_set():
        try:
            if read_chunks(c, client, "reader", 1, step, lambda: time.sleep(rng.uniform(0, 0.05))) is None:
                break
            step += 1
        except Precondition as error:
            if error.reason != "ROWS_FREED":
                raise
            step = c.dcs.head
    client.close()


def watcher(c: Campaign, last: threading.Event) -> None:
    """The event stream, opened again wherever it breaks; ends with the run."""
    client, seen = c.client(), 0
    while True:
        try:
            for e in client.watch_events(seen, 2.0):
                entry = {"revision": e.revision, "kind": e.kind, "group": e.group, "detail": e.detail_json}
                seen = e.revision
                c.history.add("events", entry)
                if e.kind == "run_state" and '"ended"' in e.detail_json:
                    client.close()
                    last.set()
                    return
        except Unavailable:
            time.sleep(0.05)
        except RelaxError as error:
            if c.done.is_set() and last.is_set():
                return
            raise error
