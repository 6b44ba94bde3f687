"""Engines: token ids in, token ids with log-probs and versions out."""
