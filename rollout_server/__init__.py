"""The rollout server: leases groups, generates, scores, puts rows. It holds no state that must survive it."""

from relax_common.process.tuning import poll_where_it_waits

poll_where_it_waits()
