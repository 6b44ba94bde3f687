"""The rollout server: leases groups, generates, scores, puts rows. It holds nothing that matters."""
