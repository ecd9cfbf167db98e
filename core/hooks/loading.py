"""Loads and calls the functions that a configuration names by import path, and holds their code as it was at the run's start.

A process that starts later must find the same code: the starting process passes the hashes on (`expect`); its child processes
have them in their environment. Does not know what a function is for: protocols.py has the signatures.
"""

import hashlib
import importlib
import inspect
import itertools
import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from millrace.core.config.parts.user_function import UserFunction
from millrace.core.contracts.references import resolved, scrubbed
from millrace.core.errors import ConfigError, MillraceError, described, remedy_of
from millrace.core.hooks.slime.names import SLIME, NotHereError, provide, slime_remedy

EXPECTED = "MILLRACE_OWN_CODE"  # the environment variable


def source_of(module: ModuleType) -> Path | None:
    """The file of a module; None if it has none."""
    try:
        found = inspect.getsourcefile(module)
    except TypeError:
        return None
    return Path(found) if found and os.path.exists(found) else None


def hash_of(file: Path) -> str:
    """Hash of a file's code."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def expect(hashes: Mapping[str, str]) -> None:
    """From now on, this process and its child processes accept only this code for these modules."""
    os.environ[EXPECTED] = json.dumps(dict(hashes), sort_keys=True)


def expected() -> dict[str, str]:
    """Hashes by module; empty if no run was started."""
    found: dict[str, str] = json.loads(os.environ.get(EXPECTED, "{}"))
    return found


def check_unchanged(module: ModuleType, where: str) -> None:
    """Raise ConfigError for a module that was just imported, if its code differs from the code at the start of the run."""
    wanted, source = expected().get(module.__name__), source_of(module)
    if wanted and source and hash_of(source) != wanted:
        raise ConfigError(
            f"{source} changed after the run was started",
            where=where,
            remedy="put it back, or start the same command again: then the change is recorded with the iteration from which it "
            "holds",
        )


def _closed(module_name: str) -> str:
    """The remedy if a folder on the way to a module cannot be read, which Python treats as a folder without modules."""
    parts = module_name.split(".")
    for entry, length in itertools.product(sys.path, range(len(parts))):
        folder = os.path.join(entry, *parts[:length])
        try:
            os.scandir(folder).close()
            os.stat(
                os.path.join(folder, os.curdir)
                # a folder may be listed although files in it may not be looked up
            )
        except PermissionError as error:
            return f"{folder} cannot be read: {remedy_of(error, '')}"
        except OSError:
            # another entry of the path may have the module
            continue
    return ""


def load(path: str, field_name: str = "hook") -> Callable[..., Any]:
    """The function at `package.module:function` (`function` may be dotted), named by `field_name` of the configuration.

    Errors: ConfigError naming field, path and remedy when it has another form, cannot be imported, is not there
    or cannot be called.
    """
    where = f"{field_name} = {path}"
    module_name, name = module_and_name(path)
    if not module_name or not name:
        raise ConfigError("no import path", where=where, remedy="write it as package.module:function")
    search_in()
    if written_for_slime(path):
        provide()
    fresh = module_name not in sys.modules
    try:
        target: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"cannot be imported: {error}",
            where=where,
            remedy=_rename(module_name)
            or _closed(module_name)
            or slime_remedy(error)
            or "correct the path, put the module beside the YAML file or into the folder where you start, or its package on "
            "PYTHONPATH",
        ) from error
    if fresh:
        try:
            check_unchanged(target, where)
        except ConfigError:
            # so that the next import gives the same error
            del sys.modules[module_name]
            raise
    for part in name.split("."):
        try:
            there = hasattr(target, part)
        except NotHereError as error:
            raise ConfigError(str(error), where=where, remedy=error.remedy) from error
        if not there:
            raise ConfigError(
                f"{module_name} has no function {name}",
                where=where,
                remedy=_rename(module_name) or "correct the part after the colon",
            )
        target = getattr(target, part)
    if not callable(target):
        raise ConfigError(f"{name} is a {type(target).__name__}", where=where, remedy="name a function")
    return target  # type: ignore[no-any-return]


def module_and_name(path: str) -> tuple[str, str]:
    """Module and function of `package.module:function`, or of `slime:package.module.function`, which has slime's signature."""
    module_name, _, name = path.partition(":")
    if module_name == SLIME:
        module_name, _, name = name.rpartition(".")
    return module_name, name


def written_for_slime(path: str) -> bool:
    """Whether the function at this import path has slime's signature."""
    return path.startswith(f"{SLIME}:")


def load_function(function: UserFunction, field_name: str) -> Callable[..., Any]:
    """The function of a configuration's field with its options bound: call it with positional arguments.

    Errors: ConfigError as of `load`, naming `field_name`.function, and of a reference in the options to what is not set.
    """
    loaded = load(function.function, f"{field_name}.function")
    options = resolved(function.options, f"{field_name}.options")
    return partial(loaded, **options) if options else loaded


def call_function(function: UserFunction, field_name: str, *args: Any) -> Any:
    """What the function of a configuration's field returns for these arguments and its options.

    Errors: ConfigError naming field and function for any error that it raises, millrace's errors included, and as of `load`.
    Errors of a function that millrace brings are raised unchanged.
    """
    loaded = load_function(function, field_name)
    try:
        return loaded(*args)
    except Exception as error:  # noqa: BLE001 - a function of the user's may raise anything
        if isinstance(error, MillraceError) and function.function.startswith("millrace."):
            raise
        # the text shows the errors that it was raised from too
        story = "".join(traceback.format_exception(error))
        raise ConfigError(
            f"it raised {failure_of(error, function)}",
            where=f"{field_name}.function = {function.function}",
            remedy="correct the function and start the run again",
        ) from (error if story == cleaned(story, function) else None)


def failure_of(error: Exception, function: UserFunction) -> str:
    """An error of a user's function as text: type, message and line, without the secrets of its options."""
    return cleaned(described(error), function)


def cleaned(text: str, function: UserFunction) -> str:
    """A text of a user's function without secrets: of its options, and secrets that are recognised by their place."""
    # imported here, since names of hooks load no library
    from millrace.core.config.parts.redaction import shown_text

    return shown_text(scrubbed(text, function.options))


def search_in(folders: Sequence[str] = ()) -> None:
    """From now on, modules are found in these folders too, then in the working folder, after all installed packages.

    Processes that this one starts by multiprocessing search the same folders.
    """
    sys.path += [folder for folder in (*folders, os.getcwd()) if folder not in sys.path]


def hidden_module(path: str) -> tuple[str, str] | None:
    """A second place of a function's module, and the place that it is imported from; None if there is only one.

    path: package.module:function, not millrace's own. The first place on the search path hides the other.
    """
    name = module_and_name(path)[0].partition(".")[0]
    found = (_place(PathFinder.find_spec(name, [folder])) for folder in sys.path if name != "millrace")
    imported, *hidden = dict.fromkeys(filter(None, found)) or [""]
    return (hidden[0], imported) if hidden else None


def _place(spec: ModuleSpec | None) -> str | None:
    """The file of a module, or the folder of a package without one."""
    if spec is None:
        return None
    places = [spec.origin, *(spec.submodule_search_locations or ())]
    return next((os.path.realpath(place) for place in places if place and os.path.exists(place)), None)


def _rename(module_name: str) -> str:
    """The remedy if one module hides another of the same name; else empty."""
    hidden = hidden_module(module_name)
    return f"rename the one of yours: {hidden[1]} is imported, and hides {hidden[0]}" if hidden else ""
