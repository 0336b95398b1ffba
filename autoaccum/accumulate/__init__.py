"""Windows in a training loop: each takes the optimizer step of the whole batch, or none at all.

Until the optimizer steps, a window is a transaction: whatever goes wrong, gradients, random generators and buffers are as
they were at its start.
"""
