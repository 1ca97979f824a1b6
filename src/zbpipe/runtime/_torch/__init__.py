"""The private names of torch that zbpipe uses, one file for each part of torch, known from torch 2.11 to 2.15.

What differs between versions is asked of the installed torch, not of its version number.
"""
