"""TRL's GRPOTrainer on the same task; runs in an environment of its own and prints one JSON line at its end.

python trl_peer.py MODEL_DIR DATA_JSONL OUT_DIR STEPS MICRO_BATCH LEARNING_RATE
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

PROMPTS_PER_STEP, SAMPLES_PER_PROMPT, NEW_TOKENS = 8, 8, 6


class Clock(TrainerCallback):  # type: ignore[misc]
    """CPU and wall seconds between begin and end of training; the mean reward of each step."""

    def __init__(self) -> None:
        self.rewards: list[float] = []
        self.step_end_seconds: list[float] = []
        self.cpu_seconds = self.wall_seconds = 0.0

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self._cpu, self._wall = time.process_time(), time.monotonic()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.step_end_seconds.append(time.monotonic() - self._wall)
        print(
            f"trl: step {len(self.step_end_seconds)} at {self.step_end_seconds[-1]:.0f} s", file=sys.stderr, flush=True
        )

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if logs and "reward" in logs:
            self.rewards.append(logs["reward"])

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self.cpu_seconds = time.process_time() - self._cpu
        self.wall_seconds = time.monotonic() - self._wall


def exact(completions: list[str], label: list[str], **_: Any) -> list[float]:
    return [float(text.strip() == right) for text, right in zip(completions, label, strict=True)]


def main() -> None:
    model_dir, data, out, steps, micro_batch, rate = sys.argv[1:]
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(model_dir, padding_side="left")
    rows = [json.loads(line) for line in Path(data).read_text().splitlines()]
    prompts = [tokenizer.apply_chat_template(r["prompt"], tokenize=False, continue_final_message=True) for r in rows]
    config = GRPOConfig(
        output_dir=out,
        use_cpu=True,
        bf16=False,
        max_steps=int(steps),
        learning_rate=float(rate),
        lr_scheduler_type="constant",
        warmup_steps=0,
        weight_decay=0.0,
        max_grad_norm=1.0,
        per_device_train_batch_size=int(micro_batch),
        gradient_accumulation_steps=PROMPTS_PER_STEP * SAMPLES_PER_PROMPT // int(micro_batch),
        num_generations=SAMPLES_PER_PROMPT,
        max_completion_length=NEW_TOKENS,
        temperature=1.0,
        beta=0.0,
        epsilon=0.2,
        epsilon_high=0.28,
        loss_type="dapo",
        scale_rewards="group",
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        seed=0,
        disable_tqdm=True,
    )
    clock = Clock()
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32),
        processing_class=tokenizer,
        reward_funcs=exact,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": prompts, "label": [row["label"] for row in rows]}),
        callbacks=[clock],
    )
    trainer.train()
    trainer.save_model(out)
    tokenizer.save_pretrained(out)
    print(
        json.dumps(
            {
                "rewards": clock.rewards,
                "step_end_seconds": clock.step_end_seconds,
                "samples": int(steps) * PROMPTS_PER_STEP * SAMPLES_PER_PROMPT,
                "cpu_seconds": clock.cpu_seconds,
                "wall_seconds": clock.wall_seconds,
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    main()
