"""One training step: read its rows, train them, count what was seen."""
