"""What travels: column blocks, row keys, facts about rows, and the specification of a run. Imports no other room."""
