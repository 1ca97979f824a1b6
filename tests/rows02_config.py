"""Models of torchtitan 0.2 that the demo lacks, on its text: an import makes their names known to `--model.name`."""

from torchtitan.models import llama4, qwen3
from torchtitan.protocols.train_spec import register_train_spec

from zbpipe.cli.demo.models02 import on_python_stdlib

register_train_spec("llama4_python_stdlib", on_python_stdlib(llama4.get_train_spec()))
register_train_spec("qwen3_python_stdlib", on_python_stdlib(qwen3.get_train_spec()))
