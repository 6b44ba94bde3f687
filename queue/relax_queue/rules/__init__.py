"""How a run changes: events, the state that they add up to, and the pure rules that decide them. No I/O, no clock."""
