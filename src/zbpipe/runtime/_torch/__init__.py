"""The private names of torch that zbpipe uses, one file for each part of torch, known from torch 2.11 to 2.15.

The code detects versions by the names in the installed torch, not by its version number.
"""
