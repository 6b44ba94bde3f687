"""How bytes travel between a client and dcs."""
