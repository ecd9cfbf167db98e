"""One rank of a trainer that ships: a Rank (connectors/trainers/rank.py), which says what each call promises.

Owns the weight version, and the rule that a step is applied once. A step runs like this: `train` reads the batch (packing); the
learner prepares this rank's part (rank_batch), runs forward and backward passes (policy_step, critic, passes) and applies them
(trained_model). A subclass starts the library's processes and makes the learner. With pipeline.eager the passes run chunk by chunk
(chunks), the first chunks by `pass_chunk`, before the batch exists. Heavy imports happen in `prepare`, so that the driver can
name the class without loading torch.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import socket
import tempfile
import time
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from millrace.connectors.host.garbage import collect_garbage
from millrace.connectors.trainers.rank_weights import REBUILD, RankWeights
from millrace.connectors.trainers.refusals import check_loss, check_rows
from millrace.core.contracts.task_records import StepRequest
from millrace.core.errors import CorruptFileError, MissingFileError, RefusedStepError, TrainerError
from millrace.core.hooks.loading import search_in
from millrace.core.replay import (
    check_trainer_fits,
    numbers_of,
    settings_again,
    settings_of,
)

if TYPE_CHECKING:
    import torch

    from millrace.connectors.storage.kernel_cache import KernelCache
    from millrace.connectors.trainers.checkpoint.background import BackgroundWriter
    from millrace.connectors.trainers.chunks import Chunks
    from millrace.connectors.trainers.learner import Learner
    from millrace.connectors.trainers.packing import BatchRow
    from millrace.connectors.trainers.rank import HeldOutSample, RankState
    from millrace.core.contracts.task_records import StepMetrics


class LearnerRank(RankWeights):
    """Holds one rank's share of the policy at a weight version."""

    learner: Learner
    chunks: Chunks
    device: torch.device

    @abstractmethod
    def _import(self) -> None:
        """Load the trainer's libraries."""

    @abstractmethod
    def _join(self, master: tuple[str, int], meeting: socket.socket | None) -> torch.device:
        """Join the other ranks; returns this rank's device. meeting: rank 0's socket, which listens at `master`."""

    @abstractmethod
    def _leave(self) -> None:
        """Undo `_join`, so that the process may join other ranks."""

    @abstractmethod
    def _build(self) -> None:
        """Make the learner, with the weights of model.path, and what moves its memory."""

    @abstractmethod
    def _calls(self) -> contextlib.AbstractContextManager[Any]:
        """The context of each thread's calls of the library."""

    @abstractmethod
    def _reload(self) -> None:
        """Take GPU memory back."""

    @abstractmethod
    def _release(self) -> int:
        """Release GPU memory, all but the weights; returns bytes freed."""

    def __init__(self, config: Mapping[str, Any], rank: int, world_size: int) -> None:
        super().__init__(rank)
        self.settings = config
        self.world_size = world_size
        self.busy: str | None = None
        self._background: BackgroundWriter | None = None
        self._kernels: KernelCache | None = None  # takes what this process compiled, once it has made a step
        self.last: StepMetrics | None = None  # metrics of the step that made `version`
        self.reload_s = 0.0  # seconds to take GPU memory back, in the last call that needed it
        self._rows: tuple[tuple[str, str | None], list[BatchRow]] | None = (
            None  # with URL and hash of their batch
        )
        self._trained_on: str | None = None  # hash of the last step's batch
        self._meeting: socket.socket | None = None  # the ranks' meeting point, from `address` to `setup`

    def address(self) -> tuple[str, int]:
        """This node's address and a port of rank 0, reserved until `setup`."""
        host = "127.0.0.1" if self.world_size == 1 else os.environ.get("RAY_NODE_IP_ADDRESS", "127.0.0.1")
        if self._meeting:
            self._meeting.close()
        self._meeting = socket.create_server((host, 0), backlog=max(128, self.world_size))
        return host, int(self._meeting.getsockname()[1])

    def state(self) -> RankState:
        """What the rank holds and does."""
        return {
            "rank": self.rank,
            "version": self.version,
            "busy": self.busy,
            "pid": os.getpid(),
            "saving": self._background.state() if self._background else None,
        }

    def prepare(self) -> None:
        """Load the libraries. Uses no GPU memory."""
        if self.settings.get("trainer", {}).get("device") == "cpu":
            # compiling would take seconds and save microseconds
            os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        elif self.settings.get("placement", {}).get("kernel_cache") and self._kernels is None:
            self._take_kernels()
        from millrace.connectors.trainers import chunks, comparison, learner, packing  # noqa: F401
        from millrace.connectors.trainers.checkpoint import background  # noqa: F401

        self._import()

        if not gc.get_freeze_count():  # once, since `setup` calls this again
            collect_garbage()

    def _take_kernels(self) -> None:
        """Have this process compile kernels into the folder of placement.kernel_cache, with what its storage has."""
        from millrace.connectors.storage.kernel_cache import kernel_cache
        from millrace.core.config import RunConfig

        self._kernels = kernel_cache(RunConfig.model_validate(self.settings), f"trainer rank {self.rank}")
        if self._kernels:
            os.environ.update(self._kernels.environment)

    def setup(self, master: tuple[str, int]) -> RankState:
        """Join the other ranks at rank 0's `address`, build the model from model.path and hold version 0."""
        self.prepare()
        from millrace.connectors.trainers.chunks import Chunks
        from millrace.connectors.trainers.process import numerics
        from millrace.core.config import RunConfig

        self.config = RunConfig.model_validate(self.settings)
        search_in(self.config.run.import_from)  # for the user's loss
        meeting, self._meeting = self._meeting, None
        self.device = self._join(master, meeting)
        self.step_settings = settings_of(self.config, numerics(self.config, self.device))
        with self._working("setup"):
            self._build()
            self.chunks = Chunks(self.learner)
            self.version = 0
        self._prepare_saves()
        return self.state()

    def train(self, step: StepRequest) -> StepMetrics:
        """Make a step, or answer from memory if its version is held already."""
        if step.version == self.version and self.last is not None:
            self._check_made_of(step)
            return self.last
        self._check_version(step.version - 1, f"and cannot make version {step.version} of it")
        with self._working("train"), self._traced(step):
            self.last = self._train(step)
            self.version, self._trained_on = step.version, step.batch_sha256
        if self._kernels:
            self._kernels.give_later()
        return self.last

    @contextlib.contextmanager
    def _traced(self, step: StepRequest) -> Iterator[None]:
        """A context whose computations are traced if the request asks for it. Nothing is stored of a step that fails."""
        from millrace.connectors.host.torch_trace import TorchTrace
        from millrace.connectors.storage.store import split_url

        if step.trace is None:
            yield
            return
        trace = TorchTrace(gpu=self.device.type == "cuda")
        with tempfile.TemporaryDirectory(prefix="millrace-trace") as folder:
            try:
                yield
            finally:
                trace.stop(folder, f"trainer-{self.rank}-step-{step.version}")
            store, path = split_url(step.trace)
            store.upload_dir(folder, path)

    def _train(self, step: StepRequest) -> StepMetrics:
        from millrace.connectors.trainers.comparison import (
            Comparison,
            sample_logprobs,
            write_logprobs,
        )
        from millrace.connectors.trainers.packing import cut_into

        started = time.perf_counter()
        self.learner.scored()  # of held-out sets, since the last step
        version, guard, recorded = step.version, step.guard, step.recorded
        chunks = recorded.get("chunks") if recorded is not None else step.chunks
        if recorded is not None:
            check_trainer_fits(version, recorded, self.step_settings)
        every = self._read(step.batch_url, step.batch_sha256)
        steps = sorted({row.train_step for row in every})
        versions = range(steps[0], steps[0] + self.config.trainer.passes * len(steps)) if steps else range(0)
        if version in versions[1:]:
            self._check_made_of(step)  # the step before is of this iteration
        due = steps[(version - steps[0]) % len(steps)] if version in versions else version
        rows = [row for row in every if row.train_step == due]
        comparison = Comparison(self.learner, guard) if guard is not None else None
        check_rows(rows, version, step.batch_url, self.config.algorithm.correction.max_token_age)
        if chunks:
            prepared = time.perf_counter()
            metrics, packs, logprobs = self.chunks.finish(version, cut_into(rows, chunks))
        else:
            self.chunks.drop()
            batch = self.learner.rank_batch(version, step.batch_url, every, step.batch_sha256)
            if comparison is not None:
                for number, gap in self.learner.logprob_gaps().items():
                    comparison.check([row for row in every if row.train_step == number], *gap, version)
            stored = self.learner.batches_before_update() if step.stores else []
            prepared = time.perf_counter()
            metrics = self.learner.forward_backward(batch, version)
            logprobs = [row for each in stored for row in sample_logprobs(each, self.learner.place)]
            packs = [pack.tokens for pack in batch.packs]
        computed = time.perf_counter()
        check_loss(metrics["loss"], version)
        if comparison is not None:
            comparison.check(rows, metrics["logprob_gap_mean"], metrics["logprob_gap_max"], version)
            metrics |= comparison.figures
        self.learner.check_on_policy(version, metrics)
        # before the weights change, so that after a failed write the whole step can be repeated
        files = write_logprobs(logprobs, step.batch_url, self.learner.place) if step.stores else []
        metrics |= self._apply(version, metrics, len(rows), recorded)
        finished = time.perf_counter()
        scored, scoring_s = self.learner.scored()
        if version == versions[-1]:
            self._rows = None  # the iteration's last step
        tokens = sum(len(row.tokens) for row in rows)
        made: dict[str, Any] = {
            **metrics,
            "lr": self.learner.policy.lr,
            "version": version,
            "samples": len(rows),
            "tokens": tokens,
            "packs": packs,
            "seconds": {
                "reload": self.reload_s,
                "prepare": prepared - started,
                "compute": computed - prepared,
                "apply": finished - computed,
                **({"scoring": scoring_s} if scored else {}),
            },
            "tokens_per_second": tokens / (finished - started),
            **({"scored_tokens": scored} if scored else {}),
            **({} if chunks else self._speed(rows, finished - started)),
            "settings": settings_again(recorded, self.step_settings),
            **({"chunks": list(chunks)} if chunks else {}),
            **({"logprobs": files} if files else {}),
        }
        return cast("StepMetrics", made)

    def _speed(self, rows: Sequence[BatchRow], seconds: float) -> dict[str, Any]:
        """Figures of a step whose passes were all made in it, as far as they are known."""
        from millrace.connectors.trainers.step_speed import share_of_peak

        device = self.step_settings["numerics"]["device"]
        mfu = share_of_peak(self.config, self.learner.architecture, device, rows, seconds)
        return {} if mfu is None else {"mfu": mfu}

    def pass_chunk(self, version: int, number: int, url: str, sha256: str) -> int:
        """Run the passes of chunk `number` of the step to `version`; returns the number of chunks then held."""
        from millrace.connectors.storage.store import split_url
        from millrace.connectors.trainers.packing import read_rows

        self._check_version(version - 1, f"and cannot make passes of step {version}")
        store, name = split_url(url)
        with self._working("train"):
            rows = read_rows(store.read_table(name, "batch", sha256=sha256), images=self.config.trains_images)
            return self.chunks.add(version, number, rows)

    def _check_made_of(self, step: StepRequest) -> None:
        """Raise TrainerError if the held version was made from another batch. Not checked for a loaded version."""
        if step.batch_sha256 != self._trained_on and None not in (step.batch_sha256, self._trained_on):
            raise TrainerError(
                f"rank {self.rank} made weight version {self.version} of another batch than {step.batch_url}",
                remedy=REBUILD,
            )

    def _apply(
        self, version: int, metrics: dict[str, float], samples: int, recorded: StepMetrics | None
    ) -> dict[str, float]:
        """Make the optimizer's and schedule's steps, unless a gradient is not finite; returns norms before clipping."""
        figures = {"grad_norm": 0.0}
        moved = self.learner.models_of_step(version)
        for prefix, trained in moved:
            norm = trained.gradient_norm()
            if not math.isfinite(norm):
                raise RefusedStepError(
                    f"step {version}: the {prefix.replace('_', ' ')}gradient norm is {norm}; nothing was applied. "
                    "Lower the learning rate or look at the batch"
                )
            figures[f"{prefix}grad_norm"] = norm
        try:
            for prefix, trained in moved:
                trained.step(numbers_of(recorded, prefix) if recorded is not None else None)
                if prefix:
                    figures[f"{prefix}lr"] = trained.lr
            self.learner.finish_step(version, metrics, samples)
        except BaseException:
            self.version = None  # a partly applied step leaves weights of no version
            raise
        return figures

    def losses(self, version: int, samples: Sequence[HeldOutSample]) -> list[float]:
        """Loss of each sample under `version`, in nats."""
        from millrace.connectors.trainers.passes import sample_losses

        self._check_version(version, f"and losses under version {version} are asked for")
        with self._working("losses"):
            learner = self.learner
            shape = learner.architecture
            return sample_losses(learner.passes, samples, self.config, shape, self.device, learner.place)

    def save(self, url: str) -> None:
        """Save model, optimizer, schedule and RNG to a URL; complete.json is written last."""
        from millrace.connectors.trainers.checkpoint.trainer_state import save

        with self._working("save"):
            assert self.version is not None
            save(self.learner, url, self.version, self.last)

    def _prepare_saves(self) -> None:
        from millrace.connectors.trainers.checkpoint.background import prepared_writer

        if self._background is None:
            self._background = prepared_writer(self.learner, self.device)

    def begin_save(self, url: str) -> None:
        """Start to save in the background: a separate process writes a copy in host memory. `commit_save` writes complete.json."""
        from millrace.connectors.trainers.checkpoint.background import BackgroundWriter
        from millrace.connectors.trainers.checkpoint.trainer_state import begin

        if self._background is None:
            self._background = BackgroundWriter(self.config.part_limit)
        self._background.drop()
        with self._working("save"):
            assert self.version is not None
            begin(self.learner, url, self.version, self.last, self._background)

    def commit_save(self) -> float:
        """Wait until every rank has written its files, then write complete.json; returns the seconds that this rank's writing took."""
        from millrace.connectors.trainers.checkpoint.trainer_state import commit

        assert self._background is not None, "begin_save comes first"
        with self._working("save", everything=False):
            commit(self.learner, self._background)
            seconds = self._background.seconds
            self._background.drop()
            return seconds

    def drop_save(self) -> None:
        """Give up the save that was started, and end its writer."""
        if self._background is not None:
            self._background.drop()

    def load(self, url: str) -> int:
        """Load a checkpoint that `save` wrote, perhaps under another layout; returns the version now held."""
        from millrace.connectors.trainers.checkpoint.trainer_state import load

        with self._working("load"):
            self.chunks.drop()
            before = self.version, self.last
            self.version = self.last = self._rows = self._trained_on = None
            try:
                self.version, self.last = load(self.learner, url)
            except (CorruptFileError, MissingFileError):
                self.version, self.last = before  # files are checked before any of them is loaded
                raise
        return self.version

    def offload(self) -> int:
        """Release GPU memory to engines until the rank needs it again; returns bytes freed."""
        self.learner.drop_iteration()
        self.chunks.drop()
        return self._release()

    def reload(self) -> None:
        """Take GPU memory back ahead of a call that needs it."""
        with self._working("reload"):
            pass

    def shutdown(self) -> None:
        """Leave the process group."""
        self.close_broadcast()
        if self._background is not None:
            self._background.close()
        self._leave()

    def _read(self, url: str, sha256: str | None = None) -> list[BatchRow]:
        """Rows of a batch, which must have this hash. All steps of an iteration read its file once."""
        from millrace.connectors.storage.store import split_url
        from millrace.connectors.trainers.packing import read_rows

        if self._rows is None or self._rows[0] != (url, sha256):
            store, name = split_url(url)
            table = store.read_table(name, "batch", sha256=sha256)
            rows = read_rows(
                table,
                self.config.trainer.passes,
                keeps_cache=self.config.pipeline.keeps_cache,
                images=self.config.trains_images,
            )
            self._rows = (url, sha256), rows
        return self._rows[1]

    @contextlib.contextmanager
    def _working(self, what: str, *, everything: bool = True) -> Iterator[None]:
        """A context in which the rank counts as busy and, with `everything`, has its GPU memory back.

        Raises TrainerMemoryError if GPU memory runs out.
        """
        from millrace.connectors.trainers.memory_errors import out_of_memory, ran_out

        self.busy = what
        try:
            if everything and what != "setup":
                started = time.perf_counter()
                self._reload()
                self.reload_s = time.perf_counter() - started
            with self._calls():
                yield
        except RuntimeError as error:
            if not ran_out(error):
                raise
            raise out_of_memory(what, self.rank, self.config, str(error)) from None
        finally:
            self.busy = None
