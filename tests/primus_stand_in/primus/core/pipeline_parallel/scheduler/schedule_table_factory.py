"""Primus' schedules (commit fd1eeab) by their names. None is here: zbpipe's take their places."""

from typing import Any

pp_algorithm_map: dict[str, Any] = dict.fromkeys(["1f1b", "1f1b-interleaved", "zero-bubble", "zbv-formatted"])


def produce_schedule_instance(algorithm: str, pp_size: int, vpp_size: int, micro_batches: int, **options: Any) -> Any:
    return pp_algorithm_map[algorithm](pp_size, vpp_size, micro_batches, **options)
