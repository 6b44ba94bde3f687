"""What the training thread tells the event loop, and the wishes it gets from there."""

import threading
from dataclasses import dataclass, field

from relax_common.versions import PolicyVersion


@dataclass
class RoleStatus:
    """Written by the training thread, read by the server. The two events go the other way."""

    run: str = ""
    term: int = 0
    step: int = 0
    phase: str = "load"
    version: PolicyVersion = field(default_factory=lambda: PolicyVersion(0, 0))
    waits_for: str = ""
    pause: threading.Event = field(default_factory=threading.Event)
    stop: threading.Event = field(default_factory=threading.Event)

    def wait_for(self, what: str) -> None:
        """Within a phase."""
        self.waits_for = what

    def enter(self, phase: str, waits_for: str = "") -> None:
        self.phase = phase
        self.waits_for = waits_for
