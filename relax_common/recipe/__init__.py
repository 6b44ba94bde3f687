"""The typed recipe, which defines a run. Imports without torch."""

from relax_common.recipe.derived import ColumnRole, Derived, derive
from relax_common.recipe.loading import load_recipe, parse_recipe, recipe_digest, to_toml
from relax_common.recipe.schema import Recipe

__all__ = ["ColumnRole", "Derived", "Recipe", "derive", "load_recipe", "parse_recipe", "recipe_digest", "to_toml"]
