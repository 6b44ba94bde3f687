"""Make the quick start's material: a tiny Qwen3 with a character tokenizer, warm-started on one-digit addition.

    python recipes/quickstart/make_model.py OUT_DIR [--seed N]

writes OUT_DIR/model (a Hugging Face folder) and OUT_DIR/data.jsonl (the 100 problems "3+4=" -> "07").
The supervised warm start stops as soon as greedy decoding solves `TARGET_ACCURACY` of the problems: reinforcement
learning then has something to reward, and most of the way still to go. Same seed and same torch: same weights.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from relax_common.storage.checkpoint_folder import follow_umask

PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"
CHARACTERS = "0123456789+="
TARGET_ACCURACY = 0.3
MAX_WARM_START_STEPS = 600
EVALUATE_EVERY_STEPS = 5
BATCH_PROBLEMS = 64
LEARNING_RATE = 1e-3


def problems() -> list[tuple[str, str]]:
    """All one-digit additions. The sum is padded to two digits so that every answer has one length."""
    return [(f"{a}+{b}=", f"{a + b:02d}") for a in range(10) for b in range(10)]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character. No begin token is added: a prompt is exactly its characters."""
    vocabulary = {token: index for index, token in enumerate([PAD, BOS, EOS, UNK, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        clean_up_tokenization_spaces=False,
    )


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
        initializer_range=0.05,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        # No pad_token_id: transformers would make that row of the embedding zero, and RMSNorm at zero has slope 1000.
        # Once the id is sampled, its gradient would be hundreds of times all others together.
    )
    return Qwen3ForCausalLM(config).float()


def encode(tokenizer: PreTrainedTokenizerFast) -> torch.Tensor:
    """The problems with their answers and end tokens, int64 [100, 7]; the answer starts at column 4."""
    end = tokenizer.eos_token_id
    return torch.tensor([[*tokenizer.encode(prompt + answer), end] for prompt, answer in problems()])


@torch.no_grad()
def greedy_accuracy(model: Qwen3ForCausalLM, sequences: torch.Tensor) -> float:
    """Share of the problems whose two digits and end token are all the most likely continuation.

    A greedy answer equals the right one exactly when each of its tokens is the argmax after the right prefix,
    so one forward pass over the right sequences decides it.
    """
    predicted = model(input_ids=sequences).logits[:, 3:-1].argmax(-1)
    return float((predicted == sequences[:, 4:]).all(-1).float().mean())


def warm_start(model: Qwen3ForCausalLM, sequences: torch.Tensor, seed: int) -> float:
    """Train until greedy accuracy reaches the target; returns it."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    accuracy = greedy_accuracy(model, sequences)
    for step in range(MAX_WARM_START_STEPS):
        batch = sequences[torch.randint(len(sequences), (BATCH_PROBLEMS,), generator=generator)]
        logits = model(input_ids=batch).logits[:, 3:-1]
        loss = functional.cross_entropy(logits.flatten(0, 1), batch[:, 4:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % EVALUATE_EVERY_STEPS == 0:
            accuracy = greedy_accuracy(model, sequences)
            if (step + 1) % (10 * EVALUATE_EVERY_STEPS) == 0:
                print(f"warm start: step {step + 1}, loss {loss:.3f}, greedy accuracy {accuracy:.2f}", flush=True)
            if accuracy >= TARGET_ACCURACY:
                print(f"warm start: ends at step {step + 1}, greedy accuracy {accuracy:.2f}", flush=True)
                return accuracy
    raise SystemExit(
        f"warm start: greedy accuracy {accuracy:.2f} after {MAX_WARM_START_STEPS} steps, wanted {TARGET_ACCURACY}"
    )


def write_data(path: Path) -> None:
    lines = (json.dumps({"prompt": prompt, "label": answer}) for prompt, answer in problems())
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def make(out_dir: Path, seed: int) -> None:
    """Write model and data next to `out_dir` first, then rename, so that an existing folder is always complete."""
    torch.set_num_threads(1)
    started = time.monotonic()
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, seed)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"model: Qwen3 with {parameters} parameters, {len(tokenizer)} tokens", flush=True)
    warm_start(model, encode(tokenizer), seed)
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out_dir.parent) as scratch:
        made = Path(scratch) / "made"
        model.save_pretrained(made / "model")
        tokenizer.save_pretrained(made / "model")
        follow_umask(made / "model" / "model.safetensors")  # safetensors makes files for their owner alone
        write_data(made / "data.jsonl")
        os.rename(made, out_dir)
    print(f"wrote {out_dir} in {time.monotonic() - started:.1f} s", flush=True)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="make the quick start's model and data")
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if options.out_dir.exists():
        print(f"{options.out_dir} is there already: left as it is")
        return 0
    make(options.out_dir, options.seed)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
