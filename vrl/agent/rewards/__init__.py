"""Rewards of finished episodes: rules by data source, a user's own function, and the processes they run in.

`pool` is what a rollout worker uses; `process` is the program of one reward process; `scoring` turns a spec into a
scorer; `registry` finds the rule of a data source, `user` loads a function from a file. The other modules are rules.
"""
