from torchtitan.config import ConfigManager
from torchtitan.trainer import Trainer

__all__ = ["Trainer", "main"]


def main() -> None:
    ConfigManager().parse_args().build().train()
