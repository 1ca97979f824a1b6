"""The plug for TorchTitan, in one for all versions; `zbpipe.titan` is what users call and launch."""
