import sys
from importlib import import_module
from typing import Any

from torchtitan.config.configs import CommConfig, CompileConfig, JobFields, ParallelismConfig, TrainingConfig

__all__ = ["CommConfig", "CompileConfig", "ConfigManager", "JobFields", "ParallelismConfig", "TrainingConfig"]


class ConfigManager:
    def parse_args(self, args: list[str] | None = None) -> Any:
        config, rest = self._load_config(sys.argv[1:] if args is None else args)
        for flag, value in zip(rest[::2], rest[1::2], strict=True):
            section, name = flag.removeprefix("--").split(".")
            owner = getattr(config, section)
            known = getattr(owner, name)
            setattr(owner, name, int(value) if isinstance(known, int) else value)
        return config

    def _load_config(self, args: list[str]) -> tuple[Any, list[str]]:
        named = dict(zip(args[:4:2], args[1:4:2], strict=True))
        return getattr(import_module(named["--module"]), named["--config"])(), args[4:]
