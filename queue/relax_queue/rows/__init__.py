"""The data model: column blocks, row keys, facts about rows, the specification of a run. Imports no other room."""
