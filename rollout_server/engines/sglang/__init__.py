"""The production engine: SGLang in a process of its own (managed) or behind a URL (external)."""
