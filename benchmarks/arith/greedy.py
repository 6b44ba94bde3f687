"""Greedy accuracy of a Hugging Face folder on the additions, in plain transformers."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

NEW_TOKENS = 6
BATCH = 20


@torch.no_grad()
def accuracy(model_dir: Path, data: Path) -> float:
    """Share of rows whose answer is the label, spaces at both ends aside."""
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(model_dir, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    right = 0
    for start in range(0, len(rows), BATCH):
        batch = rows[start : start + BATCH]
        texts = [tokenizer.apply_chat_template(r["prompt"], tokenize=False, continue_final_message=True) for r in batch]
        encoded = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        made = model.generate(**encoded, max_new_tokens=NEW_TOKENS, do_sample=False)[:, encoded["input_ids"].size(1) :]
        answers = tokenizer.batch_decode(made, skip_special_tokens=True)
        right += sum(answer.strip() == row["label"] for answer, row in zip(answers, batch, strict=True))
    return right / len(rows)
