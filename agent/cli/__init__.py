"""The command line: a table of verbs, each imported only when it is called."""
