from hypothesis import given
from hypothesis import strategies as st

from relax_common.versions import PolicyVersion
from rollout_server.serving_state import (
    Serving,
    ServingState,
    on_commit,
    on_confirmed,
    on_engine_lost,
    on_rollback,
    on_staging_begun,
    on_staging_ended,
    on_swap_begun,
    on_swap_verified,
)

V0, V1 = PolicyVersion(0, 0), PolicyVersion(0, 1)


def serve(serving: Serving, version: PolicyVersion) -> Serving:
    return on_confirmed(on_swap_verified(on_swap_begun(serving), version), version)


def test_I6_a_new_server_may_not_lease_before_it_has_confirmed() -> None:
    serving = on_commit(Serving(), V0)
    assert serving.state is ServingState.UNVERIFIED
    assert not serving.may_lease
    serving = on_swap_verified(on_swap_begun(serving), V0)
    assert serving.state is ServingState.SERVING
    assert not serving.may_lease
    assert on_confirmed(serving, V0).may_lease


def test_I6_staging_goes_on_serving_and_a_swap_does_not() -> None:
    serving = on_staging_begun(on_commit(serve(on_commit(Serving(), V0), V0), V1), V1)
    assert serving.state is ServingState.STAGING
    assert serving.may_lease
    assert serving.versions_behind == 1
    swapping = on_swap_begun(on_staging_ended(serving))
    assert swapping.state is ServingState.UNVERIFIED
    assert not swapping.may_lease


def test_I6_a_lost_engine_serves_nothing_until_a_swap_was_verified_and_confirmed_again() -> None:
    serving = on_engine_lost(serve(on_commit(Serving(), V0), V0))
    assert serving.state is ServingState.UNVERIFIED
    assert not serving.may_lease
    assert serving.target == V0
    assert serving.target != serving.served
    assert serve(serving, V0).may_lease


def test_I6_a_rollback_to_before_the_served_version_takes_its_confirmation() -> None:
    serving = serve(on_commit(on_commit(Serving(), V0), V1), V1)
    cut = on_rollback(serving, 0)
    assert cut.served is None
    assert not cut.may_lease
    assert cut.target == V0
    kept = on_rollback(serving, 1)
    assert kept == serving


def test_a_confirmation_of_another_version_counts_for_nothing() -> None:
    serving = on_swap_verified(on_swap_begun(on_commit(on_commit(Serving(), V0), V1)), V1)
    assert not on_confirmed(serving, V0).may_lease


V2, V3 = PolicyVersion(0, 2), PolicyVersion(0, 3)
LINE = (V0, V1, V2, V3)


def test_a_server_in_the_middle_of_the_line_knows_how_far_it_is_behind() -> None:
    assert [Serving(LINE, served=version).versions_behind for version in LINE] == [3, 2, 1, 0]
    assert Serving(LINE).versions_behind == 4


def test_a_swap_and_a_loss_take_the_confirmation_with_what_was_served() -> None:
    serving = Serving(LINE, served=V2, confirmed=True, staging=V3)
    assert on_swap_begun(serving) == Serving(LINE, served=None, confirmed=False, staging=V3)
    assert on_engine_lost(serving) == Serving(LINE, served=None, confirmed=False, staging=V3)


def test_a_rollback_drops_what_is_staged_only_if_it_cuts_it_off() -> None:
    serving = Serving(LINE, served=V0, confirmed=True, staging=V2)
    assert on_rollback(serving, 2) == Serving((V0, V1, V2), served=V0, confirmed=True, staging=V2)
    assert on_rollback(serving, 1) == Serving((V0, V1), served=V0, confirmed=True, staging=None)


def test_a_rollback_does_not_confirm_what_was_not_confirmed() -> None:
    unconfirmed = Serving(LINE, served=V0, confirmed=False)
    assert on_rollback(unconfirmed, 1) == Serving((V0, V1), served=V0, confirmed=False)
    assert not on_rollback(unconfirmed, 1).may_lease


KINDS = st.sampled_from(["commit", "rollback", "stage", "swap", "verified", "confirm"])


@given(st.lists(st.tuples(KINDS, st.integers(0, 4))))
def test_I6_whatever_happens_only_a_version_on_the_line_is_leased_for(events: list[tuple[str, int]]) -> None:
    serving, lineage = Serving(), 0
    for kind, number in events:
        head = serving.target
        if kind == "commit":
            serving = on_commit(serving, PolicyVersion(lineage, 0 if head is None else head.number + 1))
        elif kind == "rollback" and head is not None:
            lineage += 1
            serving = on_rollback(serving, min(number, head.number))
        elif kind == "stage" and head is not None:
            serving = on_staging_begun(serving, head)
        elif kind == "swap":
            serving = on_swap_begun(serving)
        elif kind == "verified":
            serving = on_swap_verified(serving, PolicyVersion(lineage, number))
        elif kind == "confirm":
            serving = on_confirmed(serving, PolicyVersion(lineage, number))
        assert not serving.may_lease or serving.served in serving.line
        assert serving.versions_behind >= 0


def test_I6_a_server_begins_unconfirmed() -> None:
    assert Serving() == Serving(line=(), served=None, confirmed=False, staging=None)


def test_the_end_of_a_staging_leaves_what_is_served() -> None:
    serving = Serving(LINE, served=V2, confirmed=True, staging=V3)
    assert on_staging_ended(serving) == Serving(LINE, served=V2, confirmed=True, staging=None)


def test_I6_a_verified_swap_ends_the_staging_and_is_still_to_be_confirmed() -> None:
    serving = Serving(LINE, served=V2, confirmed=True, staging=V3)
    assert on_swap_verified(serving, V3) == Serving(LINE, served=V3, confirmed=False, staging=None)
    assert on_swap_verified(serving, PolicyVersion(1, 1)) == Serving(LINE, served=None, confirmed=False, staging=None)


def test_I6_a_rollback_that_cuts_the_served_version_off_leaves_no_confirmation_behind() -> None:
    assert on_rollback(Serving(LINE, served=V2, confirmed=True), 1) == Serving((V0, V1), served=None, confirmed=False)
