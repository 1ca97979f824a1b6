"""Models outside TorchTitan, for `zbpipe estimate --layers`: TOML or JSON, as described in docs/costs-file.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zbpipe.costs.file import layer_tables, read_data, table_of
from zbpipe.costs.numbers import amount
from zbpipe.estimation.workload import Degrees, LayerWork, ParameterBytes, Workload
from zbpipe.schedule.ir import OpKind, require_whole

_DEGREES = ("pipeline", "tensor", "context", "replicas")
_AMOUNTS = ("f", "i", "w", "parameters", "activations")
_WORKING = {"working_f": OpKind.F, "working_i": OpKind.I, "working_b": OpKind.B}
_OPTIONAL = ("waits", "keys", "attention_f", "attention_i", "traffic_f", "traffic_i", *_WORKING)
_PARAMETER_BYTES = ("gathered", "summed", "stored")


def load_layers(path: str | Path, gpus: int) -> Workload:
    """The workload from a file of a model's layers, on this number of GPUs. FSDP uses GPUs that the degrees leave.

    docs/costs-file.md has the format. Raises ValueError for a file that cannot be read, for invalid keys and values,
    and if the number of GPUs is not a multiple of the degrees.
    """
    data = read_data(path)
    (gpus,) = require_whole(1, gpus=gpus)
    try:
        return _workload(data, gpus, Path(path).stem)
    except (TypeError, ValueError) as error:
        raise ValueError(f"file of layers {str(path)!r}: {error}") from None


def _workload(data: Any, gpus: int, name: str) -> Workload:
    required = ("tokens", "microbatches", "message_bytes", "layers")
    job = table_of(data, "", required=required, optional=("schedule", "degrees", "parameter_bytes"))
    require_whole(1, tokens=job["tokens"], microbatches=job["microbatches"])
    layers = tuple(_layer(table, name) for name, table in layer_tables(job["layers"], _AMOUNTS, _OPTIONAL))
    if not layers:
        raise ValueError("a model needs at least one layer: give [[layers]]")
    given = table_of(job.get("parameter_bytes", {}), "[parameter_bytes]", optional=_PARAMETER_BYTES)
    degrees = table_of(job.get("degrees", {}), "[degrees]", optional=_DEGREES)
    require_whole(1, **{f"[degrees] {key}": value for key, value in degrees.items()})
    each = Degrees(**degrees).gpus
    if gpus % each:
        raise ValueError(f"{gpus} GPUs are not a multiple of the degrees' product {each}")
    sizes: Any = {key: amount("a parameter", key, value) for key, value in given.items()}
    return Workload(
        name,
        layers,
        Degrees(**degrees, fsdp=gpus // each),
        job["microbatches"],
        job["tokens"],
        amount("a job", "message_bytes", job["message_bytes"]),
        # As in a model without recomputation: a backward costs two forwards.
        3 * sum(layer.f for layer in layers) / job["tokens"],
        f"as in {name}",
        job.get("schedule", "1F1B"),
        parameter_bytes=ParameterBytes(**sizes),
    )


def _layer(table: dict[str, Any], name: str) -> LayerWork:
    modules = table["modules"]
    if not isinstance(modules, list) or not modules or not all(isinstance(each, str) for each in modules):
        raise ValueError(f"{name} modules = {modules!r}: expected a list of names, for example ['layers.0']")
    numbers = {key: amount(name, key, value) for key, value in table.items() if key != "modules"}
    f, i, w, parameters, activations = (numbers[key] for key in _AMOUNTS)
    return LayerWork(
        *(tuple(modules), f, i, w, parameters, activations),
        waits=numbers.get("waits", numbers["activations"]),
        working=tuple((kind, numbers.get(key, 0.0)) for key, kind in _WORKING.items()),
        attention=(numbers.get("attention_f", 0.0), numbers.get("attention_i", 0.0)),
        traffic=(numbers.get("traffic_f", 0.0), numbers.get("traffic_i", 0.0)),
        keys=numbers.get("keys", 0.0),
    )
