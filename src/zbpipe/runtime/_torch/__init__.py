"""The private names of torch that zbpipe uses: all of them in this folder, one file for each part of torch.

What differs between versions is asked of the installed torch, not of its version number.
`tests/test_private_names.py` refuses such names anywhere else.
"""

from zbpipe.runtime._torch.abandoned import can_send_marks as can_send_marks
from zbpipe.runtime._torch.autograd import *  # noqa: F403
from zbpipe.runtime._torch.checkpoints import *  # noqa: F403
from zbpipe.runtime._torch.compiler import *  # noqa: F403
from zbpipe.runtime._torch.frames import *  # noqa: F403
from zbpipe.runtime._torch.fsdp import *  # noqa: F403
from zbpipe.runtime._torch.graph_products import *  # noqa: F403
from zbpipe.runtime._torch.hooks import *  # noqa: F403
from zbpipe.runtime._torch.live import *  # noqa: F403
from zbpipe.runtime._torch.on_meta import *  # noqa: F403
from zbpipe.runtime._torch.pipelining import *  # noqa: F403
from zbpipe.runtime._torch.running_ahead import *  # noqa: F403
