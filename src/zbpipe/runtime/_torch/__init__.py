"""The private names of torch that zbpipe uses: all of them in this folder, one file for each part of torch.

What differs between versions is asked of the installed torch, not of its version number.
`tests/test_private_names.py` refuses such names anywhere else.
"""
