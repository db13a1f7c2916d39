"""Where code that a model wrote runs: a local sandbox, or a remote server."""
