"""Policy versions and their packed form."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from relax_common.versions import PolicyVersion


@given(st.integers(0, 2**20), st.integers(0, 2**32 - 1))
def test_versions_survive_packing_and_order_by_lineage(lineage: int, number: int) -> None:
    version = PolicyVersion(lineage, number)
    assert PolicyVersion.unpack(version.pack()) == version
    assert PolicyVersion(lineage + 1, 0) > version
