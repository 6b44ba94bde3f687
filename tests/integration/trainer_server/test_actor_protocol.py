"""The actor on real Megatron between a real queue and a real dcs, under kills. Rollouts are scripted: what a group
holds is a function of its id, so a run with crashes must end with the same bits as one without."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
import xxhash
from safetensors.torch import load_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from dcs.client import DcsClient
from relax.controller.v1 import controller_pb2, controller_pb2_grpc
from relax.dcs.v1 import dcs_pb2, dcs_pb2_grpc
from relax.queue.v1 import queue_pb2
from relax_common.errors import RelaxError
from relax_common.process.telemetry import configure_logging
from relax_common.recipe import derive, load_recipe
from relax_common.rpc.channels import sync_channel
from relax_common.versions import PolicyVersion
from relax_queue.client import QueueClient, block_to, to_columns
from relaxd.plan.requests import queue_request

WORKER = Path(__file__).with_name("actor_process.py")
RUN = "tiny-run"
VOCAB = 31
STEPS = 6
EXIT_KILLED = -9
EXIT_STALE_TERM = 4
EXIT_LOST_RANK = 5

RECIPE = """
name = "tiny"
total_steps = {steps}
prompts_per_step = 2
samples_per_prompt = 4
max_staleness = 0
snapshot_every = {snapshot_every}
[model]
path = "model"
[data]
path = "data.jsonl"
prompt_tokens_max = 4
[sampling]
max_new_tokens = 8
[optimizer]
lr = 1e-3
warmup_updates = 2
[actor]
tensor_parallel_size = {tp}
data_parallel_size = {dp}
tokens_per_microbatch = 64
"""


@pytest.fixture(scope="module", autouse=True)
def _quiet() -> None:
    configure_logging("warning", "test", "test")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=32,
        tie_word_embeddings=True,
    )
    folder = tmp_path_factory.mktemp("material")
    Qwen3ForCausalLM(config).save_pretrained(folder / "model")
    return folder


def _rows_of(group: str, version: PolicyVersion) -> dict[str, Any]:
    random = np.random.default_rng(xxhash.xxh3_64_intdigest(group.encode()))
    lengths = random.integers(3, 10, 4)
    masks = [np.arange(n) >= 2 for n in lengths]
    return {
        "tokens": [random.integers(0, VOCAB, n) for n in lengths],
        "loss_mask": masks,
        "log_probs": [np.where(mask, -3.4, 0) for mask in masks],
        "versions": [np.where(mask, version.pack(), -1) for mask in masks],
        "temperature": [1.0] * 4,
        "reward": random.permutation([0.0, 0.0, 1.0, 1.0]).tolist(),
        "reward_status": [0] * 4,
    }


class ScriptedRollout(threading.Thread):
    """Confirms each version and answers every lease at once."""

    def __init__(self, queue: str, dcs: str) -> None:
        super().__init__(daemon=True)
        self._queue, self._dcs = QueueClient(queue, RUN), DcsClient(dcs, RUN)
        self._confirmed: PolicyVersion | None = None
        self.stopped = threading.Event()

    def run(self) -> None:
        while not self.stopped.is_set():
            try:
                self._serve_once()
            except RelaxError:
                self._confirmed = None
                time.sleep(0.05)

    def _serve_once(self) -> None:
        head = self._dcs.head().head
        if head is None or not self._dcs.head().holds_head_bytes:
            time.sleep(0.02)
            return
        if head != self._confirmed:
            self._dcs.confirm("server", 1, head)
            self._confirmed = head
        for lease in self._queue.lease_groups("server", 1, 2, 0.3):
            group = lease.group.group
            header = queue_pb2.PutHeader(
                run=RUN,
                server="server",
                term=1,
                lease=queue_pb2.LeaseKey(group=group, attempt=lease.attempt),
                rows=block_to([(group, sample, 0) for sample in range(4)]),
                completes_group=queue_pb2.GROUP_OUTCOME_OK,
            )
            version = PolicyVersion.from_proto(lease.confirmed)
            self._queue.put(header, to_columns(_rows_of(group, version)))


class FakeController(controller_pb2_grpc.ControllerServiceServicer):
    """What relaxd does when it hears that the head is lost: ROLLBACK, then the groups are offered again."""

    def __init__(self, dcs_address: str, queue: QueueClient) -> None:
        self._stub = dcs_pb2_grpc.DcsServiceStub(sync_channel(dcs_address))
        self._queue = queue
        self.reports: list[str] = []
        self.server = grpc.server(futures.ThreadPoolExecutor(2))
        controller_pb2_grpc.add_ControllerServiceServicer_to_server(self, self.server)
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        self.server.start()

    def ReportHeadLost(
        self, request: controller_pb2.ReportHeadLostRequest, context: Any
    ) -> controller_pb2.ReportHeadLostResponse:
        self.reports.append(request.reason)
        lost = dcs_pb2.RollbackRequest(run=RUN, lost_head=request.head, reason=request.reason)
        rolled_back = self._stub.Rollback(lost, timeout=10)
        groups = [queue_pb2.PromptGroup(group=f"0/{i}/0", position=i, prompt_json="1") for i in range(2 * STEPS)]
        self._queue.offer_groups(groups, term=1, after_dcs_revision=rolled_back.revision)
        return controller_pb2.ReportHeadLostResponse()


@dataclass
class Bench:
    """A run's folder, its daemons and its actor incarnations."""

    folder: Path
    start_daemon: Callable[..., Any]
    tp: int = 1
    dp: int = 1
    snapshot_every: int = 1
    checkpoint_every: int = 0
    environment: dict[str, str] = field(default_factory=dict)
    term: int = 0
    ranks: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def open(self) -> None:
        recipe_path = self.folder / "recipe.toml"
        recipe_path.write_text(RECIPE.format(tp=self.tp, dp=self.dp, snapshot_every=self.snapshot_every, steps=STEPS))
        recipe = load_recipe(recipe_path)
        self.dcs, self.queue = self.start_daemon("dcs"), self.start_daemon("relax_queue")
        dcs_pb2_grpc.DcsServiceStub(sync_channel(self.dcs.address)).OpenRun(
            dcs_pb2.OpenRunRequest(
                run=RUN,
                memory_budget_bytes=1 << 26,
                snapshot_every=self.snapshot_every,
                snapshot_ranks={"actor": self.tp * self.dp},
                checkpoint=self._checkpoints(),
            ),
            timeout=10,
        )
        self.client = QueueClient(self.queue.address, RUN)
        request = queue_request(RUN, recipe, derive(recipe), self.dcs.address)
        self.client.open_run(request.spec, request.recipe_digest, self.dcs.address)
        self.client.offer_groups(
            [queue_pb2.PromptGroup(group=f"0/{i}/0", position=i, prompt_json="1") for i in range(2 * STEPS)], term=1
        )
        self.rollout = ScriptedRollout(self.queue.address, self.dcs.address)
        self.rollout.start()
        self.log = DcsClient(self.dcs.address, RUN)

        self.controller = FakeController(self.dcs.address, self.client)

    def _checkpoints(self) -> dcs_pb2.CheckpointPolicy | None:
        if not self.checkpoint_every:
            return None
        folder, model = str(self.folder / "checkpoints"), str(self.folder / "model")
        return dcs_pb2.CheckpointPolicy(every_steps=self.checkpoint_every, folder=folder, keep=3, model_folder=model)

    def start_actor(self) -> None:
        self.term += 1
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            store = f"127.0.0.1:{probe.getsockname()[1]}"
        options = {
            "world-size": self.tp * self.dp,
            "term": self.term,
            "store": store,
            "queue": self.queue.address,
            "dcs": self.dcs.address,
            "controller": self.controller.address,
            "run": RUN,
            "recipe": self.folder / "recipe.toml",
            "run-dir": self.folder,
        }
        arguments = [part for name, value in options.items() for part in (f"--{name}", str(value))]
        markers = {"RELAX_FAILPOINTS_DIR": str(self.folder), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        self.ranks = []
        for rank in range(self.tp * self.dp):
            with (self.folder / f"actor-{rank}.log").open("ab") as log:
                command = [sys.executable, str(WORKER), "--rank", str(rank), *arguments]
                environment = os.environ | markers | self.environment
                self.ranks.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))

    def exit_codes(self) -> list[int]:
        try:
            return [rank.wait(90) for rank in self.ranks]
        except subprocess.TimeoutExpired as error:
            raise AssertionError(self.actor_log()) from error

    def actor_log(self, rank: int = 0) -> str:
        return (self.folder / f"actor-{rank}.log").read_text()

    def wait_for_version(self, number: int) -> None:
        end = time.monotonic() + 60
        while (head := self.log.head().head) is None or head.number < number:
            assert time.monotonic() < end, self.actor_log()
            time.sleep(0.02)

    def run_to_end(self) -> list[list[int]]:
        """Restart the actor until it ends by itself; returns the exit code of each incarnation."""
        seen = []
        while not seen or any(seen[-1]):
            assert len(seen) < 9, self.actor_log()
            self.start_actor()
            seen.append(self.exit_codes())
        return seen

    def commits(self) -> list[dcs_pb2.CommitRecord]:
        return [r.commit for r in self.log.watch_log(0, 0.5) if r.WhichOneof("record") == "commit"]

    def weights(self) -> dict[str, torch.Tensor]:
        return load_file(self.folder / "export" / "model.safetensors")

    def close(self) -> None:
        self.rollout.stopped.set()
        self.rollout.join(5)
        self.controller.server.stop(None)
        for rank in self.ranks:
            if rank.poll() is None:
                rank.kill()


MakeBench = Callable[..., Bench]


@pytest.fixture
def make_bench(tmp_path: Path, model: Path, start_daemon: Callable[..., Any]) -> Iterator[MakeBench]:
    benches: list[Bench] = []

    def make(**options: Any) -> Bench:
        os.symlink(model / "model", tmp_path / "model")
        bench = Bench(tmp_path, start_daemon, **options)
        bench.open()
        benches.append(bench)
        return bench

    yield make
    for bench in benches:
        bench.close()


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, torch.Tensor]:
    """Weights of the run without crashes, filled in by the first test."""
    return {}


def _assert_whole_line(bench: Bench) -> None:
    """Every version once, in order; every group trained once."""
    commits = bench.commits()
    assert [commit.version.number for commit in commits] == list(range(STEPS + 1))
    trained = [group for commit in commits for group in commit.groups]
    assert sorted(trained) == sorted(f"0/{i}/0" for i in range(2 * STEPS))


def test_undisturbed_run_trains_every_group_once_and_exports(
    make_bench: MakeBench, undisturbed: dict[str, torch.Tensor]
) -> None:
    bench = make_bench()
    assert bench.run_to_end() == [[0]]
    _assert_whole_line(bench)
    metrics = bench.commits()[-1].metrics
    assert metrics["staleness_max"] == 0
    assert metrics["samples"] == 8
    assert metrics["seconds_train"] > 0
    undisturbed |= bench.weights()


def test_I1_kills_at_every_point_of_the_commit_end_on_the_same_bits(
    make_bench: MakeBench, undisturbed: dict[str, torch.Tensor]
) -> None:
    points = (
        "after_optimizer_step=kill@1",
        "after_last_push=kill@2",
        "before_commit_sent=kill@2",
        "after_commit_sent_before_answer=kill@2",
        "after_commit_heard=kill@2",
    )
    bench = make_bench(environment={"RELAX_FAILPOINTS": ",".join(f"actor.{point}" for point in points)})
    assert bench.run_to_end() == [[EXIT_KILLED]] * len(points) + [[0]]
    _assert_whole_line(bench)
    weights = bench.weights()
    assert all(torch.equal(weights[name], tensor) for name, tensor in undisturbed.items())


def test_I1_replay_from_an_older_snapshot_ends_on_the_same_bits(
    make_bench: MakeBench, undisturbed: dict[str, torch.Tensor]
) -> None:
    # Version 3 is committed, its state is not kept: the restart loads version 2 and replays step 2.
    bench = make_bench(snapshot_every=2, environment={"RELAX_FAILPOINTS": "actor.after_optimizer_step=kill@4"})
    assert bench.run_to_end() == [[EXIT_KILLED], [0]]
    assert '"event": "replay"' in bench.actor_log()
    assert "replay_divergence" not in bench.actor_log()
    _assert_whole_line(bench)
    weights = bench.weights()
    assert all(torch.equal(weights[name], tensor) for name, tensor in undisturbed.items())


def test_I1_dcs_and_queue_die_while_the_actor_lives(
    make_bench: MakeBench, undisturbed: dict[str, torch.Tensor]
) -> None:
    bench = make_bench()
    bench.start_actor()
    bench.wait_for_version(1)
    bench.dcs.kill()
    bench.dcs.restart()
    bench.wait_for_version(3)
    bench.queue.kill()
    bench.queue.restart()
    assert bench.exit_codes() == [0]
    _assert_whole_line(bench)
    weights = bench.weights()
    assert all(torch.equal(weights[name], tensor) for name, tensor in undisturbed.items())


def test_I8_a_frozen_actor_that_wakes_after_its_replacement_exits_with_its_own_code(
    make_bench: MakeBench, undisturbed: dict[str, torch.Tensor]
) -> None:
    bench = make_bench(environment={"RELAX_FAILPOINTS": "actor.after_last_push=stop@3"})
    bench.start_actor()
    bench.wait_for_version(1)
    [frozen] = bench.ranks
    end = time.monotonic() + 30
    while not (bench.folder / "actor.after_last_push.fired").exists():
        assert time.monotonic() < end, bench.actor_log()
        time.sleep(0.02)
    bench.start_actor()
    assert bench.exit_codes() == [0]
    frozen.send_signal(signal.SIGCONT)
    assert frozen.wait(30) == EXIT_STALE_TERM
    assert "term 1 of actor is over" in bench.actor_log()
    _assert_whole_line(bench)
    weights = bench.weights()
    assert all(torch.equal(weights[name], tensor) for name, tensor in undisturbed.items())


def test_one_lost_rank_of_two_ends_both_and_the_next_incarnation_goes_on(make_bench: MakeBench) -> None:
    bench = make_bench(tp=2, environment={"RELAX_FAILPOINTS": "actor.after_last_push=kill@3"})
    codes = bench.run_to_end()
    assert EXIT_KILLED in codes[0]
    assert all(code != 0 for code in codes[0])
    assert codes[1:] == [[0, 0]]
    _assert_whole_line(bench)


def test_I9_two_data_parallel_ranks_end_on_the_same_weights(
    make_bench: MakeBench, undisturbed: dict[str, torch.Tensor]
) -> None:
    bench = make_bench(dp=2)
    assert bench.run_to_end() == [[0, 0]]
    _assert_whole_line(bench)
    weights = bench.weights()
    for name, tensor in undisturbed.items():
        # Adam divides by the root of tiny second moments, which magnifies the last bit of a gradient.
        assert float((weights[name] - tensor).abs().max()) < 1e-4, name


@pytest.mark.parametrize("dp", [1, 2])
def test_resumed_from_disk_the_run_ends_on_the_same_bits(
    make_bench: MakeBench, undisturbed: dict[str, torch.Tensor], dp: int
) -> None:
    bench = make_bench(dp=dp, checkpoint_every=2, environment={"RELAX_FAILPOINTS": "actor.after_optimizer_step=kill@4"})
    bench.start_actor()
    assert EXIT_KILLED in bench.exit_codes()
    # All memory is gone: the head is version 3, the newest state is version 2's on disk.
    for daemon in (bench.dcs, bench.queue):
        daemon.kill()
        daemon.restart()
    assert bench.log.head().recovery == PolicyVersion(0, 2)
    assert bench.run_to_end() == [[0] * dp]
    assert len(bench.controller.reports) == 1
    assert [(c.version.lineage, c.version.number) for c in bench.commits()] == [
        *((0, number) for number in range(4)),
        *((1, number) for number in range(3, STEPS + 1)),
    ]
    found = load_file(bench.folder / "checkpoints" / "version-00000006.1" / "weights" / "model.safetensors")
    weights = bench.weights()
    assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())
    if dp == 1:  # two ranks add in a different order
        assert all(torch.equal(weights[name], tensor) for name, tensor in undisturbed.items())


def test_a_head_that_nobody_can_rebuild_is_reported_and_the_run_goes_on_from_the_base(make_bench: MakeBench) -> None:
    bench = make_bench(environment={"RELAX_FAILPOINTS": "actor.after_optimizer_step=kill@4"})
    bench.start_actor()
    assert bench.exit_codes() == [EXIT_KILLED]
    bench.dcs.kill()  # its memory held the head and the only state newer than the base checkpoint
    bench.dcs.restart()
    assert bench.run_to_end() == [[0]]
    assert len(bench.controller.reports) == 1
    commits = bench.commits()
    assert [(c.version.lineage, c.version.number) for c in commits] == [
        *((0, number) for number in range(4)),
        *((1, number) for number in range(1, STEPS + 1)),
    ]
    trained = [group for commit in commits if commit.version.lineage == 1 for group in commit.groups]
    assert sorted(trained) == sorted(f"0/{i}/0" for i in range(2 * STEPS))
