"""`sglang.launch_server` where there is no accelerator; processes that it spawns run this file again up to the guard.

    PYTHON -P .../cpu/launch_server.py --model-path FOLDER --port PORT --device cpu --attention-backend torch_native \
        --sampling-backend pytorch --disable-cuda-graph --max-total-tokens 65536 --skip-tokenizer-init
"""

import importlib.util
import runpy
from pathlib import Path

spec = importlib.util.spec_from_file_location("relax_sglang_standins", Path(__file__).with_name("standins.py"))
if spec is None or spec.loader is None:
    raise ImportError("standins.py is missing beside launch_server.py")
standins = importlib.util.module_from_spec(spec)
spec.loader.exec_module(standins)
standins.install()

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
