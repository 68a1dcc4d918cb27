"""Pure: the device of a replay: one run at a time, in order; what lost its race is stopped."""

from __future__ import annotations

from collections.abc import Callable

from attrs import define

from split_models.replay_link import Agenda, Timer


@define(eq=False)
class Job:
    """One run. `done` is called with nothing when it has ended by itself, `left` when one that was cancelled is over,
    with the seconds that it ran."""

    seconds: float
    done: Callable[[], None]
    left: Callable[[float], None] | None = None
    began_s: float | None = None
    ends: Timer | None = None


class Lane:
    """stop_s: a run under way that is cancelled ends after so long, if not by itself sooner; infinite: it always ends
    by itself."""

    def __init__(self, agenda: Agenda, stop_s: float) -> None:
        self._agenda = agenda
        self._stop_s = stop_s
        self._jobs: list[Job] = []
        self._free_s = 0.0

    def submit(self, seconds: float, done: Callable[[], None], left: Callable[[float], None] | None = None) -> Job:
        """Run it after all that came before."""
        job = Job(seconds, done, left)
        self._jobs.append(job)
        self._go_on()
        return job

    def cancel(self, job: Job) -> None:
        """Nobody waits for it any more: it leaves the line, or is stopped."""
        if job not in self._jobs:
            return
        job.done = lambda: None
        if job.began_s is None or job.ends is None:
            self._jobs.remove(job)
            self._told(job, 0.0)
            return
        self._free_s = min(self._free_s, self._agenda.now_s + self._stop_s)
        job.ends.cancel()
        job.ends = self._agenda.at(self._free_s, self._end)

    def wait_s(self) -> float:
        """Seconds that a newcomer would wait."""
        waiting = sum(job.seconds for job in self._jobs if job.began_s is None)
        return waiting + max(0.0, self._free_s - self._agenda.now_s)

    def _go_on(self) -> None:
        if self._jobs and self._jobs[0].began_s is None:
            job = self._jobs[0]
            job.began_s = self._agenda.now_s
            self._free_s = job.began_s + job.seconds
            job.ends = self._agenda.at(self._free_s, self._end)

    def _end(self) -> None:
        job = self._jobs.pop(0)
        self._go_on()
        job.done()
        self._told(job, self._agenda.now_s - (job.began_s or 0.0))

    def _told(self, job: Job, ran_s: float) -> None:
        if job.left is not None:
            job.left(ran_s)
