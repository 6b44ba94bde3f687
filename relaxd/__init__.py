"""The controller: runs, daemons, terms, launching and recovery. Never on the data path."""
