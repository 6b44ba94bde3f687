"""The sample bus: groups, leases, rows and plans of many runs."""

from relax_common.rpc.grpc_polling import poll_where_it_waits

poll_where_it_waits()
