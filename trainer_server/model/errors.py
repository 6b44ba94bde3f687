"""Refusals of the model package: one line that says what, where, and what to do."""


class ModelError(ValueError):
    """A model folder, configuration or layout that cannot be used."""
