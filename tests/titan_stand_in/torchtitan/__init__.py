"""A small trainer with the names and signatures of TorchTitan's main branch that zbpipe takes, and nothing of its code.

It trains a toy model on the CPU, so that the plug is tested where no TorchTitan is installed.
"""
