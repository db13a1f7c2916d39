"""What answers a model's turns: `registry` finds the environment that a row names, `types` says what one is.

`plain` is one turn without tools, `tool_calls` calls tools by name, `code` runs Python cells, `deepeyes` runs classes
with DeepEyes' interface; `observations` makes messages of what tools return.
"""
