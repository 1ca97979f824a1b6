"""The plug for all versions of TorchTitan. Users call and launch `zbpipe.titan`."""
