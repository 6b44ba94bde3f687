"""How daemons reach each other: serving, channels, registration, streams."""
