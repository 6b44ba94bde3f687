"""What a trainer process can be in a run; one file per role."""

from trainer_server.roles.actor import ActorRole
from trainer_server.roles.critic import CriticRole
from trainer_server.roles.role import Role
from trainer_server.roles.scorer import ScorerRole

_SCORERS = (ScorerRole("reference"), ScorerRole("teacher"), ScorerRole("actor_fwd"))
ROLES: dict[str, Role] = {role.name: role for role in (ActorRole(), CriticRole(), *_SCORERS)}

__all__ = ["ROLES", "Role"]
