"""Pure torch functions of reinforcement learning: advantages, losses, KL, aggregation, schedules.

No configuration object, no DataProto and no distributed call: callers pass flat ragged tensors. Everywhere `x [T]`
holds the tokens of all rows one after the other and `offsets int64 [B+1]` the row borders; `mask bool [T]` is true on
the tokens that the policy sampled.
"""
