"""Packing, attention over packs, log-probs, the learning rate, and the traps of megatron-core it steps around."""

import itertools
import socket
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from relax_common.rows import RowKey
from trainer_server.megatron import optimizer
from trainer_server.megatron.attention import packed_rows
from trainer_server.megatron.cpu.optimizer_fixes import unshare_step_after_load
from trainer_server.megatron.log_probs import VocabularyShard, token_log_probs
from trainer_server.megatron.parallel import Parallel, claim_device
from trainer_server.megatron.schedule import LearningRate, apply_to
from trainer_server.model.hf_config import ModelError
from trainer_server.packing.attention import RowPlaces, attention_layout, packed_causal_attention
from trainer_server.packing.pack import dummy_pack, pack_rows
from trainer_server.packing.rows import RowLimits, TrainRow, refusal, staleness_by_sample

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def one_rank() -> Iterator[dist.ProcessGroup]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def _row(ids: list[int], prompt: int, **changes: object) -> TrainRow:
    mask = np.arange(len(ids)) >= prompt
    columns: dict[str, object] = {
        "key": RowKey("g", 0, 0),
        "tokens": np.array(ids, np.int32),
        "loss_mask": mask,
        "log_probs": np.where(mask, -0.5, 0).astype(np.float32),
        "versions": np.where(mask, 3, -1).astype(np.int64),
        "temperature": 1.0,
        "advantages": np.ones(len(ids), np.float32),
    }
    return TrainRow(**(columns | changes))


def test_pack_predicts_the_trained_tokens_from_the_places_before_them() -> None:
    mixed = _row([5, 6, 7], 1, versions=np.array([-1, 3, 4], np.int64))
    pack = pack_rows([mixed, _row([8, 9, 4], 2, temperature=0.5)], CPU)
    assert pack.tokens.tolist() == [[5, 6, 7, 8, 9, 4]]
    assert pack.positions[0, 0].tolist() == [0, 1, 2, 0, 1, 2]
    assert pack.places.tolist() == [0, 1, 4]
    assert pack.targets.tolist() == [6, 7, 4]
    assert pack.mask.tolist() == [True, True, True]
    assert pack.row_versions.tolist() == [-1, -1, 3]
    assert pack.temperatures.tolist() == [1, 1, 0.5]


def test_pack_predicts_every_token_but_the_first_of_a_row_where_asked() -> None:
    pack = pack_rows([_row([5, 6, 7], 2), _row([8], 1), _row([9, 4], 2)], CPU, predict="all")
    assert pack.places.tolist() == [0, 1, 4]
    assert pack.targets.tolist() == [6, 7, 4]
    assert pack.mask.tolist() == [False, True, False]


def test_rows_of_a_group_bring_what_they_begin_with_once() -> None:
    other = RowKey("h", 0, 0)
    rows = [_row([5, 6, 7], 2), _row([5, 6, 8, 9], 2), _row([5, 6, 8], 2, key=other), _row([5, 6, 7], 2)]
    pack = pack_rows(rows, CPU)
    assert pack.tokens.tolist() == [[5, 6, 7, 8, 9, 5, 6, 8]]
    assert pack.positions[0, 0].tolist() == [0, 1, 2, 2, 3, 0, 1, 2]
    assert pack.places.tolist() == [1, 1, 3, 6, 1]
    assert pack.targets.tolist() == [7, 8, 9, 8, 7]


def test_packed_longest_is_of_one_row_not_of_the_pack() -> None:
    packed = packed_rows(pack_rows([_row([1] * 5, 1), _row([2] * 3, 1)], CPU))
    assert (packed.max_seqlen_q, packed.max_seqlen_kv) == (5, 5)
    assert packed.cu_seqlens_q.tolist() == [0, 5, 8]


def test_dummy_pack_trains_nothing() -> None:
    pack = dummy_pack(CPU)
    assert pack.rows == ()
    assert not pack.mask.any()


@pytest.mark.parametrize(
    "rows",
    [
        [(1, None, 0)],
        [(4, None, 0), (4, None, 0), (4, None, 0)],
        [(3, None, 0), (9, None, 0), (1, None, 0), (17, None, 0), (5, None, 0)],
        [(2, None, 0), (3, None, 0), (2, None, 0)],
        [(6, None, 0), (8, 0, 5), (6, 0, 6), (3, None, 0), (7, 0, 2), (4, 3, 1)],
    ],
)
def test_packed_attention_equals_a_causal_mask_over_each_rows_tokens(rows: list[tuple[int, int | None, int]]) -> None:
    """Rows as (tokens, row whose first tokens it shares, how many)."""
    torch.manual_seed(0)
    laid: list[RowPlaces] = []
    total = 0
    for length, leader, shared in rows:
        before = laid[leader].places[:shared] if leader is not None else np.zeros(0, np.int64)
        laid.append(RowPlaces(np.concatenate([before, np.arange(total, total + length - shared)]), shared))
        total += length - shared
    query, key, value = (torch.randn(total, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    found = packed_causal_attention(query, key, value, attention_layout(laid, CPU), scale=0.3)

    mask = torch.zeros(total, total, dtype=torch.bool)
    for row in laid:
        for i in range(row.shared, len(row.places)):
            mask[row.places[i], row.places[: i + 1]] = True
    k, v = (t.repeat_interleave(2, dim=1) for t in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, k) * 0.3
    expected = torch.einsum("hqk,khd->qhd", scores.masked_fill(~mask, -torch.inf).softmax(-1), v)

    torch.testing.assert_close(found, expected)
    weight = torch.randn_like(found)
    ours = torch.autograd.grad((found * weight).sum(), (query, key, value))
    theirs = torch.autograd.grad((expected * weight).sum(), (query, key, value))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_log_probs_entropy_and_gradient_with_temperature_and_padding(one_rank: dist.ProcessGroup) -> None:
    torch.manual_seed(0)
    true_size, padded = 7, 10
    logits = (torch.randn(5, padded) * 3).requires_grad_()
    before = logits.detach().clone()
    targets = torch.tensor([0, 6, 3, 1, 5])
    temperatures = torch.tensor([1.0, 0.5, 2.0, 1.0, 0.7])
    found, entropy = token_log_probs(logits, targets, temperatures, VocabularyShard(one_rank, 0, true_size))
    assert torch.equal(logits.detach(), before)

    other = before[:, :true_size].clone().requires_grad_()
    reference = torch.log_softmax(other / temperatures[:, None], -1)
    torch.testing.assert_close(found, reference.gather(1, targets[:, None])[:, 0])
    torch.testing.assert_close(entropy, -(reference.exp() * reference).sum(1))
    weight = torch.randn(5)
    (found * weight).sum().backward()
    (reference.gather(1, targets[:, None])[:, 0] * weight).sum().backward()
    torch.testing.assert_close(logits.grad[:, :true_size], other.grad)
    assert (logits.grad[:, true_size:] == 0).all()


def test_warmup_counts_updates_and_starts_above_zero() -> None:
    rate = LearningRate(peak=1.0, warmup_updates=4)
    assert [rate.at(update) for update in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_cosine_falls_to_its_floor_and_stays() -> None:
    rate = LearningRate(peak=1.0, warmup_updates=2, shape="cosine", total_updates=12, floor=0.1)
    values = [rate.at(update) for update in range(2, 20)]
    assert values[0] == 1.0
    assert values[5] == pytest.approx(0.55)
    assert all(a >= b for a, b in itertools.pairwise(values))
    assert values[10:] == [pytest.approx(0.1)] * 8


def test_norms_are_decayed_unless_the_multiplier_is_applied() -> None:
    groups = [{"wd_mult": 1.0, "weight_decay": 0.1}, {"wd_mult": 0.0, "weight_decay": 0.1}]
    apply_to(groups, learning_rate=0.5, weight_decay=0.1)
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert [group["lr"] for group in groups] == [0.5, 0.5]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"tokens": np.arange(9, dtype=np.int32)}, "has 9 tokens, the model's context is 8"),
        ({"tokens": np.array([1, 2, 99], np.int32)}, "has id 99 at position 2"),
        ({"loss_mask": np.array([False, True])}, "has 3 tokens but 2 values of loss_mask"),
        ({"loss_mask": np.array([True, True, True])}, "trains its first token"),
        ({"log_probs": np.array([0, np.nan, 0], np.float32)}, "not finite on a trained token"),
        ({"log_probs": np.array([np.nan, 0, 0], np.float32)}, None),
        ({"temperature": float("nan")}, "has temperature nan"),
    ],
)
def test_I11_unusable_row_is_refused_with_its_reason(changes: dict[str, object], reason: str | None) -> None:
    found = refusal(_row([1, 2, 3], 1, **changes), RowLimits(vocab_size=50, max_tokens=8))
    assert found is None if reason is None else found is not None and reason in found


def test_staleness_is_of_the_oldest_trained_token() -> None:
    versions = np.array([-1, 5, 4, 6], np.int64)
    lineage_one = np.where(versions >= 0, versions | 1 << 32, -1)
    newer = np.array([-1, 6, 6, 6], np.int64)
    rows = [
        _row([1, 2, 3, 4], 1, versions=newer),
        _row([1, 2, 3, 4], 1, versions=versions, key=RowKey("g", 0, 1)),
        _row([1, 2, 3, 4], 1, versions=lineage_one, key=RowKey("g", 1, 0)),
        _row([1, 2], 2, key=RowKey("g", 2, 0)),
    ]
    assert staleness_by_sample(rows, 1 << 32 | 6) == [2, 2]


def test_megatrons_cross_entropy_overwrites_its_logits(one_rank: dist.ProcessGroup) -> None:
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    logits = torch.randn(3, 1, 7)
    before = logits.clone()
    vocab_parallel_cross_entropy(logits, torch.zeros(3, 1, dtype=torch.long), tp_group=one_rank)
    assert not torch.equal(logits, before)


def test_adam_steps_are_not_shared_after_megatrons_load() -> None:
    class Megatron:
        """Loads as the distributed optimizer does with torch's Adam: one step tensor for all parameters."""

        def __init__(self) -> None:
            self.optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1)) for _ in range(2)])

        def load_state_dict(self, step: torch.Tensor) -> None:
            for parameter in self.optimizer.param_groups[0]["params"]:
                self.optimizer.state[parameter]["step"] = step

    unshare_step_after_load(Megatron)
    optimizer = Megatron()
    optimizer.load_state_dict(torch.tensor(3.0))
    first, second = (state["step"] for state in optimizer.optimizer.state.values())
    first += 1
    assert second == 3.0


def test_device_blocks_still_work_in_a_process_prepared_for_megatron() -> None:
    with torch.device("meta"):
        made = [torch.arange(3), torch.zeros(2), torch.empty(1), torch.ones(1), torch.tensor([1.0])]
    assert {tensor.device.type for tensor in made} == {"meta"}
    assert torch.zeros(2, device="cpu").device.type == "cpu"


def test_the_fixes_are_in_place_where_there_is_no_cuda() -> None:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    patched = DistributedOptimizer.load_state_dict.__module__ == "trainer_server.megatron.cpu.optimizer_fixes"
    assert patched != torch.cuda.is_available()


@pytest.mark.parametrize(("tensor", "expert"), [(1, 1), (2, 1), (1, 2), (1, 4)])
def test_of_the_ranks_that_hold_a_slice_exactly_one_owns_it(tensor: int, expert: int) -> None:
    ranks = [Parallel(rank, 4, tensor, expert) for rank in range(4)]
    kinds = [(True, False), (False, False), *([(False, True)] if tensor == 1 else [])]
    for replicated, of_expert in kinds:
        holders: dict[object, list[int]] = {}
        for rank in ranks:
            held = rank.place.expert if of_expert else None if replicated else rank.place.tensor
            holder = rank.holder(replicated=replicated, of_expert=of_expert)
            holders.setdefault((held, holder.size), []).append(holder.rank)
        assert all(sorted(found) == list(range(size)) for (_, size), found in holders.items())


def test_expert_groups_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ModelError, match="2 data-parallel ranks cannot be divided into expert-parallel groups of 4"):
        Parallel(0, 4, 2, 4)


def test_a_process_takes_the_device_of_its_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert claim_device() == torch.device("cpu")
    taken: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    assert claim_device() == torch.device("cuda:0")
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert claim_device() == torch.device("cuda:3")
    assert taken == [torch.device("cuda:0"), torch.device("cuda:3")]


def test_an_adam_that_is_not_torchs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fused = SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=object())])
    monkeypatch.setattr(optimizer, "get_megatron_optimizer", lambda *args, **kwargs: fused)
    with pytest.raises(ModelError, match="without Transformer Engine and Apex"):
        optimizer.build_optimizer(optimizer.AdamWOptions(LearningRate(1e-3)), None, torch.bfloat16)
