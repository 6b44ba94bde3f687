"""A process of this host: its configuration, logs, metrics, memory, ports and state directory."""
