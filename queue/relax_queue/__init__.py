"""The sample bus: groups, leases, rows and plans of many runs."""

from relax_common.process.tuning import poll_where_it_waits

poll_where_it_waits()
