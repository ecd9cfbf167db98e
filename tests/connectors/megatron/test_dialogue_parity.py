"""Dialogues of uneven length, packed and trained with their masks, against plain transformers; so are held-out losses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from examples.sft_dialogues.price_list import TOOLS
from millrace.connectors.huggingface.dialogue import Dialogues, TrainedDialogue
from millrace.connectors.huggingface.tiny import build_tiny_model, build_tokenizer
from millrace.connectors.huggingface.tokenizer import PromptTokenizer
from millrace.connectors.trainers.rank import HeldOutSample
from millrace.core.contracts.rows.chat_options import ChatOptions
from millrace.core.contracts.rows.messages import trained_messages
from tests.support.slow_members import slow_but
from tests.support.trainer_ranks import Workers, configuration, samples, write_batch

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "data": (2, {}),
    "tensor and sequence": (2, {"tensor": 2, "sequence": True}),
    "pipeline": (2, {"pipeline": 2}),
    "context": (2, {"context": 2}),
}
MORE_TURNS = [3, 0, 5, 1, 2, 0, 1, 4]  # pairs of turns of each dialogue before its last turn


def dialogues() -> list[TrainedDialogue]:
    """Dialogues with a tool, with one to six turns; of the long ones some turns are not trained."""
    reader = Dialogues(PromptTokenizer(build_tokenizer(tools=True)), ())
    found = []
    for number, more in enumerate(MORE_TURNS):
        messages: list[dict[str, Any]] = [{"role": "user", "content": f"What do {number} hats cost?"}]
        for turn in range(more):
            call = {"name": "price", "arguments": {"item": "hats" * turn}}
            messages += [
                {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
                {"role": "tool", "content": str(turn)},
                {"role": "assistant", "content": "Hm." * turn, "train": turn % 2 == 0},
                {"role": "user", "content": "Again?"},
            ]
        messages.append({"role": "assistant", "content": str(number + 2)})
        numbers = trained_messages(messages, "assistant")
        found.append(reader.trained(messages, numbers, ChatOptions(tools=TOOLS)))
    return found


def ids_of(dialogue: TrainedDialogue) -> list[int]:
    return [*dialogue.prompt_tokens, *dialogue.tokens]


def plain_losses(model: Any) -> list[torch.Tensor]:
    """Each dialogue's loss by transformers: labels are the tokens, -100 where they are not trained; times their number."""
    losses = []
    for dialogue in dialogues():
        ids = torch.tensor([ids_of(dialogue)])
        mask = [*[0] * len(dialogue.prompt_tokens), *dialogue.mask]
        labels = torch.where(torch.tensor([mask]).bool(), ids, -100)
        losses.append(model(input_ids=ids, labels=labels).loss * sum(mask))
    return losses


def plain_model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("dialogues") / "model", tools=True)


def settings(folder: Path, layout: str) -> dict[str, Any]:
    world, parallel = LAYOUTS[layout]
    changes: dict[str, Any] = {
        "algorithm": {"loss": "sft", "aggregation": "token_mean"},
        "parallel": parallel,
    }
    return configuration(folder, world, max_pack_tokens=512, **changes)


def written(folder: Path) -> str:
    rows = samples(1)
    for row, dialogue in zip(rows, dialogues(), strict=True):
        row |= {
            "tokens": ids_of(dialogue),
            "response_length": len(dialogue.tokens),
            "loss_mask": dialogue.mask,
            "rollout_logprobs": [0.0] * len(dialogue.tokens),
        }
    return write_batch(folder, rows)


@pytest.mark.parametrize("layout", slow_but(["one rank", "data", "context"], "one rank", "context"))
def test_a_step_on_packed_dialogues_is_that_of_transformers(
    workers: Workers, folder: Path, tmp_path: Path, layout: str
) -> None:
    with workers.group(settings(folder, layout)) as group:
        (found,) = group.train([1], written(tmp_path))
        after = group.call("losses", 1, [HeldOutSample(ids_of(each), each.mask) for each in dialogues()])[0]
    model = plain_model(folder)
    tokens = sum(sum(dialogue.mask) for dialogue in dialogues())
    loss = torch.stack(plain_losses(model)).sum() / tokens
    loss.backward()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.98), weight_decay=0.01)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    assert len(found["packs"]) < len(dialogues()) / 2
    assert found["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert found["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    with torch.no_grad():  # of the weights after the step
        assert after == pytest.approx([each.item() for each in plain_losses(model)], rel=1e-3)


@pytest.mark.parametrize("layout", slow_but(LAYOUTS, "one rank", "pipeline"))
def test_held_out_losses_are_those_of_transformers_and_change_nothing(
    workers: Workers, folder: Path, tmp_path: Path, layout: str
) -> None:
    given = [HeldOutSample(ids_of(each), each.mask) for each in dialogues()]
    with workers.group(settings(folder, layout)) as group:
        of_ranks = group.call("losses", 0, given)
        one = group.call("losses", 0, given[:1])[0]
        (found,) = group.train([1], written(tmp_path))
    with workers.group(settings(folder, layout)) as group:
        (without,) = group.train([1], written(tmp_path))
    with torch.no_grad():
        expected = [each.item() for each in plain_losses(plain_model(folder))]
    assert all(losses == of_ranks[0] for losses in of_ranks)
    assert of_ranks[0] == pytest.approx(expected, rel=1e-5)
    assert one == pytest.approx(expected[:1], rel=1e-5)
    assert (found["loss"], found["grad_norm"]) == (without["loss"], without["grad_norm"])
    total = sum(expected) / sum(sum(each.mask) for each in given)
    assert found["loss"] == pytest.approx(total, rel=1e-5)
