"""The plug for TorchTitan, in one for all versions; users call and launch `zbpipe.titan`."""
