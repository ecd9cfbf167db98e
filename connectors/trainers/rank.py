"""What a run asks of one process of its trainer: the Protocol that every trainer's ranks implement.

The ranks of a run hold one model together. Most calls go to all of them at the same time, and every rank answers
(tasks/runtime/trainer.py asks). A rank holds weights of one version, an integer that each optimizer step raises by one, and is a
cache of storage: after any loss the run builds new ranks, loads a checkpoint and repeats the steps after it. Nothing here says
how a rank computes. Calls of one rank follow each other, except `state`, which is answered during the others.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol, TypedDict

from millrace.core.contracts.handles import BroadcastSource
from millrace.core.contracts.task_records import FileRecord, StepMetrics, StepRequest
from millrace.core.contracts.weight_bucket import WeightBucket
from millrace.core.families.served_files import ALONE, Served


class HeldOutSample(NamedTuple):
    """A row of a held-out set whose loss is asked for."""

    tokens: list[int]  # prompt and response
    mask: list[int]  # for each response token, 1 if it has a loss
    images: tuple[str, ...] = ()  # names of its prompt's pictures


class SaveState(TypedDict):
    """A checkpoint that is written while training continues."""

    url: str
    version: int
    state: Literal["writing", "written", "failed"]
    reason: str | None  # the reason of its failure


class RankState(TypedDict):
    """What a rank holds and does."""

    rank: int
    version: int | None  # None: no weights, or weights of no version after a failure
    busy: str | None  # the call that it works on
    pid: int
    saving: SaveState | None  # the newest background checkpoint that is not committed


class Rank(BroadcastSource, Protocol):
    """One process of a trainer.

    It is made of the run's configuration (RunConfig as JSON), its number and the number of ranks, without loading libraries.
    """

    def state(self) -> RankState:
        """What the rank holds and does. Answered while other calls run."""
        ...

    def address(self) -> tuple[str, int]:
        """Asked of rank 0: host and port at which the ranks meet. The port stays reserved until `setup`."""
        ...

    def prepare(self) -> None:
        """Load the libraries. Takes no GPU memory."""
        ...

    def setup(self, master: tuple[str, int]) -> RankState:
        """Join the other ranks at rank 0's `address`, build the model of model.path, and hold version 0."""
        ...

    def train(self, step: StepRequest) -> StepMetrics:
        """Make a step, or answer from memory if the version it makes is held already. All ranks return the same loss and norms.

        Raises TrainerError if neither that version nor the one before is held, or if the held one was made of another batch;
        CorruptFileError if the batch has another hash; RefusedStepError if the step may not be applied: no tokens, a loss or a
        gradient that is not finite, too large a difference from the engines; TrainerMemoryError if memory runs out. After an
        error the weights are unchanged.
        """
        ...

    def pass_chunk(self, version: int, number: int, url: str, sha256: str) -> int:
        """Make the passes of chunk `number`, from 0, of the step to `version`; returns the number of chunks then held.

        url, sha256: of a file with the chunk's rows, in a batch's form. Changes no weights: `train` applies the step if its batch
        has these rows. Does nothing if the chunk is held, or if an earlier one is missing. A rank that makes all passes in `train`
        only counts. Raises TrainerError unless `version` - 1 is held.
        """
        ...

    def losses(self, version: int, samples: Sequence[HeldOutSample]) -> list[float]:
        """The loss of each sample, nats: the negative log-probabilities of its tokens whose mask is 1, added up.

        Every rank returns all. Changes no state of training. Raises TrainerError unless `version` is held.
        """
        ...

    def save(self, url: str) -> None:
        """Write a checkpoint: files, then complete.json, sealed, with `version` and `files`.

        Keeps a complete checkpoint of the same version, and replaces an incomplete one. Raises StorageError if a complete one of
        another version is there.
        """
        ...

    def begin_save(self, url: str) -> None:
        """Copy the state and start to write it as `save` does, while training continues. Drops an earlier one."""
        ...

    def commit_save(self) -> float:
        """Wait until every rank has written its files, then write complete.json; returns this rank's seconds of writing.

        Raises StorageError if a rank could not write; then it can be called again.
        """
        ...

    def drop_save(self) -> None:
        """Give up the checkpoint that `begin_save` started, if there is one."""
        ...

    def load(self, url: str) -> int:
        """Load a checkpoint, perhaps of another number of ranks; returns the version now held.

        What the next steps make is what they would have made without the stop. Raises MissingFileError if the checkpoint is not
        complete, CorruptFileError if a file has changed; then the weights are unchanged.
        """
        ...

    def export(self, directory: str, version: int, merged: bool = False) -> None:
        """Write the weights as a Hugging Face folder that all ranks see, whole or not at all. Raises TrainerError unless
        `version` is held.

        With trainer.lora it is a PEFT folder of the adapters, and with `merged` the model's, to which what they add is added.
        """
        ...

    def upload(
        self, url: str, version: int, served: Served = ALONE, merged: bool = False
    ) -> list[FileRecord]:
        """Write the same to a folder in any storage; returns this rank's files, relative to it. served: the run's settings for
        engines."""
        ...

    def bucket(self, version: int, number: int, size: int, share: bool) -> WeightBucket:
        """Fill a buffer with bucket `number` of the weights, about `size` bytes; 0 starts a new pass. It stays until the next one.

        A pass has every tensor of the exported folder once, with trainer.lora of the merged one. share: let other processes on this GPU open the buffer. Raises
        TrainerError unless `version` is held.
        """
        ...

    def end_buckets(self) -> None:
        """Free the last bucket."""
        ...

    def offload(self) -> int:
        """Release GPU memory to engines, all but the weights, until the next call that needs it; returns the bytes freed.

        Raises TrainerMemoryError if the host has no room for it.
        """
        ...

    def reload(self) -> None:
        """Take GPU memory back ahead of a call that needs it. Raises TrainerMemoryError if there is not enough."""
        ...
