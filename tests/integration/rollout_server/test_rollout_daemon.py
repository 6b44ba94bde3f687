"""The real dcs, queue and rollout daemons as processes; this test plays relaxd, the feeder and the actor."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any, Protocol

import grpc
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from dcs.client import DcsClient, SliceData
from relax.common.v1 import common_pb2
from relax.controller.v1 import controller_pb2, controller_pb2_grpc
from relax.dcs.v1 import dcs_pb2, dcs_pb2_grpc
from relax.queue.v1 import queue_pb2
from relax.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from relax_common.recipe import Recipe, derive, load_recipe, to_toml
from relax_common.rpc.channels import sync_channel
from relax_common.rpc.registration import make_identity
from relax_common.rpc.serving import EXIT_STALE_TERM
from relax_common.versions import PolicyVersion
from relax_queue.client import ROW_FIELDS, Column, PlanAnswer, QueueClient, RowKey
from relaxd.plan.requests import dcs_request, queue_request

RUN = "test-run"
SERVER = "test-run.rollout-0"
START_SECONDS = 60.0
PROMPTS_PER_STEP, SAMPLES = 4, 8
PROBLEMS = [(f"{a}+{b}=", f"{a + b:02d}") for a in range(10) for b in range(10)]
PROBE = [5, 14, 6, 15, 3, 10, 2]


class RunningDaemon(Protocol):
    """What tests/conftest.py starts."""

    address: str
    log: str
    process: subprocess.Popen[bytes] | None

    def restart(self, **env: str) -> None: ...

    def terminate(self) -> int: ...


StartDaemon = Callable[..., RunningDaemon]


class Controller(controller_pb2_grpc.ControllerServiceServicer):
    """Plays relaxd: gives a term and an assignment at each registration."""

    def __init__(self, recipe: Recipe, queue: str, dcs: str) -> None:
        peers = controller_pb2.Peers(queue=queue, dcs=dcs)
        self._assignment = controller_pb2.Assignment(run=RUN, recipe_toml=to_toml(recipe), run_dir=".", peers=peers)
        self.term = 0
        self.address = ""

    def Register(self, request: controller_pb2.RegisterRequest, context: Any) -> controller_pb2.RegisterResponse:
        self.term += 1
        self.address = request.address
        return controller_pb2.RegisterResponse(
            term=self.term,
            assignment=self._assignment,
            ttl_seconds=4.0,
            controller=make_identity(common_pb2.ROLE_CONTROLLER, "relaxd"),
        )

    def Heartbeat(self, request: controller_pb2.HeartbeatRequest, context: Any) -> controller_pb2.HeartbeatResponse:
        return controller_pb2.HeartbeatResponse()


class House:
    def __init__(self, start_daemon: StartDaemon, recipe: Recipe, folder: Path) -> None:
        self._start_daemon = start_daemon
        self._failpoints = str(folder)
        dcs_address, queue_address = start_daemon("dcs").address, start_daemon("relax_queue").address
        self._channels = [sync_channel(dcs_address)]
        self.dcs, self.queue = DcsClient(dcs_address, RUN), QueueClient(queue_address, RUN)
        dcs_pb2_grpc.DcsServiceStub(self._channels[0]).OpenRun(
            dcs_request(RUN, recipe, derive(recipe), recipe.model.path)
        )
        self.dcs.register_term("actor", 1)
        opening = queue_request(RUN, recipe, derive(recipe), dcs_address)
        self.queue.open_run(opening.spec, opening.recipe_digest, dcs_address)
        for holder in ("relaxd", "actor"):
            self.queue.register_term(holder, 1)
        self.controller = Controller(recipe, queue_address, dcs_address)
        self._server = grpc.server(futures.ThreadPoolExecutor(4))
        controller_pb2_grpc.add_ControllerServiceServicer_to_server(self.controller, self._server)
        self._controller_port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()
        self.reference = AutoModelForCausalLM.from_pretrained(recipe.model.path, dtype=torch.float32)
        self.rollout: RunningDaemon | None = None

    def start_rollout(self, failpoints: str = "") -> rollout_pb2_grpc.RolloutServiceStub:
        if self.rollout is None:
            controller = ("--controller", f"127.0.0.1:{self._controller_port}", "--instance", SERVER)
            directory = {"RELAX_FAILPOINTS_DIR": self._failpoints}
            self.rollout = self._start_daemon("rollout_server", *controller, RELAX_FAILPOINTS=failpoints, **directory)
        else:
            self.rollout.restart(RELAX_FAILPOINTS=failpoints)
        self._channels.append(sync_channel(self.rollout.address))
        return rollout_pb2_grpc.RolloutServiceStub(self._channels[-1])

    def wait_exit(self) -> int:
        assert self.rollout is not None
        assert self.rollout.process is not None
        return self.rollout.process.wait(START_SECONDS)

    def offer(self, prompts: Sequence[tuple[str, str | None]], first: int = 0) -> None:
        groups = [
            queue_pb2.PromptGroup(
                group=f"0/{position}/0",
                position=position,
                prompt_json=json.dumps(prompt),
                label=label,
                metadata_json="{}",
            )
            for position, (prompt, label) in enumerate(prompts, start=first)
        ]
        self.queue.offer_groups(groups, term=1)

    def publish(
        self, number: int, scale: float = 1.0, probe_scale: float | None = None, step: PlanAnswer | None = None
    ) -> PolicyVersion:
        """Commit the warm-started weights times `scale`, as training `step`; the probe is of `probe_scale`."""
        version = PolicyVersion(0, number)
        attempt = self.dcs.begin("actor", version, 1)
        self.dcs.push(version, attempt, 1, list(self._slices(scale)))
        self.dcs.put_snapshot(version, attempt, "actor", 0, 1, [b"state"])
        row = dcs_pb2.ProbeRow(tokens=PROBE, log_probs=self.log_probs(PROBE, probe_scale or scale, 1.0))
        record = dcs_pb2.CommitRecord(
            version=version.to_proto(), term=1, attempt=attempt, probe=dcs_pb2.Probe(rows=[row])
        )
        if step is not None and step.close is not None:
            record.step, record.groups[:] = number - 1, step.close.groups
            record.plan_digest, record.plan_generation = step.close.plan_digest, step.plan.generation
        self.dcs.commit(record)
        return version

    def _slices(self, scale: float) -> Iterator[SliceData]:
        """Every tensor in two halves, as two ranks would push it."""
        for name, parameter in self.reference.named_parameters():
            half = parameter.shape[0] // 2
            for start, part in ((0, parameter[:half]), (half, parameter[half:])):
                data = (part.detach() * scale).contiguous().numpy().tobytes()
                begin = (start, *[0] * (parameter.dim() - 1))
                yield SliceData(name, tuple(parameter.shape), begin, tuple(part.shape), "F32", data)

    @torch.no_grad()
    def log_probs(self, ids: list[int], scale: float, temperature: float) -> list[float]:
        """Log-probs of all tokens but the first, under the weights times `scale`."""
        weights = {name: parameter * scale for name, parameter in self.reference.named_parameters()}
        output = torch.func.functional_call(self.reference, weights, kwargs={"input_ids": torch.tensor([ids])})
        scores = torch.log_softmax(output.logits[0, :-1] / temperature, -1)
        return scores.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()

    def close(self) -> None:
        for channel in self._channels:
            channel.close()
        self.dcs.close()
        self.queue.close()
        self._server.stop(None)

    def plan(self, step: int) -> tuple[list[RowKey], dict[str, Column], PlanAnswer]:
        """Rows of a step as the actor reads them, and its closing."""
        answer = self.queue.get_plan("actor", 1, 0, step, 0, wait_seconds=START_SECONDS)
        assert answer.chunk is not None
        rows = [key for rank in answer.chunk.ranks for batch in rank for key in batch.rows]
        columns = self.queue.read_rows(answer.plan, rows, [field.name for field in ROW_FIELDS])
        closing = self.queue.get_plan("actor", 1, 0, step, 1, wait_seconds=START_SECONDS)
        return rows, columns, closing


def wait_until(condition: Any, what: str, seconds: float = START_SECONDS) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"waited {seconds} s for {what}")
        time.sleep(0.02)


@pytest.fixture
def house(start_daemon: StartDaemon, quickstart_material: Path, tmp_path: Path) -> Iterator[House]:
    settings = {
        "prompts_per_step": PROMPTS_PER_STEP,
        "samples_per_prompt": SAMPLES,
        "max_refills_per_step": 50,
        "queue.lease_ttl_seconds": 3.0,
    }
    overrides = [f"{key}={value}" for key, value in settings.items()]
    recipe = load_recipe(quickstart_material / "quickstart.toml", overrides)
    made = House(start_daemon, recipe, tmp_path)
    yield made
    made.close()


def status(stub: rollout_pb2_grpc.RolloutServiceStub) -> rollout_pb2.GetStatusResponse:
    return stub.GetStatus(rollout_pb2.GetStatusRequest(), timeout=5.0)


def serves(stub: rollout_pb2_grpc.RolloutServiceStub, number: int) -> bool:
    answer = status(stub)
    return answer.serving == rollout_pb2.SERVING_STATE_SERVING and answer.version.number == number


def check_rows(house: House, rows: list[RowKey], columns: dict[str, Column], scales: dict[int, float]) -> None:
    """Everything in the rows follows from the prompt, the sampled tokens and the weights of their versions."""
    digits = {4 + digit: str(digit) for digit in range(10)}
    for index, (group, sample, segment) in enumerate(rows):
        prompt, label = PROBLEMS[int(group.split("/")[1])]
        ids, mask = columns["tokens"].unit(index).tolist(), columns["loss_mask"].unit(index)
        assert segment == 0
        assert sample < SAMPLES
        assert mask.tolist() == [0] * 4 + [1] * (len(ids) - 4)
        versions = columns["versions"].unit(index)
        assert (versions[:4] == -1).all()
        # A swap may come between two tokens; with `retract` the later ones know nothing of the older weights.
        under = {version: house.log_probs(ids, scales[version], 1.0) for version in set(versions[4:].tolist())}
        expected = [under[version][at] for at, version in enumerate(versions[4:].tolist(), 3)]
        assert np.abs(np.array(expected) - columns["log_probs"].unit(index)[4:]).max() <= 1e-5
        assert not columns["log_probs"].unit(index)[:4].any()
        response = "".join(digits.get(token, "?" if token > 3 else "") for token in ids[4:])
        assert columns["reward"].values[index] == float(response == label), (prompt, ids)
        assert columns["reward_status"].values[index] == 0
        assert columns["temperature"].values[index] == 1.0


def test_groups_are_answered_under_verified_versions(house: House) -> None:
    stub = house.start_rollout()
    house.offer(PROBLEMS)
    wait_until(lambda: "first committed version" in status(stub).waits_for, "the server to name its wait")
    assert status(stub).serving == rollout_pb2.SERVING_STATE_UNVERIFIED
    house.publish(0)
    scales = {0: 1.0, 1: 0.95}
    rows, columns, closing = house.plan(0)
    assert len(rows) == PROMPTS_PER_STEP * SAMPLES
    assert set(columns["versions"].values.tolist()) == {-1, 0}
    check_rows(house, rows, columns, scales)
    for step in (1, 2):
        house.publish(step, scale=0.95 if step == 1 else 1.0, step=closing)
        scales[step] = 0.95 if step == 1 else 1.0
        rows, columns, closing = house.plan(step)
        check_rows(house, rows, columns, scales)
        sampled = columns["versions"].values[columns["versions"].values >= 0]
        assert sampled.min() >= step - 1
    wait_until(lambda: serves(stub, 2), "version 2 to be served")
    answer = status(stub)
    assert (answer.run, answer.term) == (RUN, 1)
    assert answer.tokens_generated >= 3 * len(rows)

    greedy = stub.Generate(rollout_pb2.GenerateRequest(prompts=["3+4=", "1+1="], max_new_tokens=3), timeout=10.0)
    assert [len(each.tokens) > 0 for each in greedy.generations] == [True, True]
    assert {version for each in greedy.generations for version in each.versions} == {2}
    with pytest.raises(grpc.RpcError, match="exceed the model's 64"):
        stub.Generate(rollout_pb2.GenerateRequest(prompts=["3+4="], max_new_tokens=99), timeout=10.0)
    with pytest.raises(grpc.RpcError, match="mode is not set"):
        stub.Pause(rollout_pb2.PauseRequest(), timeout=10.0)

    # SIGTERM in the middle of work: every group is returned, so that no lease has to expire.
    stub.Pause(rollout_pb2.PauseRequest(mode=rollout_pb2.PAUSE_MODE_IN_PLACE), timeout=10.0)
    house.publish(3, step=closing)
    wait_until(lambda: status(stub).samples_in_flight > 0, "groups to reach the engine")
    assert house.rollout is not None
    assert house.rollout.terminate() == 0
    counts = house.queue.status().counts
    assert counts.leased == counts.leases_lost == 0


def test_I1_I6_killed_servers_lose_no_group_and_serve_only_what_they_verified(house: House) -> None:
    house.publish(0)
    house.offer(PROBLEMS)
    for point in ("rollout.after_n_samples=kill@3", "rollout.before_put=kill@2"):
        house.start_rollout(point)
        assert house.wait_exit() == -signal.SIGKILL
    house.start_rollout("rollout.mid_swap=kill@2")
    rows, columns, closing = house.plan(0)
    check_rows(house, rows, columns, {0: 1.0})
    house.publish(1, scale=0.95, step=closing)
    assert house.wait_exit() == -signal.SIGKILL
    stub = house.start_rollout()
    wait_until(lambda: serves(stub, 1), "version 1 to be served")
    assert status(stub).term == 4
    rows, columns, closing = house.plan(1)
    check_rows(house, rows, columns, {0: 1.0, 1: 0.95})
    # Weights that fail the probe: the server gives up instead of serving them.
    house.publish(2, probe_scale=0.5, step=closing)
    assert house.wait_exit() == 1
    assert house.rollout is not None
    assert "probe log-probs differ" in house.rollout.log.splitlines()[-2]
    assert set(house.queue.status().confirmed) == {SERVER}
    assert house.queue.status().confirmed[SERVER].number == 1


def test_I8_a_server_at_work_that_a_newer_one_has_replaced_exits_with_its_own_code(house: House) -> None:
    house.publish(0)
    house.offer(PROBLEMS)
    stub = house.start_rollout()
    wait_until(lambda: status(stub).tokens_generated > 0, "tokens")
    house.queue.register_term(SERVER, 2)
    assert house.wait_exit() == EXIT_STALE_TERM
    assert house.rollout is not None
    assert f"term 1 of {SERVER} is over, term 2 has registered" in house.rollout.log


def test_a_server_without_relaxd_says_what_is_missing() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rollout_server"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert "controller is not set" in done.stderr.splitlines()[-1]
