"""Workflows: from a prompt group to scored samples."""
