"""What a recipe needs of hosts and devices, computed from the recipe and the model's config.json alone."""
