"""What the comparison of engine and trainer passes and refuses: models × states of the engine; on CPU.

    python -m benchmarks.logprob_gap [--model FOLDER ...] [--prompts FILE] [--out FILE]

Trainer and embedded engine are the product's. The trainer makes five steps, with advantages drawn at random; then the engine,
in each of the states below, generates samples, and the trainer compares them as before a step. Reported: the mean absolute difference,
the rounding floor that the trainer measures, their ratio, whether the step is refused and what the message takes it for.
Tiny random models of every family are always there; `--model` adds checkpoints with a tokenizer, which are asked sums in words.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VERSIONS = 5
FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
VOCAB = 997
RIGHT = ("right", "right, in float32")
QUESTIONS = (
    "What is {0} plus {1}? Explain each step.",
    "A box holds {0} apples and another one {1}. How many are there in all?",
    "Write a short poem about the number {0}{1}.",
    "Tom had {0} marbles and lost {1}. What is left, and why?",
)


@dataclass(frozen=True)
class Sizes:
    """How much is generated."""

    samples: int
    tokens: int
    lr: float


@dataclass(frozen=True)
class State:
    """Of an engine: its tensors by name, what it divides logits by, and changes of the model's shape."""

    tensors: dict[str, Any]
    temperature: float = 1.0
    shape: tuple[tuple[str, Any], ...] = ()


def states(exports: list[Path], dtype: str) -> Iterator[tuple[str, Callable[[], State]]]:
    """The engine that is right, and those that are not, by name; `exports`: folders of the versions, the newest last."""
    import torch
    from safetensors.torch import load_file

    own = getattr(torch, dtype)

    def version(number: int, as_type: Any = own) -> dict[str, Any]:
        return {name: t.to(as_type) for name, t in load_file(exports[number] / "model.safetensors").items()}

    def swapped() -> State:
        """One matrix of a layer in the middle holds the values of another layer's."""
        tensors = version(-1)
        layers = sorted({int(name.split(".")[2]) for name in tensors if name.startswith("model.layers.")})
        name = "model.layers.{}.self_attn.o_proj.weight"
        tensors[name.format(layers[len(layers) // 2])] = tensors[name.format(layers[0])]
        return State(tensors)

    def half(other: Callable[[Any], Any]) -> State:
        """The second half of the tensors is not the newest."""
        tensors = version(-1)
        for name in sorted(tensors)[len(tensors) // 2 :]:
            tensors[name] = other(name)(tensors[name])
        return State(tensors)

    oldest = version(0)
    generator = torch.Generator().manual_seed(0)

    def random(tensor: Any) -> Any:
        return (0.02 * torch.randn(tensor.shape, generator=generator)).to(tensor.dtype)

    def rounded(tensor: Any) -> Any:
        if tensor.ndim < 2:
            return tensor
        narrow = torch.float8_e4m3fn if own == torch.bfloat16 else torch.bfloat16
        return tensor.to(narrow).to(own)

    theta = json.loads((exports[-1] / "config.json").read_text())
    base = theta.get("rope_theta") or theta["rope_parameters"]["rope_theta"]
    yield "right", lambda: State(version(-1))
    if own == torch.bfloat16:
        yield "right, in float32", lambda: State(version(-1, torch.float32))
    yield "one version old", lambda: State(version(-2))
    yield f"{VERSIONS} versions old", lambda: State(version(0))
    yield "one tensor of another layer", swapped
    yield "half of the tensors old", lambda: half(lambda name: lambda _: oldest[name])
    yield "half of the tensors random", lambda: half(lambda _: random)
    yield "temperature 0.9", lambda: State(version(-1), temperature=0.9)
    yield "temperature 0.7", lambda: State(version(-1), temperature=0.7)
    yield "temperature 1.2", lambda: State(version(-1), temperature=1.2)
    yield (
        "weights rounded to a narrower type",
        lambda: State({name: rounded(t) for name, t in version(-1).items()}),
    )
    yield "rope_theta ten times", lambda: State(version(-1), shape=(("rope_theta", 10 * base),))


def generate(
    folder: Path, state: State, prompts: list[list[int]], count: int, seed: int
) -> list[tuple[list[int], list[float]]]:
    """Tokens and log-probabilities that the embedded engine makes after each prompt."""
    import dataclasses

    import torch

    from millrace.connectors.engines.embedded.model import Decoder, Weights, read_shape
    from millrace.connectors.engines.embedded.sampling import SamplingParams
    from millrace.connectors.engines.embedded.slots import Request, Slots

    shape = dataclasses.replace(read_shape(folder), **dict(state.shape))
    tensors = dict(state.tensors)
    if shape.tied:
        tensors.pop("lm_head.weight", None)
    slots = Slots(Decoder(Weights(shape, tensors)), max_running=len(prompts), max_total_tokens=1 << 16)
    params = SamplingParams(max_new_tokens=count)
    requests = [
        Request(str(number), prompt, params, seed, notify=lambda _: None)
        for number, prompt in enumerate(prompts)
    ]
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        logits = slots.admit(requests)
        while True:
            logprobs = (logits.float() / state.temperature).log_softmax(-1)
            tokens = torch.multinomial(logprobs.exp(), 1, generator=generator)
            chosen = logprobs.gather(1, tokens)[:, 0]
            for request, token, logprob in zip(requests, tokens[:, 0].tolist(), chosen.tolist(), strict=True):
                request.output.append(token)
                request.logprobs.append(logprob)
            if len(requests[0].output) == count:
                return [(request.output, request.logprobs) for request in requests]
            logits = slots.step()


class Trainer:
    """One rank of the trainer."""

    def __init__(self, model: Path, dtype: str, sizes: Sizes, folder: Path, threads: int) -> None:
        from millrace.connectors.trainers.megatron.rank import TrainerRank
        from millrace.core.config import RunConfig

        config = RunConfig.model_validate(
            {
                "run": {"name": "benchmark", "iterations": 1000},
                "model": {"path": str(model), "dtype": dtype},
                "data": {"sources": [{"path": "none"}]},
                "trainer": {
                    "threads": threads,
                    "device": "cpu",
                    "max_pack_tokens": 4096,
                    "optimizer": {"lr": sizes.lr},
                },
            }
        )
        self.folder = folder
        self.rank = TrainerRank(config.model_dump(mode="json"), 0, 1)
        self.rank.setup(self.rank.address())

    def batch(self, step: int, prompts: list[list[int]], made: list[tuple[list[int], list[float]]]) -> str:
        """URL of a batch of generated samples."""
        from benchmarks.batch_rows import batch_row, write_batch

        rows = []
        for number, (prompt, (tokens, logprobs)) in enumerate(zip(prompts, made, strict=True)):
            row = batch_row(
                step, number, [*prompt, *tokens], len(tokens), (-1.0) ** (number * number // 2 % 2), 0.0
            )
            rows.append(row | {"rollout_logprobs": logprobs, "engine_id": "engine-0"})
        return write_batch(self.folder / f"batch-{step}", rows)

    def compare(self, url: str) -> dict[str, Any]:
        """The difference on a batch, the rounding floor, and the refusal if it is one."""
        with self.rank._working("losses"):
            return self._compare(url)

    def _compare(self, url: str) -> dict[str, Any]:
        import torch

        from millrace.connectors.trainers.comparison import Comparison
        from millrace.connectors.trainers.packing import make_packs
        from millrace.connectors.trainers.policy_step import logprob_gap
        from millrace.core.errors import RefusedStepError
        from millrace.core.logprob_gap import LogprobGuard

        learner, rows = self.rank.learner, self.rank._read(url)
        self.rank._rows = None
        packs = make_packs(rows, learner.config, learner.architecture, learner.device, learner.place)
        ours = learner.passes.logprobs(packs)
        theirs = torch.cat([torch.tensor(row.rollout_logprobs) for pack in packs for row in pack.rows])
        sums = logprob_gap(ours, theirs, torch.ones_like(theirs))
        total, count = (float(x) for x in sums["logprob_gap_mean"])
        comparison = Comparison(learner, LogprobGuard())
        found: dict[str, Any] = {"gap": total / count, "largest": float(sums["logprob_gap_max"][0])}
        try:
            comparison.check(rows, found["gap"], found["largest"], rows[0].train_step)
        except RefusedStepError as error:
            found |= {"refused": True, "message": error.reason}
        else:
            found |= {"refused": False}
        found["floor"] = comparison._floor
        return {**found, "ratio": found["gap"] / found["floor"]}


def case(
    model: Path, dtype: str, prompts: list[list[int]], sizes: Sizes, folder: Path, threads: int
) -> list[dict[str, Any]]:
    """One model: five steps, then every state of the engine."""
    from millrace.core.contracts.task_records import StepRequest

    trainer = Trainer(model, dtype, sizes, folder, threads)
    exports = [folder / "0"]
    trainer.rank.export(str(exports[0]), 0)
    for step in range(1, VERSIONS + 1):
        right = dict(states(exports, dtype))["right"]()
        made = generate(exports[-1], right, prompts, sizes.tokens, seed=step)
        trainer.rank.train(StepRequest(step, trainer.batch(step, prompts, made)))
        exports.append(folder / str(step))
        trainer.rank.export(str(exports[-1]), step)
    found = []
    for number, (name, state) in enumerate(states(exports, dtype)):
        made = generate(exports[-1], state(), prompts, sizes.tokens, seed=100)
        compared = trainer.compare(trainer.batch(VERSIONS + 1 + number, prompts, made))
        found.append({"model": model.name, "dtype": dtype, "state": name, **compared})
        print(shown(found[-1]), flush=True)
    trainer.rank.shutdown()
    return found


def shown(row: dict[str, Any]) -> str:
    """A line of the table."""
    looks = row.get("message", "").partition("It looks like ")[2].partition(":")[0]
    verdict = f"refused: {looks}" if row["refused"] else "passes"
    return f"{row['model']:12} {row['dtype']:9} {row['state']:36} {row['gap']:.2e} {row['ratio']:9.2f}  {verdict}"


def asked(folder: Path, count: int) -> list[list[int]]:
    """Questions as the checkpoint's chat template writes them."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [QUESTIONS[n % len(QUESTIONS)].format(7 * n % 89 + 10, 5 * n % 47 + 3) for n in range(count)]
    chats = [[{"role": "user", "content": text}] for text in texts]
    return [
        list(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False))
        for chat in chats
    ]


def main() -> None:
    """Every case; the table is printed, and kept as JSON."""
    import torch

    from tests.support.tiny_models import save_tiny_model

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, action="append", default=[])
    parser.add_argument("--dtype", action="append", choices=["float32", "bfloat16"])
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--no-tiny", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place:
        models: list[tuple[Path, list[list[int]], float]] = []
        draw = torch.Generator().manual_seed(0)
        for family in () if options.no_tiny else FAMILIES:
            folder = save_tiny_model(
                Path(place) / f"tiny-{family}",
                family,
                VOCAB,
                max_position_embeddings=256,
                initializer_range=0.2,
            )
            prompts = [torch.randint(VOCAB, (8,), generator=draw).tolist() for _ in range(options.samples)]
            models.append((folder, prompts, 1e-3))
        models += [(folder, asked(folder, options.samples), 1e-5) for folder in options.model]
        for folder, prompts, lr in models:
            for dtype in options.dtype or ("float32", "bfloat16"):
                work = Path(place) / "work"
                sizes = Sizes(options.samples, options.tokens, lr)
                found += case(folder, dtype, prompts, sizes, work, options.threads)
                shutil.rmtree(work)
    if options.out:
        options.out.write_text(json.dumps({"cases": found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
