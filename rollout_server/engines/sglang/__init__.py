"""The production engine: SGLang in a process of its own (managed) or reached by a URL (external)."""
