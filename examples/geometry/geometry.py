"""Questions about small pictures that are drawn here: coloured shapes to count, and charts whose highest or lowest bar is asked.

`prepare` draws them, and makes a tiny model that sees and answers some of them.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path

from PIL import Image, ImageDraw

from millrace import RunConfig
from millrace.connectors.huggingface.tiny_vision import build_tiny_vision
from millrace.flows.quickstart import is_warm, learn_answers, warm_config, write_rows

SIDE = 56  # pixels of a picture, which the model sees as 2 x 2 tokens
CELL = SIDE // 2  # a shape's place
BACKGROUND = (
    128,
    128,
    128,
)  # close to 0 as the model sees it, so that a tower of random weights shows what is drawn
COLOURS = {"red": (200, 30, 30), "green": (30, 150, 30), "blue": (40, 60, 200)}
HEIGHTS = (12, 24, 36, 48)  # pixels of a chart's bars, in any order, each up to two more or fewer
TRAINING, HELD_OUT = 4000, 300
TARGET_LOSS = 0.68  # mean of the last ten steps: much is left to learn
WARM_UP = [
    "trainer.kind=fsdp",
    "data.sources.0.images_key=images",
    "trainer.max_pack_tokens=1024",
    "run.iterations=12",
    "rollout.prompts=640",
    "trainer.threads=1",
]
GPU_SHAPE = {"hidden": 512, "head_dim": 64, "layers": 8}  # a head size that SGLang's kernels accept
GPU_WARM_UP = [
    *WARM_UP,
    "run.iterations=5",  # the larger model learns faster
    "model.dtype=bfloat16",
    "trainer.optimizer.lr=5.0e-4",
    "trainer.max_pack_tokens=16384",
    "trainer.deterministic=false",
]


def prepare(config: RunConfig) -> None:
    """Draw the questions, and make the warmed-up model at config.model.path unless it exists."""
    _make(config, WARM_UP, {"hidden": 128})


def prepare_for_gpu(config: RunConfig) -> None:
    """`prepare` in bfloat16 with a larger model."""
    _make(config, GPU_WARM_UP, GPU_SHAPE)


def _make(config: RunConfig, warm_up: Sequence[str], shape: Mapping[str, int]) -> None:
    if is_warm(config):
        return
    draw(config)
    model, seed = Path(config.model.path), config.run.seed
    build_tiny_vision(model.parent / "model", "qwen2_5_vl", seed=seed, contrast=2, **shape)
    learn_answers(warm_config(config, model.parent, warm_up), model, TARGET_LOSS)


def draw(config: RunConfig) -> None:
    """Write the questions with their pictures: those of the held-out set first, no picture twice."""
    folder = Path(config.data.sources[0].path or "").parent
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    rows = questions(folder, config.run.seed, HELD_OUT + TRAINING)
    write_rows(folder / "held_out.jsonl", rows[:HELD_OUT])
    write_rows(folder / "train.jsonl", rows[HELD_OUT:])


def questions(folder: Path, seed: int, count: int) -> list[dict[str, str]]:
    """Rows, whose pictures are written below the folder. No two have the same picture."""
    rng = random.Random(seed)
    rows: list[dict[str, str]] = []
    drawn: set[bytes] = set()
    while len(rows) < count:
        image, asked, answer = shapes(rng) if rng.random() < 0.5 else chart(rng)
        if image.tobytes() in drawn:
            continue
        drawn.add(image.tobytes())
        path = f"pictures/{len(rows):04d}.png"
        image.save(folder / path)
        rows.append({"prompt": f"<image>{asked}?", "images": path, "label": answer})
    return rows


def shapes(rng: random.Random) -> tuple[Image.Image, str, str]:
    """Up to four shapes, one in each quarter. Asked is how many have a colour."""
    image = Image.new("RGB", (SIDE, SIDE), BACKGROUND)
    drawn: list[str] = []
    for left in (0, CELL):
        for top in (0, CELL):
            if rng.random() < 0.8:
                drawn.append(rng.choice([*COLOURS]))
                draw_shape(ImageDraw.Draw(image), left, top, drawn[-1], rng)
    colour = rng.choice([*COLOURS])
    return image, colour, str(drawn.count(colour))


def draw_shape(pen: ImageDraw.ImageDraw, left: int, top: int, colour: str, rng: random.Random) -> None:
    """Draw a circle, a square or a triangle somewhere in a quarter of the picture."""
    size = rng.randint(16, 20)
    x, y = (edge + rng.randint(3, CELL - 3 - size) for edge in (left, top))
    box = (x, y, x + size, y + size)
    fill, kind = COLOURS[colour], rng.randrange(3)
    if kind == 0:
        pen.ellipse(box, fill=fill)
    elif kind == 1:
        pen.rectangle(box, fill=fill)
    else:
        pen.polygon([(x, y + size), (x + size, y + size), (x + size // 2, y)], fill=fill)


def chart(rng: random.Random) -> tuple[Image.Image, str, str]:
    """Bars of different heights. Asked is the place of the highest or of the lowest one, from the left."""
    image = Image.new("RGB", (SIDE, SIDE), BACKGROUND)
    heights = [height + rng.randint(-2, 2) for height in rng.sample(HEIGHTS, len(HEIGHTS))]
    draw_bars(ImageDraw.Draw(image), heights)
    asked, height = rng.choice([("highest", max(heights)), ("lowest", min(heights))])
    return image, asked, str(1 + heights.index(height))


def draw_bars(pen: ImageDraw.ImageDraw, heights: Sequence[int]) -> None:
    """Draw bars on the picture's lower edge."""
    width = SIDE // len(heights)
    for place, height in enumerate(heights):
        left = place * width + 2
        pen.rectangle((left, SIDE - height, left + width - 5, SIDE - 1), fill=COLOURS["blue"])
