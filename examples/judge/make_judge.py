"""Make the judge: a tiny model that is taught one rubric, 10 for an answer that ends in an even digit and else 0.

It stands for a language model that reads any rubric. Called again, it leaves the model as it is.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
import yaml

from millrace import RewardInput
from millrace.connectors.huggingface.tiny import CHARACTERS, build_tiny_model
from millrace.connectors.rewards.judge import messages_for

FOLDER = Path("judge-files") / "judge"
RUBRIC = yaml.safe_load((Path(__file__).parent / "even.yaml").read_text())["reward"]["options"]["rubric"]
STEPS = 40
BATCH = 16
# Last characters of a question that are shown: what counts is near the end, and is found sooner in a short text
ENDS = (*(48,) * 6, 96, 192, 384, 4096)


def make(folder: Path, steps: int = STEPS) -> float:
    """Teach a new model, `steps` for each of ENDS, and write it; the share of right scores of the last 20 steps."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    build_tiny_model(folder, seed=0)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    rng, right = random.Random(0), []
    for end in (end for end in ENDS for _ in range(steps)):
        questions, answers = zip(*(lesson(rng) for _ in range(BATCH)), strict=True)
        texts = [
            tokenizer.apply_chat_template(q, tokenize=False, add_generation_prompt=True) for q in questions
        ]
        asked = tokenizer(
            [text[-end:] for text in texts], padding=True, padding_side="left", return_tensors="pt"
        )
        said = tokenizer([f"{answer}<eos>" for answer in answers], padding=True, return_tensors="pt")
        ids = torch.cat([asked.input_ids, said.input_ids], 1)
        mask = torch.cat([asked.attention_mask, said.attention_mask], 1)
        labels = ids.masked_fill(mask == 0, -100)
        labels[:, : asked.input_ids.shape[1]] = -100
        out = model(ids, attention_mask=mask, labels=labels)
        optimizer.zero_grad()
        out.loss.backward()
        optimizer.step()
        guessed = out.logits[:, asked.input_ids.shape[1] - 1 : -1].argmax(-1)
        right.append(((guessed == said.input_ids) | (said.attention_mask == 0)).all(1).float().mean().item())
    model.save_pretrained(folder)
    return sum(right[-20:]) / 20


def lesson(rng: random.Random) -> tuple[list[dict[str, str]], str]:
    """What the judge is asked about some answer to a sum, and what it should say."""
    a, b = rng.randrange(50), rng.randrange(50)
    answer = str(rng.randrange(100))
    if rng.random() < 0.2:  # a policy writes other things too
        answer = "".join(rng.choice(CHARACTERS) for _ in range(rng.randrange(7)))
    score = 10 if answer[-1:] in ("0", "2", "4", "6", "8") else 0
    return messages_for(RewardInput(f"{a}+{b}=", answer, label=str(a + b)), RUBRIC), f"Score: {score}"


if __name__ == "__main__":
    if not (FOLDER / "config.json").exists():
        FOLDER.parent.mkdir(exist_ok=True)
        partial = FOLDER.with_name("judge.partial")
        print(f"the judge scores {make(partial):.3f} of its lessons right")
        partial.rename(FOLDER)
