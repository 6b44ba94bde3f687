"""Prompts of a run: read from files or generated, checked row by row, visited in a seeded order."""

from relaxd.data.prompts import Prompts, group_id, parse_group_id, read_prompts, visit_order
from relaxd.data.row import PromptRow

__all__ = ["PromptRow", "Prompts", "group_id", "parse_group_id", "read_prompts", "visit_order"]
