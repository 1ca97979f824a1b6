"""GPU figures from the makers' data sheets, and the shares of the peak that training sustains. As of November 2026.

Peaks are dense BF16, bandwidths one-directional, and memory is as torch reports it. The sustained shares are fitted to
published jobs (`benchmarks/published_jobs.csv`, docs/hardware.md). They are the least certain numbers of an estimate:
on the same GPUs, frameworks differ by a factor of 1.3. So each device has a range of plausible speeds, which scales all
rows alike; the gains barely change. `--tflops` replaces the shares.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any

from zbpipe.costs.model import Transport

GIB = 2**30
_OF_MEMORY = 0.8
"""Share of the memory's bandwidth that kernels of norms and activation functions reach."""
_OF_LINK = 0.85
"""Share of a link's bandwidth that large collectives reach."""
_HOP = 0.2
"""Latency of a ring's hop, relative to a message's: NCCL counts 3.4 microseconds in a node, 9.6 between nodes."""
USABLE = 0.85
"""Usable share of a GPU's memory. The communication library and fragmentation need the rest."""


@dataclass(frozen=True)
class Device:
    """A GPU, and the node that contains it."""

    name: str
    peak: float
    """Floating-point operations per second in BF16, without sparsity."""
    products: float
    """Likely share of the peak that products reach, and attention."""
    attention: float
    hbm: float
    """Bytes per second between the GPU and its memory."""
    inside: float
    """Bytes per second from a GPU to the others of its node, in one direction."""
    gib: float
    """GiB of memory, as torch reports it."""
    source: str
    """Sources of the maker's figures, and of the shares."""
    share_from: str
    between: float = 50e9
    """One-directional bandwidth from a GPU to other nodes through its own network card, in bytes per second."""
    range: tuple[float, float] | None = None
    """Least and largest plausible speed, relative to the likely one. None if unknown."""
    gpus_per_node: int = 8
    experts: float = 0.6
    """Speed of the products of routed experts relative to other products, with their routing and copies. torchao, one
    B200 in bfloat16: TorchTitan's layer with experts takes 275 ms in Llama 4's sizes and 92 ms in DeepSeek V3's, or
    23 and 25 % of the peak in the routed experts. Grouped products alone reach 36 % there, and 54 % on an H100."""
    latency: float = 2e-5
    transport: Transport = Transport.ONE_QUEUE
    """Which messages wait for each other: those of a rank, by the process groups of NCCL and RCCL."""
    worst_transport: Transport | None = None
    """A transport that some jobs of this device have, and that takes longer."""
    overhead: float = 3e-4
    """Seconds between two ops of a schedule: Python and launches. An H200 takes 0.33 ms (benchmarks/README.md)."""

    @property
    def memory(self) -> float:
        """Bytes per second that kernels reach."""
        return _OF_MEMORY * self.hbm

    @property
    def usable_bytes(self) -> float:
        return USABLE * self.gib * GIB

    def bandwidth(self, gpus: int, apart: int) -> float:
        """Bandwidth of a collective for each GPU, in bytes per second. `apart` is the distance of the group's GPUs.

        A group that spans nodes uses the network cards of all its GPUs in parallel. Data enters a node once.

        >>> find("H100").bandwidth(8, apart=1) / 1e9, find("H100").bandwidth(4, apart=8) / 1e9
        (450.0, 50.0)
        """
        if gpus * apart <= self.gpus_per_node:
            return self.inside
        here = max(self.gpus_per_node // apart, 1)
        return min(self.inside, here * self.between)

    def collective(self, size: float, gpus: int, apart: int = 1) -> float:
        """Seconds in which a ring gathers, or reduces and scatters, this number of bytes.

        >>> h100 = find("H100")
        >>> [round(size / h100.collective(size, 8) / 450e9 * 7 / 8, 2) for size in (17e6, 67e6, 268e6)]
        [0.49, 0.72, 0.81]
        """
        hop = _HOP * self.latency
        return (gpus - 1) * (size / gpus / (_OF_LINK * self.bandwidth(gpus, apart)) + hop)

    def exchange(self, size: float, gpus: int, copies: float = 1.0) -> float:
        """Seconds in which each of a group's neighbours sends all others its part of this number of bytes.

        Between nodes each GPU uses only its own network card, and sends the data for each other GPU separately. With
        `copies` of each token for different GPUs, it sends one to each node that needs any, as DeepEP does.

        >>> h100 = find("H100")
        >>> [round(h100.exchange(1e9, *group) * 1e3, 1) for group in ((8,), (64,), (64, 8))]
        [2.3, 20.6, 13.5]
        """
        inside = min(gpus, self.gpus_per_node)
        nodes = gpus / inside
        in_node = (inside - 1) / gpus * size / self.inside
        reached: float = nodes * (1 - (1 - 1 / nodes) ** copies) / copies
        elsewhere = reached * (gpus - inside) / gpus * size / self.between
        return max(in_node, elsewhere) / _OF_LINK + (gpus > 1) * self.latency


_COLUMNS = ("peak", "products", "attention", "hbm", "range", "inside", "between", "gib")
_FIGURES = {
    "A100": (312e12, 0.70, 0.45, 2.039e12, (0.85, 1.2), 300e9, 25e9, 79),
    "H100": (989.4e12, 0.60, 0.42, 3.35e12, (0.82, 1.25), 450e9, 50e9, 79),
    "H100-500W": (989.4e12, 0.46, 0.28, 2.4e12, (0.87, 1.15), 450e9, 50e9, 94),
    "H200": (989.4e12, 0.60, 0.42, 4.8e12, (0.82, 1.25), 450e9, 50e9, 139),
    "B200": (2250e12, 0.56, 0.40, 7.7e12, (0.8, 1.25), 900e9, 50e9, 178),
    "GB200": (2500e12, 0.56, 0.40, 8e12, (0.8, 1.25), 900e9, 50e9, 184),
    "L40S": (362.05e12, 0.50, 0.35, 8.64e11, (0.6, 1.4), 32e9, 25e9, 44),
    "MI250X": (191.5e12, 0.42, 0.25, 1.6e12, (0.85, 1.1), 200e9, 12.5e9, 64),
    "MI300X": (1307.4e12, 0.45, 0.25, 5.3e12, (0.8, 1.3), 448e9, 50e9, 192),
    "MI325X": (1307.4e12, 0.55, 0.33, 6e12, (0.8, 1.2), 448e9, 50e9, 256),
    "MI355X": (2516.6e12, 0.45, 0.25, 8e12, (0.7, 1.3), 537.6e9, 50e9, 288),
}
_NVLINK = "400 Gb/s ConnectX-7 per GPU, as in NVIDIA DGX H100 and HGX reference designs"
_NICS = "8 network cards of 400 Gb/s per node, as in ROCm's documentation of distributed setups"
_SOURCES = {
    "A100": "NVIDIA A100 80GB data sheet (SXM): 312 TFLOPS, NVLink 600 GB/s; 200 Gb/s ConnectX-6 per GPU, as in NVIDIA"
    " DGX A100",
    "H100": f"NVIDIA H100 data sheet (SXM5, 700 W): 1,979 TFLOPS with sparsity, NVLink 900 GB/s; {_NVLINK}",
    "H100-500W": "Meta's Grand Teton: H100 with 96 GB of HBM2e and a limit of 500 W, otherwise as H100",
    "H200": f"NVIDIA H200 data sheet (SXM): 1,979 TFLOPS with sparsity, NVLink 900 GB/s, 141 GB; {_NVLINK}",
    "B200": "NVIDIA DGX B200 data sheet: 8 GPUs of 1,440 GB together, NVLink 1.8 TB/s; HGX B200: 4.5 PFLOPS with"
    f" sparsity, 7.7 TB/s of memory; {_NVLINK}",
    "GB200": "NVIDIA GB200 NVL72 data sheet: 72 GPUs with 360 PFLOPS with sparsity, 13.4 TB and NVLink 130 TB/s"
    f" together; {_NVLINK}",
    "L40S": "NVIDIA L40S data sheet: 362.05 TFLOPS, PCIe 64 GB/s both ways, 48 GB; a network card of 200 Gb/s per GPU"
    " is an assumption",
    "MI250X": "AMD Instinct MI250X data sheet: one of its two dies, each of which is a GPU to torch, with half of 383"
    " TFLOPS, 128 GB and 8 Infinity Fabric links of 100 GB/s both ways; 4 network cards of 200 Gb/s for 8 dies, as on"
    " Frontier",
    "MI300X": f"AMD Instinct MI300X data sheet: 1,307.4 TFLOPS, 7 Infinity Fabric links of 128 GB/s both ways; {_NICS}",
    "MI325X": f"AMD Instinct MI325X data sheet: 1,307.4 TFLOPS, 7 Infinity Fabric links of 128 GB/s both ways; {_NICS}",
    "MI355X": f"AMD Instinct MI355X data sheet: 2.5 PFLOPS, 7 Infinity Fabric links of 153.6 GB/s both ways; {_NICS}",
}
_BRIDGE = (
    "fitted to NVIDIA's Megatron-Bridge 25.11 in float8, Llama 3 8B to 405B, and to dgxc-benchmarking 25.05, 405B on"
    " GB200 in both precisions"
)
_SHARES = {
    "A100": "fitted to published jobs of TorchTitan and MosaicML, Llama 8B to 70B",
    "H100": "fitted to published jobs of NVIDIA's NeMo and of MosaicML, 2 to 405 billion parameters",
    "H100-500W": "fitted to TorchTitan's reports of December 2024 and June 2025, Llama 3 8B, 70B and 405B",
    "H200": "as H100; one H200 reaches 78 % for milliseconds (benchmarks/README.md)",
    "B200": _BRIDGE,
    "GB200": _BRIDGE,
    "L40S": "assumed as H100: no public measurement",
    "MI250X": "arXiv 2312.12705, on Frontier: 38, 36 and 32 % of the peak for 22B, 175B and 1T parameters",
    "MI300X": "a benchmark of January 2026, github.com/DmitriiNikolaevAtAmd/tprimat: 32 and 38 % of the peak on 8"
    " MI300X, with Llama 3.1 8B and Qwen 2.5 7B, attention not counted",
    "MI325X": "fitted to AMD Primus, Llama 2 70B on 8 and 64 GPUs",
    "MI355X": "assumed as MI300X: no public measurement",
}


def _device(name: str) -> Device:
    figures: dict[str, Any] = dict(zip(_COLUMNS, _FIGURES[name], strict=True))
    figures["gpus_per_node"] = 72 if name == "GB200" else 8
    figures["worst_transport"] = Transport.SHARED if name.startswith("MI") else None
    figures["experts"] = 0.43 if name in ("B200", "GB200") else 0.6
    return Device(name, source=_SOURCES[name], share_from=_SHARES[name], **figures)


DEVICES: Mapping[str, Device] = MappingProxyType({name: _device(name) for name in _FIGURES})


def find(name: str | Device) -> Device:
    """The device with this name, in any case, or itself. The ValueError for unknown names lists the known ones."""
    if isinstance(name, Device):
        return name
    if not isinstance(name, str):
        raise TypeError(f"a device is named by a string, for example 'H100', or is a Device, got {name!r}")
    known = {each.lower(): device for each, device in DEVICES.items()}
    if (device := known.get(name.lower())) is not None:
        return device
    near = get_close_matches(name.lower(), known, n=1, cutoff=0.8)  # V100 is not a misspelling of H100
    meant = f"did you mean {known[near[0]].name}? " if near else ""
    raise ValueError(
        f"unknown device {name!r}: {meant}the table has"
        f" {', '.join(f'{each.name} ({each.gib:.0f} GiB)' for each in DEVICES.values())}; use one with as much memory,"
        " and replace its speeds by --tflops and --link"
    )
