"""One run, from its creation to its end: its state, its prompts, its events, its report."""
