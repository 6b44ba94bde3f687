"""What a recipe asks of hosts and devices, by arithmetic alone: from the recipe and the model's config.json."""
