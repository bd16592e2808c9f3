"""The ``umim`` command, one file per subcommand."""
