"""A search in a process of its own, so that a kernel that dies of a refused allocation takes nothing with it.

__main__   starts the child; imports nothing before Ctrl-C is settled
messages   what the two processes say to each other
child      loads the target and searches; imports torch
parent     starts the child, follows it, and goes on where it died; does not import torch
"""
