"""The controller: runs, daemons, terms, launching and recovery. Never on the data path."""

from relax_common.process.tuning import poll_where_it_waits

poll_where_it_waits()
