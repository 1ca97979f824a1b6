"""zbpipe in TorchTitan: `python -m zbpipe.titan.train` in place of `python -m torchtitan.train`."""
