"""Windows in a training loop: each takes the optimizer step of the whole batch, or none at all.

Until the optimizer steps, a window is a transaction: whatever goes wrong, gradients, random generators and buffers are as
they were at its start.

    accumulator   what users hold
    training      what all windows of one training share; `arguments`: whether its options fit together
    run           one window: attempts, and the step
    cut           how it is cut, and what failures teach about that
    own_loop      a window whose loop the user writes
"""
