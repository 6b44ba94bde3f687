"""What every Relax daemon uses: recipe, serving, channels, errors, telemetry. Imports no daemon and no torch."""
