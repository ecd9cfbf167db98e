"""How busy this host's GPUs are: a thread that reads NVIDIA's management library (NVML). Loads no CUDA."""

import ctypes
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

LIBRARY = "libnvidia-ml.so.1"
EVERY_S = 0.5  # NVML's own figure is of the last 0.17 to 1 s
KEPT = 200_000  # readings, a day
UUID_SIZE = 96  # bytes
SHOWN_BY_INDEX = str.isdecimal

Reading = Callable[[], Mapping[str, float]]
"""Share of the last moment in which a kernel ran, by the GPU's UUID."""


class Busy(NamedTuple):
    """Readings of one GPU, added up."""

    total: float  # sum of shares
    readings: int


class _Utilisation(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


def nvml_reading(visible: Sequence[str], library: str = LIBRARY) -> Reading | None:
    """Reads these GPUs, named as CUDA_VISIBLE_DEVICES names them: by number or UUID. None without the library or without GPUs."""
    try:
        nvml = ctypes.CDLL(library)
    except OSError:
        return None
    if nvml.nvmlInit_v2() != 0:
        return None
    devices: dict[str, ctypes.c_void_p] = {}
    for one in visible:
        device, uuid = ctypes.c_void_p(), ctypes.create_string_buffer(UUID_SIZE)
        found = (
            nvml.nvmlDeviceGetHandleByIndex_v2(int(one), ctypes.byref(device))
            if SHOWN_BY_INDEX(one)
            else nvml.nvmlDeviceGetHandleByUUID(one.encode(), ctypes.byref(device))
        )
        if found == 0 and nvml.nvmlDeviceGetUUID(device, uuid, UUID_SIZE) == 0:
            devices[uuid.value.decode()] = device

    def read() -> Mapping[str, float]:
        shares = {}
        for name, device in devices.items():
            used = _Utilisation()
            if nvml.nvmlDeviceGetUtilizationRates(device, ctypes.byref(used)) == 0:
                shares[name] = used.gpu / 100
        return shares

    return read if devices else None


class BusyMeter:
    """Reads every EVERY_S seconds, from its start to the end of the process."""

    def __init__(self, read: Reading, every_s: float = EVERY_S) -> None:
        self._read, self._every_s = read, every_s
        self._readings: deque[tuple[float, Mapping[str, float]]] = deque(maxlen=KEPT)
        threading.Thread(target=self._watch, name="gpu-busy", daemon=True).start()

    def between(self, start: float, end: float) -> dict[str, Busy]:
        """The readings between two moments, seconds of the epoch by this host's clock, by the GPU's UUID."""
        found: dict[str, Busy] = {}
        for at, shares in list(self._readings):
            if start <= at <= end:
                for name, share in shares.items():
                    before = found.get(name, Busy(0.0, 0))
                    found[name] = Busy(before.total + share, before.readings + 1)
        return found

    def _watch(self) -> None:
        while True:
            self._readings.append((time.time(), self._read()))
            time.sleep(self._every_s)


def visible_meter() -> BusyMeter | None:
    """A meter of the GPUs that this process sees; None if CUDA_VISIBLE_DEVICES names none, or none can be read."""
    visible = [one for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one]
    read = nvml_reading(visible) if visible else None
    return BusyMeter(read) if read else None
