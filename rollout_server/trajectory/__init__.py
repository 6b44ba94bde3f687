"""What a group becomes: samples of token ids with masks, log-probs and versions, and their columns."""
