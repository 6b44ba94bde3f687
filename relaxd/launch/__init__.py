"""How daemons are started, watched and started again."""
