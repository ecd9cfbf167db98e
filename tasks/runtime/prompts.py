"""The prompts of a run: tokenizer, training data, held-out sets, the ledger over them and the seeds of their samples.

Owns that each is read once. The ledger decides what is drawn (millrace.core.accounts.ledger).
"""

import asyncio
import json
from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from typing import Any

from millrace.connectors.huggingface.tokenizer import PromptTokenizer
from millrace.connectors.storage.files import FileEntry
from millrace.connectors.storage.images import StoredImages
from millrace.connectors.storage.iteration_files import IterationFiles
from millrace.connectors.storage.run_folder import RunFolder
from millrace.connectors.user_code.mcp_tools import tool_schemas
from millrace.core.accounts.curriculum import part_name
from millrace.core.accounts.history import Key
from millrace.core.accounts.ledger import Ledger
from millrace.core.accounts.staleness import Ahead
from millrace.core.config import RunConfig
from millrace.core.config.data.prompt_rows import PromptRows
from millrace.core.config.evaluation import EvalSet
from millrace.core.contracts.ids import derived_seed, sample_seed
from millrace.core.contracts.images import SentImage, SentImages, image_names
from millrace.core.contracts.sample import DrawnGroup
from millrace.core.families.images import image_rules
from millrace.tasks.data.images import RowPictures
from millrace.tasks.data.prompt_dataset import PromptDataset, PromptSet, load_prompts
from millrace.tasks.data.rows import Read, UsablePrompt

DRAWN = ["source", "level", "row", "epoch", "ordinal"]  # columns of prompts.parquet that the ledger needs
IMAGES_HELD = 256  # pictures that are kept in memory for further requests


class Prompts:
    """The sources of a run's prompts."""

    def __init__(self, config: RunConfig, run_folder: RunFolder) -> None:
        self.config = config
        self._run_folder = run_folder
        self._held_out: dict[str, PromptSet] = {}
        self._ledger: Ledger | None = None
        self._data_since = 0
        self._whole: frozenset[str] = frozenset()
        self.tokenizer_kind: str | None = None  # kind of the driver's tokenizer, in its shards
        self.ahead = Ahead()  # how many iterations may be open ahead; from run.json
        self._stored = StoredImages(run_folder.store)
        self._image = lru_cache(maxsize=IMAGES_HELD)(self._read_image)

    @cached_property
    def tokenizer(self) -> PromptTokenizer:
        """Tokenizer and chat template of the model."""
        return PromptTokenizer.load(self.config.model, self.tools, self.tokenizer_kind)

    @cached_property
    def tools(self) -> list[dict[str, Any]]:
        """The schemas of the tools that the model may call."""
        session = self.config.rollout.session
        return tool_schemas(session.tools) if session else []

    @cached_property
    def dataset(self) -> PromptDataset:
        """The usable training prompts."""
        return PromptDataset(self.config, self.tokenizer, self._whole, self.images)

    @cached_property
    def images(self) -> RowPictures | None:
        """Reads the pictures of rows; None if prompts are text. Raises ConfigError if the model sees no pictures."""
        config = self.config
        if not any(source.images_key for source in (*config.data.sources, *config.evaluation.sets)):
            return None
        return RowPictures(image_rules(config.model.path), config.data.max_image_tokens)

    def keep_images(self, read: Iterable[Read]) -> list[FileEntry]:
        """Store the pictures of prompts in the run's folder; returns their files, relative to it."""
        usable = (item for item in read if isinstance(item, UsablePrompt))
        return self._stored.keep(picture for item in usable for picture in item.pictures)

    @cached_property
    def held_out_images(self) -> list[FileEntry]:
        """The files of the pictures of all evaluation sets, which are stored at the first use."""
        read = (item for each in self.config.evaluation.sets for item in self.held_out(each).usable)
        return self.keep_images(read)

    async def sent_images(self, prompt: str) -> SentImages | None:
        """The pictures of a stored prompt, for an engine; None if it has none. prompt: as JSON."""
        return None if self.images is None else await asyncio.to_thread(self._sent, self.images, prompt)

    def _sent(self, images: RowPictures, prompt: str) -> SentImages | None:
        names = image_names(json.loads(prompt))
        return SentImages(images.rules.token, tuple(map(self._image, names))) if names else None

    def unsampled(self, sets: Iterable[PromptRows]) -> Sequence[int]:
        """Ids that no answer to these sources may contain, since they stand for pictures."""
        return self.images.rules.marks if self.images and any(each.images_key for each in sets) else ()

    def _read_image(self, name: str) -> SentImage:
        assert self.images is not None
        picture = self._stored.read(name)
        return SentImage(picture.png, self.images.rules.tokens(picture.width, picture.height))

    def held_out(self, held_out: EvalSet) -> PromptSet:
        """The usable prompts of an evaluation set."""
        if held_out.name not in self._held_out:
            limit = self.config.data.max_prompt_tokens
            self._held_out[held_out.name] = load_prompts(
                held_out,
                self.tokenizer,
                limit,
                skips_special=held_out.sampling.skip_special_tokens,
                images=self.images,
            )
        return self._held_out[held_out.name]

    def read_whole(self, sources: Iterable[str]) -> None:
        """Set the sources that were read whole when the run started: its history counts only their usable rows."""
        assert "dataset" not in vars(self), "the sources are read already"
        self._whole = frozenset(sources)

    def use_data_since(self, iteration: int) -> None:
        """Set the iteration from which on the sources have their current content: epochs start again there."""
        assert self._ledger is None, "the ledger has drawn already"
        self._data_since = iteration

    def sample_seed(self, group: DrawnGroup, index: int) -> int:
        """Sampling seed of a sample of a drawn group."""
        return sample_seed(self.config.run.seed, group.iteration, group.prompt_id, group.ordinal, index)

    def use_ahead(self, ahead: Ahead) -> None:
        """Set how many iterations may be open ahead, from run.json. It must not change for drawn iterations."""
        self.ahead = ahead
        if self._ledger is not None:
            self._ledger.use_ahead(ahead)

    def ledger(self) -> Ledger:
        """The ledger over the committed manifests."""
        if self._ledger is None:
            data = self.config.data
            seed = self.config.run.seed
            if self._data_since:
                seed = derived_seed(seed, "data", self._data_since)
            self._ledger = Ledger(
                seed,
                self.dataset.plans(),
                shuffle=data.shuffle,
                first=self._data_since,
                stages=data.stages,
                ahead=self.ahead,
            )
        return self._ledger.extend(self._run_folder.history(since=self._ledger.iterations))

    def newest_before(self, iteration: int) -> int:
        """The newest iteration that must be committed before this one is drawn; below zero if none must."""
        return max(-1, iteration - 1 - self.ahead.at(iteration))

    def deferred_by(self, iteration: int) -> list[Key]:
        """Groups that a committed iteration deferred."""
        manifest = self._run_folder.manifest(iteration) if iteration >= 0 else None
        return manifest.history.deferred_keys() if manifest and manifest.history else []

    def ledger_before(self, iteration: int) -> Ledger:
        """The ledger over the committed manifests and the open iterations before one, whose draws are committed."""
        ledger = self.ledger()
        while ledger.next_iteration < iteration:
            index = ledger.next_iteration
            table = IterationFiles(self._run_folder, index).read_table("prompts", columns=DRAWN)
            rows = table.sort_by("ordinal").to_pylist()
            ledger.open(index, [(part_name(r["source"], r["level"]), r["row"], r["epoch"]) for r in rows])
        return ledger
