"""The settings of a run: frozen dataclasses (`schema.Config`), their builder, rules across keys, override handling."""
