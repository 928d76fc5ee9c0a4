"""Progress of the demo: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars


class Progress(Protocol):
    """Tells the user which engine runs and how far it is."""

    def note(self, text: str) -> None:
        """Say something about the whole run."""

    def starting(self, name: str, total: int) -> None:
        """An engine is being started."""

    def ready(self, seconds: float) -> None:
        """The engine is up and serves."""

    def done(self, requests: int) -> None:
        """So many requests are finished."""

    def close(self) -> None:
        """Nothing more will be shown."""


class PlainProgress:
    """One line a step, for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._name = ""
        self._total = 0
        self._quarter = 0

    def note(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, highlight=False, markup=False)

    def starting(self, name: str, total: int) -> None:
        self._name, self._total, self._quarter = name, total, 0
        self.note(f"{name}: starting the engine")

    def ready(self, seconds: float) -> None:
        self.note(f"{self._name}: engine ready after {seconds:.1f} s")

    def done(self, requests: int) -> None:
        quarter = 4 * requests // self._total
        if quarter > self._quarter:
            self._quarter = quarter
            self.note(f"{self._name}: {requests} of {self._total} requests")

    def close(self) -> None:
        pass


class LiveProgress:
    """One bar an engine, for terminals."""

    def __init__(self, console: Console) -> None:
        self._bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[state]}"),
            console=console,
        )
        self._bars.start()
        self._task = self._bars.add_task("", visible=False, state="")

    def note(self, text: str) -> None:
        self._bars.console.print(text, soft_wrap=True, highlight=False, markup=False)

    def starting(self, name: str, total: int) -> None:
        self._task = self._bars.add_task(name, total=total, state="starting the engine")

    def ready(self, seconds: float) -> None:
        self._bars.update(self._task, state="serving")

    def done(self, requests: int) -> None:
        task = self._bars.tasks[self._task]
        state = "done" if requests == task.total else "serving"
        self._bars.update(self._task, completed=requests, state=state)

    def close(self) -> None:
        self._bars.stop()


def make_progress(console: Console) -> Progress:
    """Bars on a terminal, plain lines elsewhere."""
    return LiveProgress(console) if console.is_terminal else PlainProgress(console)
