"""First import of the process that ranks are forked from: it collects no garbage among its imports."""

import atexit
import gc

gc.disable()
atexit.register(gc.freeze)
