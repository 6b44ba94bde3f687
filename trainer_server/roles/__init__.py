"""What a trainer process can be in a run; one file per role."""
