"""Shared memory: an arena that the broker owns, slabs that writers fill in place, views that readers map."""
