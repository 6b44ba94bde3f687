"""Code of the engine's own process. It may run under another interpreter and needs only SGLang's environment."""
