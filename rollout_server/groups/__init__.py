"""From a leased group to its finished samples, and back to the queue."""
