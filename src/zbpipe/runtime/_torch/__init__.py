"""The private names of torch that zbpipe uses, one file for each part of torch, known from torch 2.11 to 2.15.

Differences between versions are detected in the installed torch, not from its version number.
"""
