"""The result of a group: samples of token ids with masks, log-probs and versions, and their columns."""
