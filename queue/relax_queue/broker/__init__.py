"""The daemon: servicers, transactions, timers, waiting calls, and the follower of the dcs log."""
