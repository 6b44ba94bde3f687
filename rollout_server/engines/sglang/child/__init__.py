"""What runs in the engine's own process, perhaps under another interpreter, on nothing but SGLang's environment."""
