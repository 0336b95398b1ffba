"""The sections of gpu.py: each measures one thing on the device that it is given, and yields its rows as they come.

They ask the device for what it counts, so that they run on a virtual one as well: their code can be tried without a GPU.
"""
