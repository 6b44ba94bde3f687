"""How a trainer rank is started."""

from pydantic import Field

from relax_common.process.config import DaemonConfig


class TrainerConfig(DaemonConfig):
    """One rank of a role on Megatron-core."""

    role: str = "actor"
    """What this process is of the run, by name: the trained policy, or a role that only computes."""
    rank: int = Field(0, ge=0)
    """This process among the role's."""
    world_size: int = Field(1, ge=1)
    """Processes of the role."""
    store: str = ""
    """host:port at which rank 0 opens the store where the ranks meet; not needed for one process."""
    collective_timeout_seconds: float = Field(120.0, gt=0)
    """A rank that is silent for this long is lost, and all ranks end."""
