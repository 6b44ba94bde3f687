"""relaxctl: the command line of the controller."""
