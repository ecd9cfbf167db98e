"""Packs samples for this rank: token tensors, and the positions of response tokens in them.

Owns which rank gets which sample, padding, and context parallel order. Knows nothing of losses.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor

from millrace.connectors.trainers.batching import plan_packs
from millrace.connectors.trainers.place import RankPlace
from millrace.core.accounts.staleness import token_ages
from millrace.core.config import RunConfig
from millrace.core.contracts.images import image_names
from millrace.core.families.architecture import Architecture
from millrace.core.families.routed_experts import RoutingFormat

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


@dataclass
class BatchRow:
    """One sample of a batch, as read by the trainer."""

    sample_id: str
    tokens: npt.NDArray[np.int32]
    response_length: int
    loss_mask: npt.NDArray[np.int8]
    rollout_logprobs: Floats
    advantage: float | None  # None: computed per token
    reward: float  # NaN: not scored
    shaped_reward: float | None  # None: not shaped, or stored before this column existed
    truncated: bool
    train_step: int
    teacher_logprobs: Floats | None = None  # of a served teacher
    teacher_top_tokens: Ints | None = None  # [response tokens, k] its likeliest tokens
    teacher_top_logprobs: Floats | None = None  # [response tokens, k]
    ages: Ints | None = None  # [response tokens] see millrace.core.accounts.staleness.token_ages; None: all 0
    engine_id: str = ""  # the engine that made its last tokens
    routed: bytes | None = None  # experts of its first tokens, as core.families.routed_experts stores them
    images: tuple[str, ...] = ()  # names of its prompt's pictures, if the trainer sees them

    @property
    def fed(self) -> int:
        """Its first tokens that a token which the policy generated, and the loss uses, follows."""
        trained = np.flatnonzero(self.loss_mask)
        return len(self.tokens) - self.response_length + int(trained[-1]) if len(trained) else 0

    def trains(self, max_age: int | None) -> bool:
        """Whether the loss uses any of its tokens, if it excludes tokens older than `max_age`."""
        mask = (
            self.loss_mask
            if max_age is None or self.ages is None
            else self.loss_mask * (self.ages <= max_age)
        )
        return bool(mask.any())


def oldest_age(rows: Sequence[BatchRow]) -> int:
    """The largest age of a token in these rows."""
    return max((int(row.ages.max(initial=0)) for row in rows if row.ages is not None), default=0)


def cut_into(rows: Sequence[BatchRow], counts: Sequence[int]) -> list[Sequence[BatchRow]]:
    """Split the rows into consecutive parts with these counts, which must add up to all rows."""
    ends = np.cumsum([0, *counts]).tolist()
    assert ends[-1] == len(rows), f"{counts} are not {len(rows)} rows"
    return [rows[start:end] for start, end in zip(ends[:-1], ends[1:], strict=True)]


@dataclass
class Pack:
    """One microbatch of this rank: a pack of T tokens with N response tokens."""

    rows: list[BatchRow]
    members: list[int]  # indices of the rows in the global batch
    input_ids: Tensor  # [1, T / cp]
    position_ids: Tensor  # [1, T / cp]
    bounds: list[int]  # where each sample starts in the whole pack, padding counted, and the pack's end
    starts: Tensor  # `bounds` as int32 on the device, as kernels for packs take them
    sample_of_token: Tensor  # [T / cp] number of its sample in the pack, -1: padding
    places: Tensor  # [n] local positions whose next token is a response token held by this rank
    targets: Tensor  # [n] the next tokens
    slots: Tensor  # [n] their indices among the pack's N response tokens
    count: int  # N
    others: Tensor | None  # [n, k] a served teacher's likeliest tokens at each target's position
    routed: (
        Tensor | None
    )  # [T / cp, layers with experts, experts of a token] int16, on the host; -1: not replayed

    @property
    def tokens(self) -> int:
        """Number of the samples' tokens, without padding."""
        return sum(len(row.tokens) for row in self.rows)

    @property
    def longest(self) -> int:
        """Tokens of the longest sample, padding counted."""
        return max(end - start for start, end in pairwise(self.bounds))


def read_rows(
    table: pa.Table, passes: int = 1, *, keeps_cache: bool = False, images: bool = False
) -> list[BatchRow]:
    """The rows of a batch table, in its order. keeps_cache: see `_ages`. images: whether their prompts may have pictures."""
    tokens, generated = _lists(table, "tokens", np.int32), _lists(table, "loss_mask", np.int8)
    trained = _lists(table, "trained_mask", np.int8)
    logprobs = _lists(table, "rollout_logprobs", np.float32)
    teacher = _lists(table, "teacher_logprobs", np.float32)
    top_tokens = _lists(table, "teacher_top_tokens", np.int64)
    top_logprobs = _lists(table, "teacher_top_logprobs", np.float32)
    columns = [
        "sample_id",
        "response_length",
        "advantage",
        "reward",
        "shaped_reward",
        "status",
        "train_step",
        "reused_from",
        "policy_versions",
        "engine_id",
        "routed_experts",
    ]
    plain = table.select(columns).to_pylist()
    prompts = table.column("prompt").to_pylist() if images else []
    chosen = table.column("trained_mask").is_valid().to_pylist()
    asked = table.column("teacher_logprobs").is_valid().to_pylist()
    topped = table.column("teacher_top_tokens").is_valid().to_pylist()
    steps = [row["train_step"] for row in plain]
    first, last = min(steps, default=1), max(steps, default=1)
    return [
        BatchRow(
            sample_id=row["sample_id"],
            tokens=tokens[i],
            response_length=row["response_length"],
            loss_mask=trained[i] if chosen[i] else generated[i],
            rollout_logprobs=logprobs[i],
            advantage=row["advantage"],
            reward=float("nan") if row["reward"] is None else row["reward"],
            shaped_reward=row["shaped_reward"],
            truncated=row["status"] == "truncated",
            train_step=row["train_step"],
            teacher_logprobs=teacher[i] if asked[i] else None,
            teacher_top_tokens=top_tokens[i].reshape(row["response_length"], -1) if topped[i] else None,
            teacher_top_logprobs=top_logprobs[i].reshape(row["response_length"], -1) if topped[i] else None,
            ages=_ages(row, first - 1, passes * (last - first + 1), keeps_cache),
            engine_id=row["engine_id"],
            routed=row["routed_experts"],
            images=tuple(image_names(json.loads(prompts[i]))) if images else (),
        )
        for i, row in enumerate(plain)
    ]


def _ages(row: dict[str, Any], trained: int, steps: int, keeps_cache: bool) -> Ints | None:
    """Age of each response token under the weights `trained`, from which an iteration of `steps` starts; None: all 0.

    Tokens of a reused sample come from an earlier iteration, so their age is at least 1. If engines continue with the keys and
    values of older weights (keeps_cache), the same holds for tokens after a token of older weights: no single version gives them
    their log-probabilities.
    """
    reused = row["reused_from"] is not None
    if not reused and all(span["version"] >= trained for span in row["policy_versions"]):
        return None
    ages = token_ages(row["policy_versions"], row["response_length"], trained, steps)
    if reused:
        return np.maximum(ages, 1)
    return np.maximum(ages, np.maximum.accumulate(ages > 0)) if keeps_cache else ages


def _lists(table: pa.Table, column: str, dtype: type[np.generic]) -> list[npt.NDArray[Any]]:
    """Each row's list as an array, without a Python object per element."""
    found: list[npt.NDArray[Any]] = []
    for lists in table.column(column).chunks:
        values = lists.values.to_numpy(zero_copy_only=False).astype(dtype, copy=False)
        bounds = lists.offsets.to_numpy()
        found += (values[start:end] for start, end in zip(bounds[:-1], bounds[1:], strict=True))
    return found


def make_packs(
    rows: Sequence[BatchRow],
    config: RunConfig,
    architecture: Architecture | None,
    device: Any,
    place: RankPlace,
    *,
    with_teacher: bool = True,
) -> list[Pack]:
    """This rank's packs of a global batch. Every rank gets the same number, with about the same FLOPs; with the same tokens if the
    architecture is not known.

    with_teacher: whether the rows have values of a served teacher; held-out texts have none.
    """
    parallel = config.trainer.parallel
    align = (2 * parallel.context if parallel.context > 1 else 1) * (
        parallel.tensor if parallel.sequence else 1
    )
    lengths = [-(-len(row.tokens) // align) * align for row in rows]
    limit = config.trainer.max_pack_tokens * parallel.context
    cost = [architecture.flops(length) for length in lengths] if architecture else None
    # megatron's schedule of virtual stages passes groups of as many packs as there are ranks in a pipeline
    multiple = parallel.pipeline if parallel.virtual > 1 else 1
    plans = plan_packs(lengths, ranks=place.data_size, max_tokens=limit, cost=cost, multiple=multiple)
    return [
        make_pack(
            [rows[i] for i in members],
            members,
            cp_size=parallel.context,
            cp_rank=place.context_rank,
            align=align,
            device=device,
            top_k=config.algorithm.teacher_top_k if with_teacher else 0,
            form=RoutingFormat.of(architecture) if architecture and config.rollout.routing_replay else None,
        )
        for members in plans[place.data_rank]
    ]


def make_pack(
    rows: Sequence[BatchRow],
    members: list[int],
    *,
    cp_size: int,
    cp_rank: int,
    align: int,
    device: Any,
    top_k: int = 0,
    form: RoutingFormat | None = None,
) -> Pack:
    """Concatenate samples, each padded to a multiple of `align` tokens. Without rows, the pack has only padding.

    form: of the samples' routed experts, if they are replayed.
    top_k: number of a teacher's likeliest tokens at each response token. Uses numpy, since PyTorch's threads spin between
    operations that are too small for several threads.
    """
    padded = [-(-len(row.tokens) // align) * align for row in rows] or [align]
    bounds = [0, *np.cumsum(padded).tolist()]
    tokens = np.zeros(bounds[-1], dtype=np.int64)
    samples = np.full(bounds[-1], -1, dtype=np.int64)
    before_response = [np.zeros(0, dtype=np.int64)]  # positions whose next token is a response token
    for number, (row, start) in enumerate(zip(rows, bounds, strict=False)):
        assert row.response_length < len(row.tokens), f"sample {row.sample_id} has no prompt token"
        end = start + len(row.tokens)
        tokens[start:end] = row.tokens
        samples[start:end] = number
        before_response.append(np.arange(end - row.response_length - 1, end - 1))
    positions = np.arange(bounds[-1]) - np.repeat(bounds[:-1], padded)
    predicts = np.concatenate(before_response)
    count = len(predicts)
    places, pack_places, slots = predicts, predicts, np.arange(count)
    local: Any = slice(None)  # positions of this rank
    if cp_size > 1:  # without context parallelism this rank has the whole pack
        local = zigzag_positions(bounds, cp_size, cp_rank).numpy()
        slot_of = np.full(bounds[-1], -1)
        slot_of[predicts] = slots
        places = np.flatnonzero(slot_of[local] >= 0)
        pack_places = local[places]
        slots = slot_of[pack_places]
    tops = [row.teacher_top_tokens for row in rows if row.teacher_top_tokens is not None] if top_k else []
    others = np.concatenate([np.zeros((0, top_k), dtype=np.int64), *tops])
    return Pack(
        rows=list(rows),
        members=members,
        input_ids=torch.from_numpy(tokens[local])[None].to(device),
        position_ids=torch.from_numpy(positions[local])[None].to(device),
        bounds=bounds,
        starts=torch.tensor(bounds, dtype=torch.int32, device=device),
        sample_of_token=torch.from_numpy(samples[local]).to(device),
        places=torch.from_numpy(places).to(device),
        targets=torch.from_numpy(tokens[pack_places + 1]).to(device),
        slots=torch.from_numpy(slots).to(device),
        count=count,
        others=torch.from_numpy(others[slots]).to(device) if top_k else None,
        routed=_routed(rows, bounds, local, form) if form else None,
    )


def zigzag_positions(bounds: Sequence[int], size: int, rank: int) -> Tensor:
    """The pack's positions that a context parallel rank holds, in its local order. [T / size]."""
    pieces = []
    for start, end in zip(bounds[:-1], bounds[1:], strict=True):
        chunk = (end - start) // (2 * size)
        for number in (rank, 2 * size - 1 - rank) if size > 1 else (0, 1):
            pieces.append(torch.arange(start + number * chunk, start + (number + 1) * chunk))
        if size == 1 and (end - start) % 2:
            pieces.append(torch.arange(end - 1, end))
    return torch.cat(pieces)


def _routed(
    rows: Sequence[BatchRow], bounds: Sequence[int], local: Any, form: RoutingFormat
) -> Tensor | None:
    """The experts of this rank's tokens, as Pack.routed; None if no sample has any, as held-out texts."""
    if all(row.routed is None for row in rows):
        return None
    whole = np.full((bounds[-1], len(form.expert_layers), form.used), -1, dtype=np.int16)
    for row, start in zip(rows, bounds, strict=False):
        if row.routed is not None:
            experts = form.read(row.routed, len(row.tokens), row.fed)
            whole[start : start + len(experts)] = experts
    return torch.from_numpy(whole[local])
