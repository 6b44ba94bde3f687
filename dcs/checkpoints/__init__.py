"""Versions on disk: saving, retention, reading back."""
