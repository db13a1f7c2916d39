"""What a model's text asks for: tool calls, code cells, an answer. Nothing that a model can print makes them raise.

`hermes` reads `<tool_call>` tags, `code` fenced blocks and `<code>` tags, `answer` the `<answer>` tag; `types` holds
what they return. All take time linear in the text.
"""
