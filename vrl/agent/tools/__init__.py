"""Tools that a model calls by name with JSON arguments.

`types` says what a tool is, `configured` makes the tools of a settings file, `registry` names the built-in ones,
`user_tools` runs classes with verl's interface, `mcp_servers` those of MCP servers. The other modules are tools.
"""
