"""What every Relax daemon stands on: recipe, serving, channels, errors, telemetry. Imports no daemon and no torch."""
