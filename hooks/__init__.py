"""Training-process side of ``--calibrate``: the instruments around a Megatron training loop.

::

    import torch                     start: waits for a host to be imported
    import megatron...               post_import: adapters replace a few module attributes
    for step in range(train_iters):  session: warm-up, window (hooked and bare steps), watching
        on_training_step_start()     instruments.put_on, in hooked steps only
            forward-backward         timers: phases; modules: operators; process_groups: transfers
            optimizer.step()         recorder: marks in integer arrays, of host or device time
        on_training_step_end()       instruments.take_off; live: one event to the companion
    (window closes)                  writer: the marks as one line; who reads it makes records
                                     large worlds: a plan selects ranks, the rest send a summary

Nothing here raises into training, waits for the device, or draws a random number; ``guard`` removes
all hooks after three faults.
"""
