"""Things made once and kept in a folder: built by one process while others wait, whole or not there at all."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from trainwright.core.errors import DataError

try:
    import fcntl
except ImportError:  # Windows: no flock; unique folders and atomic renames still keep the cache whole
    fcntl = None  # type: ignore[assignment]

T = TypeVar("T")


class DamagedCache(Exception):
    """A kept folder is not what was written into it."""


@contextlib.contextmanager
def file_lock(path: Path) -> Iterator[bool]:
    """Hold an exclusive lock on ``path``, waiting for it; the kernel frees it when its holder dies.

    Yields False, and holds nothing, on file systems without locks. The lock file stays: removing it would let
    two processes lock two files of one name.
    """
    if fcntl is None:
        yield False
        return
    with path.open("ab") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            held = True
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL):
                raise
            held = False
        yield held  # closing the file lets go of the lock


def build_once(final: Path, build: Callable[[Path], None], load: Callable[[Path], T]) -> T:
    """``load(final)``, after ``build(folder)`` filled it where it was missing or damaged.

    ``build`` writes into a folder of its own, which is then renamed to ``final``: a reader sees a whole folder or
    none. Processes that want the same folder at once wait for the first. ``load`` raises :class:`DamagedCache` where
    the folder is not whole; it is then rebuilt, with a warning. What a killed builder left is removed by the next.
    Raises DataError where the folder cannot be written.
    """
    if final.is_dir():
        # No lock for the usual case: a folder that is there was renamed whole.
        with contextlib.suppress(DamagedCache):
            return load(final)
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        lock = final.parent / f".{final.name}.lock"
        lock.touch()
    except OSError as error:
        raise DataError(f"cache folder {final.parent} cannot be written ({error.strerror}); choose another") from error
    with file_lock(lock) as held:
        if final.is_dir():
            try:
                return load(final)
            except DamagedCache as damage:
                warnings.warn(f"{final} is damaged ({damage}); building it anew", stacklevel=3)
                _discard(final)
        if held:
            for left in final.parent.glob(f".{glob_escape(final.name)}.tmp-*"):
                shutil.rmtree(left, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{final.name}.tmp-", dir=final.parent))
        try:
            folder.chmod(0o777 & ~_umask())  # mkdtemp's 0700 would shut out others who share the cache
            build(folder)
            _sync(folder)
            try:
                folder.rename(final)
            except OSError:
                # Only without locks: another process was first. Its folder is as good as ours.
                if held or not final.is_dir():
                    raise
            _sync(final.parent)
        except OSError as error:
            raise DataError(
                f"{final}: cannot be written ({error.strerror or error}); free space or choose another folder"
            ) from error
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return load(final)


def _discard(folder: Path) -> None:
    """Take ``folder`` away in one step, then delete it; readers that have it mapped keep what they see."""
    trash = Path(tempfile.mkdtemp(prefix=f".{folder.name}.tmp-", dir=folder.parent))
    folder.rename(trash / "old")
    shutil.rmtree(trash, ignore_errors=True)


def _sync(folder: Path) -> None:
    """Names in ``folder`` survive a power cut."""
    with contextlib.suppress(OSError):  # some file systems have no sync of folders
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def glob_escape(name: str) -> str:
    import glob

    return glob.escape(name)
