from dataclasses import dataclass
from typing import Any

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@dataclass
class ParallelDims:
    pp: int
    world_size: int

    @property
    def pp_enabled(self) -> bool:
        return self.pp > 1

    def get_mesh(self, name: str) -> DeviceMesh | Any:
        return init_device_mesh("cpu", (self.pp,), mesh_dim_names=(name,))
