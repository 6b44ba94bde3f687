"""The row schema: one entry adds a field everywhere."""

from __future__ import annotations

import numpy as np
import pytest

from relax.queue.v1 import queue_pb2
from relax_common.recipe import derive, parse_recipe
from relax_common.rows import FIELDS, ITEM_BYTES, Field, RowKey, bytes_per_group, fields_read_by, fields_written_by
from relax_common.rows import schema as rows_schema
from relax_queue.broker.messages import spec_from
from relax_queue.rows.column_block import Column, encode, read_table
from relax_queue.rows.columns import check_put
from relax_queue.rows.row_keys import keys_of_samples
from relax_queue.rows.spec import check_spec
from relaxd.plan.requests import queue_request

RECIPE = """
name = "rows"
prompts_per_step = 4
samples_per_prompt = 2
total_steps = 10
[model]
path = "model"
[data]
path = "data.jsonl"
prompt_tokens_max = 8
[reward]
name = "exact"
[sampling]
max_new_tokens = 8
[actor]
tokens_per_microbatch = 64
"""


def test_every_item_size_is_that_of_numpy() -> None:
    assert {name: np.dtype(name).itemsize for name in ITEM_BYTES} == ITEM_BYTES


def test_names_are_unique_and_only_a_critic_reads_what_it_writes() -> None:
    """It is trained on the values that the actor has seen, whichever of its incarnations wrote them."""
    names = [field.name for field in FIELDS]
    assert len(set(names)) == len(names)
    assert [field.name for field in FIELDS if field.writer in field.readers] == ["values"]


def test_a_run_has_the_fields_of_its_roles_only() -> None:
    assert "old_log_probs" not in [field.name for field in fields_written_by(("rollout", "actor"))]
    read = [field.name for field in fields_read_by("actor", ("rollout", "actor", "actor_fwd"))]
    assert "old_log_probs" in read
    assert "ref_log_probs" not in read
    assert [field.name for field in fields_read_by("reference", ("rollout", "reference"))] == ["tokens", "temperature"]


def test_one_entry_brings_a_field_from_the_recipe_to_the_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    values = Field("values", "float32", (-1,), "row", writer="rollout", readers=("actor",))
    recipe = parse_recipe(RECIPE)
    before = derive(recipe)
    monkeypatch.setattr(rows_schema, "FIELDS", (*FIELDS, values))
    after = derive(recipe)
    spec = spec_from(queue_request("run", recipe, after, "dcs:1").spec)
    check_spec(spec)
    assert spec.field("values") == Field("values", "float32", (-1,), "row", "rollout")
    assert "values" in spec.consumers[0].fields
    assert after.bytes_per_group == spec.bytes_per_group
    assert after.bytes_per_group - before.bytes_per_group == bytes_per_group([values], 2, 16) - bytes_per_group(
        [], 2, 16
    )
    columns = {f.name: _column(f) for f in spec.fields}
    check_put(spec, read_table(encode(columns)).entries, keys_of_samples("g", range(2)), "g")


def test_the_budget_covers_values_and_tables_of_both_scopes() -> None:
    ragged = Field("a", "int64", (-1,), "row", "rollout")
    single = Field("b", "uint8", (), "group", "rollout")
    assert bytes_per_group([ragged, single], 3, 10) == 3 * (80 + 256) + (1 + 256) + 4096


def test_a_run_s_queue_is_told_who_needs_the_version_of_the_step() -> None:
    recipe = parse_recipe(RECIPE + '\n[algorithm]\nold_policy = "actor_fwd"\nkl_loss_coef = 0.1\n')
    consumers = {c.name: c for c in queue_request("run", recipe, derive(recipe), "dcs:1").spec.consumers}
    step, any_version = queue_pb2.NEEDS_VERSION_STEP, queue_pb2.NEEDS_VERSION_ANY
    assert {name: c.needs_version for name, c in consumers.items()} == {
        "actor": step,
        "actor_fwd": step,
        "reference": any_version,
    }


def test_a_row_key_reads_like_its_path_and_equals_its_tuple() -> None:
    key = RowKey("g7", 1, 0)
    assert str(key) == f"{key}" == "g7/1/0"
    assert key == ("g7", 1, 0)


def _column(field: Field) -> Column:
    if field.ragged:
        return Column(field.scope, np.ones(6, field.dtype), np.array([0, 3, 6]), field.transposed)
    return Column(field.scope, np.ones(2, field.dtype))
