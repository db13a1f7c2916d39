"""What all parts share: the batch, the rows, the settings, the interfaces between layers. Imports no other part of vrl.

Glossary
    row           one trajectory: prompt, model turns and observations in the order they happened
    ragged column one value a token; all ragged columns of a batch have the same offsets
    loss mask     1 exactly on tokens that the engine sampled
    prompt, uid   one draw of a dataset row; its n samples form one group (GRPO)
    rollout       generating rows with the current policy
    mini-batch    the rows of `ppo_mini_batch_size` prompts: one optimizer step
    micro-batch   the rows of one forward and backward pass on one rank
    role          actor, critic, reference, reward model, rollout
    rank          one worker process; data-parallel, sequence-parallel and tensor-parallel ranks share them
"""
