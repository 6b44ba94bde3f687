"""Which version a server serves and whether it may lease: a pure state machine.

| event | effect |
|---|---|
| commit v | v joins the line and becomes the target |
| rollback to head u | the line is cut after u; a served version off the line is unverified from now on |
| staging begun / ended | the next version is copied next to the live one; serving goes on |
| swap begun | nothing is served, nothing is confirmed: live weights may be mixed |
| swap verified v | v is served (tensors hashed right, probe agreed) if it is still on the line |
| engine lost | its weights are gone: nothing is served, nothing is confirmed, until a swap was verified again |
| confirmed v | if v is what is served: leases may be asked for |
"""

from dataclasses import dataclass, replace
from enum import StrEnum

from relax_common.versions import PolicyVersion


class ServingState(StrEnum):
    UNVERIFIED = "unverified"
    SERVING = "serving"
    STAGING = "staging"


@dataclass(frozen=True)
class Serving:
    """`line` holds the committed versions from 0 to the head, oldest first."""

    line: tuple[PolicyVersion, ...] = ()
    served: PolicyVersion | None = None
    confirmed: bool = False
    staging: PolicyVersion | None = None

    @property
    def state(self) -> ServingState:
        if self.served is None:
            return ServingState.UNVERIFIED
        return ServingState.SERVING if self.staging is None else ServingState.STAGING

    @property
    def target(self) -> PolicyVersion | None:
        return self.line[-1] if self.line else None

    @property
    def may_lease(self) -> bool:
        return self.served is not None and self.confirmed

    @property
    def versions_behind(self) -> int:
        """Committed versions that are newer than the served one."""
        if self.served is None:
            return len(self.line)
        return len(self.line) - 1 - self.line.index(self.served)


def on_commit(serving: Serving, version: PolicyVersion) -> Serving:
    return serving if version in serving.line else replace(serving, line=(*serving.line, version))


def on_rollback(serving: Serving, head_number: int) -> Serving:
    """Versions up to `head_number` stay on the line."""
    line = tuple(version for version in serving.line if version.number <= head_number)
    served = serving.served if serving.served in line else None
    staging = serving.staging if serving.staging in line else None
    return replace(
        serving, line=line, served=served, confirmed=serving.confirmed and served is not None, staging=staging
    )


def on_staging_begun(serving: Serving, version: PolicyVersion) -> Serving:
    return replace(serving, staging=version)


def on_staging_ended(serving: Serving) -> Serving:
    return replace(serving, staging=None)


def on_swap_begun(serving: Serving) -> Serving:
    return replace(serving, served=None, confirmed=False)


def on_engine_lost(serving: Serving) -> Serving:
    return replace(serving, served=None, confirmed=False)


def on_swap_verified(serving: Serving, version: PolicyVersion) -> Serving:
    served = version if version in serving.line else None
    return replace(serving, served=served, confirmed=False, staging=None)


def on_confirmed(serving: Serving, version: PolicyVersion) -> Serving:
    return replace(serving, confirmed=True) if version == serving.served else serving
