"""First import of the process that ranks are forked from: it collects no garbage, but the ranks do."""

import atexit
import gc
import os

gc.disable()
os.register_at_fork(after_in_child=gc.enable)
atexit.register(gc.freeze)
