"""The protocol of versions as pure rules: no files, no sockets, no clock."""
