"""The sample bus: groups, leases, rows and plans of many runs."""
