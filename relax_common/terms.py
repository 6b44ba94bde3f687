"""Terms: the one fence of I8. Each incarnation of a role has a term issued by relaxd; the newest term known wins."""

from __future__ import annotations

from dataclasses import dataclass, field

from relax_common.errors import InvalidInput, StaleTerm
from relax_common.names import check_name

TERM_STEP_MAX = 1000
"""How far a term may be above the newest one known. relaxd counts terms one by one, so a larger step is a mistake;
accepting it could fence the holder for good."""


@dataclass(slots=True)
class Terms:
    """The newest term by holder. Call `check`; if the term is new, make it durable, then `register` it."""

    newest: dict[str, int] = field(default_factory=dict)

    def of(self, holder: str) -> int:
        """The newest term; 0 if the holder has not registered yet."""
        return self.newest.get(holder, 0)

    def check(self, holder: str, term: int) -> bool:
        """Whether the term is new. Raises StaleTerm for an old one and InvalidInput for one that cannot be."""
        known = self.of(holder)
        if not known:
            check_name(holder, "holder of a term")
        if term < 1:
            raise InvalidInput(f"term {term} of {holder}: terms begin with 1")
        if term < known:
            raise StaleTerm(f"term {term} of {holder} is over, term {known} has registered")
        if term > known + TERM_STEP_MAX:
            raise InvalidInput(
                f"term {term} of {holder}: the newest one known is {known}, and a new one is at most {TERM_STEP_MAX} "
                f"above it; use the term that relaxd granted",
            )
        return term > known

    def register(self, holder: str, term: int) -> None:
        """Call after the term was made durable."""
        self.newest[holder] = max(term, self.of(holder))
